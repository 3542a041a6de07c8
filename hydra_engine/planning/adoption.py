"""Plans that tasks take over from one of their kind that was rehearsed.

Two tasks are of a kind if all is equal that a rehearsal depends on: the classes of modules, the shapes, types and flags
of tensors, plain attributes, options, and the code of the model, the loss, the metrics and their hooks, with what
closures and globals hold. Values of parameters and buffers do not count, nor does the first batch, whose sizes are
compared apart.

Plans are also in a folder beside a run's checkpoints, for resumes and other processes. There the command line, the
files of the program, the packages and the version of Python have to be the same, too.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hydra_engine.data import residue
from hydra_engine.host import Cut, KnownUnits, Measured, Observed, TaskState, has_hooks
from hydra_engine.planning.cuts import CutChoice, PredictedCut
from hydra_engine.tasks import Purpose
from hydra_engine.texts import warn
from partitioners.reach import CLASS, CONTAINERS, GLOBALS, PLAIN, reach, text_of

# Kinds whose plans are remembered; the first to be seen are forgotten.
MOST_KNOWN = 64
# Values that are looked at. A layer that leads to more leads to the program around it.
MOST_VALUES = 2**17
# Numbers of a tensor that may be a setting, as a rate of dropout is.
MOST_NUMBERS = 64

_TORCH_MODULE: Any = torch.nn.modules.module
_HOOK = re.compile(r"hooks\w*(\[\d+\])?")
# Whose code does not change from task to task.
_LIBRARIES = ("builtins", "torch", "numpy", "hydra_engine", "partitioners", "transformers")
# Options of a task that its plan depends on, beside layers, loss and metrics.
_OPTIONS = (
    "partitioner",
    "precision",
    "accumulation_steps",
    "max_device_batch",
    "adapts",
    "loss_reduction",
    "split",
    "grad_scaler",
    "optimizer_scope",
    "early_release",
    "records",
    "compile",
)


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What a plan has found out of a kind of task."""

    task: str
    cut: Cut
    measured: Measured
    observed: Observed
    input_bytes: list[int]
    choice: CutChoice | None  # of the cut
    predicted: PredictedCut | None

    @classmethod
    def of(
        cls, state: TaskState, input_bytes: list[int], choice: CutChoice | None, predicted: PredictedCut | None
    ) -> Rehearsed:
        """Return it, apart from what the task goes on to find out."""
        return cls(
            task=state.name,
            cut=state.cut,
            measured=state.measured.copied(),
            observed=state.observed.copied(),
            input_bytes=list(input_bytes),
            choice=choice,
            predicted=predicted,
        )

    def put_into(self, state: TaskState) -> None:
        """Let a task of the same kind know it."""
        measured = self.measured.copied()
        measured.state_bytes = state.measured.state_bytes
        state.adopt(self.cut, measured, self.observed.copied())


class Rehearsals:
    """Remembers what was rehearsed, by the kind of task; also in a folder, if `folder()` is one."""

    def __init__(self, folder: Callable[[], Path | None] = lambda: None) -> None:
        self._folder = folder
        self._found: dict[str, Rehearsed] = {}
        self._paths: dict[str, Path] = {}  # of those that are, or may be, in the folder

    def get(self, kind: str | None) -> Rehearsed | None:
        """Return what was found out of a task of this kind."""
        folder = self._folder()
        if kind is None or kind in self._found or folder is None or (program := _program(len(sys.modules))) is None:
            return self._found.get(kind or "")
        path = self._paths[kind] = folder / f"{_digest([kind, program])}.plan"
        found = _read(path)
        if found is not None:
            self._found[kind] = found
        return found

    def forget(self, kind: str) -> None:
        """Plan tasks of this kind anew: one has failed with a plan that it took over, which may be why."""
        self._found.pop(kind, None)
        if (path := self._paths.pop(kind, None)) is not None:
            with suppress(OSError):
                path.unlink()

    def put(self, kind: str | None, rehearsed: Rehearsed) -> None:
        """Remember it, unless its layers work in place on a batch: that depends on who keeps the batch."""
        if kind is not None and not rehearsed.observed.works_on_batch:
            self._found[kind] = rehearsed
            for oldest in list(self._found)[:-MOST_KNOWN]:
                del self._found[oldest]

    def save(self) -> None:
        """Write to the folder what is not there; the oldest files go. What the disk does not take is planned anew."""
        with suppress(OSError):
            for kind, path in self._paths.items():
                if kind in self._found and not path.exists():
                    _write(path, self._found[kind])
            for folder in {path.parent for path in self._paths.values()}:
                for old in sorted(folder.glob("*.plan"), key=os.path.getmtime)[:-MOST_KNOWN]:
                    old.unlink()


