"""Every benchmark still runs, with its smallest setting where that takes seconds. What it prints is not checked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*/main.py"))
SMALLEST = {
    "dram": ["--params", "3e5", "--repeats", "2"],
    "host_optimizer": ["--params", "3e5", "--triad", "1", "--repeats", "2", "--threads", "1", "--no-judge"],
    "scheduler": ["swaps", "--instances", "2", "--no-judge"],
}


@pytest.mark.rest
@pytest.mark.parametrize("main", BENCHMARKS, ids=lambda path: path.parent.name)
def test_a_benchmark_runs_as_it_is_installed(main, tmp_path):
    """From another folder and without PYTHONPATH: the packages come from the installation alone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, main, *SMALLEST.get(main.parent.name, ["--help"])]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout
