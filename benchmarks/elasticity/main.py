"""Steps redone and outage when devices join, leave and fail: the engine's pool beside torchrun. See README.md.

python benchmarks/elasticity/main.py                          # all of it; exit code 1 where a step of ours is redone
python benchmarks/elasticity/main.py pool crash --repeats 1   # one program, some events, and less often
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from figures import Figures, add_arguments  # noqa: E402

EVENTS = ("none", "join", "leave", "crash")
POLL_S = 0.005
LAST_CALL_S = 5  # torchrun waits for more agents where it could begin; 30 unless given
HANG_S = 300  # a run that takes longer has failed


class Found(NamedTuple):
    """One task in one run."""

    redone: int  # steps that were committed more than once
    outage_s: float  # the longest time without a commit, less the usual time between two
    usual_s: float
    weights: str  # at the end, as a hash

    @classmethod
    def of(cls, lines, event_s, task="gpt"):
        """Read a log; the event was at this time."""
        lines = [line for line in lines if line.get("task") == task]
        steps = [line["step"] for line in lines if "step" in line]
        gaps = list(pairwise(sorted(line["s"] for line in lines if "step" in line)))
        usual_s = median(end_s - begin_s for begin_s, end_s in gaps if end_s <= event_s)
        outage_s = max(end_s - begin_s for begin_s, end_s in gaps if end_s > event_s) - usual_s
        [weights] = {line["weights"] for line in lines if "weights" in line}
        return cls(len(steps) - len(set(steps)), max(0.0, outage_s), usual_s, weights)


class Run:
    """A training in a new folder, and its log."""

    def __init__(self, root, num_steps):
        self.folder = Path(tempfile.mkdtemp(dir=root))
        self.log = self.folder / "log"
        (self.folder / "checkpoints").mkdir()
        arguments = ("--steps", num_steps, "--commits", self.log, "--folder", self.folder / "checkpoints")
        self._arguments = [str(each) for each in arguments]
        self._processes = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in reversed(self._processes):  # an agent ends its worker as well
            process.terminate()
        for process in self._processes:
            process.wait()

    def start(self, *command):
        """Start a program, which prints to a file beside the log."""
        output = (self.folder / f"output-{len(self._processes)}").open("wb")
        path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else an agent that joins waits in vain (torch 2.13)
        command = [sys.executable, *map(str, command), *self._arguments]
        with output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        self._processes.append(process)
        return process

    def lines(self):
        """The log as far as it is written."""
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait(self, is_there):
        """Wait for a log of which this is true, and return it."""
        until_s = time.monotonic() + HANG_S
        while not is_there(lines := self.lines()):
            if time.monotonic() > until_s or all(each.poll() is not None for each in self._processes):
                printed = "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("output-*")))
                raise RuntimeError(f"{self.folder}: it has ended, or hangs:\n{printed}")
            time.sleep(POLL_S)
        return lines


def has_ended(lines, num_tasks=1):
    return len({line["task"] for line in lines if "weights" in line}) == num_tasks


def pool(event, at_step, root, options):
    """The engine in one process, on emulated devices."""
    with Run(root, options.steps) as run:
        run.start(HERE / "pool.py", "--event", event, "--at", at_step)
        lines = run.wait(has_ended)
    [event_s] = [line["s"] for line in lines if "event" in line]
    [devices] = [line["devices"] for line in lines if "devices" in line]
    expected = {"none": ["in"], "join": ["in", "in"]}.get(event, ["in", "out"])
    assert list(devices.values()) == expected, devices
    return Found.of(lines, event_s)


def torchrun(event, at_step, root, options):
    """Plain PyTorch under torchrun, one model in all processes."""
    return under_torchrun("ddp.py", event, at_step, root, options)[0]


def agents(event, at_step, root, options):
    """The engine under torchrun, one for each agent and two models between them; the model that fares worse."""
    found = under_torchrun("agents.py", event, at_step, root, options, tasks=("a", "b"))
    return max(found, key=lambda each: each.outage_s)._replace(redone=max(each.redone for each in found))


def under_torchrun(program, event, at_step, root, options, tasks=("gpt",)):
    """An agent for each process of one thread; what became of each task."""
    with Run(root, options.steps) as run:
        run.start("-c", STORE)
        run.wait(lambda _: (run.folder / "output-0").read_text().endswith("\n"))
        port = (run.folder / "output-0").read_text().strip()
        launch = ("-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3")
        launch += (f"--rdzv-conf=last_call_timeout={LAST_CALL_S}",)
        launch += ("--rdzv-backend=c10d", "--rdzv-id=elasticity", f"--rdzv-endpoint=localhost:{port}")

        def agent():
            return run.start(*launch, HERE / program)

        started = [agent() for _ in range(1 if event in ("none", "join") else 2)]
        lines = run.wait(lambda lines: sum(line.get("step") == at_step for line in lines) == len(tasks))
        assert [line["num_ranks"] for line in lines if "rank" in line] == [len(started)] * len(started), lines
        event_s = time.monotonic()
        if event == "join":
            agent()
        elif event == "leave":
            started[1].terminate()
        elif event == "crash":
            [pid] = [line["pid"] for line in lines if line.get("rank") == 1]
            os.kill(pid, 9)
        lines = run.wait(lambda lines: has_ended(lines, len(tasks)))
    num_ranks = [line["num_ranks"] for line in lines if line.get("rank") == 0]
    expected = {"none": [1], "join": [1, 2], "leave": [2, 1], "crash": [2, 2]}[event]
    if num_ranks != expected:
        print(f"{program}: {event}: worlds of {num_ranks} processes, where {expected} were expected", flush=True)
    return [Found.of(lines, event_s, task) for task in tasks]


# Keeps the rendezvous in a process of its own, which no agent takes with it.
STORE = (
    "import signal, torch.distributed as dist; store = dist.TCPStore('localhost', 0, is_master=True, "
    "wait_for_workers=False); print(store.port, flush=True); signal.pause()"
)
PROGRAMS = {"pool": pool, "torchrun": torchrun, "agents": agents}


def spread(values, text):
    """Median and range."""
    return f"{text(median(values))} ({text(min(values))} to {text(max(values))})"


def whole(value):
    return f"{value:g}"


def seconds(value):
    return f"{value:.3f} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=f"of {', '.join((*PROGRAMS, *EVENTS))}; default: all")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each program with each event (default 5)")
    parser.add_argument("--steps", type=int, default=200, help="of a run (default 200)")
    parser.add_argument("--at", type=int, default=30, help="the event follows so many steps, and up to 9 more")
    parser.add_argument("--no-judge", action="store_true", help="exit code 0 whatever comes out")
    add_arguments(parser)
    options = parser.parse_args()
    programs = [name for name in PROGRAMS if name in options.what] or list(PROGRAMS)
    events = [name for name in EVENTS if name in options.what] or list(EVENTS)
    print(f"load of the machine as it began: {os.getloadavg()[0]:.1f}", flush=True)
    found, figures = {(event, name): [] for event in events for name in programs}, Figures("elasticity")
    with tempfile.TemporaryDirectory(prefix="elasticity-") as root:
        for repeat in range(options.repeats):
            at_step = options.at + 2 * repeat % 10  # anywhere between two checkpoints
            for (event, name), runs in found.items():
                if event == "none" and repeat:  # once is enough to know the weights
                    continue
                runs.append(run := PROGRAMS[name](event, at_step, root, options))
                print(f"{event:6}{name:10}{run.redone:3} redone, outage {run.outage_s:.3f} s", flush=True)
    print(f"load of the machine as it ended: {os.getloadavg()[0]:.1f}")
    for (event, name), runs in found.items():
        alone = {run.weights for run in found.get(("none", name), runs)}
        same, step_s = sum(run.weights in alone for run in runs), median(run.usual_s for run in runs)
        print(
            f"{event:6}{name:10}redone {spread([run.redone for run in runs], whole):14}  outage "
            f"{spread([run.outage_s for run in runs], seconds):36}  a step {seconds(step_s)}  "
            f"weights as without: {same} of {len(runs)}"
        )
        if name != "pool" and (event, "pool") in found:
            ours, theirs = (median(run.outage_s for run in found[event, each]) for each in ("pool", name))
            print(f"{event:6}{name:10}outage / that of the pool: {theirs / max(ours, 1e-3):.0f}")
        if event != "none":
            figures.add(f"{event}, {name}: outage, s", [run.outage_s for run in runs], better="less")
            if name == "pool":
                figures.add(f"{event}, pool: steps redone", [run.redone for run in runs], better="less", limit=0)
    figures.save(options.json)
    is_good = all(run.redone == 0 for (_, name), runs in found.items() for run in runs if name == "pool")
    sys.exit(0 if is_good or options.no_judge else 1)


if __name__ == "__main__":
    main()
