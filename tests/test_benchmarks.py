"""The benchmarks that are quick to run small, in this process."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

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
