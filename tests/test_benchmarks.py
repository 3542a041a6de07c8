"""The benchmarks that are quick to run small, in this process."""

import importlib.util
import json
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hydra_engine.trace import Span
from tests.durability import Kill, Outcome

ROOT = Path(__file__).parent.parent


def main_of(benchmark):
    return ROOT / "benchmarks" / benchmark / "main.py"


@pytest.mark.parametrize("judged", [False, True])
def test_host_optimizer_measures_and_judges(judged, monkeypatch, capsys):
    options = ["--params", "3e5", "--triad", "1", "--repeats", "2", "--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", ["main.py", *options, *([] if judged else ["--no-judge"])])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(main_of("host_optimizer")), run_name="__main__")
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()].count("blocked") == 2
    slow = printed.rstrip().endswith("NO")
    assert ended.value.code == (1 if judged and slow else 0)


def test_scheduler_compares_with_exhaustive_search(monkeypatch, capsys):
    monkeypatch.syspath_prepend(main_of("scheduler").parent)
    monkeypatch.setattr(sys, "argv", ["main.py", "swaps", "--instances", "2", "--no-judge"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(main_of("scheduler")), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    ratios = [float(line.split()[1]) for line in lines if line.startswith("sharded-lrtf")]
    assert len(ratios) == 2
    assert min(ratios) >= 1


def test_simulator_predicts_to_a_file_and_runs(monkeypatch, capsys, tmp_path):
    spec = importlib.util.spec_from_file_location("benchmarks_simulator", main_of("simulator"))
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec.loader.exec_module(module)
    small = module.Kind(24, (2, 6), 1)
    whole = module.Kind(24, (6,), 1)
    monkeypatch.setattr(module, "SMALL", small)
    monkeypatch.setattr(module, "WHOLE", whole)
    workloads = {
        "linked": module.Workload(((small, 2), (whole, 2)), 2, 100_000_000),
        "bare": module.Workload(((small, 2),), 1, None),
    }
    monkeypatch.setattr(module, "WORKLOADS", workloads)
    num_threads = torch.get_num_threads()

    def in_this_process(what, number):
        assert what == "together"
        module.together(number)
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr(module, "in_own_process", in_this_process)
    try:
        module.predict(tmp_path / "predictions.json")
        module.run("linked")
    finally:
        torch.set_num_threads(num_threads)
    predictions = json.loads((tmp_path / "predictions.json").read_text())
    beside = predictions.pop("beside")
    assert beside.keys() == {"1", "2"}
    assert all(each["cores"] > 0 and each["first_step_times"] >= 1 for each in beside.values())
    assert predictions.keys() == workloads.keys()
    assert all(each["bound_s"] > 0 and each["makespan_s"] > 0 for each in predictions.values())
    assert float(capsys.readouterr().out) > 0


@pytest.fixture
def durability(monkeypatch):
    """The benchmark with a model of a few thousand parameters."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # the benchmark adds to it
    spec = importlib.util.spec_from_file_location("benchmarks_durability", main_of("durability"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MODEL", module.Model(16, 1, 1, 1, 8, (1, 2, 3), "8MiB"))
    return module


def test_durability_tells_what_saves_cost_and_how_fast_they_are(durability, tmp_path, capsys):
    options = ["--pairs", "1", "--every", "3", "--saves", "1", "--rounds", "1", "--folder", str(tmp_path)]
    assert durability.main(["cost", "rates", *options, "--no-judge"]) == 0
    printed = capsys.readouterr().out
    assert "a save per 3 steps: held up" in printed
    assert printed.count("writer over plain write") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_good", [True, False])
def test_durability_counts_kills_and_judges(is_good, durability, monkeypatch, capsys):
    def in_own_process(*arguments):
        assert "--other-settings" in arguments
        usual = {"settings": [], "begun": {"task": 3}, "duration_s": 2.0}
        kills = [Kill(1.0, True, True, 2), Kill(0.5, False, False, 0)]
        yield Outcome(name="plain-0", kills=[], **usual)
        yield Outcome(name="run-0", kills=kills, **usual)
        yield Outcome(name="run-1", kills=kills[:1], different=[] if is_good else ["task.step"], **usual)

    monkeypatch.setattr(durability, "in_own_process", in_own_process)
    assert durability.main(["others", "--kills", "3", "--at-once", "1"]) == (0 if is_good else 1)
    printed = capsys.readouterr().out
    assert "3 kills in 2 runs" in printed
    assert "2 cut off a save or a removal, 1 came before the first checkpoint" in printed
    assert f"resumed bitwise equal: {'3 of 3: yes' if is_good else '2 of 3: NO'}" in printed
    assert ("task.step" in printed) != is_good


@pytest.fixture
def gpu_day(monkeypatch):
    """The benchmark's modules by name, as its own folder has them."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(main_of("gpu_day").parent)
    names = ("bounds", "scales", "tables", "ceilings", "models", "row", "contestants")
    modules = {name: importlib.import_module(name) for name in names}
    spec = importlib.util.spec_from_file_location("benchmarks_gpu_day", main_of("gpu_day"))
    modules["main"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(modules["main"])
    yield SimpleNamespace(**modules)
    for name in [name for name in sys.modules if name.split(".")[0] in (*names, "peers")]:
        del sys.modules[name]


def in_this_process(gpu_day, refusing=()):
    """What measures a group, without a process of its own; some methods raise out-of-memory instead."""

    def run(scale_name, group, add, until_s, row_s):
        if group.method in refusing:
            for key in group.rows():
                with gpu_day.row.measured(add, torch.device("cpu"), key):
                    raise torch.OutOfMemoryError("no room\nfor it")
        elif group.method != "fsdp2":
            gpu_day.contestants.run_group(gpu_day.scales.SCALES[scale_name], group, add)

    return run


def test_gpu_day_writes_every_row_and_names_what_was_not_run(gpu_day, tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = ["--emulated", "--quick", "--json", str(path)]
    assert gpu_day.main.main(arguments, in_this_process(gpu_day, refusing=("interleaved",))) == 0
    rows = {row["method"]: row for row in json.loads(path.read_text())["rows"]}
    found = {name: row["status"] for name, row in rows.items()}
    measured = dict.fromkeys(("machine", "kernels", "resident", "engine"), "ok")
    assert found == {**measured, "fsdp2": "not run", "interleaved": "failed"}
    engine = rows["engine"]
    assert engine["bound_s"] == max(engine["terms_s"].values()) == engine["terms_s"][engine["binding"]] > 0
    assert engine["share_of_bound"] == engine["bound_s"] / engine["step_s"]
    assert engine["times_resident"] == engine["tokens_per_s"] / rows["resident"]["tokens_per_s"]
    assert engine["host_peak_bytes"] > 0
    assert 0 <= engine["exposed_share"] < 1
    weights = 2 * engine["num_parameters"]  # at least, norms being wider
    assert engine["stored_bytes"] >= weights <= engine["loaded_bytes"]
    printed = capsys.readouterr().out
    assert "failed: out of memory: no room" in printed
    assert "emulated: the script runs; its figures say nothing of a GPU" in printed


def test_gpu_day_measures_fsdp2_in_a_process_of_its_own(gpu_day, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests keep the cores busy
    group = gpu_day.scales.Group(method="fsdp2", size="0.3M", memory="4MiB", tokens=(256,))
    rows = []
    gpu_day.main.run_child("emulated-quick", group, rows.append, time.monotonic() + 60, 60)
    [row] = rows
    assert row["status"] == "ok", row
    assert row["tokens_per_s"] == 256 / row["step_s"]


def test_gpu_day_reports_what_ends_a_process_and_what_there_is_no_time_for(gpu_day):
    group = gpu_day.scales.Group(method="engine", size="unknown", memory="4MiB", tokens=(256,))
    rows = []
    gpu_day.main.run_child("emulated-quick", group, rows.append, time.monotonic() + 60, 60)
    [row] = rows
    assert (row["status"], row["reason"]) == ("failed", "its process ended with 1: KeyError: 'unknown'")
    gpu_day.main.run_child("emulated-quick", group, rows.append, time.monotonic(), 60)
    assert len(rows) == 1


def test_gpu_day_adds_up_kernels_as_the_plan_runs_them(gpu_day):
    bounds = gpu_day.bounds
    layers = [bounds.LayerSeconds(forward=1.0, recompute=2.0, backward=4.0)] * 4
    assert bounds.compute_s(layers, [4], [], 3) == 3 * 4 * 6  # one shard: no forward twice
    assert bounds.compute_s(layers, [1, 2, 4], [0, 0, 0], 1) == 7 + 7 + 2 * 6
    assert bounds.compute_s(layers, [1, 2, 4], [0, 5, 0], 1) == 7 + 6 + 2 * 6  # a kept graph
    assert bounds.linear_flops([10, 20], [1, 2], [0, 0], 3) == (8 * 10 + 6 * 20) * 3


def test_gpu_day_bounds_a_step_by_its_slowest_resource(gpu_day):
    ceilings = {"up_bytes_per_s": 2.0, "down_bytes_per_s": 4.0, "dram_bytes_per_s": 7.0}
    options = {"num_parameters": 100, "num_shards": 4, "boundary_bytes": 10}
    found = gpu_day.bounds.bound(5.0, ceilings, moved=(1000, 1000), **options)
    # Up 1.75 times 200 bytes, down 200 and three boundaries with their gradients, 28 bytes in DRAM.
    assert (found.compute, found.up, found.down, found.host) == (5.0, 175.0, 65.0, 400.0)
    assert (found.seconds, found.binding) == (400.0, "host")
    resident = gpu_day.bounds.bound(5.0, ceilings, moved=(220, 210), num_tasks=2, **options)
    assert (resident.compute, resident.up, resident.down, resident.host) == (10.0, 110.0, 52.5, 800.0)


def test_gpu_day_tells_exposed_updates_from_hidden_ones(gpu_day):
    spans = [
        Span("cuda:0", "compute", "a.f0@1", 0.0, 4.0),
        Span("host", "update", "a.0", 3.0, 6.0),  # exposed from 4 to 6
        Span("host", "update", "a.1", 5.0, 7.0),  # and from 6 to 7
        Span("cuda:0", "compute", "b.f0@1", 7.0, 10.0),
        Span("host", "commit", "a", 9.0, 12.0),  # past the window from 10 on
    ]
    assert gpu_day.bounds.exposed_share(spans, 0.0, 10.0) == pytest.approx(0.3)
    assert gpu_day.bounds.busy_share(spans, 0.0, 10.0) == pytest.approx(0.7)
    assert gpu_day.bounds.rounds_s([0, 1, 3, 6, 10], 1, 2) == [3 - 1, 6 - 3, 10 - 6]
    assert gpu_day.bounds.rounds_s([0, 1, 3, 6, 10], 2, 1) == [6 - 1, 10 - 3]


def test_gpu_day_plans_every_row_once_the_most_important_first(gpu_day):
    planned = gpu_day.scales.groups(gpu_day.scales.GPU)
    keys = [key for group in planned for key in group.rows()]
    assert len(keys) == len(set(keys))
    assert [sum(key[0] == method for key in keys) for method in gpu_day.scales.METHODS] == [20, 10, 20, 10]
    assert keys[:3] == [("machine", "", "", 0), ("kernels", "1.5B", "", 0), ("resident", "1.5B", "", 16384)]
    some = gpu_day.scales.groups(gpu_day.scales.GPU, sizes=["3B"], tokens=[4096], methods=["fsdp2"])
    assert [key for group in some for key in group.rows()] == [
        ("machine", "", "", 0),
        ("kernels", "3B", "", 0),
        ("fsdp2", "3B", "16GiB", 4096),
        ("fsdp2", "3B", "24GiB", 4096),
    ]