def _write(path: Path, rehearsed: Rehearsed) -> None:
    """Write a plan at once or not at all, after the hash of what is written."""
    try:
        content = pickle.dumps(rehearsed)
        _Plan(io.BytesIO(content)).load()
    except Exception:  # it holds what a batch has of the user's classes
        return
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_bytes(_sha256(content) + content)
    new.replace(path)


def _read(path: Path) -> Rehearsed | None:
    if not path.exists():
        return None
    with suppress(Exception):  # what unpickling bytes raises, if they are no plan
        written, size = path.read_bytes(), hashlib.sha256().digest_size
        found = _Plan(io.BytesIO(written[size:])).load() if _sha256(written[size:]) == written[:size] else None
        if isinstance(found, Rehearsed):
            return found
    warn(f"hydra_engine: {path} is not a plan as it was written; the task is planned anew")
    with suppress(OSError):
        path.unlink()
    return None


class _Plan(pickle.Unpickler):
    """Reads a plan, and makes nothing but values: of the engine's own classes of such, and torch's types and sizes."""

    def find_class(self, module: str, name: str) -> Any:
        found: Any = getattr(sys.modules.get(module), name, None)  # nothing is imported
        if isinstance(found, torch.dtype) or found in (torch.Size, torch.device, Measured, KnownUnits):
            return found
        is_own = module.partition(".")[0] in ("hydra_engine", "partitioners") and isinstance(found, type)
        if is_own and (is_dataclass(found) or issubclass(found, tuple)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} in a plan")


@cache
def _program(_: int) -> str | None:
    """Return the digest of this program: its arguments, its own modules, packages; None: it is in no file."""
    if getattr(sys.modules.get("__main__"), "__file__", None) is None:
        return None
    installed = tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    own = sorted({file for file in map(os.path.realpath, filter(None, files)) if not file.startswith(installed)})
    packages = sorted(path.name for folder in {*installed} for path in Path(folder).glob("*.dist-info"))
    return _digest((repr(sys.argv[1:]), sys.version, torch.__version__, *packages, *map(_file_digest, own)))


@cache
def _file_digest(path: str) -> str:
    """Digest of a file as this process has found it first."""
    with suppress(OSError):
        return _sha256(Path(path).read_bytes()).hex()
    return ""


