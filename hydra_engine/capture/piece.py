"""The calls between two cuts as one Python function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from hydra_engine.capture.tape import HERE, Call, Constant, Held, Value, Values, name_of
from partitioners.reach import PLAIN


class Piece:
    """Runs some recorded calls: values that cross into it go in, values that cross out of it come out."""

    def __init__(self, calls: Sequence[Call], inputs: Sequence[int], outputs: Sequence[int], values: Values) -> None:
        writer = _Writer(inputs, values)
        needed_last = _last_uses(calls, outputs)
        for p, call in enumerate(calls):
            writer.call(call, needed_last.get(p, ()))
        self.text = writer.text(outputs)
        self.held = tuple(name.split(".") for name in writer.held)
        self.constants = writer.constants
        space: dict[str, Any] = {"leaves": pytree.tree_leaves, "no_grad": torch.no_grad, **writer.constants}
        exec(_compiled(self.text), space)
        self._run: Callable[..., tuple[Any, ...]] = space["piece"]

    def run(self, holder: nn.Module, here: torch.device, values: Sequence[Tensor]) -> tuple[Any, ...]:
        """Run the calls with the parameters and modules that a holder has by their names."""
        return self._run(here, [found_in(holder, path) for path in self.held], values)


def found_in(holder: nn.Module, path: Sequence[str]) -> Any:
    module = holder
    for name in path[:-1]:
        module = module._modules[name]  # type: ignore[assignment]
    name = path[-1]
    for held in (module._modules, module._parameters, module._buffers):
        if name in held:
            return held[name]
    raise KeyError(".".join(path))


@lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<layer>", "exec")


def _last_uses(calls: Sequence[Call], outputs: Sequence[int]) -> dict[int, list[int]]:
    """Return, by call, the values that nobody needs after it."""
    last = {number: p for p, call in enumerate(calls) for number in (*call.reads, *call.makes)}
    found: dict[int, list[int]] = {}
    for number, p in last.items():
        if number not in set(outputs):
            found.setdefault(p, []).append(number)
    return found


class _AsRecorded:
    """Sees that a module which was recorded as a whole gives the numbers, and the sizes, that the forward goes by."""

    def __init__(self, call: Call, told: Mapping[int, tuple[tuple[int, ...], str]]) -> None:
        self._call, self._told = call, told
        leaves, self._spec = pytree.tree_flatten(call.result, is_leaf=_stands_for)
        self._leaves = [repr(each) if isinstance(each, PLAIN) else each for each in leaves]

    @classmethod
    def of(cls, call: Call, told: Mapping[int, tuple[tuple[int, ...], str]]) -> _AsRecorded | None:
        """Return one for a call; None: nobody asks for sizes, and it gives no numbers."""
        about = {number: told[number] for number in call.makes if number in told}
        has_numbers = any(isinstance(each, PLAIN) and each is not None for each in _flat(call.result))
        return cls(call, about) if call.is_kept and (has_numbers or about) else None

    def __call__(self, found: Any) -> Any:
        leaves, spec = pytree.tree_flatten(found)
        if spec != self._spec:
            raise self._differs(str(spec), str(self._spec), self._call.line)
        for each, wanted in zip(leaves, self._leaves, strict=True):
            if isinstance(wanted, str):
                if repr(each) != wanted and not _has_no_values(leaves):
                    raise self._differs(repr(each), wanted, self._call.line)
            elif isinstance(wanted, Value) and wanted.number in self._told:
                shape, line = self._told[wanted.number]
                if tuple(each.shape) != shape and not _has_no_values([each]):
                    raise self._differs(f"sizes {tuple(each.shape)}", f"sizes {shape}", line)
        return found

    def _differs(self, found: str, wanted: str, line: str) -> ValueError:
        return ValueError(
            f"the model's own forward goes by what its module {name_of(self._call.func)} gives ({line}), which "
            f"depends on values: {found}, limit: {wanted}, as recorded; put the lines that go by it into that module, "
            f"or return tensors of sizes that follow from its inputs' sizes"
        )


def _has_no_values(leaves: Iterable[Any]) -> bool:
    return any(isinstance(each, Tensor) and (each.is_meta or isinstance(each, FakeTensor)) for each in leaves)


class _Writer:
    """Writes the function, with names that do not tell one block of a model from the next."""

    def __init__(self, inputs: Sequence[int], values: Values) -> None:
        self.held: dict[str, int] = {}
        self.constants: dict[str, Any] = {}
        self._tensors, self._told = values.constants, values.told
        self._names: dict[int, str] = {}
        self._by_id: dict[int, str] = {}
        self._lines = [f"[{', '.join(map(self._value, inputs))}] = values"]
        self._is_in_no_grad = False

    def call(self, call: Call, dead: Sequence[int]) -> None:
        if call.with_grad == self._is_in_no_grad:
            self._is_in_no_grad = not call.with_grad
            if self._is_in_no_grad:
                self._lines.append("with no_grad():")
        arguments = [self._shown(each) for each in call.args]
        arguments += [f"{key}={self._shown(each)}" for key, each in call.kwargs.items()]
        func = self._held(call.func.name) if isinstance(call.func, Held) else self._constant(call.func)
        made = f"{func}({', '.join(arguments)})"
        if (check := _AsRecorded.of(call, self._told)) is not None:
            made = f"{self._constant(check)}({made})"
        if isinstance(call.result, Value):
            line = f"{self._value(call.result.number)} = {made}"
        elif not call.makes:
            line = made
        else:
            targets = [self._value(each.number) if isinstance(each, Value) else "_" for each in _flat(call.result)]
            is_plain = type(call.result) in (list, tuple) and len(targets) == len(call.result)
            line = f"[{', '.join(targets)}] = {made if is_plain else f'leaves({made})'}"
        indent = "    " if self._is_in_no_grad else ""
        self._lines.append(indent + line)
        names = [self._names[number] for number in dead if number in self._names]
        if names:
            self._lines.append(f"{indent}del {', '.join(names)}")

    def text(self, outputs: Sequence[int]) -> str:
        returned = "".join(f"{self._value(number)}, " for number in outputs)
        lines = [f"p{k} = held[{k}]" for k in range(len(self.held))]
        body = "\n    ".join([*lines, *self._lines, f"return ({returned})"])
        return f"def piece(here, held, values):\n    {body}\n"

    def _held(self, name: str) -> str:
        return f"p{self.held.setdefault(name, len(self.held))}"

    def _value(self, number: int) -> str:
        return self._names.setdefault(number, f"v{len(self._names)}")

    def _constant(self, value: Any) -> str:
        name = self._by_id.setdefault(id(value), f"k{len(self._by_id)}")
        self.constants[name] = value
        return name

    def _shown(self, value: Any) -> str:
        if isinstance(value, Value):
            return self._value(value.number)
        if isinstance(value, Held):
            return self._held(value.name)
        if isinstance(value, Constant):
            return self._constant(self._tensors[value.number])
        if value is HERE:
            return "here"
        is_plain = value is None or value is Ellipsis or type(value) in (bool, int, str)
        if is_plain or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if type(value) is tuple:
            return f"({''.join(self._shown(each) + ', ' for each in value)})"
        if type(value) is list:
            return f"[{', '.join(map(self._shown, value))}]"
        if type(value) is dict and all(type(key) is str for key in value):
            return f"{{{', '.join(f'{key!r}: {self._shown(each)}' for key, each in value.items())}}}"
        if type(value) is slice:
            return f"slice({', '.join(map(self._shown, (value.start, value.stop, value.step)))})"
        if isinstance(value, tuple) and any(isinstance(each, (Value, Held, Constant)) for each in value):
            return f"{self._constant(type(value))}({', '.join(map(self._shown, value))})"
        return self._constant(value)


def _flat(result: Any) -> list[Any]:
    return pytree.tree_leaves(result, is_leaf=_stands_for)


def _stands_for(leaf: Any) -> bool:
    return isinstance(leaf, (Value, Held, Constant))
