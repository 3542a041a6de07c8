"""Train every architecture as layers and by its own forward, and print which give the same bits, as a table.

python -m tests.any_model                  # all; a row takes seconds
python -m tests.any_model t5 bert          # those with one of these in their name
python -m tests.any_model --plain          # only by its own forward, twice: is that one deterministic?
"""

import argparse
import importlib
import sys
import time
import warnings

import torch

from tests import exact
from tests.any_model import harness

TABLES = ("huggingface", "vision")  # modules here, each with its CASES


def main(argv=None):
    """Print the table. 1 if an architecture that must train does not."""
    args = _arguments(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [
        case for case in all_cases() if not args.names or any(part.lower() in case.name.lower() for part in args.names)
    ]
    return _plain(cases) if args.plain else _table(cases)


def all_cases():
    """The cases of all tables whose library is installed."""
    found = []
    for name in TABLES:
        try:
            found += importlib.import_module(f"tests.any_model.{name}").CASES
        except ImportError as error:
            print(f"no table {name!r}: {error}", file=sys.stderr)
    return found


def _table(cases):
    print("| architecture | class | layers | bit-equal in one shard | in as many as layers |")
    print("|---|---|---|---|---|", flush=True)
    begin_s = time.perf_counter()
    rows = []
    for case in cases:
        row = harness.examine(case)
        rows.append(row)
        layers = "refused" if row.layers is None else row.layers
        print(f"| {row.name} | {row.module} | {layers} | {row.one} | {row.each} |", flush=True)
    refused = sum(row.layers is None for row in rows)
    missing = [case.name for case, row in zip(cases, rows, strict=True) if case.is_listed and not row.holds]
    held = sum(row.holds for row in rows)
    print(
        f"\n{len(rows)} architectures: {held} bit-equal in both cuts, {refused} refused, "
        f"{len(rows) - held - refused} otherwise; {time.perf_counter() - begin_s:.0f} s"
    )
    if missing:
        print(f"must train and do not: {', '.join(missing)}")
    return 1 if missing or not rows else 0


def _plain(cases):
    failed = []
    for case in cases:
        begin_s = time.perf_counter()
        try:
            first, second = harness.plain(case), harness.plain(case)
            assert first[:2] == second[:2], f"losses differ from run to run: {first.losses} and {second.losses}"
            exact.assert_same_state(second.state, first.state)
            word = f"deterministic, losses {', '.join(f'{loss:.3f}' for loss in first.losses)}"
        except Exception as error:
            failed.append(case.name)
            word = harness.first_line(error)
        print(f"{case.name}: {word}; {time.perf_counter() - begin_s:.1f} s", flush=True)
    print(f"{len(cases)} architectures, {len(failed)} do not train by themselves: {', '.join(failed) or 'none'}")
    return 1 if failed or not cases else 0


def _arguments(argv):
    parser = argparse.ArgumentParser(prog="python -m tests.any_model", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases with one of these in their name")
    parser.add_argument("--plain", action="store_true", help="only train each by its own forward, twice")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
