"""Runs one unit on tensors that are on the device already: forward, fused forward and backward, recomputing backward.

Nothing here copies, waits for a device or touches the host's state, so a unit can be run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from hydra_engine.data import Boundary, RandomState, Stream, TaskGenerator, capture, copy_of, install, installed
from hydra_engine.devices import DeviceGenerator
from hydra_engine.host import LayerFault, Shard, Structure
from hydra_engine.schedule import BACKWARD, EVALUATE, FORWARD, FUSED
from hydra_engine.worker.attributes import Attributes
from hydra_engine.worker.compiled import CompiledLayers
from hydra_engine.worker.graphs import Arrival, Arrive, Graph, Saved
from hydra_engine.worker.unit import MicroInput, MicroOutput, UnitOutput
from partitioners.boundary import UnfitTensor, check_fit
from partitioners.precision import cast
from partitioners.skips import Frame, replayed

Modes: TypeAlias = "Callable[[], AbstractContextManager[Any]]"
OnRecomputed: TypeAlias = "Callable[[Shard, int, Sequence[Tensor]], None]"  # sees micro-batch m's recomputed output


def _drop(_: Any) -> Any:
    return None


class Inspector(Protocol):
    """Looks on while units run on trial."""

    # The process-wide states that a backward runs with, where a unit has these to itself; None: those of its forward.
    in_backward: RandomState | None
    carries: bool  # units find the Python attributes that those before have left

    def begins(self, kind: str, shard: Shard, views: Mapping[int, Tensor]) -> None:
        """A unit begins, with these parameters."""

    def enters(self, shard: Shard, m: int, micro: MicroInput) -> None:
        """See what a micro-batch starts from."""

    def enters_layer(self, value: Any, frame: Frame, target: Any = None) -> None:
        """See the value that a layer, or the loss, starts from."""

    def drew_in_backward(self) -> None:
        """A backward left the generators otherwise than it found them."""

    def begins_backward(self, buffers: Mapping[int, Tensor]) -> None:
        """See the buffers as a recomputed forward left them."""

    def ends_backward(self, buffers: Mapping[int, Tensor]) -> set[int]:
        """See them after the backward: which of them it has written to."""

    def ends(self, views: Mapping[int, Tensor], parameters: Sequence[nn.Parameter]) -> None:
        """All micro-batches of a unit are through."""

    def leaves(self, layer: int, attributes: Attributes) -> None:
        """A unit has changed Python attributes of a layer."""


class Executor:
    """Runs the units of one task on one device."""

    def __init__(
        self,
        structure: Structure,
        loss_fn: Callable[[Any, Any], Tensor],
        num_layers: int,
        modes: Modes = nullcontext,
        metrics: Mapping[str, Callable[[Any, Any], float | Tensor]] | None = None,
        generator: DeviceGenerator | None = None,
        compiled: CompiledLayers | None = None,
    ) -> None:
        """`generator`: that the device's kernels draw from; None: the CPU's, whose draws are redirected one by one."""
        self.structure = structure
        self._generator = generator
        self._compiled = compiled
        self._may_compile = False
        self._modes = modes
        self._metrics = metrics or {}
        self.current = ""  # the layer that runs, for messages
        self._on_recomputed: OnRecomputed | None = None
        self._redirects = True  # draws on the CPU, to the task's own generator
        self._bound: set[int] = set()  # storages that a layer's output must not share: the slab, the buffers
        self._written: set[int] = set()  # buffers that a backward has written to
        self._hooks: Modes = nullcontext
        self._num_layers = num_layers
        self._is_narrow = structure.narrow is not None
        self.loss_fn = structure.layers[num_layers] if isinstance(loss_fn, nn.Module) else loss_fn
        self._accumulated: dict[int, Tensor] = {}  # by slot: a narrow gradient so far, in float32
        self._anchor = torch.zeros((), device=structure.device, requires_grad=True)
        # As they are before any unit: what a forward leaves on its layers would stay on the device, and make one copy
        # of a layer another one than those of other devices.
        self.attributes = [Attributes(*each) for each in zip(structure.layers, structure.names, strict=True)]
        self.inspector: Inspector | None = None

    def run(
        self,
        kind: str,
        shard: Shard,
        views: dict[int, Tensor],
        buffers: dict[int, Tensor],
        inputs: Iterable[MicroInput],
        emit: Callable[[int, MicroOutput], None],
        *,
        locked: bool,
        draws: bool = True,
        keep_saved: bool = False,
        on_recomputed: OnRecomputed | None = None,
        step: Callable[[Sequence[nn.Parameter], dict[int, Tensor | None]], Any] | None = None,
        first: int = 0,
        so_far: Mapping[int, Tensor] | None = None,
        in_pieces: bool = False,
        is_last: bool = True,
        saved: Saved | None = None,
        graphs: Sequence[Graph] = (),
        written: Collection[int] = (),
    ) -> UnitOutput:
        """Run a unit over its micro-batches, in order; each one's output goes to `emit` before the next one starts.

        `locked`: the shard draws from generators that only exist once in the process, and runs with those installed.
        `draws`: a layer may draw random numbers; without it, none is looked for on a device, where kernels would wait.
        `step`: updates the parameters, in place, once all micro-batches are through.
        `keep_saved`: a layer of it differentiates inside its own forward, which must find what it saved.

        Of a step that is spread over several devices, a unit has the micro-batches from `first` on. It adds their
        gradients to those `so_far`, in place; or gives them `in_pieces`, with each micro-batch's output. Unless it
        `is_last`, narrow gradients are not rounded: others will be added.

        `saved`: counts or keeps what autograd saves in a forward. `graphs`: kept by the forward, and not run again.
        `written`: buffers that a backward is known to write to.
        """
        structure = self.structure
        self._on_recomputed = on_recomputed
        self._redirects = draws or self._generator is None
        self._may_compile = not (locked or keep_saved or kind == EVALUATE)
        structure.bind(views, buffers)
        self._accumulated, self._written = {}, {index for index in shard.buffers if index in written}
        self._bound = {t.untyped_storage().data_ptr() for t in (*views.values(), *buffers.values())}
        self._hooks = partial(saved_tensors_hooks, _drop, _drop) if kind == FORWARD and not keep_saved else nullcontext
        if saved is not None:
            saved.begin(views.values())
            self._hooks = saved.hooks
        m = first
        has_gradients = kind in (FUSED, BACKWARD)
        if self.inspector is not None:
            self.inspector.begins(kind, shard, views)
        try:
            with self._modes(), self._evaluating(shard) if kind == EVALUATE else torch.enable_grad():
                self._go_on_from(so_far or {})
                for micro in inputs:  # not enumerate, which holds on to the micro-batch before
                    if m > first:
                        self._accumulate(shard)
                    if graphs:
                        out = self._from_graph(shard, m, micro, graphs[m - first])
                    else:
                        out = self._micro(kind, shard, m, micro, locked, saved)
                    if in_pieces and has_gradients:
                        out.pieces = {index: self._taken(index) for index in shard.owned}
                    emit(m, out)
                    m += 1
                    del micro, out
            if self.inspector is not None:
                self.inspector.ends(views, structure.parameters)
            gradients: dict[int, Tensor | None] = {}
            stepped = None
            if has_gradients and not in_pieces:
                if self._accumulated:
                    self._accumulate(shard)
                gradients = {index: self._gradient(index, is_rounded=is_last) for index in shard.owned}
                if step is not None:
                    stepped, gradients = step(structure.parameters, gradients), {}
                    for index in shard.owned:  # a layer may have moved one elsewhere, as an LSTM does for cuDNN
                        if structure.parameters[index].data_ptr() != views[index].data_ptr():
                            views[index].copy_(structure.parameters[index].data)
            structure.check_shared()
            taken = structure.take_buffers(shard.first, self._end(shard))
            self._settle_attributes(shard)
            if kind == BACKWARD:  # the rest is what the forward left
                taken = {index: taken[index] for index in self._written}
            return UnitOutput(gradients=gradients, buffers=taken, stepped=stepped)
        except BaseException:  # what a layer has bound or set must not stay for the next run
            structure.take_buffers(shard.first, self._end(shard))
            if self.inspector is None or not self.inspector.carries:
                for attributes in self.attributes[shard.first : self._end(shard)]:
                    attributes.put_back()
            raise
        finally:
            self._accumulated = {}
            structure.release(shard)

    def _settle_attributes(self, shard: Shard) -> None:
        """Put back what a unit has changed of its layers' attributes; raises LayerFault for parameters and buffers."""
        for k in range(shard.first, self._end(shard)):
            attributes = self.attributes[k]
            if not attributes.is_changed():
                continue
            changed = attributes.changed()
            own = next((each for each in changed if each.is_own), None)
            if own is not None:
                raise LayerFault(
                    f"layer {own.layer}: its parameter, buffer or child {own.attribute!r} came, went or was replaced "
                    f"while it ran, which only this device's copy would have; register it in __init__, or run a batch "
                    f"through the model first; write to buffers of their final shape, and leave parameters in place"
                )
            if changed and self.inspector is not None:
                self.inspector.leaves(k, attributes)
            if self.inspector is None or not self.inspector.carries:
                attributes.put_back()

    def _accumulate(self, shard: Shard) -> None:
        """Add the narrow gradients of the last micro-batch to those before it, in float32."""
        if not self._is_narrow:
            return  # autograd adds
        for index in shard.owned:
            parameter = self.structure.parameters[index]
            if parameter.grad is None or parameter.grad.dtype == torch.float32:
                continue
            if index in self._accumulated:
                self._accumulated[index].add_(parameter.grad)
            else:
                self._accumulated[index] = parameter.grad.float()
            parameter.grad = None

    def _go_on_from(self, so_far: Mapping[int, Tensor]) -> None:
        for index, gradient in so_far.items():
            parameter = self.structure.parameters[index]
            if gradient.dtype == parameter.dtype:
                parameter.grad = gradient
            else:
                self._accumulated[index] = gradient

    def _taken(self, index: int) -> Tensor | None:
        """A parameter's gradient, which is none from here on."""
        parameter = self.structure.parameters[index]
        gradient, parameter.grad = self._dense(index), None
        return gradient

    def _dense(self, index: int) -> Tensor | None:
        """A parameter's gradient, apart from others; raises UnfitTensor where it is sparse."""
        gradient = self.structure.parameters[index].grad
        if gradient is not None and gradient.layout != torch.strided:
            raise UnfitTensor(
                f"parameter {self.structure.slot_names[index]} received a gradient of layout {gradient.layout}, limit: "
                f"dense gradients; build its layer with sparse=False, or let its backward give a dense one"
            )
        return self._apart(gradient)

    def _gradient(self, index: int, *, is_rounded: bool) -> Tensor | None:
        """A parameter's gradient over all micro-batches, as it crosses the link."""
        parameter = self.structure.parameters[index]
        accumulated = self._accumulated.pop(index, None)
        if accumulated is None:
            return self._dense(index)
        return accumulated.to(parameter.dtype) if is_rounded else accumulated

    def _end(self, shard: Shard) -> int:
        return shard.last if shard.last < self._num_layers else len(self.structure.layers)

    @contextmanager
    def _evaluating(self, shard: Shard) -> Iterator[None]:
        layers = self.structure.layers[shard.first : self._end(shard)]
        flags = [(module, module.training) for layer in layers for module in layer.modules()]
        try:
            for layer in layers:
                layer.eval()
            with torch.no_grad():
                yield
        finally:
            for module, training in flags:
                module.training = training

    def _micro(
        self, kind: str, shard: Shard, m: int, micro: MicroInput, locked: bool, saved: Saved | None = None
    ) -> MicroOutput:
        if self.inspector is not None:
            self.inspector.enters(shard, m, micro)
        with _Drawing(micro.random, locked, self._redirects, self._generator, self.inspector) as drawing:
            arrivals, tensors = self._arrive(micro.value, graph=kind != EVALUATE)
            versions = [tensor._version for tensor in tensors]
            skips = {name: self._arrive(skip, graph=kind != EVALUATE) for name, skip in micro.skips.items()}
            arriving = {name: micro.skips[name].build(found) for name, (_, found) in skips.items()}
            gotten_versions = [tensor._version for _, found in skips.values() for tensor in found]
            with self._hooks(), drawing.forward(), Frame(arriving) as frame:
                value = self._layers(shard, micro.value.build(tensors), frame)
                gotten = [tensor for _, found in skips.values() for tensor in found]
                if gotten_versions != [tensor._version for tensor in gotten]:
                    raise ValueError(
                        f"layers {self.structure.names[shard.first]} to {self.current} work in place on a value that "
                        f"they got from skips, which other layers may get too; clone it first"
                    )
                if micro.value.shares_memory and versions != [tensor._version for tensor in tensors]:
                    raise ValueError(
                        f"layers {self.structure.names[shard.first]} to {self.current} work in place on an input that "
                        f"shares memory with another input, which crossing between shards takes apart; clone it first"
                    )
                if self._is_narrow and micro.target is not None:
                    value = cast(value, torch.float32)  # what the loss and the metrics compute in
                loss = self._loss(value, micro) if micro.target is not None else None
            if kind in (FORWARD, EVALUATE) and loss is None:
                out = Boundary.of(value, f"the output of layer {self.current}")
                self._check_place(out)
                if saved is not None:
                    saved.weigh(out.tensors)
                if saved is not None and saved.graphs is not None:
                    edges = [get_gradient_edge(t) if t.requires_grad else None for t in out.tensors]
                    saved.graphs.append(Graph(arrivals=arrivals, outputs=edges, frame=frame))
                leaving = {name: self._leaving(name, frame) for name in shard.leaving}
                skipping = {t.untyped_storage().data_ptr() for each in leaving.values() for t in each.tensors}
                if skipping & {tensor.untyped_storage().data_ptr() for tensor in out.tensors}:
                    out = out._replace(shares_memory=True)  # crossing takes it apart from what skips layers
                return MicroOutput(
                    random=drawing.state,
                    value=self._around(out),
                    skips={name: self._around(each) for name, each in leaving.items()},
                )
            if kind == EVALUATE:
                assert loss is not None
                return MicroOutput(random=drawing.state, loss=_number(loss), metrics=self._measured(value, micro))
            if loss is not None:
                del value  # logits are large, and the plain loop does not hold them either
                watching = nullcontext() if self.inspector is None else self._watching_buffers(shard)
                with watching, replayed(frame):
                    scaled = loss if micro.loss_scale is None else loss * micro.loss_scale
                    scaled.backward()  # type: ignore[no-untyped-call]
            else:
                with self._watching_buffers(shard):
                    self._backward(value, micro, shard, m, skips, frame)
        gradients = [self._apart(arrival.gradient if arrival else None) for arrival in arrivals]
        tied = {}
        for index in shard.borrowed:
            tied[index] = self._dense(index)
            self.structure.parameters[index].grad = None
        return MicroOutput(
            random=drawing.state,
            gradients=gradients if shard.index else None,
            tied=tied,
            skip_gradients={
                name: [self._apart(arrival.gradient if arrival else None) for arrival in found]
                for name, (found, _) in skips.items()
            },
            loss=_number(loss) if loss is not None else None,
        )

    def _from_graph(self, shard: Shard, m: int, micro: MicroInput, graph: Graph) -> MicroOutput:
        """The backward of a forward whose graph was kept; what skips layers, and tied weights, it has none of."""
        found = zip(graph.outputs, micro.gradients, strict=True)
        pairs = [(edge, gradient) for edge, gradient in found if edge is not None and gradient is not None]
        if pairs:
            outputs, gradients = zip(*pairs, strict=True)
            with self._watching_buffers(shard), replayed(graph.frame):
                torch.autograd.backward(outputs, gradients)
        return MicroOutput(
            random=micro.random,
            gradients=[self._apart(a.gradient if a else None) for a in graph.arrivals] if shard.index else None,
        )

    @contextmanager
    def _watching_buffers(self, shard: Shard) -> Iterator[None]:
        """Note the buffers that the body, a backward, writes to: in a hook, or where a checkpoint runs a forward again.

        By their versions, which kernels of torch do not always move: on trial by their bits.
        """
        places = shard.first, self._end(shard)
        before = self.structure.buffer_versions(*places)
        if before and self.inspector is not None:
            self.inspector.begins_backward(self.structure.current_buffers(*places))
        yield
        if before:
            after = self.structure.buffer_versions(*places)
            self._written |= {index for index, version in after.items() if version != before.get(index)}
            if self.inspector is not None:
                self._written |= self.inspector.ends_backward(self.structure.current_buffers(*places))

    def _check_place(self, value: Boundary) -> None:
        """What crosses to another shard comes back on the device, wherever it was."""
        here = self.structure.device
        strange = next((tensor for tensor in value.tensors if tensor.device.type != here.type), None)
        if strange is not None:
            raise ValueError(
                f"layer {self.current} gave a tensor of shape {tuple(strange.shape)} on {strange.device}, limit: "
                f"{here}, where its inputs are; make it there, or pass it on as a number"
            )

    def _around(self, value: Boundary) -> Boundary:
        """A value without its graph, that nothing else writes to."""
        return value.around([tensor for each in value.tensors if (tensor := self._apart(each)) is not None])

    def _leaving(self, name: str, frame: Frame) -> Boundary:
        if name not in frame.values:
            raise KeyError(f"skips: {name!r} was put at the sample and not in this forward; put it at every forward")
        return Boundary.of(frame.values[name], f"the skip {name!r}")

    def _apart(self, tensor: Tensor | None) -> Tensor | None:
        """The tensor without its graph, and cloned if it lies in the slab or a buffer, which others will write to."""
        if tensor is None:
            return None
        if tensor.layout != torch.strided:
            check_fit(f"a gradient that leaves a shard, up to {self.current},", tensor)
        tensor = tensor.detach()
        return copy_of(tensor) if tensor.untyped_storage().data_ptr() in self._bound else tensor

    def _arrive(self, value: Boundary, *, graph: bool) -> tuple[list[Arrival | None], list[Tensor]]:
        arrivals = [
            Arrival(t) if grad and graph else None for t, grad in zip(value.tensors, value.requires_grad, strict=True)
        ]
        tensors = [
            tensor if arrival is None else Arrive.apply(self._anchor, arrival)  # type: ignore[no-untyped-call]
            for tensor, arrival in zip(value.tensors, arrivals, strict=True)
        ]
        return arrivals, tensors

    def _layers(self, shard: Shard, value: Any, frame: Frame) -> Any:
        for k in range(shard.first, shard.last):
            self.current = self.structure.names[k]
            if self.inspector is not None:
                self.inspector.enters_layer(value, frame)
            if self._compiled is None or not self._may_compile:
                value = self.structure.layers[k](value)
            else:
                value = self._compiled.run(k, value)
        return value

    def _loss(self, value: Any, micro: MicroInput) -> Tensor:
        assert micro.target is not None
        self.current = "loss_fn"
        target = micro.target.build(micro.target.tensors)
        if self.inspector is not None:
            self.inspector.enters_layer(value, Frame({}), target)
        loss = self.loss_fn(value, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn returned {shape}, not a scalar tensor; reduce it to one number")
        return loss if micro.weight is None else loss * micro.weight

    def _measured(self, value: Any, micro: MicroInput) -> dict[str, float | Tensor]:
        assert micro.target is not None
        target = micro.target
        found: dict[str, float | Tensor] = {}
        for name, metric in self._metrics.items():
            self.current = f"metric {name}"
            measured = metric(value, target.build(target.tensors))
            found[name] = _number(measured) if isinstance(measured, Tensor) else float(measured)
        return found

    def _backward(
        self,
        value: Any,
        micro: MicroInput,
        shard: Shard,
        m: int,
        skips: Mapping[str, tuple[list[Arrival | None], list[Tensor]]],
        frame: Frame,
    ) -> None:
        tensors = Boundary.of(value, f"the output of layer {self.current}").tensors
        # A metered unit runs uncompiled, and another one of its step may not.
        if self._on_recomputed is not None and (self._compiled is None or not self._compiled.any_graph):
            self._on_recomputed(shard, m, tensors)
        roots: list[tuple[Tensor, Tensor]] = []
        # What skips layers comes first, from the highest shard that got it down: autograd's order in the whole model.
        for name in sorted(micro.skip_gradients, key=lambda each: -shard.above[each]):
            found = skips[name][1] if name in skips else self._leaving(name, frame).tensors
            roots += [(t, g) for t, g in zip(found, micro.skip_gradients[name], strict=True) if g is not None]
        roots += [(t, g) for t, g in zip(tensors, micro.gradients, strict=True) if g is not None]
        # A tied parameter is a root with the gradient from above: added to before the shard's own uses, which is
        # autograd's order in the whole model.
        roots += [(self.structure.parameters[index], g) for index, g in micro.tied.items()]
        if roots:
            outputs, gradients = zip(*roots, strict=True)
            with replayed(frame):
                torch.autograd.backward(outputs, gradients)


def _number(value: Tensor) -> float | Tensor:
    """A number that is in DRAM; of one on a device, what will be it once the device is through."""
    return value.item() if value.device.type == "cpu" else value.detach().clone()


class _Drawing:
    """Where the draws of one micro-batch go, and the random state they leave."""

    def __init__(
        self,
        state: RandomState,
        locked: bool,
        redirects: bool,
        generator: DeviceGenerator | None,
        inspector: Inspector | None = None,
    ) -> None:
        self.state = state
        self._inspector = inspector
        self._after: Any = None  # of the device's generator, once the forward is through
        self._redirects = redirects
        self._stream = Stream(state)
        self._installed = installed(self._stream) if locked else None
        self._generator = generator

    def __enter__(self) -> _Drawing:
        if self._installed is not None:
            self._installed.__enter__()
        return self

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The body's draws move the state; what a backward draws again, in a checkpoint inside a layer, does not."""
        before = None if self._generator is None else self._generator.install(self.state.device)
        if self._installed is not None:
            yield
            self.state = capture()._replace(device=self.state.device)
            if self._inspector is not None and self._inspector.in_backward is not None:
                install(self._inspector.in_backward)
        elif not self._redirects:
            yield
        else:
            with TaskGenerator(self.state.torch) as drawn:
                yield
            self.state = self.state._replace(torch=drawn.state)
        if self._generator is not None:
            after = self._generator.state()
            assert before is not None
            if not self._generator.same_seed(before, after):
                raise RuntimeError(
                    "the device's random generator was seeded while a unit drew from it: torch.manual_seed() seeds "
                    "those of all devices; in what runs meanwhile (loaders, callbacks), use one of your own"
                )
            self._after = after
            if after != before:  # a seed stays one until something is drawn
                self.state = self.state._replace(device=after)

    def __exit__(self, *exc: Any) -> None:
        inspector = self._inspector
        drew = exc[0] is None and inspector is not None and self._drew_in_backward(inspector.in_backward)
        if self._installed is not None:
            self._installed.__exit__(*exc)
        if drew and inspector is not None:
            inspector.drew_in_backward()

    def _drew_in_backward(self, before: RandomState | None) -> bool:
        """Return True if the states are others than a backward found; a checkpoint in a layer puts them back."""
        if self._installed is None or before is None:
            return False
        drew_there = self._generator is not None and self._generator.state() != self._after
        return drew_there or not capture()._replace(device=before.device).same_as(before)
