"""Chooses where a recorded forward is cut into layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hydra_engine.capture.tape import Call

# A range of layers with more calls that have weights than this is cut again where each side gets a fair share.
MOST_CALLS = 4
LEAST_SHARE = 0.2
# A value that is used this many calls with weights later skips layers: wherever the cut is, it has to cross.
LONG = 16


class Lives:
    """Between which calls each value is needed."""

    def __init__(self, calls: Sequence[Call], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """`inputs`, `outputs`: numbers of the values that enter the forward, and of those that it returns."""
        self.begin: dict[int, int] = dict.fromkeys(inputs, 0)
        self.end: dict[int, int] = {}
        for p, call in enumerate(calls):
            for number in call.reads:
                self.end[number] = p
            for number in call.makes:
                self.begin[number] = p + 1
        for number in outputs:
            self.end[number] = len(calls)

    def entangled(self, calls: Sequence[Call], storage: Callable[[int], int]) -> set[int]:
        """Return the positions at which two values cross that share memory which is written to later.

        Past a cut they are two tensors, of which such a write would reach one.
        """
        last_write: dict[int, int] = {}
        for p, call in enumerate(calls):
            last_write.update(dict.fromkeys(call.writes, p))
        found = set()
        for p, numbers in self.crossing(1, len(calls) - 1).items():
            places = [storage(number) for number in numbers]
            shared = {place for place in places if last_write.get(place, -1) >= p}
            if any(places.count(place) > 1 for place in shared):
                found.add(p)
        return found

    def crossing(self, first: int, last: int) -> dict[int, list[int]]:
        """Return, by position, the values that are made before it and needed at it or after."""
        found: dict[int, list[int]] = {p: [] for p in range(first, last + 1)}
        for number, end in self.end.items():
            for p in range(max(first, self.begin[number]), min(last, end) + 1):
                found[p].append(number)
        return found


def choose_cuts(
    calls: Sequence[Call],
    lives: Lives,
    weight: Callable[[Call], int],
    storage: Callable[[int], int],
    num_bytes: Callable[[int], int],
    is_embedding: Callable[[Any], bool],
    may_cut: Callable[[Call], bool],
) -> list[int]:
    """Return the positions of calls that begin a layer, the first one's left out.

    A cut lies where the fewest values cross: between the halves of a block, between blocks, after embeddings, before
    a head. `weight`: bytes of the parameters that a call uses. may_cut: before a call.
    """
    weights = [weight(call) for call in calls]
    atoms = [p for p, each in enumerate(weights) if each]
    if len(atoms) < 2:
        return []
    ranks, count = [], 0  # by position, how many of them lie below
    for p in range(len(calls) + 1):
        ranks.append(count)
        if p < len(calls) and weights[p]:
            count += 1
    crossing = lives.crossing(1, len(calls) - 1)
    entangled = lives.entangled(calls, storage)

    def cost(p: int) -> tuple[int, int] | None:
        if p in entangled or not may_cut(calls[p]):
            return None
        own: set[int] = set()
        for number in crossing[p]:
            place = storage(number)
            span = ranks[min(lives.end[number], len(calls))] - ranks[lives.begin[number]]
            if lives.begin[number] > 0 and span <= LONG:
                own.add(place)
        return len(own), sum(num_bytes(number) for number in crossing[p])

    gaps: list[tuple[tuple[int, int], int, int] | None] = []  # (cost, position, atoms below it)
    for k, (below, above) in enumerate(itertools.pairwise(atoms), start=1):
        found = [(cost(p), -p) for p in range(below + 1, above + 1)]
        fit = [(each, -p) for each, p in found if each is not None]
        gaps.append((*min(fit, key=lambda each: (each[0], -each[1])), k) if fit else None)

    chosen: set[int] = set()
    counts = [None if gap is None else gap[0][0] for gap in gaps]
    for k, gap in enumerate(gaps):
        if gap is None:
            continue
        left = next((c for c in reversed(counts[:k]) if c is not None and c != counts[k]), None)
        right = next((c for c in counts[k + 1 :] if c is not None and c != counts[k]), None)
        is_least = all(c is None or c > gap[0][0] for c in (left, right))
        is_after_embedding = is_embedding(calls[atoms[k]].func) and not is_embedding(calls[atoms[k + 1]].func)
        if is_least or is_after_embedding or k == len(gaps) - 1:
            chosen.add(k)

    def split(first: int, last: int) -> None:
        """Cut the atoms [first, last) again while they are many."""
        if last - first <= MOST_CALLS:
            return
        total = sum(weights[atoms[k]] for k in range(first, last))
        best: tuple[tuple[bool, int, int], int] | None = None
        below = 0
        for k in range(first, last - 1):
            below += weights[atoms[k]]
            gap = gaps[k]
            if gap is None:
                continue
            share = min(below, total - below)
            key = (share < LEAST_SHARE * total, gap[0][0], -share)
            if best is None or key < best[0]:
                best = key, k
        if best is None:
            return
        chosen.add(best[1])
        split(first, best[1] + 1)
        split(best[1] + 1, last)

    ends = [*(k + 1 for k in sorted(chosen)), len(atoms)]
    first = 0
    for end in ends:
        split(first, end)
        first = end
    return sorted(gaps[k][1] for k in chosen)  # type: ignore[index]
