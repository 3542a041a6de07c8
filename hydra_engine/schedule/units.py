"""Units, the order they run in and where they ran, as data: tuples that print and parse back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

FORWARD = "f"  # one shard's forward; what autograd saves is dropped, or kept where there is room
FUSED = "fb"  # the last shard's forward, loss and backward in one residency: nothing is recomputed
BACKWARD = "b"  # backward of a lower shard, after its forward again where its graph was not kept
EVALUATE = "e"  # one shard's forward in eval mode under no_grad
KINDS = (FORWARD, FUSED, BACKWARD, EVALUATE)

_PATTERN = re.compile(r"(?P<task>.+)\.(?P<kind>fb|f|b|e)(?P<shard>\d+)@(?P<step>\d+)(\+(?P<part>\d+))?", re.DOTALL)


class Unit(NamedTuple):
    """One shard's forward or backward for one whole step of one task: the thing that is scheduled.

    Prints as `bert.f2@5`: task bert, forward of shard 2, step 5. An evaluation batch counts as a step of kind `e`.
    Where a step is spread over several devices, a unit is that of one part of the step's micro-batches; of those from
    the second part on it prints as `bert.f2@5+1`.
    """

    task: str
    kind: str
    shard: int
    step: int
    part: int = 0

    def __str__(self) -> str:
        return f"{self.task}.{self.kind}{self.shard}@{self.step}" + (f"+{self.part}" if self.part else "")

    @classmethod
    def parse(cls, text: str) -> Unit:
        """The unit that prints as `text`."""
        if (match := _PATTERN.fullmatch(text)) is None:
            raise ValueError(f"unit: {text!r} is not of the form task.kind+shard@step, such as 'bert.f2@5'")
        return cls(match["task"], match["kind"], int(match["shard"]), int(match["step"]), int(match["part"] or 0))


@lru_cache(maxsize=1024)  # asked for at the begin of every step
def part_ranges(num_micro_batches: int, num_parts: int) -> tuple[tuple[int, int], ...]:
    """The micro-batches [first, end) of each part of a step, whose numbers differ by at most 1."""
    return tuple(pairwise(num_micro_batches * k // num_parts for k in range(num_parts + 1)))


def training_chain(num_shards: int, lowest_backward: int) -> tuple[tuple[str, int], ...]:
    """(kind, shard) of one training step, in order: f0 ... f(n-2), fb(n-1), b(n-2) ... b(lowest).

    `lowest_backward` is the lowest shard with a trainable parameter: below it no gradient flows.
    """
    last = num_shards - 1
    forward = [(FORWARD, shard) for shard in range(last)]
    backward = [(BACKWARD, shard) for shard in range(last - 1, lowest_backward - 1, -1)]
    return (*forward, (FUSED, last), *backward)


def evaluation_chain(num_shards: int) -> tuple[tuple[str, int], ...]:
    """(kind, shard) of one evaluation batch, in order."""
    return tuple((EVALUATE, shard) for shard in range(num_shards))


# A unit whose time nobody knows takes this, so that one after another is later.
LEAST_S = 1e-6


class Flow(NamedTuple):
    """A batch's units in order, and when each is needed."""

    order: dict[tuple[str, int], int]
    left_s: list[float]  # of the chain, from each position on
    uses: list[list[int]]  # by shard: positions

    @classmethod
    def of(cls, chain: Sequence[tuple[str, int]], unit_s: Mapping[tuple[str, int], float], num_shards: int) -> Flow:
        """Make the flow of units that take these seconds."""
        left_s = list(accumulate((unit_s.get(node, 0.0) or LEAST_S for node in reversed(chain)), initial=0.0))[::-1]
        uses = [[k for k, (_, shard) in enumerate(chain) if shard == j] for j in range(num_shards)]
        return cls({node: k for k, node in enumerate(chain)}, left_s, uses)

    def next_use_s(self, shard: int, position: int, *, beyond_step: bool) -> float:
        """Seconds from a position to the next unit of a shard, also of the next batch; infinite if there is none."""
        for k in self.uses[shard]:
            if k >= position:
                return self.left_s[position] - self.left_s[k]
        if beyond_step and self.uses[shard]:
            return self.left_s[position] + self.left_s[0] - self.left_s[self.uses[shard][0]]
        return math.inf


class Placed(NamedTuple):
    """A unit where and when it was computed. Prints as `bert.f2@5 on 1 from 0.25 to 0.5`; times in seconds."""

    unit: Unit
    device: int
    start_s: float
    end_s: float

    def __str__(self) -> str:
        return f"{self.unit} on {self.device} from {self.start_s!r} to {self.end_s!r}"

    @classmethod
    def parse(cls, text: str) -> Placed:
        """The placed unit that prints as `text`."""
        if (match := _PLACED.fullmatch(text.strip())) is None:
            raise ValueError(f"schedule: {text!r} is not of the form 'bert.f2@5 on 1 from 0.25 to 0.5'")
        return cls(Unit.parse(match["unit"]), int(match["device"]), float(match["start"]), float(match["end"]))


_PLACED = re.compile(r"(?P<unit>\S.*) on (?P<device>\d+) from (?P<start>\S+) to (?P<end>\S+)")


def format_schedule(schedule: Iterable[Placed]) -> str:
    """A line for each unit."""
    return "".join(f"{placed}\n" for placed in schedule)


def parse_schedule(text: str) -> list[Placed]:
    """The schedule that prints as `text`."""
    return [Placed.parse(line) for line in text.splitlines() if line.strip()]
