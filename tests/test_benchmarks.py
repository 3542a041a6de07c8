"""The benchmarks that are quick to run small, in this process."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hydra_engine.trace import Span
from tests.durability import Kill, Outcome

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"


def main_of(benchmark):
    return FOLDER / benchmark / "main.py"


def loaded(path, monkeypatch):
    """A module of a benchmark by its file. What it adds to `sys.path` is gone afterwards."""
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location(f"benchmarks_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@contextmanager
def modules_of(benchmark, names, monkeypatch):
    """Modules of a benchmark by name, as its own folder has them; all from there are forgotten afterwards."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(FOLDER / benchmark)
    before = set(sys.modules)
    yield SimpleNamespace(**{name.rpartition(".")[2]: importlib.import_module(name) for name in names})
    for name in set(sys.modules) - before:
        if str(FOLDER) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def exit_code(benchmark, monkeypatch, *arguments):
    """Of a benchmark's command in this process."""
    monkeypatch.setattr(sys, "argv", ["main.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(main_of(benchmark)), run_name="__main__")
    return ended.value.code


@pytest.mark.rest
@pytest.mark.parametrize("main", sorted(ROOT.glob("benchmarks/*/main.py")), ids=lambda path: path.parent.name)
def test_command_starts_as_it_is_installed(main, tmp_path):
    """From another folder and without PYTHONPATH: the packages come from the installation alone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, main, "--help"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "usage:" in found.stdout


def test_cuts_are_predicted_for_stated_rates_and_measured(monkeypatch, capsys, tmp_path):
    module = loaded(FOLDER / "predictions" / "cuts.py", monkeypatch)
    monkeypatch.setattr(module, "BALANCED", range(2, 4))
    small = module.stated_costs(1, 4, 64)
    monkeypatch.setattr(module, "stated_costs", lambda _: small)
    assert module.stated()  # no balanced cut is faster
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 * 2 * 4
    monkeypatch.setattr(module, "NUM_STEPS", 3)
    monkeypatch.setattr(module, "CASES", {"tiny": module.Case(2, 2**20, 10**9, 16, 2, 1, 8)})
    module.predict("tiny")
    prediction = tmp_path / "prediction.json"
    prediction.write_text(capsys.readouterr().out)
    cuts = {tuple(ends) for _, ends, _ in json.loads(prediction.read_text())["rows"]}
    module.measure("tiny", prediction)
    measured = json.loads(capsys.readouterr().out)
    assert {tuple(ends) for ends, _ in measured} == cuts
    assert min(seconds for _, seconds in measured) > 0


@pytest.mark.parametrize("judged", [False, True])
def test_host_optimizer_measures_and_judges(judged, monkeypatch, capsys):
    options = ["--params", "3e5", "--triad", "1", "--repeats", "2", "--threads", str(torch.get_num_threads())]
    code = exit_code("host_optimizer", monkeypatch, *options, *([] if judged else ["--no-judge"]))
    printed = capsys.readouterr().out
    names = [line.split()[0] for line in printed.splitlines()]
    assert names.count("blocked") == names.count("plain") == 2
    slow = any(line.endswith("NO") for line in printed.splitlines())
    assert code == (1 if judged and slow else 0)


def test_scheduler_compares_with_exhaustive_search(monkeypatch, capsys):
    monkeypatch.syspath_prepend(main_of("scheduler").parent)
    assert exit_code("scheduler", monkeypatch, "swaps", "--instances", "2", "--no-judge") == 0
    lines = capsys.readouterr().out.splitlines()
    ratios = [float(line.split()[1]) for line in lines if line.startswith("sharded-lrtf")]
    assert len(ratios) == 2
    assert min(ratios) >= 1


def test_simulator_prints_shares_of_the_bound(monkeypatch, capsys):
    bound = loaded(FOLDER / "simulator" / "bound.py", monkeypatch)
    small = {"WIDTH": 64, "NUM_BLOCKS": 3, "NUM_HEADS": 2, "VOCABULARY": 256, "LENGTH": 32, "MICRO_TOKENS": 128}
    for name, value in (small | {"NUM_STEPS": 6}).items():
        monkeypatch.setattr(bound, name, value)
    with pytest.raises(SystemExit) as ended:
        bound.main(["--models", "2", "1", "--tokens", "256", "--dram", "200", "--link", "50"])
    assert ended.value.code == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[0] in "21"]
    assert [row[0] for row in rows] == ["2", "1"]
    assert all(sum(each.endswith("%") for each in row) == 7 for row in rows)  # of today, and six improvements


def test_scheduler_compares_plans_of_each_task_and_of_all(monkeypatch):
    together = loaded(FOLDER / "scheduler" / "together.py", monkeypatch)
    long, short = (
        together.Layers(num_layers=4, param_bytes=10**8, forward_s=0.002, num_steps=number) for number in (6, 2)
    )
    *others, own = together.makespans([long, short], together.machine(1, [long, short]))
    assert len(others) == 4
    assert 0 < own <= 1.01 * min(others[2:])  # what generate() begins with, and cuts alone


def test_simulator_predicts_to_a_file_and_runs(monkeypatch, capsys, tmp_path):
    module = loaded(main_of("simulator"), monkeypatch)
    small, whole = module.Kind(24, (2, 6), 1), module.Kind(24, (6,), 1)
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
    module = loaded(main_of("durability"), monkeypatch)
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
    """Modules of the benchmark by name, as its own folder has them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other tests keep the cores busy
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))  # put back
    names = ("bounds", "scales", "stages", "rows", "report", "wheels", "child")
    with modules_of("gpu_day", names, monkeypatch) as found:
        found.main = loaded(main_of("gpu_day"), monkeypatch)
        monkeypatch.setattr(found.wheels, "install", lambda: None)
        yield found


