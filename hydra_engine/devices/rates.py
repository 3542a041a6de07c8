"""Ceilings of a machine: the rates that nothing on it goes beyond, measured once by `hydra-engine probe`, and stored.

One JSON file per machine holds an entry for each kind of device. Where a device's rates are needed and none are stored,
it measures them itself, shortly.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hydra_engine.system import cache_folder, dram, warn
from partitioners.plain_numbers import make_plain

# Names the file, where it is not to lie in the user's cache.
VARIABLE = "HYDRA_ENGINE_CEILINGS"
FORMAT, VERSION = "hydra_engine ceilings", 1

_warn_once = cache(warn)  # as a warning of Python's: once for each text

# A median of so many; what is measured was done once before.
NUM_REPEATS = 7
# One copy in DRAM, of all threads together: more than any cache holds.
DRAM_BYTES = 2**29
# A product takes so long at least: its matrices are grown until it does.
MATMUL_S = 4e-3
SMALLEST_MATRIX = 64
# Where figures come from: given by the user, measured for this plan, or read from the file.
STATED, MEASURED_NOW, STORED = "stated", "measured now", "stored"


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Highest rates of one kind of device, and of the host beside it."""

    name: str  # of the kind of device, by which it is stored: "cpu", or an accelerator's product name
    up_bytes_per_s: float  # of a copy from DRAM to the device, while nothing else is copied
    down_bytes_per_s: float  # of a copy from the device to DRAM, while nothing else is copied
    both_up_bytes_per_s: float  # up, while something else is on its way down all the time
    both_down_bytes_per_s: float  # down, while something else is on its way up all the time
    dram_bytes_per_s: float | None = None  # read and written by all threads that update weights; None: unknown
    matmul_flops: Mapping[str, float] = field(default_factory=dict)  # of a product of matrices, by dtype ("float32")
    measured: str = ""  # when, ISO 8601, UTC; "" where it was not by `probe`
    torch_version: str = ""  # that it was measured with
    num_threads: int = 1  # intra-op, of each lane and update, at that time
    origin: str = MEASURED_NOW  # STATED, MEASURED_NOW or STORED; not stored itself

    def __post_init__(self) -> None:
        make_plain(self)
        rates = {name: getattr(self, name) for name in LINK_RATES}
        rates |= {f"matmul_flops of {dtype}": rate for dtype, rate in self.matmul_flops.items()}
        if self.dram_bytes_per_s is not None:
            rates["dram_bytes_per_s"] = self.dram_bytes_per_s
        for name, rate in rates.items():
            is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
            if not is_number or not 0 < rate < math.inf:
                raise ValueError(f"{name}: {rate!r}, limit: finite, above 0")

    @classmethod
    def of_link(cls, name: str, bytes_per_s: float, origin: str) -> Ceilings:
        """A link that is as fast each way, alone or not; nothing else is known."""
        return cls(name=name, origin=origin, **dict.fromkeys(LINK_RATES, bytes_per_s))  # type: ignore[arg-type]

    @property
    def link_bytes_per_s(self) -> float:
        """Return the rate of a pipeline that loads and stores all the time: of the slower way."""
        return min(self.both_up_bytes_per_s, self.both_down_bytes_per_s)

    @property
    def source(self) -> str:
        """Return the figures' origin, in words."""
        return f"rates of {self.name}: {self.origin}{f' on {self.measured[:10]}' if self.origin == STORED else ''}"


LINK_RATES = ("up_bytes_per_s", "down_bytes_per_s", "both_up_bytes_per_s", "both_down_bytes_per_s")


def path() -> Path:
    """The file: what HYDRA_ENGINE_CEILINGS names, or hydra_engine/ceilings.json in the user's cache."""
    named = os.environ.get(VARIABLE)
    return Path(os.path.expanduser(named)) if named else cache_folder() / "ceilings.json"


def load_all() -> dict[str, Ceilings]:
    """All that is stored, by name. Raises ValueError for a file that is none of ours, or that cannot be read."""
    file = path()
    try:
        return _parsed(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"ceilings: {file} is not a file of ceilings that this version can read ({type(error).__name__}: {error}); "
            f"remove it, or name another place in {VARIABLE}, and run `hydra-engine probe` again"
        ) from error


