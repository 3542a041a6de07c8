"""The benchmarks that are quick to run small, in this process."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("judged", [False, True])
def test_host_optimizer_measures_and_judges(judged, monkeypatch, capsys):
    options = ["--params", "3e5", "--triad", "1", "--repeats", "2", "--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", ["main.py", *options, *([] if judged else ["--no-judge"])])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / "host_optimizer" / "main.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()].count("blocked") == 2
    slow = printed.rstrip().endswith("NO")
    assert ended.value.code == (1 if judged and slow else 0)
