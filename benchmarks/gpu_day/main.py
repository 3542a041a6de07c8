"""A session on a machine with one GPU: is it right, how fast is it, and beside whom. See README.md.

python benchmarks/gpu_day/main.py                       # every stage, as far as 9 minutes go; again goes on
python benchmarks/gpu_day/main.py facts right           # some of them
python benchmarks/gpu_day/main.py --emulated            # without a GPU: shows that the script runs
python benchmarks/gpu_day/main.py report                # the tables of what was measured
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import wheels
from peers import PEERS
from report import report
from rows import Results, failed
from scales import SCALES
from stages import stages

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
END_S = 8  # kept for ending a process and printing


class Stopped(BaseException):
    """SIGTERM came."""


def run_child(scale_name, group, add, until_s, row_s, folder):
    """Measure a group in a process of its own; a row that ends it is marked, and the rest goes on in another one."""
    left = group.rows()
    while left and time.monotonic() < until_s:
        left = run_rest(scale_name, group.only(left), add, until_s, row_s, folder)


def run_rest(scale_name, group, add, until_s, row_s, folder):
    """One process's rows; the keys of those that it did not come to, though there is time."""
    left = group.rows()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, HERE / "child.py", scale_name, json.dumps(asdict(group)), folder],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment_of(group, is_emulated=SCALES[scale_name].is_emulated),
            start_new_session=True,  # what it starts ends with it
        )
        lines = queue.Queue()
        reader = threading.Thread(target=lambda: [lines.put(line) for line in (*process.stdout, None)], daemon=True)
        reader.start()
        reason = None
        try:
            while reason is None:
                row_until_s = time.monotonic() + row_s
                try:
                    line = lines.get(timeout=max(0.0, min(until_s, row_until_s) - time.monotonic()))
                except queue.Empty:
                    if time.monotonic() >= until_s:
                        return []
                    reason = f"no end after {row_s:.0f} s"
                    break
                if line is None:
                    break
                row = parsed(line)
                if row is None:
                    continue
                left = [key for key in left if key != (row["method"], row["size"], row["memory"], row["tokens"])]
                add(row if row["status"] == "ok" else {**row, "stderr": tail(errors)})
        finally:
            end(process)
        if left:
            reason = (
                reason or f"its process ended with {process.returncode}: {(tail(errors).splitlines() or ['-'])[-1]}"
            )
            add({**failed(left[0], reason), "stderr": tail(errors)})
        return left[1:]


def parsed(line):
    """A row, or None where a library printed something."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "method" in row else None


def environment_of(group, *, is_emulated):
    """The environment of a child: this folder's modules, the wheels, and what the method needs."""
    path = [str(HERE), str(ROOT), *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if is_emulated:
        found["CUDA_VISIBLE_DEVICES"] = ""
    if group.module == "peers":
        # Segments that grow keep a peer, whose allocator has a hard cap, from failing for fragmentation.
        found.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return found


def end(process):
    """End a process of ours, and what it has started."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
            process.wait(timeout=END_S / 2)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()
    process.stdout.close()


def tail(errors):
    """What a process said at last."""
    errors.seek(0)
    return "\n".join(line for line in errors.read().splitlines() if line.strip())[-3000:]


def measure(scale_name, names, only, tokens, folder, until_s, run):
    """Measure what the folder does not have yet: in each stage first rows that nobody tried, then those that failed.

    only: methods, tokens: per step, of the rows; none: all.
    """
    planned, built = stages(SCALES[scale_name]), []
    for name in names:
        stage = planned[name]
        if name == "right" and not only:  # beside checks, where nothing is timed
            built = [process for peer in PEERS.values() if (process := peer.prepare()) is not None]
        chosen = [each for each in stage.groups if not only or each.method in only]
        groups = [each.only([key for key in each.rows() if not tokens or key[3] in (0, *tokens)]) for each in chosen]
        go_on(scale_name, name, groups, stage.row_s, folder, until_s, run)
        if name == "four" and not only:  # is compared with rows of another stage
            peers = [replace(each, tokens=each.tokens[:2]) for each in planned["one"].groups if each.module == "peers"]
            go_on(scale_name, "one", peers, planned["one"].row_s, folder, until_s, run, retries=False)
        for process in built:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, until_s - time.monotonic()))
            process.kill()
        built = []


def go_on(scale_name, name, groups, row_s, folder, until_s, run, *, retries=True):
    """Measure rows of a stage."""
    results = Results(folder, name, scale_name)

    def add(row):
        results.add(row)
        print(f"{name}: {row['method']} {row['size']} {row['tokens'] or ''}: {said(row)}", flush=True)

    keys = [key for group in groups for key in group.rows()]
    untried = {key for key in keys if results.status(key) is None}
    failed_before = {key for key in keys if results.status(key) == "failed"}
    for wanted in (untried, failed_before if retries else set()):
        for group in groups:
            if wanted.intersection(group.rows()) and time.monotonic() < until_s:
                run(scale_name, group.only(wanted), add, until_s, row_s, folder)


def said(row):
    """What a row has to say, in short."""
    if row["status"] != "ok":
        return f"{row['status']}: {row.get('reason', '')}"
    return f"{row['step_s']:.3f} s per step" if "step_s" in row else f"ok, {row.get('row_s', 0):.0f} s"


def main(arguments=None, run=run_child):
    """`run`: measures one group, as `run_child`."""
    arguments = parse(arguments)
    if arguments.stages == ["report"]:
        print(report(arguments.out))
        return 0
    scale_name = "emulated" if arguments.emulated else "gpu"
    until_s = time.monotonic() + 60 * arguments.minutes - END_S
    arguments.out.mkdir(parents=True, exist_ok=True)
    installed = wheels.install()
    if installed is not None:
        sys.path.append(str(installed))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))

    def stop(*_):
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    code = 0
    try:
        names = arguments.stages or list(stages(SCALES[scale_name]))
        measure(scale_name, names, arguments.only, arguments.tokens, arguments.out, until_s, run)
    except Stopped:
        code = 143
    except KeyboardInterrupt:
        code = 130
    finally:
        signal.signal(signal.SIGTERM, before)
        text = report(arguments.out)
        (arguments.out / "report.md").write_text(text + "\n")
        print(f"\n{text}", flush=True)
    return code


def parse(arguments):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*stages(SCALES["gpu"]), "report"]
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"{', '.join(known)} (default: all but the last)")
    parser.add_argument("--emulated", action="store_true", help="on the CPU: shows that the script runs")
    parser.add_argument("--only", action="append", default=[], metavar="METHOD", help="of the stages; may be repeated")
    parser.add_argument("--tokens", action="append", default=[], type=int, help="per step; may be repeated")
    parser.add_argument("--minutes", type=float, default=9.0, help="in which this call ends (default 9)")
    parser.add_argument("--out", type=Path, help="folder of the results (default: results beside this file)")
    found = parser.parse_args(arguments)
    unknown = [each for each in found.stages if each not in known]
    if unknown or ("report" in found.stages and len(found.stages) > 1):
        parser.error(f"STAGE: {' '.join(found.stages)}, known: {', '.join(known)}; the last stands alone")
    methods = {each.method for stage in stages(SCALES["gpu"]).values() for each in stage.groups}
    if not methods.issuperset(found.only):
        parser.error(f"--only: {', '.join(found.only)}, known: {', '.join(sorted(methods))}")
    if found.out is None:
        found.out = Path(tempfile.mkdtemp()) if found.emulated else HERE / "results"
    return found


if __name__ == "__main__":
    sys.exit(main())
