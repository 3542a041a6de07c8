"""The model and batch that a user's function gives to plan with, and mistakes in it, told in words."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import partitioners
from hydra_engine.cli.command import Mistake
from hydra_engine.planning import Sample
from partitioners import LayerTooLarge

_OURS = (Path(__file__).parents[1], Path(partitioners.__file__).parent)
_LIBRARIES = (Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib")))
_META = re.compile(r"\bmeta\b|register_meta", re.IGNORECASE)  # how torch says that a tensor there has no values
_INSTALLED = ("site-packages", "dist-packages")


@contextlib.contextmanager
def here_importable() -> Iterator[None]:
    """The current directory comes first among those that modules are imported from."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def without_values(name: str) -> Iterator[None]:
    """Let tensors have shapes alone, so that a model may be of any size; what reads values raises Mistake."""
    try:
        with torch.device("meta"):
            yield
    except Mistake as mistake:
        error = mistake.__cause__
        if isinstance(error, (RuntimeError, TypeError)) and _META.search(str(error)):  # it wants values
            raise Mistake(
                f"{name}: {_said(error)}: the function reads values, limit: it is called under torch.device('meta'), "
                f"where tensors have shapes but no values; build the model and the batch from shapes alone, and load "
                f"weights and data elsewhere"
            ) from error
        raise


def called(name: str, returns: str) -> Any:
    """Call the function that `name` names, without arguments; raises Mistake. returns: words of a rule."""
    function = function_of(name)
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise Mistake(
            f"{name}: {_said(error)}, limit: the function is called without arguments and {returns}; correct it"
        ) from error


def function_of(name: str) -> Callable[..., Any]:
    """Import the function that `name` names, as PACKAGE.MODULE:FUNCTION; raises Mistake."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise Mistake(f"function: {name!r}, limit: PACKAGE.MODULE:FUNCTION; write for example my_models:gpt")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        said = "is not there" if missing else f"cannot be imported: {_said(error)}"
        raise Mistake(
            f"module: {module_name!r} {said}, limit: found from {os.getcwd()} or installed; run the command in the "
            f"folder that holds it, and without .py in the name"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        found = "not there" if function is None else f"a {type(function).__name__}"
        own = [value for value in vars(module).items() if getattr(value[1], "__module__", None) == module_name]
        known = [key for key, value in own if callable(value) and not isinstance(value, type)]
        raise Mistake(
            f"function: {attribute!r} of module {module_name!r} is {found}, limit: a function; the module defines "
            f"{', '.join(known) or 'none'}"
        )
    return function  # type: ignore[no-any-return]


def unpacked(name: str, returned: Any) -> Sample:
    """Check what a function returned; raises Mistake."""
    rule = "limit: (model, (inputs, target), loss_fn); return these three"
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        raise Mistake(f"{name}: returned {_kind(returned)}, {rule}")
    model, batch, loss_fn = returned
    if not isinstance(model, (nn.Module, tuple, list)):
        raise Mistake(f"{name}: its model is {_kind(model)}, limit: a module or a list of modules; return one of these")
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise Mistake(f"{name}: its sample batch is {_kind(batch)}, {rule}")
    if not callable(loss_fn):
        raise Mistake(f"{name}: its loss_fn is {_kind(loss_fn)}, limit: callable with (output, target); return such")
    if isinstance(loss_fn, type):
        raise Mistake(f"{name}: its loss_fn, {loss_fn.__name__}, is a class; return an instance of it")
    inputs, target = batch
    return Sample(model if isinstance(model, nn.Module) else list(model), inputs, target, loss_fn)


def _kind(value: object) -> str:
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"a {type(value).__name__}{size}"


@contextlib.contextmanager
def planned() -> Iterator[None]:
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
            raise Mistake(f"{error}{notes}") from error
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
    if frame.filename.startswith("<frozen") or _LIBRARIES[0] in path.parents:
        return True
    return _LIBRARIES[1] in path.parents and not set(_INSTALLED) & set(path.parts)
