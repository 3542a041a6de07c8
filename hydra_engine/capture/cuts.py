"""The cuts of a recorded forward into layers: choosing them, and finding them again in another form of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import nn

from hydra_engine.capture.names import names_of_layers
from hydra_engine.capture.tape import Call, Held, Site, Values

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


class Cuts:
    """The cuts of a model's forward into layers, and what of the model each of these has."""

    def __init__(self) -> None:
        self.sites: list[Site] | None = None  # of the cuts; None: the first form is yet to be cut
        self.allowed: set[Site] | None = None  # at which the other mode may be cut as well, if it is known
        self.holdings: list[set[str]] = []  # by layer, names of the parameters, buffers and modules that it needs
        self.names: list[str] = []  # of layers, as `names_of_layers` has them
        self.is_settled = False  # the layers are made, and hold what they hold

    def places(
        self, calls: Sequence[Call], lives: Lives, values: Values, modules: Mapping[str, nn.Module]
    ) -> list[int]:
        """Return the positions of calls that begin a layer, the first one's left out.

        Those of the first form are chosen. Another is cut at the same sites, or where layers can run it. Raises
        ValueError if a call needs what no layer has at its place in the order.
        """
        if self.sites is None:
            chosen = _choose(calls, lives, values, modules, self.allowed)
            self.sites = [calls[p].site for p in chosen]
            self.holdings = [set() for _ in range(len(chosen) + 1)]
            self.names = names_of_layers(calls, chosen, modules)
            return chosen
        entangled = lives.entangled(calls, values.storage)
        places = {call.site: p for p, call in enumerate(calls)}
        sites = [places.get(site, -1) for site in self.sites]
        if not self.is_settled and sorted({0, *sites}) == [0, *sites]:
            return sites  # its layers are yet to be made
        lacking = around = ""
        for wanted in (sites, [-1] * len(sites)):
            ends = [0]
            for k, site in enumerate(wanted):
                most = next((p for p in range(ends[-1], len(calls)) if not self._has(k, calls[p])), len(calls))
                free = [p for p in range(ends[-1], most + 1) if p not in entangled or p == ends[-1]]
                ends.append(site if site in free else free[-1])
            rest = [call for call in calls[ends[-1] :] if not self._has(len(sites), call)]
            if not rest:
                return ends[1:]
            lacking = f"{rest[0].line} uses {', '.join(sorted(rest[0].held)[:3])}"
            frames = [call.frame.split(".") for call in (rest[0], *calls[ends[-1] - 1 : ends[-1]])]
            shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*frames, strict=False))
            around = ".".join(names[0] for names in shared)
        remedy = (
            f"keep {around} as one layer: Model(module, whole=[{around!r}])"
            if around
            else "put the modules that it chooses between into one module, and keep that as one layer: "
            "Model(module, whole=[its name]), or all of the model: Model(module, whole=[''])"
        )
        raise ValueError(
            f"the model's own forward runs otherwise for this batch than for the first one, limit: batches for which "
            f"it uses its weights in the order of its layers: {lacking} where no layer has it; {remedy}; or give "
            f"example= a batch that runs all of its modules, and the longest of loops"
        )

    def are_around(self, path: str) -> bool:
        """Return True if a layer holds a module as a whole, or one around it, and not only what is in it."""
        names = {".".join(path.split(".")[:k]) for k in range(1, path.count(".") + 2)}
        return self.is_settled and not all(map(names.isdisjoint, self.holdings))

    def _has(self, layer: int, call: Call) -> bool:
        """Return True if a layer has all that a call needs of the model."""
        held = self.holdings[layer]
        return all(any(name == each or name.startswith(f"{each}.") for each in held) for name in call.held)


def num_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters."""
    return sum(each.nbytes for each in module.parameters())


def _choose(
    calls: Sequence[Call],
    lives: Lives,
    values: Values,
    modules: Mapping[str, nn.Module],
    allowed: Collection[Site] | None,
) -> list[int]:
    """Return the positions of calls that begin a layer, the first one's left out.

    A cut lies where the fewest values cross: between the halves of a block, between blocks, after embeddings, before
    a head. `allowed`: sites before which it may be; None: any.
    """
    parameters = {name: each.nbytes for name, each in modules[""].named_parameters(remove_duplicate=False)}

    def weight(name: str) -> int:
        return num_bytes(modules[name]) if name in modules else parameters.get(name, 0)

    def is_embedding(call: Call) -> bool:
        return isinstance(call.func, Held) and isinstance(modules.get(call.func.name), nn.Embedding)

    weights = [sum(map(weight, call.held)) for call in calls]
    atoms = [p for p, each in enumerate(weights) if each]
    if len(atoms) < 2:
        return []
    ranks = list(itertools.accumulate(map(bool, weights), initial=0))  # by position, how many of them lie below
    crossing = lives.crossing(1, len(calls) - 1)
    entangled = lives.entangled(calls, values.storage)

    def cost(p: int) -> tuple[int, int, int] | None:
        """Return how many values cross a cut before a call, their bytes, and -p: of equals the last is the least."""
        if p in entangled or (allowed is not None and calls[p].site not in allowed):
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
        is_after_embedding = is_embedding(calls[atoms[k]]) and not is_embedding(calls[atoms[k + 1]])
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
