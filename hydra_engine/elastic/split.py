"""The sizes of a global batch's micro-batches."""

from __future__ import annotations

import operator
from typing import Any


def split_batch(global_batch: int, max_device_batch: int, num_devices: int) -> list[int]:
    """Return the sizes, in samples, of the micro-batches that a global batch is split into.

    There are min(global_batch, num_devices * ceil(global_batch / (max_device_batch * num_devices))): each device has as
    many as the others, and no micro-batch is larger than `max_device_batch`. Sizes differ by at most 1, larger ones
    come first. A batch of fewer samples than devices leaves devices idle.

    Raises TypeError for what is no int, ValueError for what is below 1.
    """
    global_batch = at_least_one("global_batch", global_batch)
    max_device_batch = at_least_one("max_device_batch", max_device_batch)
    num_devices = at_least_one("num_devices", num_devices)
    number = min(global_batch, num_devices * -(-global_batch // (max_device_batch * num_devices)))
    size, num_larger = divmod(global_batch, number)
    return [size + 1] * num_larger + [size] * (number - num_larger)


def as_int(value: Any) -> Any:
    """Return a whole number of any kind as an int, and all else unchanged: `partitioners.plain_numbers` needs torch."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def at_least_one(name: str, value: Any) -> int:
    """Return a whole number of at least 1 as an int."""
    value = as_int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: {value!r} is not an int; give a whole number")
    if value < 1:
        raise ValueError(f"{name}: {value}, limit: at least 1; give more")
    return value
