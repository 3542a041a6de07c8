"""Converts sizes as people write them ("64MiB") to bytes and back."""

import re
from fractions import Fraction

_UNITS = {"b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_EXAMPLES = "write whole bytes (4096) or a number with a unit: '512 KiB', '64MiB', '16GiB', '1.5GB' (10^9)"


def parse_bytes(value: int | str, field: str) -> int:
    """Return the bytes named by an int or by a string such as ``"64MiB"``; drop a fraction of a byte.

    Raises ValueError, naming ``field``, for anything but a positive size.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    elif isinstance(value, str):
        num_bytes = _parse(value, field)
    else:
        raise ValueError(f"{field}: {value!r} is not a size; {_EXAMPLES}")
    if num_bytes <= 0:
        raise ValueError(f"{field}: {value!r} is {num_bytes} bytes, a size is at least 1 byte; {_EXAMPLES}")
    return num_bytes


def _parse(text: str, field: str) -> int:
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else ""
    # "16G" and "512k" are refused rather than guessed: half the tools that take them mean 1000, the others 1024.
    if match is None or (unit and unit not in _UNITS) or (unit in ("", "b") and "." in match[1]):
        raise ValueError(f"{field}: {text!r} is not a size; {_EXAMPLES}")
    # Through a fraction: 1.1 * 10**15 in floating point is already a few bytes off.
    return int(Fraction(match[1]) * _UNITS.get(unit, 1))


def format_bytes(n: int) -> str:
    """Return ``n`` bytes as text: ``"1.5 GiB"``, ``"64 MiB"``, ``"0 B"``. Rounded to one decimal."""
    size, units = float(abs(n)), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while round(size, 1) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{'-' if n < 0 else ''}{size:.1f}".removesuffix(".0") + f" {units[0]}"
