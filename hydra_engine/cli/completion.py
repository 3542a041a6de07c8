"""``hydra-engine completion``: a script that completes verbs and options in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from hydra_engine.cli.command import Mistake, parser


def run(options: argparse.Namespace) -> None:
    """Print the script."""
    try:
        import shtab
    except ImportError as error:
        raise Mistake("completion: shtab is not installed; run pip install 'hydra_engine[completion]'") from error
    found = parser()
    places = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "RUN": shtab.DIRECTORY}  # that arguments name, by metavar
    for each in _actions(found):
        if each.metavar in places:
            each.complete = places[each.metavar]  # type: ignore[attr-defined]
    print(shtab.complete(found, options.shell))


def _actions(found: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    yield from found._actions
    for each in found._actions:
        for verb in each.choices.values() if isinstance(each, argparse._SubParsersAction) else ():
            yield from _actions(verb)