def run_small(gpu_day, tmp_path, module, method, **options):
    """Rows of one group on the emulated device, in this process."""
    rows = []
    group = gpu_day.scales.Group(module=module, method=method, **options)
    gpu_day.child.run_group(gpu_day.scales.EMULATED, group, rows.append, tmp_path)
    return rows


def run_child(gpu_day, tmp_path, *, left_s=100, row_s=100, **options):
    """Rows of one group in a process of its own."""
    rows, group = [], gpu_day.scales.Group(memory="1MiB", **options)
    gpu_day.main.run_child("emulated", group, rows.append, time.monotonic() + left_s, row_s, tmp_path)
    return rows


def test_gpu_day_goes_on_with_what_is_not_there_and_then_with_what_failed(gpu_day, tmp_path, capsys):
    """And an emulated run fills no cell of a table."""
    asked = []

    def run(scale_name, group, add, until_s, row_s, folder):
        for key in group.rows():
            asked.append(key[0])
            if key[0] == "environment":
                add(gpu_day.rows.failed(key, "no room"))
            elif key[0] != "wake-up" or len(asked) > 6:
                add({**gpu_day.rows.failed(key, ""), "status": "ok"})

    arguments = ["facts", "--emulated", "--out", str(tmp_path)]
    assert gpu_day.main.main(arguments, run) == 0
    assert asked == list(gpu_day.stages.FACTS)
    assert "- facts: 4 of 6 rows ran" in capsys.readouterr().out
    assert gpu_day.main.main(arguments, run) == 0
    assert asked[6:] == ["wake-up", "environment"]
    printed = capsys.readouterr().out
    assert "- facts: 5 of 6 rows ran" in printed
    assert "  - environment : failed, no room" in printed
    assert len((tmp_path / "facts.jsonl").read_text().splitlines()) == 7
    assert (tmp_path / "report.md").read_text().startswith(gpu_day.report.report(tmp_path / "nothing"))


