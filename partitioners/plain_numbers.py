"""Python's own numbers, made of NumPy's and of others at the door: JSON, seeds and native code take no others."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

import numpy as np

_PLAIN = (bool, int, float, str, type(None))


def plain(value: Any) -> Any:
    """Return a whole number as an int and another real one as a float; a bool, and what is no number, unchanged.

    A NumPy array of no dimension is the number that it holds; `np.bool_` is a bool, and no number.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def make_plain(record: Any) -> None:
    """Make the numbers among the fields of a dataclass Python's own, in its `__post_init__`."""
    for field in fields(record):
        value = getattr(record, field.name)
        if type(value) not in _PLAIN:
            object.__setattr__(record, field.name, plain(value))


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return `value` as an int if it is a whole number of at least `least`."""
    value = plain(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: {value!r} is not an int; give a whole number")
    if value < least:
        raise ValueError(f"{name}: {value}, limit: at least {least}; give more")
    return value


def finite_number(name: str, value: Any) -> float:
    """Return `value` as a float if it is a finite number of at least 0."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: {value!r} is not a number; give an int or a float")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}: {value}, limit: finite and at least 0; give such a number")
    return float(value)
