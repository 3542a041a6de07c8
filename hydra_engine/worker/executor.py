"""Runs one unit on tensors that are on the device already: forward, fused forward and backward, recomputing backward.

Nothing here copies, waits for a device or touches the host's state, so a unit can be run again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from hydra_engine.data import register_draws
from hydra_engine.devices import DeviceGenerator
from hydra_engine.host import AttributeChanges, LayerFault, NormGroups, Shard, Structure
from hydra_engine.schedule import BACKWARD, EVALUATE, FORWARD, FUSED
from hydra_engine.worker.attributes import Attributes
from hydra_engine.worker.compiled import CompiledLayers
from hydra_engine.worker.drawing import Drawing
from hydra_engine.worker.graphs import Arrival, GradientSums, Graph, GraphUse, arrive
from hydra_engine.worker.thread_modes import UNIT_MODES, ThreadModes, put_back
from hydra_engine.worker.unit import MicroInput, MicroOutput, UnitOutput
from partitioners.boundary import Boundary
from partitioners.precision import cast
from partitioners.profile import spanned
from partitioners.skips import Frame

Modes: TypeAlias = "Callable[[], AbstractContextManager[Any]]"
Arrived: TypeAlias = "tuple[list[Arrival | None], list[Tensor]]"  # where a value enters a graph, and what is in there

# Entered by every unit, so made once.
NOTHING = nullcontext()


def _drop(_: Any) -> Any:
    return None


class UnitSpec(NamedTuple):
    """The unit to run, and how."""

    kind: str
    shard: Shard
    micro_batches: range = range(1)  # of the step's, those that the unit has: all, or some where devices share a step
    locked: bool = False  # it draws from generators that exist once in the process, and runs with these installed
    # A layer may draw random numbers. Without it, none is looked for on a device, where kernels would wait.
    draws: bool = True
    keep_saved: bool = False  # a layer differentiates inside its own forward, which must find what it saved
    in_pieces: bool = False  # gradients leave with each micro-batch's output, instead of as one sum
    is_last: bool = True  # no gradients of other micro-batches will be added to these: narrow ones are rounded
    written: Collection[int] = ()  # buffers that a backward is known to write to
    changes: AttributeChanges | None = None  # of Python attributes, that were tried; None: all were
    norm_groups: NormGroups | None = None  # of parameters, whose gradients are measured by micro-batch
    norm: Callable[[int, Tensor], Tensor] | None = None  # of a slot's finished gradient; None: not needed


class Inspector(Protocol):
    """Looks on while units run on trial."""

    carries: bool  # units find the Python attributes that those before have left

    # A unit begins, with these parameters; a micro-batch starts from this, layers or (1) the loss from this of a batch;
    # it ends with these.
    def begins(self, shard: Shard, views: Mapping[int, Tensor]) -> None: ...
    def enters(self, shard: Shard, m: int, micro: MicroInput) -> None: ...
    def gets(self, side: int, value: Any) -> None: ...
    def gives(self, shard: Shard, m: int, tensors: Sequence[Tensor]) -> None: ...

    # The buffers as a recomputed forward left them, and after the backward, to say which of them that has written to.
    def begins_backward(self, buffers: Mapping[int, Tensor]) -> None: ...
    def ends_backward(self, buffers: Mapping[int, Tensor]) -> set[int]: ...

    # All micro-batches of a unit are through; it has changed Python attributes of a layer.
    def ends(self) -> None: ...
    def leaves(self, layer: int, attributes: Attributes) -> None: ...


@dataclass(eq=False)
class Executor:
    """Runs the units of one task on one device."""

    structure: Structure
    loss_fn: Callable[[Any, Any], Tensor]
    num_layers: int
    modes: Modes = lambda: NOTHING  # that micro-batches run inside
    metrics: Mapping[str, Callable[[Any, Any], float | Tensor]] = field(default_factory=dict)
    generator: DeviceGenerator | None = None  # of the device's kernels; None: the CPU's, whose draws are redirected
    compiled: CompiledLayers | None = None
    inspector: Inspector | None = field(default=None, init=False)
    current: str = field(default="", init=False)  # the layer that runs, for messages
    has_written: bool = field(default=False, init=False)  # to parameters, in a unit that has failed

    def __post_init__(self) -> None:
        structure = self.structure
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn = structure.layers[self.num_layers]
        self.is_narrow = structure.narrow is not None
        self.anchor = torch.zeros((), device=structure.device, requires_grad=True)
        # As they are before any unit: what a forward leaves on its layers would stay on the device, and make one copy
        # of a layer another one than those of other devices.
        self.attributes = [Attributes(*each) for each in zip(structure.layers, structure.names, strict=True)]
        if self.generator is None:
            register_draws()  # of what layers have imported

    @property
    def shown(self) -> str:
        """What runs, as the user knows it."""
        return self.structure.shown(self.current)

    def run(
        self,
        spec: UnitSpec,
        views: dict[int, Tensor],
        buffers: dict[int, Tensor],
        so_far: Mapping[int, Tensor] | None = None,
        graphs: GraphUse | None = None,
    ) -> UnitRunning:
        """Return a context that runs a unit: `micro` for each of its micro-batches in order, then `end`.

        views: the shard's parameters. so_far: gradients of the micro-batches before these; the unit adds to them in
        place. graphs: that it makes, or goes on from; then its forward is not run again.
        """
        return UnitRunning(self, spec, views, buffers, so_far or {}, graphs or GraphUse())

    def loss(self, value: Any, micro: MicroInput) -> Tensor:
        """Return the loss that a micro-batch's backward starts from."""
        assert micro.target is not None
        self.current = "loss_fn"
        target = micro.target.value()
        if self.inspector is not None:
            self.inspector.gets(1, target)
        loss = self.loss_fn(value, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn returned {shape}, not a scalar tensor; reduce it to one number")
        return loss if micro.weight is None else loss * micro.weight

    def measured(self, value: Any, micro: MicroInput) -> dict[str, float | Tensor]:
        """Return what the metrics say of one micro-batch."""
        assert micro.target is not None
        found: dict[str, float | Tensor] = {}
        for name, metric in self.metrics.items():
            self.current = f"metric {name}"
            found[name] = _figure(name, metric(value, micro.target.value()))
        return found

    def settle_attributes(self, first: int, end: int, changes: AttributeChanges | None) -> None:
        """Put back what a unit has changed of its layers' attributes, and note in `changes` what was not tried.

        Raises LayerFault for parameters and buffers.
        """
        for k in range(first, end):
            attributes = self.attributes[k]
            if not attributes.is_changed():
                continue
            changed = attributes.changed()
            own = next((each for each in changed if each.is_own), None)
            if own is not None:
                raise LayerFault(
                    f"{self.structure.shown(own.layer)}: its parameter, buffer or child {own.attribute!r} came, went "
                    f"or was replaced while it ran, which only this device's copy would have; register it in __init__, "
                    f"or run a batch through the model first; write to buffers of their final shape, and leave "
                    f"parameters in place"
                )
            if changed and self.inspector is not None:
                self.inspector.leaves(k, attributes)
            elif changes is not None:
                for each in changed:
                    changes.note(each.layer, each.attribute, each.value)
            self.put_back(attributes)

    def put_back(self, attributes: Attributes) -> None:
        """Make a layer's attributes as they were before the unit, unless units on trial hand them on."""
        if self.inspector is None or not self.inspector.carries:
            attributes.put_back()


class UnitRunning:
    """One unit while it runs: its micro-batches one after the other, then what the unit leaves.

        with executor.run(spec, views, buffers) as running:
            for m in spec.micro_batches:
                output = running.micro(m, input)
            unit_output = running.end()

    On the way out, the executor's layers are empty again, whatever happened.
    """

    def __init__(
        self,
        executor: Executor,
        spec: UnitSpec,
        views: dict[int, Tensor],
        buffers: dict[int, Tensor],
        so_far: Mapping[int, Tensor],
        graphs: GraphUse,
    ) -> None:
        self._executor, self._structure = executor, executor.structure
        self._spec, self._shard = spec, spec.shard
        # With the loss's module, which counts as part of the last layer's shard.
        is_last = spec.shard.last == executor.num_layers
        self._end = len(executor.structure.layers) if is_last else spec.shard.last
        self._views, self._buffers, self._so_far = views, buffers, so_far
        self._saved, self._graphs = graphs.saved, graphs.graphs
        bound = (*views.values(), *buffers.values())
        self._gradients = GradientSums(executor.structure, spec.shard, bound, spec.norm_groups)
        self._versions: list[int] = []  # of its parameters, as it began
        self._written = set(spec.written) & set(spec.shard.buffers)
        self._was_training: list[tuple[nn.Module, bool]] = []  # modules, while they evaluate
        self._modes: ThreadModes = ()  # of the thread, as it began

    def __enter__(self) -> UnitRunning:
        self._structure.bind(self._views, self._buffers)
        self._versions = self._structure.parameter_versions(self._views)
        self._modes = UNIT_MODES.begin()
        self._executor.has_written = False
        try:
            if self._saved is not None:
                self._saved.begin(self._views.values())
            if self._executor.inspector is not None:
                self._executor.inspector.begins(self._shard, self._views)
            if self._spec.kind == EVALUATE:
                layers = self._structure.layers[self._shard.first : self._end]
                self._was_training = [(module, module.training) for layer in layers for module in layer.modules()]
                with self._executor.modes():  # may be the user's code
                    for layer in layers:
                        layer.eval()
            if torch.is_grad_enabled() is (self._spec.kind == EVALUATE):
                torch.set_grad_enabled(self._spec.kind != EVALUATE)
            if self._so_far:
                self._gradients.go_on_from(self._so_far)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        UNIT_MODES.end(self._modes)
        self._train_again()
        try:
            if exc[0] is not None:  # what a layer has bound or set must not stay for the next run
                self._executor.has_written = self._versions != self._structure.parameter_versions(self._views)
                self._structure.take_buffers(self._shard.first, self._end)
                for attributes in self._executor.attributes[self._shard.first : self._end]:
                    self._executor.put_back(attributes)
        finally:
            self._structure.release(self._shard)

    def _train_again(self) -> None:
        """Switch modules back that evaluated, so that this is nothing which a forward has changed."""
        for module, training in self._was_training:
            module.training = training
        self._was_training = []

    def micro(self, m: int, micro: MicroInput) -> MicroOutput:
        """Run the step's micro-batch m."""
        spec, executor, inspector = self._spec, self._executor, self._executor.inspector
        if (executor.is_narrow or spec.norm_groups is not None) and m > spec.micro_batches.start:
            self._gradients.accumulate()
        with executor.modes():
            if self._graphs:
                out = self._from_graph(micro, self._graphs[m - spec.micro_batches.start])
            else:
                if inspector is not None:
                    inspector.enters(self._shard, m, micro)
                drawing = Drawing(
                    state=micro.random,
                    generator=executor.generator,
                    locked=spec.locked,
                    redirects=spec.draws or executor.generator is None,
                    is_compiled=executor.compiled is not None,
                )
                with drawing:
                    out = self._through_layers(micro, drawing)
                if inspector is not None and out.value is not None:
                    inspector.gives(self._shard, m, out.value.tensors)
        if spec.kind in (FUSED, BACKWARD):
            out.squares = self._gradients.measured()
        if spec.in_pieces and spec.kind in (FUSED, BACKWARD):
            out.pieces = self._gradients.taken(self._shard.owned)
        return out

    def end(self) -> UnitOutput:
        """Return what the unit leaves, once all its micro-batches are through."""
        spec, executor, structure, shard = self._spec, self._executor, self._structure, self._shard
        put_back(self._modes)
        if executor.inspector is not None:
            executor.inspector.ends()
        executor.current = ""  # what is found from here on is not the last layer's
        structure.check_parameters(self._views, self._versions)
        gradients: dict[int, Tensor | None] = {}
        norms = squares = None
        if spec.kind in (FUSED, BACKWARD) and not spec.in_pieces:
            gradients = self._gradients.totals(are_rounded=spec.is_last)
            if spec.is_last:
                squares = self._gradients.measured(gradients.items())
            if spec.is_last and spec.norm is not None:
                found = [spec.norm(index, gradient) for index, gradient in gradients.items() if gradient is not None]
                norms = torch.stack(found) if found else None
        self._train_again()
        structure.check_shared()
        taken = structure.take_buffers(shard.first, self._end)
        executor.settle_attributes(shard.first, self._end, spec.changes)
        if spec.kind == BACKWARD:  # the rest is what the forward left
            taken = {index: taken[index] for index in self._written}
        return UnitOutput(gradients=gradients, buffers=taken, norms=norms, squares=squares)

    def _through_layers(self, micro: MicroInput, drawing: Drawing) -> MicroOutput:
        """Run the layers forward, and backward where the unit has a backward."""
        executor, kind = self._executor, self._spec.kind
        arrivals, tensors = self._arrive(micro.value)
        versions = [tensor._version for tensor in tensors]
        skips = {name: self._arrive(skip) for name, skip in micro.skips.items()}
        arriving = {name: micro.skips[name].build(found) for name, (_, found) in skips.items()}
        gotten_versions = [tensor._version for _, found in skips.values() for tensor in found]
        hooks: AbstractContextManager[Any] = NOTHING  # of what autograd saves: dropped, or counted and kept
        if self._saved is not None:
            hooks = self._saved.hooks()
        elif kind == FORWARD and not self._spec.keep_saved:
            hooks = saved_tensors_hooks(_drop, _drop)
        with hooks, drawing.forward() as drawn, Frame(arriving) as frame:
            value = self._layers(micro.value.build(tensors))
            changed = ""
            if gotten_versions != [tensor._version for _, found in skips.values() for tensor in found]:
                changed = "a value that they got from skips, which other layers may get too"
            elif micro.value.shares_memory and versions != [tensor._version for tensor in tensors]:
                changed = "an input that shares memory with another input, which crossing between shards takes apart"
            if changed:
                names = self._structure.names[self._shard.first : self._shard.last]
                layers = spanned([*map(self._structure.shown, names)])
                raise ValueError(f"{layers}: work in place on {changed}; clone it first")
            if executor.is_narrow and micro.target is not None:
                value = cast(value, torch.float32)  # what the loss and the metrics compute in
            loss = executor.loss(value, micro) if micro.target is not None else None
        drawing.move(drawn)
        if kind in (FORWARD, EVALUATE) and loss is None:
            return self._passed_on(value, arrivals, frame, drawing)
        if kind == EVALUATE:
            assert loss is not None
            return MicroOutput(random=drawing.state, loss=_number(loss), metrics=executor.measured(value, micro))
        if loss is not None:
            del value  # logits are large, and the plain loop does not hold them either
            watching = NOTHING if executor.inspector is None else self._watching_buffers()
            with watching, frame.replayed():
                scaled = loss if micro.loss_scale is None else loss * micro.loss_scale
                scaled.backward()  # type: ignore[no-untyped-call]
        else:
            with self._watching_buffers():
                self._backward(value, micro, skips, frame)
        return MicroOutput(
            random=drawing.state,
            gradients=self._of_arrivals(arrivals) if self._shard.index else None,
            tied=self._gradients.taken(self._shard.borrowed) if self._shard.borrowed else {},
            skip_gradients={name: self._of_arrivals(found) for name, (found, _) in skips.items()},
            loss=_number(loss) if loss is not None else None,
        )

    def _passed_on(self, value: Any, arrivals: list[Arrival | None], frame: Frame, drawing: Drawing) -> MicroOutput:
        """Return what a forward leaves to the shards above."""
        shown, saved = self._executor.shown, self._saved
        out = Boundary.of(value, f"the output of {shown}")
        for tensor in out.tensors:
            if tensor.device.type != self._structure.device.type:  # or it would come back here, from DRAM
                raise ValueError(
                    f"{shown} gave a tensor of shape {tuple(tensor.shape)} on {tensor.device}, "
                    f"limit: {self._structure.device}, where its inputs are; make it there, or pass it on as a number"
                )
        if saved is not None:
            saved.weigh(out.tensors)
            if saved.graphs is not None:
                edges = [get_gradient_edge(t) if t.requires_grad else None for t in out.tensors]
                saved.graphs.append(Graph(arrivals=arrivals, outputs=edges, frame=frame))
        leaving = {name: _leaving(name, frame) for name in self._shard.leaving}
        skipping = {t.untyped_storage().data_ptr() for each in leaving.values() for t in each.tensors}
        if skipping & {tensor.untyped_storage().data_ptr() for tensor in out.tensors}:
            out = out._replace(shares_memory=True)  # crossing takes it apart from what skips layers
        return MicroOutput(
            random=drawing.state,
            value=self._around(out),
            skips={name: self._around(each) for name, each in leaving.items()},
        )

    def _from_graph(self, micro: MicroInput, graph: Graph) -> MicroOutput:
        """Run the backward of a forward whose graph was kept, in a shard without tied weights and skips."""
        found = zip(graph.outputs, micro.gradients, strict=True)
        pairs = [(edge, gradient) for edge, gradient in found if edge is not None and gradient is not None]
        if pairs:
            edges, roots = zip(*pairs, strict=True)
            with self._watching_buffers(), graph.frame.replayed():
                torch.autograd.backward(edges, roots)
        gradients = self._of_arrivals(graph.arrivals) if self._shard.index else None
        return MicroOutput(random=micro.random, gradients=gradients)

    def _watching_buffers(self) -> AbstractContextManager[None]:
        """Note the buffers that the body, a backward, writes to: in a hook, or where a checkpoint runs a forward again.

        By their versions, which kernels of torch do not always move: on trial by their bits.
        """
        return self._watched() if self._shard.buffers else NOTHING

    @contextmanager
    def _watched(self) -> Iterator[None]:
        structure, first, end, inspector = self._structure, self._shard.first, self._end, self._executor.inspector
        before = structure.buffer_versions(first, end)
        if inspector is not None:
            inspector.begins_backward(structure.current_buffers(first, end))
        yield
        after = structure.buffer_versions(first, end)
        self._written |= {index for index, version in after.items() if version != before.get(index)}
        if inspector is not None:
            self._written |= inspector.ends_backward(structure.current_buffers(first, end))

    def _around(self, value: Boundary) -> Boundary:
        """Return a value without its graph, that nothing else writes to."""
        apart, current = self._gradients.apart, self._executor.shown
        return value.around([apart(tensor, current) for tensor in value.tensors])

    def _of_arrivals(self, arrivals: Sequence[Arrival | None]) -> list[Tensor | None]:
        found = [None if arrival is None else arrival.gradient for arrival in arrivals]
        return [None if each is None else self._gradients.apart(each, self._executor.shown) for each in found]

    def _arrive(self, value: Boundary) -> Arrived:
        """Bring a value into this shard's graph, where it needs gradients."""
        graph = self._spec.kind != EVALUATE
        arrivals = [
            Arrival(t) if grad and graph else None for t, grad in zip(value.tensors, value.requires_grad, strict=True)
        ]
        tensors = [
            tensor if arrival is None else arrive(self._executor.anchor, arrival)
            for tensor, arrival in zip(value.tensors, arrivals, strict=True)
        ]
        return arrivals, tensors

    def _layers(self, value: Any) -> Any:
        executor, structure = self._executor, self._structure
        compiled = executor.compiled
        if self._spec.locked or self._spec.keep_saved or self._spec.kind == EVALUATE:
            compiled = None
        if executor.inspector is not None and self._shard.is_first:
            executor.inspector.gets(0, value)
        for k in range(self._shard.first, self._shard.last):
            executor.current = structure.names[k]
            value = structure.layers[k](value) if compiled is None else compiled.run(k, value)
        return value

    def _backward(self, value: Any, micro: MicroInput, skips: Mapping[str, Arrived], frame: Frame) -> None:
        """Run the backward of a shard that passes a value on."""
        shard = self._shard
        tensors = Boundary.of(value, f"the output of {self._executor.shown}").tensors
        roots: list[tuple[Tensor, Tensor]] = []
        # What skips layers comes first, from the highest shard that got it down: autograd's order in the whole model.
        for name in sorted(micro.skip_gradients, key=lambda each: -shard.above[each]):
            found = skips[name][1] if name in skips else _leaving(name, frame).tensors
            roots += [(t, g) for t, g in zip(found, micro.skip_gradients[name], strict=True) if g is not None]
        roots += [(t, g) for t, g in zip(tensors, micro.gradients, strict=True) if g is not None]
        # A tied parameter is a root with the gradient from above: added to before the shard's own uses, which is
        # autograd's order in the whole model.
        roots += [(self._structure.parameters[index], g) for index, g in micro.tied.items()]
        if roots:
            outputs, gradients = zip(*roots, strict=True)
            with frame.replayed():
                torch.autograd.backward(outputs, gradients)


def _leaving(name: str, frame: Frame) -> Boundary:
    if name not in frame.values:
        raise KeyError(f"skips: {name!r} was put at the sample and not in this forward; put it at every forward")
    return Boundary.of(frame.values[name], f"the skip {name!r}")


def _figure(name: str, measured: Any) -> float | Tensor:
    """Return what a metric has returned as a number."""
    if isinstance(measured, Tensor):
        if measured.numel() == 1:
            return _number(measured)
        found = f"a tensor of shape {tuple(measured.shape)}"
    else:
        with suppress(TypeError, ValueError):
            return float(measured)
        found = f"{measured!r:.60}, a {type(measured).__name__}"
    raise LayerFault(
        f"metric {name!r} returned {found}, limit: one number; reduce it, for example with .float().mean()"
    )


def _number(value: Tensor) -> float | Tensor:
    """Return a number that is in DRAM; of one on a device, what will be it once the device is through."""
    return value.item() if value.device.type == "cpu" else value.detach().clone()