def test_gpu_day_measures_the_peers_that_four_models_are_compared_with(gpu_day, tmp_path):
    asked, first_two = [], gpu_day.scales.EMULATED.tokens[:2]

    def run(scale_name, group, add, until_s, row_s, folder):
        asked.append((group.method, group.tokens))
        for key in group.rows():
            add(gpu_day.rows.failed(key, "no room"))

    arguments = ["four", "--emulated", "--out", str(tmp_path)]
    gpu_day.main.main(arguments, run)
    peers = importlib.import_module("peers").PEERS
    assert asked == [("interleaved", first_two[::-1]), *((name, first_two) for name in peers)]
    del asked[:]
    gpu_day.main.main(arguments, run)
    assert asked == [("interleaved", first_two[::-1])]  # peers that failed are tried again in their own stage


def test_gpu_day_readme_has_the_tables_that_are_printed_of_its_results(gpu_day):
    folder = main_of("gpu_day").parent
    assert gpu_day.report.report(folder / "results") in (folder / "README.md").read_text()


def test_gpu_day_knows_every_method_that_it_plans_and_plans_no_row_twice(gpu_day):
    for scale in gpu_day.scales.SCALES.values():
        for stage in gpu_day.stages.stages(scale).values():
            assert len(stage.rows()) == len(set(stage.rows()))
            for group in stage.groups:
                module = importlib.import_module(group.module)
                assert group.method in (module.PEERS if group.module == "peers" else module.METHODS)
                assert not group.parts or group.parts == tuple(module.PARTS)


def test_gpu_day_measures_the_engine_and_its_kernels(gpu_day, tmp_path):
    size = gpu_day.scales.EMULATED.size
    [kernels] = run_small(gpu_day, tmp_path, "engine", "kernels", size=size)
    [engine] = run_small(gpu_day, tmp_path, "engine", "engine", size=size, tokens=(64,), memory="1MiB")
    assert kernels["status"] == engine["status"] == "ok"
    assert len(kernels["layers"]) == engine["boundaries"][-1] == 8
    assert engine["host_peak_bytes"] > 0
    assert 0 <= engine["exposed_share"] < 1
    assert len(engine["boundaries"]) > 1
    assert engine["stored_bytes"] >= 2 * engine["num_parameters"] <= engine["loaded_bytes"]  # norms are wider


def test_gpu_day_finds_facts(gpu_day, tmp_path):
    names = ("environment", "stream", "page-locking", "wake-up")
    rows = run_small(gpu_day, tmp_path, "facts", "facts", parts=names)
    assert [(row["method"], row["status"]) for row in rows] == [(name, "ok") for name in names]


def test_gpu_day_says_how_many_models_dram_holds(gpu_day, monkeypatch):
    engine, scale = importlib.import_module("engine"), gpu_day.scales.EMULATED
    num_bytes = 16 * sum(each.numel() for each in engine.make_model(scale, scale.size, "meta").parameters())
    for available, expected in ((10, 4), (3.5, 3)):
        monkeypatch.setattr(engine, "available_dram_bytes", lambda share=available: share * num_bytes)
        assert engine.num_that_fit(scale, scale.size) == expected
    monkeypatch.setattr(engine, "available_dram_bytes", lambda: num_bytes)
    with pytest.raises(MemoryError, match=f"{num_bytes} bytes of DRAM for each model"):
        engine.num_that_fit(scale, scale.size)


def test_gpu_day_measures_fsdp2_in_a_process_of_its_own(gpu_day, tmp_path):
    [row] = run_child(gpu_day, tmp_path, method="fsdp2", size=gpu_day.scales.EMULATED.size, tokens=(64,))
    assert row["status"] == "ok", row
    assert row["tokens_per_s"] == 64 / row["step_s"]


def test_gpu_day_reports_what_ends_a_process_and_what_there_is_no_time_for(gpu_day, tmp_path):
    group = {"module": "engine", "method": "engine", "size": "unknown", "tokens": (64, 128)}
    rows = run_child(gpu_day, tmp_path, **group)
    assert [(row["tokens"], row["status"], row["reason"]) for row in rows] == [
        (tokens, "failed", "its process ended with 1: KeyError: 'unknown'") for tokens in (64, 128)
    ]
    assert "Traceback" in rows[0]["stderr"]
    assert run_child(gpu_day, tmp_path, left_s=0, **group) == []


