"""The model and batch that a user's function gives to plan with, and mistakes in it, told in words."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import partitioners
from hydra_engine import DeviceSpec, EmulatedDevice, ModelTask, resolve_devices
from hydra_engine.cli.command import Mistake, mistakes
from partitioners import LayerTooLarge

_OURS = (Path(__file__).parents[1], Path(partitioners.__file__).parent)
_LIBRARIES = (Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib")))
_META = re.compile(r"\bmeta\b|register_meta", re.IGNORECASE)  # how torch says that a tensor there has no values
_INSTALLED = ("site-packages", "dist-packages")


def called_for_shapes(name: str, returns: str) -> Any:
    """Call a function as `called` does, where tensors have shapes alone, so that a model may be of any size."""
    try:
        with torch.device("meta"):
            return called(name, returns)
    except Mistake as mistake:
        error = mistake.__cause__
        if isinstance(error, (RuntimeError, TypeError)) and _META.search(str(error)):  # it wants values
            raise Mistake(
                f"{name}: {_said(error)}: the function reads values, expected none: it is called under "
                f"torch.device('meta'), where tensors have shapes but no values; build the model and the batch from "
                f"shapes alone, and load weights and data elsewhere"
            ) from error
        raise


def tasks_of(name: str) -> list[ModelTask]:
    """Call a function for its tasks; raises Mistake for what is none, and no list of them."""
    returned = called(name, "returns a ModelTask or a list of them")
    several = isinstance(returned, Sequence) and not isinstance(returned, str)
    tasks = list(returned) if several else [returned]
    strangers = [each for each in tasks if not isinstance(each, ModelTask)]
    if strangers or not tasks:
        where = " in its list" if several else ""
        found = f"a {type(strangers[0]).__name__}{where}" if strangers else "an empty list"
        raise Mistake(f"{name}: returned {found}, expected a ModelTask or a list of them; return these")
    return tasks


def called(name: str, returns: str) -> Any:
    """Call the function that `name` names, without arguments; raises Mistake. returns: words of a rule."""
    function = function_of(name)
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise Mistake(
            f"{name}: {_said(error)}, expected a function that is called without arguments and {returns}; correct it"
        ) from error


def function_of(name: str) -> Callable[..., Any]:
    """Import the function that `name` names, as PACKAGE.MODULE:FUNCTION; raises Mistake."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise Mistake(f"function: {name!r}, expected PACKAGE.MODULE:FUNCTION; write for example my_models:gpt")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        said = "is not there" if missing else f"cannot be imported: {_said(error)}"
        raise Mistake(
            f"module: {module_name!r} {said}, expected one in {os.getcwd()}, or installed; run the command in the "
            f"folder that holds it, and without .py in the name"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        found = "not there" if function is None else f"a {type(function).__name__}"
        own = [value for value in vars(module).items() if getattr(value[1], "__module__", None) == module_name]
        known = [key for key, value in own if callable(value) and not isinstance(value, type)]
        raise Mistake(
            f"function: {attribute!r} of module {module_name!r} is {found}, expected a function; the module defines "
            f"{', '.join(known) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


def devices_of(names: Sequence[str], *, are_here: bool = True) -> list[DeviceSpec]:
    """Return the devices that --devices names, a size being an emulated one's; unless they are here, names of GPUs."""
    after = "; a size such as 512MiB is an emulated device"
    with mistakes(ValueError, RuntimeError, before="--devices: ", after=after):
        found: list[Any] = [EmulatedDevice(name) if name[:1].isdigit() else name for name in names]  # a GPU's: no digit
        return resolve_devices(found) if are_here else found


@contextlib.contextmanager
def planned(options: argparse.Namespace) -> Iterator[None]:
    """Raise Mistake for what the user can correct after a plan failed; a bug of this package keeps its traceback."""
    try:
        yield
    except LayerTooLarge as error:
        raise Mistake(f"{error} (here: --memory less --reserve, --batch, --micro-batches)") from error
    except Exception as error:
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        last = traceback.extract_tb(error.__traceback__)[-1]
        in_layer = bool(notes) or "while it was profiled" in str(error)  # as Python 3.10 carries a note
        if not _is_ours(_origin(error)) or (_is_library(last) and (in_layer or isinstance(error, RuntimeError))):
            raise Mistake(f"model: {_said(error)}{notes}; correct the layer, or the sample batch") from error
        if _is_ours(last) and (last.line or "").startswith("raise "):  # what it refuses; not what it trips over
            field, colon, said = str(error).partition(":")
            is_option = field in vars(options) and isinstance(error, ValueError)
            name = f"--{field.replace('_', '-')}" if is_option else field
            raise Mistake(f"{name}{colon}{said}{notes}") from error
        raise


def _said(error: BaseException) -> str:
    """The exception's type and text, and its place in the user's code."""
    frame = _origin(error)
    place = "" if _is_ours(frame) else f" ({Path(frame.filename).name}:{frame.lineno}, in {frame.name})"
    return f"{type(error).__name__}: {str(error).rstrip('. ')}{place}"


def _origin(error: BaseException) -> traceback.FrameSummary:
    """The user's last line on the way to the error, or else this package's: operations pass through its meters."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame)]
    return ([frame for frame in frames if not _is_ours(frame)] or frames)[-1]


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return any(folder in Path(frame.filename).parents for folder in _OURS)


def _is_library(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    if frame.filename.startswith("<") or _LIBRARIES[0] in path.parents:
        return True
    return _LIBRARIES[1] in path.parents and not set(_INSTALLED) & set(path.parts)
