"""``hydra-engine completion``: a script that completes verbs and options in a shell."""

from __future__ import annotations

import argparse

from hydra_engine.cli.command import Mistake, parser

# Arguments that name a file or a folder, by their metavar.
FILES, FOLDERS = ("FILE",), ("DIR", "RUN")


def run(options: argparse.Namespace) -> None:
    """Print the script."""
    try:
        import shtab
    except ImportError as error:
        raise Mistake("completion: shtab is not installed; run pip install 'hydra_engine[completion]'") from error
    found = parser()
    for each in _actions(found):
        if each.metavar in FILES:
            each.complete = shtab.FILE  # type: ignore[attr-defined]
        elif each.metavar in FOLDERS:
            each.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(found, options.shell))


def _actions(found: argparse.ArgumentParser) -> list[argparse.Action]:
    actions = list(found._actions)
    for each in found._actions:
        if isinstance(each, argparse._SubParsersAction):
            actions += [inner for verb in each.choices.values() for inner in _actions(verb)]
    return actions
