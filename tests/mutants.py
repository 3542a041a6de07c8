"""Which tests execute which line, and whether they notice a changed line.

    python -m tests.mutants record build/lines -- -m "not rest or net"   # runs the tests, and records lines and seconds
    python -m tests.mutants run build/lines --seed 55                    # changes 40 lines, one at a time
    python -m tests.mutants run build/lines --again build/before.jsonl   # those of another run, with these tests

A mutant is the engine with one comparison, constant, call or branch changed. It meets the tests that execute its line
and no others, the quickest first, until one of them fails or the time is over. Results go to DIR/mutants.jsonl. Needs
the package coverage.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = [f"hydra_engine/{room}" for room in ("schedule", "host", "worker", "run", "checkpoints", "data")] + [
    "partitioners"
]
NUM_MUTANTS = 40
LIMIT_S = 300.0  # of one mutant
RECORD = "HYDRA_ENGINE_RECORD"  # the folder in which this process, as a plugin of pytest, records

OPPOSITES = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


# Mutants


def mutants(paths):
    """Return (path, line, kind, begin, end, new text) of every possible change; begin and end are offsets in bytes."""
    found = []
    for path in sorted(paths):
        source = (ROOT / path).read_bytes()
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        for function in ast.walk(ast.parse(source)):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for statement in function.body:
                for node in _walk(statement):
                    for kind, place, text in _changes(node):
                        begin = starts[place.lineno - 1] + place.col_offset
                        end = starts[place.end_lineno - 1] + place.end_col_offset
                        found.append((path, place.lineno, kind, begin, end, text))
    return sorted(set(found))


def _walk(node):
    """ast.walk, but not into f-strings, whose parts have no exact place before Python 3.12."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield from _walk(child)


