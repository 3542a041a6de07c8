"""Reports as JSON: dataclasses as objects by their fields, and back by the types that their fields are declared with.

So a field that a report gets one day is saved without a word here. JSON has no infinite numbers and no NaN, so such a
float is an object with one key, FLOAT. Exceptions are saved as type and text. Tensors are not saved: a report is
figures, and weights belong in a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from hydra_engine._version import __version__
from hydra_engine.errors import SavedError

T = TypeVar("T")

FORMAT, VERSION = "hydra_engine report", 1
FLOAT, NO_NUMBERS = "__float__", ("nan", "inf", "-inf")


def save(report: Any, path: str | os.PathLike[str]) -> None:
    """Write a report, whole or not at all."""
    state = {"format": FORMAT, "version": VERSION, "hydra_engine": __version__, "report": to_json(report)}
    write_text(path, json.dumps(state, allow_nan=False, separators=(",", ":")))


def load(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Read what `save` has written. Raises ValueError for a file that holds no such report, or one of a later form."""
    where = f"Report.load: {os.fspath(path)!r}"
    try:
        state = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON ({error}); give a file that Report.save() has written") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{where} holds no report; give a file that Report.save() has written")
    if state.get("version") != VERSION:
        raise ValueError(
            f"{where} has version {state.get('version')!r} of the form, limit: {VERSION}; load it with hydra_engine "
            f"{state.get('hydra_engine')}, which has written it"
        )
    try:
        found: T = from_json(kind, state["report"])
        return found
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where} is damaged: {type(error).__name__}: {error}; save the report again") from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file, whole or not at all: it comes into being under another name.

    A link stays, and its file is written; what is no file (a pipe, /dev/null) is written to.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def to_json(value: Any) -> Any:
    """Return a value as JSON has it; anything that it has nothing for becomes its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {FLOAT: repr(float(value))}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, SavedError):
        return {"type": value.kind, "text": value.text}
    if isinstance(value, BaseException):
        home = type(value).__module__
        name = type(value).__qualname__
        return {"type": name if home == "builtins" else f"{home}.{name}", "text": str(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items() if not isinstance(each, Tensor)}
    if isinstance(value, AbstractSet):
        return sorted(map(to_json, value))
    if isinstance(value, Sequence):
        return [to_json(each) for each in value]
    return str(value)


def from_json(hint: Any, value: Any) -> Any:
    """Return what `to_json` was given, where a value was declared with this type."""
    if _is_float(value):
        return float(value[FLOAT])
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return None if value is None else from_json(next(each for each in inner if each is not NoneType), value)
    if hint is Any and isinstance(value, dict):
        return {key: from_json(Any, each) for key, each in value.items()}
    if hint is Any:
        return [from_json(Any, each) for each in value] if isinstance(value, list) else value
    if is_dataclass(hint):
        return _dataclass(hint, value)
    if isinstance(hint, type) and issubclass(hint, BaseException):
        return SavedError(value["type"], value["text"])
    if isinstance(hint, type) and hasattr(hint, "_fields"):
        hints = get_type_hints(hint)
        names: tuple[str, ...] = hint._fields
        return hint(*(from_json(hints[name], each) for name, each in zip(names, value, strict=True)))
    if origin is not None and issubclass(origin, Mapping):
        return None if inner[1] is Tensor else {key: from_json(inner[1], each) for key, each in value.items()}
    if origin in (tuple, frozenset):
        return origin(from_json(inner[0], each) for each in value)
    if origin is not None and issubclass(origin, Sequence):
        return [from_json(inner[0], each) for each in value]
    return float(value) if hint is float else value


def _dataclass(kind: Any, value: Mapping[str, Any]) -> Any:
    """Make one of what was saved; a field that it lacks has its default, and what it does not know is left out."""
    hints = get_type_hints(kind)
    found = {each.name: from_json(hints[each.name], value[each.name]) for each in fields(kind) if each.name in value}
    needed = [e.name for e in fields(kind) if e.default is MISSING and e.default_factory is MISSING]
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"{kind.__name__} lacks {', '.join(missing)}")
    return kind(**found)


def _is_float(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {FLOAT} and value[FLOAT] in NO_NUMBERS
