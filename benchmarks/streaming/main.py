"""How near a streamed step comes to what the machine can do, beside PyTorch without and with offload. See README.md.

python benchmarks/streaming/main.py                              # on a GPU: what fits into 9 minutes, the rest "not run"
python benchmarks/streaming/main.py --sizes 3B --memories 24GiB  # some of it
python benchmarks/streaming/main.py --emulated --quick           # no figures: shows that the script runs
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
from dataclasses import asdict
from pathlib import Path

from bounds import LayerSeconds, bound, compute_s, linear_flops
from scales import METHODS, SCALES, Group, groups

ROW_SHARE = 0.25  # of the minutes that one row may take: what hangs must not take them all
END_S = 5  # kept for ending a process and printing
HIGHEST, LOWEST = "at least", "under"


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
    return Group(
        method=group.method,
        size=group.size,
        memory=group.memory,
        tokens=tuple(key[3] for key in keys if key[0] == group.method and key[3]),
        kernels=any(key[0] == "kernels" for key in keys),
    )


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


# Tables


def shown(row, name, form):
    """A figure of a row, or a dash."""
    value = row.get(name)
    return "-" if value is None else form(value)


def giga(value):
    return f"{value / 1e9:.2f}"


def percent(value):
    return f"{value:.1%}"


def gib(value):
    return f"{value / 2**30:.2f}"


def times(value):
    return f"{value:.2f}"


HEAD = (
    "what", "model", "cap", "tokens", "tokens/s", "s/step (range)", "of bound", "bound by", "of matmul", "exposed",
    "x resident", "x FSDP2", "up GB", "down GB", "GiB device", "GiB host", "plan s",
)  # fmt: skip


def cells(row):
    """A row of the table."""
    place = (row["method"], row["size"], row["memory"] or "-", str(row["tokens"] or "-"))
    if row["status"] != "ok":
        return (*place, row["status"] + (f": {row['reason']}" if "reason" in row else ""))
    seconds = "-"
    if "step_s" in row:
        seconds = f"{row['step_s']:.3f} ({row['step_s_least']:.3f} to {row['step_s_most']:.3f})"
    return (
        *place,
        shown(row, "tokens_per_s", lambda value: f"{value:,.0f}"),
        seconds,
        shown(row, "share_of_bound", percent),
        row.get("binding", "-"),
        shown(row, "kernels_of_matmul_peak", percent),
        shown(row, "exposed_share", percent),
        shown(row, "times_resident", times),
        shown(row, "times_fsdp2", times),
        shown(row, "loaded_bytes", giga),
        shown(row, "stored_bytes", giga),
        shown(row, "device_peak_bytes", gib),
        shown(row, "host_peak_bytes", gib),
        shown(row, "plan_s", lambda value: f"{value:.1f}"),
    )


def table(rows):
    """Lines with aligned columns; a row that ends early, with a reason, runs on."""
    widths = [max(len(row[k]) for row in rows if len(row) == len(HEAD)) for k in range(len(HEAD))]
    for row in rows:
        widths[:4] = [max(width, len(cell)) for width, cell in zip(widths, row[:4], strict=False)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def environment(row):
    """The environment and its ceilings, in lines."""
    if row["status"] != "ok":
        return [f"machine: {row['status']} {row.get('reason', '')}".rstrip()]
    gpu = "no GPU: emulated" if row["gpu"] is None else f"{row['gpu']}, {gib(row['gpu_bytes'])} GiB"
    both = row["both_bytes_per_s"]
    return [
        f"{gpu}; driver {row.get('driver', '-')}; PCIe {row.get('pcie', '-')}; CUDA {row.get('cuda', '-')}",
        f"{row['cores']} cores ({row['cpu']}), {row['threads']} intra-op threads, {gib(row['dram_bytes'])} GiB of DRAM",
        f"{row['system']}, Python {row['python']}, torch {row['torch']}",
        f"link: up {giga(row['up_bytes_per_s'])} GB/s, down {giga(row['down_bytes_per_s'])}, "
        f"both at once {'-' if both is None else giga(both)}; DRAM: triad {giga(row['triad_bytes_per_s'])} GB/s, "
        f"in place {giga(row['in_place_bytes_per_s'])}; bfloat16 matmul {row['matmul_flops_per_s'] / 1e12:.3g} TFLOP/s",
    ]


def judged(results):
    """A line for each target: which rows meet it."""
    rows = [row for row in results.rows.values() if row["status"] == "ok"]
    streamed = [row for row in rows if row["method"] == "engine"]
    two = [row for row in rows if row["method"] == "interleaved"]
    compute_bound = [row for row in streamed if row.get("binding") == "compute"]
    at_16k = [row for row in streamed if row["tokens"] == 16384]
    return [
        verdict("of the lower bound", streamed, "share_of_bound", HIGHEST, 0.90),
        verdict("of resident tokens/s, where compute binds", compute_bound, "times_resident", HIGHEST, 0.95),
        verdict("times FSDP2's tokens/s, 16,384 tokens", at_16k, "times_fsdp2", HIGHEST, 1.5),
        verdict("of a step exposed to the optimizer, two models", two, "exposed_share", LOWEST, 0.05),
    ]


def verdict(what, rows, name, side, limit):
    """Whether every row that has the figure meets a limit."""
    values = [row[name] for row in rows if name in row]
    if not values:
        return f"{what}: {side} {limit}: not measured"
    good = sum(value >= limit if side == HIGHEST else value < limit for value in values)
    found = f"{min(values):.3f} to {max(values):.3f}"
    return f"{what}: {side} {limit}: {found}, {good} of {len(values)} rows: {'yes' if good == len(values) else 'NO'}"


def summary(results):
    """All that there is to say."""
    rows = list(results.rows.values())
    measured = [row for row in rows if row["method"] != "machine"]
    lines = environment(rows[0]) + ["", *table([HEAD, *(cells(row) for row in measured)]), ""]
    if results.scale.is_emulated:
        return [*lines, "emulated: the script runs; its figures say nothing of a GPU"]
    return lines + judged(results)


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
        code = 0
    except Stopped:
        code = 143
    except KeyboardInterrupt:
        code = 130
    finally:
        signal.signal(signal.SIGTERM, before)
        results.write()
        print("", *summary(results), sep="\n", flush=True)
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
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], json.loads(sys.argv[3]))
    else:
        sys.exit(main())
