"""Names of the layers that a forward is cut into, as the user of the model knows them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from hydra_engine.capture.tape import Call, Held


def names_of_layers(calls: Sequence[Call], cuts: Sequence[int], modules: Mapping[str, nn.Module]) -> list[str]:
    """Return a name for the calls between each two cuts: of the modules that run there as a whole.

        one module                             blocks.1 (Block)
        several                                blocks.1 to blocks.3
        none: what a forward does by itself    forward of Net between blocks.1 and blocks.2

    cuts: positions of the calls that begin a layer, the first one's left out. modules: of the model, by their names.
    """
    paths = [[*_prefixes(call, modules)] for call in calls]
    ranges = [*itertools.pairwise([0, *cuts, len(calls)])]
    layer_of = [k for k, (first, last) in enumerate(ranges) for _ in range(first, last)]
    places: dict[str, set[int]] = {}  # of each module: the layers that its calls are in
    for k, path in zip(layer_of, paths, strict=True):
        for each in path:
            places.setdefault(each, set()).add(k)

    def whole(position: int) -> str | None:
        """Return the largest module that runs in one layer and makes this call."""
        func = calls[position].func
        own = func.name if isinstance(func, Held) else None  # a call itself, wherever else the module runs
        return next((each for each in paths[position] if len(places[each]) == 1), own)

    found = []
    for first, last in ranges:
        held = list(dict.fromkeys(filter(None, map(whole, range(first, last)))))
        if len(held) == 1:
            found.append(f"{held[0]} ({_kind(modules[held[0]])})")
        else:
            found.append(f"{held[0]} to {held[-1]}" if held else _between(calls, paths, first, last, modules))
    return found


def _prefixes(call: Call, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the names of the modules inside of the model that make a call, the outermost first."""
    parts = (call.func.name if isinstance(call.func, Held) else call.frame).split(".")
    for k in range(len(parts) if parts != [""] else 0):
        path = ".".join(parts[: k + 1])
        if type(modules[path]).forward is not nn.Module.forward:  # a ModuleList does not run
            yield path


def _between(
    calls: Sequence[Call], paths: Sequence[Sequence[str]], first: int, last: int, modules: Mapping[str, nn.Module]
) -> str:
    """Name calls that a forward makes between those of its children."""
    common = [each for each in paths[first] if all(each in path for path in paths[first:last])]
    frame, depth = (common[-1], len(common)) if common else ("", 0)

    def child(positions: Sequence[int]) -> str | None:
        inside = (paths[p] for p in positions if paths[p][:depth] == common and len(paths[p]) > depth)
        return next((path[depth] for path in inside), None)

    before, after = child(range(first)[::-1]), child(range(last, len(calls)))
    what = f"forward of {f'{frame} ({_kind(modules[frame])})' if frame else _kind(modules[frame])}"
    if before and after:
        return f"{what} between {before} and {after}"
    return what + (f" after {before}" if before else f" before {after}" if after else "")


def _kind(module: nn.Module) -> str:
    return type(module).__name__
