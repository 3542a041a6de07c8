"""Partitioners by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from partitioners.balanced import Balanced
from partitioners.cost import Partitioner
from partitioners.optimal import Optimal
from partitioners.pilot import Pilot
from partitioners.presharded import Presharded

_KNOWN: dict[str, Callable[..., Partitioner]] = {}


def register_partitioner(name: str, factory: Callable[..., Partitioner]) -> None:
    """Make a partitioner known by name; ``factory(**settings)`` returns it. Each name can be registered once."""
    if name in _KNOWN:
        raise ValueError(f"partitioner: {name!r} is taken, by {_KNOWN[name]!r}; choose another name")
    _KNOWN[name] = factory


def make_partitioner(name: str, **settings: Any) -> Partitioner:
    """Return the partitioner of that name: ``make_partitioner("balanced", num_shards=4)``.

    Raises ValueError for an unknown name and for settings that it does not take.
    """
    if name not in _KNOWN:
        raise ValueError(f"partitioner: {name!r}, known: {', '.join(map(repr, sorted(_KNOWN)))}")
    try:
        return _KNOWN[name](**settings)
    except TypeError as error:
        raise ValueError(
            f"partitioner: {name!r} does not take the settings {settings!r} ({error}); pass an object with the right "
            f"ones, such as {_EXAMPLES.get(name, 'Pilot()')}"
        ) from error


_EXAMPLES = {"balanced": "Balanced(4)", "presharded": "Presharded([3, 6, 8])"}

register_partitioner("pilot", Pilot)
register_partitioner("optimal", Optimal)
register_partitioner("balanced", Balanced)
register_partitioner("presharded", Presharded)
