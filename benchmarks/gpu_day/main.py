"""How near a streamed step comes to what the machine can do, beside PyTorch without and with offload. See README.md.

python benchmarks/gpu_day/main.py                              # on a GPU: what fits into 9 minutes
python benchmarks/gpu_day/main.py --sizes 3B --memories 24GiB  # some of it
python benchmarks/gpu_day/main.py --emulated --quick           # no figures: shows that the script runs
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
from dataclasses import asdict, replace
from pathlib import Path

from bounds import LayerSeconds, bound, compute_s, linear_flops
from scales import METHODS, PARTITIONERS, RELEASES, SCALES, Group, groups
from tables import cells, summary

ROW_SHARE = 0.25  # of the minutes that one row may take: what hangs must not take them all
END_S = 5  # kept for ending a process and printing


class Stopped(BaseException):
    """SIGTERM came."""


class Results:
    """Rows as they come, written to a file after each; bounds are worked out once all they need is there."""

    def __init__(self, scale, planned, path):
        self.scale, self.path = scale, path
        self._start_s = time.perf_counter()
        self.rows = {key: not_run(key) for group in planned for key in group.rows()}

    def add(self, row):
        """Take a row, finish every figure that it makes possible, and write all."""
        key = (row["method"], row["size"], row["memory"], row["tokens"])
        self.rows[key] = row
        self.write()
        return self.rows[key]

    def write(self):
        """All rows so far, whole or not at all."""
        for key, row in self.rows.items():
            if row["status"] == "ok" and row["method"] in ("engine", "interleaved") and "share_of_bound" not in row:
                self._bound(key, row)
            if row["status"] == "ok" and row["method"] == "engine":
                self._compare(key, row)
        if self.path is not None:
            content = {"emulated": self.scale.is_emulated, "seconds": time.perf_counter() - self._start_s}
            content |= {"scale": asdict(self.scale), "rows": list(self.rows.values())}
            beside = self.path.with_name(self.path.name + ".part")
            beside.write_text(json.dumps(content, indent=1))
            os.replace(beside, self.path)

    def get(self, method, size="", memory="", tokens=0):
        """A row that was measured, or None."""
        row = self.rows.get((method, size, memory, tokens))
        return row if row is not None and row["status"] == "ok" else None

    def _bound(self, key, row):
        ceilings, kernels = self.get("machine"), self.get("kernels", key[1])
        if ceilings is None or kernels is None:
            return
        layers = [LayerSeconds(**layer) for layer in kernels["layers"]]
        cut = (row["boundaries"], row["graph_bytes"])
        least = bound(
            compute_s(layers, *cut, row["micro_batches"]),
            ceilings,
            num_parameters=row["num_parameters"],
            num_shards=len(row["boundaries"]),
            boundary_bytes=row["boundary_bytes"],
            moved=(row["loaded_bytes"], row["stored_bytes"]),
            num_tasks=row["num_tasks"],
        )
        flops = row["num_tasks"] * linear_flops(kernels["linear_parameters"], *cut, key[3])
        row.update(
            terms_s=asdict(least),
            bound_s=least.seconds,
            binding=least.binding,
            share_of_bound=least.seconds / row["step_s"],
            kernels_of_matmul_peak=flops / least.compute / ceilings["matmul_flops_per_s"],
        )

    def _compare(self, key, row):
        _, size, memory, tokens = key
        for name, other in (("resident", ""), ("fsdp2", memory)):
            beside = self.get(name, size, other, tokens)
            if beside is not None:
                row[f"times_{name}"] = row["tokens_per_s"] / beside["tokens_per_s"]


def not_run(key):
    """The row of what nobody got to."""
    return {**dict(zip(("method", "size", "memory", "tokens"), key, strict=True)), "status": "not run"}


def failed(key, reason):
    """The row of what ended its process."""
    return {**not_run(key), "status": "failed", "reason": reason}


# Processes


def child(scale_name, group):
    """Measure a group in this process and print each row as a line."""
    from contestants import run_group

    def emit(row):
        print(json.dumps(row), flush=True)

    run_group(SCALES[scale_name], Group(**{**group, "tokens": tuple(group["tokens"])}), emit)


def run_child(scale_name, group, add, until_s, row_s):
    """Measure a group in a process of its own; a row that ends it is marked, and the rest goes on in another one."""
    left = group.rows()
    while left and time.monotonic() < until_s:
        left = run_rest(scale_name, only(group, left), add, until_s, row_s)


def only(group, keys):
    """A group of what is left of it."""
    tokens = tuple(key[3] for key in keys if key[0] == group.method and key[3])
    return replace(group, tokens=tokens, kernels=any(key[0] == "kernels" for key in keys))


def run_rest(scale_name, group, add, until_s, row_s):
    """One process's rows; the keys of those that it did not come to, though there is time."""
    left = group.rows()
    with tempfile.TemporaryFile("w+") as errors:
        arguments = ["child", scale_name, json.dumps(asdict(group))]
        # Segments that grow keep a competitor, whose allocator has a hard cap, from failing for fragmentation.
        environment = os.environ if group.method in ("engine", "interleaved") else expandable()
        process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
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
                if not line.startswith("{"):  # a library that prints
                    continue
                row = json.loads(line)
                left = [key for key in left if key != (row["method"], row["size"], row["memory"], row["tokens"])]
                add(row)
        finally:
            end(process)
        if left:
            add(failed(left[0], reason or f"its process ended with {process.returncode}: {last_line(errors)}"))
        return left[1:]


