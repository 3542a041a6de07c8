"""The sizes of a global batch's micro-batches."""

from __future__ import annotations


def split_batch(global_batch: int, max_device_batch: int, num_devices: int) -> list[int]:
    """Return the sizes, in samples, of the micro-batches that a global batch is split into.

    There are min(global_batch, num_devices * ceil(global_batch / (max_device_batch * num_devices))): each device has as
    many as the others, and no micro-batch is larger than `max_device_batch`. Sizes differ by at most 1, larger ones
    come first. A batch of fewer samples than devices leaves devices idle.

    Raises TypeError for what is no int, ValueError for what is below 1.
    """
    at_least_one(global_batch=global_batch, max_device_batch=max_device_batch, num_devices=num_devices)
    number = min(global_batch, num_devices * -(-global_batch // (max_device_batch * num_devices)))
    size, num_larger = divmod(global_batch, number)
    return [size + 1] * num_larger + [size] * (number - num_larger)


def at_least_one(**given: object) -> None:
    """Refuse what is no whole number of at least 1, by its name."""
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: {value!r} is not an int; give a whole number")
        if value < 1:
            raise ValueError(f"{name}: {value}, limit: at least 1; give more")