def _changes(node):
    """Yield (kind, node that is replaced, its new text)."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITES:
        changed = ast.Compare(node.left, [OPPOSITES[type(node.ops[0])](), *node.ops[1:]], node.comparators)
        yield "comparison", node, f"({ast.unparse(changed)})"
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        yield "constant", node, repr(not node.value if type(node.value) is bool else node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call", node, "pass"
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield "branch", node.test, f"(not ({ast.unparse(node.test)}))"


def choose(recorded, seed, number):
    """Draw mutants, the kinds in turn, among those whose line some test executes."""
    rng = random.Random(seed)
    by_kind = defaultdict(list)
    for mutant in mutants([str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")]):
        by_kind[mutant[2]].append(mutant)
    chosen = []
    while len(chosen) < number:
        kind = sorted(by_kind)[len(chosen) % len(by_kind)]
        mutant = rng.choice(by_kind[kind])
        if mutant not in chosen and recorded.tests(mutant[0], mutant[1]):
            chosen.append(mutant)
    return chosen


# Which tests execute which line


class Recorded:
    """What `record` left in a folder and those below it."""

    def __init__(self, folder):
        import coverage

        self.lines = coverage.CoverageData(Path(folder) / "lines")
        self.lines.read()
        self.seconds = {}
        for path in Path(folder).glob("seconds.*"):
            for line in path.read_text().splitlines():
                test, seconds = json.loads(line)
                self.seconds[test] = seconds

    def tests(self, path, line):
        """The tests that execute a line, the quickest first."""
        names = [name for name in self.lines.measured_files() if name.endswith(f"/{path}")]
        contexts = {each for name in names for each in self.lines.contexts_by_lineno(name).get(line, ())}
        # A process that a test starts has a context of its own, with "(call)" behind the name of the test.
        tests = {context.split("|")[-1].removesuffix(" (call)") for context in contexts}
        return sorted(tests & self.seconds.keys(), key=lambda test: (self.seconds[test], test))


def record(folder, options):
    """Run pytest with this module as a plugin, and make one of the files that its processes leave."""
    import coverage

    folder = Path(folder).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "coverage.ini").write_text(
        "[run]\nsource =\n    hydra_engine\n    partitioners\ncore = ctrace\nparallel = true\n"
        "context = ${PYTEST_CURRENT_TEST}\npatch =\n    subprocess\n    _exit\n"
        "disable_warnings = no-data-collected, module-not-measured, module-not-imported, already-imported\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "tests.mutants", *options]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | {RECORD: str(folder)}).returncode
    together = coverage.Coverage(config_file=str(folder / "coverage.ini"), data_file=str(folder / "lines"))
    together.combine([str(path) for path in folder.glob("lines.*")])
    together.save()
    return code


def pytest_configure(config):
    is_controller = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if RECORD in os.environ and not is_controller:
        config.pluginmanager.register(_Recorder(Path(os.environ[RECORD])))


class _Recorder:
    """Gives every test a context of its own, and writes down its processor seconds with those of its processes."""

    def __init__(self, folder):
        import coverage

        self.file = open(folder / f"seconds.{os.getpid()}", "a", buffering=1)  # noqa: SIM115
        self.coverage = coverage.Coverage(config_file=str(folder / "coverage.ini"), data_file=str(folder / "lines"))
        self.coverage.set_option("run:context", None)
        self.coverage.start()

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.coverage.switch_context(item.nodeid)
        begin_s = _processor_s()
        yield
        self.file.write(json.dumps([item.nodeid, round(_processor_s() - begin_s, 4)]) + "\n")

    def pytest_sessionfinish(self):
        self.coverage.stop()
        self.coverage.save()
        self.file.close()


def _processor_s():
    used = [getrusage(whose) for whose in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


# Running them


def run(folder, *, seed, number, again, limit_s, workers):
    """Let the tests meet each mutant; print and write what came of it."""
    recorded = Recorded(folder)
    before = {}
    if again:
        for line in Path(again).read_text().splitlines():
            result = json.loads(line)
            before[tuple(result["mutant"])] = result["by"]
    chosen = list(before) or choose(recorded, seed, number)
    trees = SimpleQueue()
    for k in range(workers):
        tree = Path(folder).resolve() / f"tree-{k}"
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", ".*_cache"))
        trees.put(tree)

    def meet(mutant):
        tests = recorded.tests(mutant[0], mutant[1])
        if before.get(mutant) in tests:  # what noticed it before is likely to do so again
            tests = [before[mutant], *(test for test in tests if test != before[mutant])]
        tree = trees.get()
        try:
            return _meet(tree, mutant, tests, limit_s)
        finally:
            trees.put(tree)

    with (Path(folder) / "mutants.jsonl").open("w", buffering=1) as file, ThreadPoolExecutor(workers) as pool:
        for result in pool.map(meet, chosen):
            file.write(json.dumps(result) + "\n")
            path, line, kind, *_, text = result["mutant"]
            where = f"{path}:{line} {kind}: {text}"
            print(f"{result['outcome']:9} {result['seconds']:6.1f} s  {where}  {result['by'] or ''}", flush=True)


def _meet(tree, mutant, tests, limit_s):
    path, _, _, begin, end, text = mutant
    source = (ROOT / path).read_bytes()
    (tree / path).write_bytes(source[:begin] + text.encode() + source[end:])
    (tree / "tests.txt").write_text("\n".join(tests))
    begin_s, outcome, by = time.perf_counter(), "survived", None
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "@tests.txt"]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with (tree / "out.txt").open("w") as out:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            assert code != pytest.ExitCode.USAGE_ERROR, f"record again: a test is gone, says {tree / 'out.txt'}"
            outcome = "killed" if code else "survived"
        except subprocess.TimeoutExpired:
            outcome = "time over"
        finally:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            (tree / path).write_bytes(source)
    if outcome == "killed":
        lines = (tree / "out.txt").read_text(errors="replace").splitlines()
        found = (line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR ")))
        by = next((line.split(" - ")[0] for line in found), "the whole run")
    return {
        "mutant": mutant,
        "outcome": outcome,
        "by": by,
        "num_tests": len(tests),
        "seconds": round(time.perf_counter() - begin_s, 1),
    }


def main(argv=None):
    """Record, or run; see the top of this file."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=["record", "run"])
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("options", nargs="*", help="of pytest, after --")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=NUM_MUTANTS)
    parser.add_argument("--again", metavar="FILE", help="the mutants of another run, by its mutants.jsonl")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for one mutant")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="mutants at a time")
    args = parser.parse_args(argv)
    # A shell lets what it starts behind `&` ignore Ctrl-C, and so would every process of a test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if args.verb == "record":
        return record(args.folder, args.options)
    run(
        args.folder,
        seed=args.seed,
        number=args.number,
        again=args.again,
        limit_s=args.limit_s,
        workers=args.workers,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