def stored(name: str) -> Ceilings | None:
    """Return what is stored for a kind of device; None: nothing, or a line on stderr says why not."""
    try:
        return load_all().get(name)
    except ValueError as error:
        _warn_once(f"{error}; until then rates are measured for each plan")
        return None


def save(*measured: Ceilings) -> Path:
    """Store ceilings beside those of other devices; returns where. Readers see the old file or the new one.

    Raises ValueError for a file there that is none of ours, and OSError where none can be written.
    """
    file = path()
    if str(file).startswith("~"):
        raise ValueError(f"ceilings: this user has no home directory for {file}; name a place in {VARIABLE}")
    kept = load_all() | {each.name: each for each in measured}
    entries = {name: asdict(each) for name, each in sorted(kept.items())}
    for entry in entries.values():
        del entry["origin"]
    text = json.dumps({"format": FORMAT, "version": VERSION, "devices": entries}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="utf-8", delete=False) as new:
        try:
            new.write(text + "\n")
            new.close()
            os.replace(new.name, file)
        except BaseException:
            os.unlink(new.name)
            raise
    return file


def _parsed(content: Any) -> dict[str, Ceilings]:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it does not say that its format is {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(f"version: {content.get('version')!r}, known: {VERSION}")
    entries = content.get("devices")
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ValueError("it has no entries by device")
    return {name: _entry(name, entry) for name, entry in entries.items()}


def _entry(name: str, entry: dict[str, Any]) -> Ceilings:
    expected = {each.name for each in fields(Ceilings)} - {"origin"}
    is_entry = set(entry) == expected and entry["name"] == name
    if not is_entry or not isinstance(entry["matmul_flops"], dict) or not isinstance(entry["measured"], str):
        raise ValueError(f"entry {name!r} does not have the figures of a device")
    return replace(Ceilings(**entry), origin=STORED)


# -- measuring


def plain_host_bytes(num_bytes: int) -> Tensor:
    """Bytes of DRAM, each page of them written to."""
    return torch.ones(num_bytes, dtype=torch.uint8)


def dram_bytes_per_s(num_workers: int, num_threads: int, repeats: int = NUM_REPEATS) -> float:
    """Bytes read and written in a second by copies in DRAM, one in each of so many threads."""
    num_bytes = max(1, min(DRAM_BYTES, dram.available_dram_bytes() // 8) // num_workers)
    pairs = [(plain_host_bytes(num_bytes), plain_host_bytes(num_bytes)) for _ in range(num_workers)]
    with ThreadPoolExecutor(num_workers, "hydra-probe", torch.set_num_threads, (num_threads,)) as pool:

        def copy_all() -> None:
            for copied in [pool.submit(target.copy_, source) for source, target in pairs]:
                copied.result()

        seconds = median_s(copy_all, repeats)
    return 2 * num_bytes * num_workers / seconds


def matmul_flops(
    device: torch.device, dtype: torch.dtype, most_bytes: int, finish: Callable[[], None], repeats: int = NUM_REPEATS
) -> float:
    """Operations per second of a product of square matrices, as large as takes MATMUL_S or fits."""
    generator = torch.Generator(device).manual_seed(0)
    size = SMALLEST_MATRIX
    while True:
        shape = (size, size)
        left, right, product = (torch.empty(shape, dtype=dtype, device=device) for _ in range(3))
        for factor in (left, right):  # of zeros, some devices make more in a second
            factor.uniform_(-1, 1, generator=generator)

        def multiply(factors: tuple[Tensor, Tensor] = (left, right), out: Tensor = product) -> None:
            torch.mm(*factors, out=out)
            finish()

        seconds = median_s(multiply, repeats)
        if seconds >= MATMUL_S or 3 * (2 * size) ** 2 * dtype.itemsize > most_bytes:
            return 2 * size**3 / seconds
        size *= 2


def median_s(work: Callable[[], None], repeats: int = NUM_REPEATS) -> float:
    """Median seconds, after a first time that is not counted."""
    seconds = []
    for _ in range(1 + repeats):
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return median(seconds[1:])