def expandable():
    """An environment in which torch's device allocator grows its segments."""
    name = "PYTORCH_CUDA_ALLOC_CONF"
    return {**os.environ, name: os.environ.get(name, "expandable_segments:True")}


def end(process):
    """End a process of ours."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=END_S / 2)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    process.stdout.close()


def last_line(errors):
    """What a process said at last."""
    errors.seek(0)
    lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


# The call


def main(arguments=None, run=run_child):
    """`run`: measures one group, as `run_child`."""
    arguments = parse(arguments)
    name = ("emulated" if arguments.emulated else "gpu") + ("-quick" if arguments.quick else "")
    scale = SCALES[name]
    planned = groups(
        scale,
        sizes=chosen("sizes", arguments.sizes, scale.sizes),
        memories=chosen("memories", arguments.memories, scale.memories),
        tokens=chosen("tokens", arguments.tokens, scale.tokens),
        methods=chosen("methods", arguments.methods, METHODS),
        release=arguments.release,
        partitioner=arguments.partitioner,
    )
    until_s = time.monotonic() + 60 * arguments.minutes - END_S
    results = Results(scale, planned, arguments.json)

    def add(row):
        print("  ".join(cells(results.add(row))), flush=True)

    def stop(*_):
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        results.write()
        for group in planned:
            if time.monotonic() >= until_s:
                break
            run(name, group, add, until_s, 60 * arguments.minutes * ROW_SHARE)
            if group.method == "machine" and results.get("machine") is None:
                print("no ceilings, so nothing else is run; without a GPU, --emulated shows that the script runs")
                return 1
        code = 0
    except Stopped:
        code = 143
    except KeyboardInterrupt:
        code = 130
    finally:
        signal.signal(signal.SIGTERM, before)
        results.write()
        print("", *summary(list(results.rows.values()), scale.is_emulated), sep="\n", flush=True)
    return code


def chosen(option, values, known):
    """The values of an option, in their own types; refuses what is not known."""
    names = {str(each): each for each in known}
    unknown = [value for value in values if value not in names]
    if unknown:
        raise SystemExit(f"--{option}: {', '.join(unknown)}, known: {', '.join(names)}")
    return [names[value] for value in values]


def parse(arguments):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it (default 9)")
    parser.add_argument("--json", type=Path, help="file of the results, written anew after each row")
    parser.add_argument("--quick", action="store_true", help="one small model, one cap, one length of step")
    parser.add_argument("--emulated", action="store_true", help="on the CPU: shows that the script runs")
    for option in ("sizes", "memories", "tokens", "methods"):
        parser.add_argument(f"--{option}", nargs="+", default=[], help="only these")
    parser.add_argument("--release", choices=RELEASES, default="auto", help="when the engine updates (default auto)")
    parser.add_argument("--partitioner", choices=PARTITIONERS, default="pilot", help="the engine's (default pilot)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], json.loads(sys.argv[3]))
    else:
        sys.exit(main())