def test_gpu_day_ends_a_row_that_hangs(gpu_day, tmp_path):
    [row] = run_child(gpu_day, tmp_path, row_s=0.1, module="engine", method="engine", size="0.3M", tokens=(64,))
    assert (row["status"], row["reason"]) == ("failed", "no end after 0 s")


def test_gpu_day_sets_rows_of_a_gpu_beside_their_bound_and_their_peers(gpu_day, tmp_path):
    scale = gpu_day.scales.GPU

    def write(stage, method, memory=scale.memory, tokens=8192, **figures):
        size = "" if stage == "facts" else scale.size
        key = dict(zip(gpu_day.rows.KEY, (method, size, memory, tokens), strict=True))
        spread = {f"step_s{end}": figures["step_s"] for end in ("_least", "_most")} if "step_s" in figures else {}
        row = {**key, "status": "ok", **spread, **figures}
        gpu_day.rows.Results(tmp_path, stage, "gpu").add(row)

    alone = {"memory": "", "tokens": 0}
    rates = {f"{name}_bytes_per_s": 1e9 for name in ("up", "down", "both_up", "both_down", "dram")}
    write("facts", "ceilings", **alone, **rates, matmul_flops={"bfloat16": 5e14})
    by_threads = {"triad_bytes_per_s": {"1": 2e9}, "in_place_bytes_per_s": {"1": 1e9}}
    write("facts", "stream", **alone, **by_threads, dram_bytes_per_s=2e9)
    write("one", "kernels", **alone, layers=[{"forward": 1.0, "recompute": 1.0, "backward": 1.0}] * 2)
    cut = {"boundaries": [1, 2], "graph_bytes": [0, 0], "micro_batches": 2, "num_parameters": 1e9, "boundary_bytes": 10}
    moved = {"loaded_bytes": 1e9, "stored_bytes": 1e9, "exposed_share": 0.02}
    least_s = 28.0 * 4 / 2  # of four models on the host; the kernels take 4 * 2 * 5
    write("four", "interleaved", step_s=least_s / 0.96, tokens_per_s=500.0, num_tasks=4, **cut, **moved)
    write("one", "fsdp2", step_s=40.0, tokens_per_s=100.0, losses=[5.0, 4.0], steps_before=0)
    write("one", "resident", memory="", step_s=8.0, tokens_per_s=1000.0, losses=[5.0, 4.1], steps_before=0)
    found = gpu_day.report.report(tmp_path)
    assert "500 tokens/s; 58.333 s (58.333 to 58.333); 96% of the bound (host)" in found
    assert "one after another: fsdp2 | not measured on a GPU | 160.000 s; ours takes 0.36 of it" in found
    assert "100 tokens/s; 40.000 s (40.000 to 40.000); 0.10 of resident" in found
    assert "11.11% at 8,192 tokens per step" in found


def test_gpu_day_adds_up_kernels_as_the_plan_runs_them(gpu_day):
    bounds = gpu_day.bounds
    layers = [bounds.LayerSeconds(forward=1.0, recompute=2.0, backward=4.0)] * 4
    assert bounds.compute_s(layers, [4], [], 3) == 3 * 4 * 6  # one shard: no forward twice
    assert bounds.compute_s(layers, [1, 2, 4], [0, 0, 0], 1) == 7 + 7 + 2 * 6
    assert bounds.compute_s(layers, [1, 2, 4], [0, 5, 0], 1) == 7 + 6 + 2 * 6  # a kept graph


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
    assert gpu_day.bounds.rounds_s({"a": [0, 1, 3, 6, 10]}, 2) == [3 - 1, 6 - 3, 10 - 6]


