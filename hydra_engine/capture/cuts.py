"""Chooses where a recorded forward is cut into layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hydra_engine.capture.tape import Call, Values

# A range of layers with more calls that have weights than this is cut again where each side gets a fair share.
MOST_CALLS = 4
LEAST_SHARE = 0.2
# A value that is used this many calls with weights later skips layers: wherever the cut is, it has to cross.
LONG = 16


class Lives:
    """Between which calls each value is needed."""

    def __init__(self, calls: Sequence[Call], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """`inputs`, `outputs`: numbers of the values that enter the forward, and of those that it returns."""
        self.begin = dict.fromkeys(inputs, 0) | {n: p for p, call in enumerate(calls, start=1) for n in call.makes}
        self.end = {n: p for p, call in enumerate(calls) for n in call.reads} | dict.fromkeys(outputs, len(calls))

    def entangled(self, calls: Sequence[Call], storage: Callable[[int], int]) -> set[int]:
        """Return the positions at which two values cross that share memory which is written to later.

        Past a cut they are two tensors, of which such a write would reach one.
        """
        last_write = {place: p for p, call in enumerate(calls) for place in call.writes}
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
    values: Values,
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
    ranks = list(itertools.accumulate(map(bool, weights), initial=0))  # by position, how many of them lie below
    crossing = lives.crossing(1, len(calls) - 1)
    entangled = lives.entangled(calls, values.storage)

    def cost(p: int) -> tuple[int, int, int] | None:
        """Return how many values cross a cut before a call, their bytes, and -p: of equals the last is the least."""
        if p in entangled or not may_cut(calls[p]):
            return None
        near = [
            number
            for number in crossing[p]
            if lives.begin[number] > 0 and ranks[lives.end[number]] - ranks[lives.begin[number]] <= LONG
        ]
        return len(set(map(values.storage, near))), sum(map(values.num_bytes, crossing[p])), -p

    gaps = [  # between two atoms, the least cost
        min(filter(None, map(cost, range(below + 1, above + 1))), default=None)
        for below, above in itertools.pairwise(atoms)
    ]
    counts = [None if gap is None else gap[0] for gap in gaps]
    chosen: set[int] = set()
    for k, gap in enumerate(gaps):
        if gap is None:
            continue
        left = next((c for c in reversed(counts[:k]) if c is not None and c != gap[0]), None)
        right = next((c for c in counts[k + 1 :] if c is not None and c != gap[0]), None)
        is_least = all(c is None or c > gap[0] for c in (left, right))
        is_after_embedding = is_embedding(calls[atoms[k]].func) and not is_embedding(calls[atoms[k + 1]].func)
        if is_least or is_after_embedding or k == len(gaps) - 1:
            chosen.add(k)

    def split(first: int, last: int) -> None:
        """Cut the atoms [first, last) again while they are many."""
        if last - first <= MOST_CALLS:
            return
        sums = list(itertools.accumulate(weights[p] for p in atoms[first:last]))
        fit = []
        for k, below in enumerate(sums[:-1], start=first):
            if (gap := gaps[k]) is not None:
                share = min(below, sums[-1] - below)
                fit.append((share < LEAST_SHARE * sums[-1], gap[0], -share, k))
        if fit:
            *_, best = min(fit)
            chosen.add(best)
            split(first, best + 1)
            split(best + 1, last)

    for first, end in itertools.pairwise([0, *(k + 1 for k in sorted(chosen)), len(atoms)]):
        split(first, end)
    return sorted(-gaps[k][2] for k in chosen)  # type: ignore[index]