def _sha256(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _digest(texts: Iterable[str]) -> str:
    return _sha256("\0".join(texts).encode(errors="surrogatepass")).hex()


def kind_of(state: TaskState, beside: Callable[[], Hashable]) -> str | None:
    """Return a digest of all of a task that its plan depends on; None: it is not compared with others.

    beside: what it depends on beside the task's structure.
    """
    task, layout = state.task, state.layout
    if task.purpose is not Purpose.TRAIN or _TORCH_MODULE._has_any_global_hook() or has_hooks(layout):
        return None
    options = {name: getattr(task, name) for name in _OPTIONS}
    source = task.model.source if task.model.is_converted else None
    roots = {"loss_fn": task.loss_fn, "metrics": task.metrics, "source": source, "options": options}
    try:
        texts = [*_texts(state, [*zip(layout.names, layout.layers, strict=True), *roots.items()])]
    except Exception:  # of whatever a layer holds, too: it is rehearsed, and may fail there
        return None
    states = tuple(state.measured.state_bytes.items())
    texts.append(repr(_comparable((task.validation is None, states, *_settings(), beside()))))
    return _digest(texts)


def _texts(state: TaskState, roots: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """Describe everything that these hold, in texts that are equal for values of a kind that hold each other alike."""
    slots = {id(slot.parameter): slot for slot in state.layout.slots}
    held = [module for _, root in roots if isinstance(root, nn.Module) for module in _modules(root)]
    first: dict[int, int] = {}
    yield repr([first.setdefault(id(module), k) for k, module in enumerate(held)])  # which are the same
    # Made of the source, and of the first batch.
    made = {id(module) for module in held if type(module).__module__.startswith("hydra_engine.capture.")}
    kinds: set[type] = set()
    # A resume brings their values back before it plans.
    saved = {id(each) for module in held for each in module._buffers.values()}
    for number, (path, value, _) in enumerate(reach(*roots, plain=True, code=True, besides=made)):
        if number == MOST_VALUES:
            raise ValueError("too many values")
        path = _HOOK.sub("hooks", path) if "hooks" in path else path  # keys of hooks say how many the process has had
        if path.endswith(("hooks.keys()", "_object_hash")):  # of transformers, by an address
            continue
        if isinstance(value, PLAIN):
            yield f"{path}: {type(value).__name__} {value!r}"
            continue
        if (
            isinstance(value, (Tensor, np.ndarray))
            and math.prod(value.shape) <= MOST_NUMBERS
            and not (isinstance(value, nn.Parameter) or id(value) in saved)
        ):
            yield f"{path}: {text_of(value)}"
        if GLOBALS in path:
            continue
        kind: Any = value if isinstance(value, type) else type(value)
        if kind not in kinds:
            kinds.add(kind)
            yield from _class_texts(kind)
        yield f"{path}: {kind.__module__}.{kind.__qualname__}"
        if isinstance(value, Tensor):
            slot = slots.get(id(value))
            place = None if slot is None else (slot.index, slot.offset, slot.link_dtype)
            form = value.stride() if value.layout == torch.strided else value.layout
            beside = residue(value) if slot is None else 0
            yield repr((value.shape, form, value.dtype, value.device, value.requires_grad, place, beside))
        elif isinstance(value, np.ndarray):
            yield repr((value.shape, value.strides, value.dtype.str))
        elif isinstance(value, types.FunctionType):
            yield _code_text(value)
        elif not hasattr(value, "__dict__") and not isinstance(value, (*CONTAINERS, tuple, frozenset)):
            text = repr(value)  # with an address, unless that says all
            yield text.partition(" at 0x")[0] if CLASS in path else text


def _modules(root: nn.Module) -> Iterator[nn.Module]:
    return (module for _, module in root.named_modules(remove_duplicate=False))


def _code_text(function: types.FunctionType) -> str:
    """Describe a function's code, with the values of variables of the environment that it names."""
    code = function.__code__
    named = [os.environ[each] for each in code.co_consts if isinstance(each, str) and each in os.environ]
    return repr((_comparable(code), named))


def _class_texts(kind: type) -> Iterator[str]:
    """Describe a class by its code and plain values: it may be made anew for each task."""
    for base in kind.__mro__:
        for name, value in vars(base).items() if base.__module__.partition(".")[0] not in _LIBRARIES else ():
            member = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            member = member.fget if isinstance(member, property) else member
            if isinstance(member, types.FunctionType):
                yield f"{name} {_code_text(member)}"
            elif type(member) in PLAIN and name not in ("__doc__", "__firstlineno__"):
                yield f"{name} {member!r}"


def _comparable(value: Hashable) -> Hashable:
    """Return a value whose text is the same in another process: of code, all but where it stands in its file."""
    if isinstance(value, types.CodeType):
        names = (value.co_name, value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
        return ("code", names, value.co_argcount, value.co_flags, value.co_code, _comparable(value.co_consts))
    if isinstance(value, frozenset):
        return tuple(sorted(map(repr, value)))
    return tuple(map(_comparable, value)) if isinstance(value, tuple) else repr(value)


def _settings() -> Iterator[Hashable]:
    """What torch and layers may ask for anywhere."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    yield torch.get_default_dtype()
    yield torch.get_deterministic_debug_mode()
    yield torch.get_float32_matmul_precision()
    yield from (getattr(cuda, f"{each}_sdp_enabled")() for each in ("flash", "mem_efficient", "math", "cudnn"))
    yield from (cudnn.enabled, cudnn.benchmark, cudnn.deterministic)
    yield torch.backends.mkldnn.enabled
    yield torch.backends.mha.get_fastpath_enabled()