def test_gpu_day_takes_the_mean_of_bursts_of_commits(gpu_day):
    # Three of four tasks commit together each 3 s, so a commit takes 1 s, a round 4.
    order, commits = "abcdabcdabcdabcdabcd", {}
    for k, name in enumerate(order):
        commits.setdefault(name, []).append(3.0 * (k // 3))
    spans = [Span("host", "commit", name, at - 0.5, at) for name, times in commits.items() for at in times]
    assert gpu_day.bounds.commit_times(spans) == commits
    assert gpu_day.bounds.measured_window({"a": [1, 2, 5], "b": [2, 4, 6]}, 2) == (4, 5)
    assert gpu_day.bounds.rounds_s(commits, 1) == [pytest.approx(4.0, rel=0.1)]
    late = {"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]}  # begun as the other was through
    assert gpu_day.bounds.measured_window(late, 1) == (4.0, 6.0)
    assert gpu_day.bounds.rounds_s(late, 1) == [1.0]


@pytest.fixture
def elasticity(monkeypatch):
    """Modules of the benchmark by name, with a model that is quick to train."""
    with modules_of("elasticity", ("main", "workload", "pool"), monkeypatch) as found:
        for name, value in {"WIDTH": 16, "LENGTH": 8, "BATCH_SIZE": 4, "one_thread": lambda: None}.items():
            monkeypatch.setattr(found.workload, name, value)
        yield found


def test_elasticity_follows_a_pool(elasticity, monkeypatch, tmp_path):
    options = {"steps": 6, "commits": tmp_path / "commits", "folder": tmp_path / "saved", "event": "none", "at": 3}
    arguments = [str(each) for name, value in options.items() for each in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["pool.py", *arguments])
    elasticity.pool.main()
    lines = [json.loads(line) for line in (tmp_path / "commits").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["devices"] for line in lines if "devices" in line] == [{"emulated:0": "in"}]
    assert elasticity.main.has_ended(lines)
    [event_s] = [line["s"] for line in lines if "event" in line]
    assert elasticity.main.Found.of(lines, event_s).redone == 0


def test_elasticity_counts_steps_that_are_committed_again(elasticity):
    times = [(0.0, 1), (1.0, 2), (2.0, 3), (9.0, 2), (10.0, 3), (11.0, 4)]
    lines = [{"task": "gpt", "s": s, "step": step} for s, step in times]
    lines += [
        {"task": "gpt", "s": 12.0, "weights": "0"},
        {"task": "another", "s": 5.0, "step": 9},
        {"s": 6.0, "rank": 0},
    ]
    assert elasticity.main.Found.of(lines, 2.5) == (2, 6.0, 1.0, "0")


@pytest.fixture
def adaptive(monkeypatch):
    return loaded(main_of("adaptive"), monkeypatch)


def test_adaptive_predicts_steps_of_other_splits(adaptive, monkeypatch, capsys):
    workload = adaptive.WORKLOADS["GPT, no link"]
    small = workload._replace(
        layers=lambda: adaptive.gpt(16, 1, 2, 8), samples=adaptive.texts(64, 8), measured=((4, 2),), predicted=((8, 2),)
    )
    monkeypatch.setattr(adaptive, "WORKLOADS", {"small": small})
    adaptive.predict(SimpleNamespace(rounds=1, steps=5))
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:-1]] == [["small", "8", "2"]]


def test_adaptive_tells_what_norms_cost(adaptive, monkeypatch, capsys):
    layers, samples = (lambda: adaptive.gpt(16, 1, 2, 8)), (lambda: adaptive.texts(64, 8))
    small = (layers, adaptive.text_loss, samples, (8, 2), {"memory": "8MiB"})
    monkeypatch.setattr(adaptive, "COSTS", {"small": small})
    adaptive.cost(SimpleNamespace(rounds=1, steps=2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("small")
    assert lines[2].startswith("norms cost at most ")


def test_dram_compares_bits_and_times(monkeypatch, capsys):
    options = ("--params", "1e6", "--repeats", "1", "--threads", str(torch.get_num_threads()))
    assert not exit_code("dram", monkeypatch, *options)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "split weights are bit-equal after 3 steps"
    assert [line.partition("  ")[0] for line in lines[1:]] == ["whole", "split", "split, narrow moments"]
