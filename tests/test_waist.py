"""What the engine offers is public and written down; without the folders of its clients, its own tests pass."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hydra_engine
from hydra_engine.checkpoints import store
from hydra_engine.cli import resume
from hydra_engine.sweep import sweep
from hydra_engine.system import process
from tests.test_imports import CLIENTS, ENGINE_MODULES, PUBLIC, own_imports, room_of

ROOT = Path(__file__).resolve().parents[1]
QUICK = "schedule/test_scheduler.py", "run/test_chooser.py"
ROOMS = [
    "any_model",
    "capture",
    "checkpoints",
    "data",
    "devices",
    "host",
    "planning",
    "progress",
    "run",
    "schedule",
    "tasks",
    "worker",
]
AWAY = f"""
import importlib.util

def test_clients_are_away():
    assert [each for each in {CLIENTS} if importlib.util.find_spec(f"hydra_engine.{{each}}")] == []
"""


def test_what_clients_use_is_offered_and_what_is_offered_is_public():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| `(tests/[^`]+)` \|$", page, flags=re.MULTILINE)
    assert len(rows) == 11
    offered = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    assert offered <= {*hydra_engine.__all__, *PUBLIC}
    clients = [name for name in ENGINE_MODULES if room_of(name) in CLIENTS]
    used = {each for name in clients for module, names, _ in own_imports(name) if module == "" for each in names}
    assert used <= {*offered, "__version__"}


@pytest.mark.parametrize(
    "tests",
    [pytest.param(QUICK, id="quick"), *(pytest.param((room,), marks=pytest.mark.rest, id=room) for room in ROOMS)],
)
def test_the_engine_trains_without_its_clients(tmp_path, tests):
    for folder in ("hydra_engine", "partitioners", "tests"):
        away = shutil.ignore_patterns("__pycache__", *CLIENTS) if folder == "hydra_engine" else None
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=away)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    (tmp_path / "tests" / "test_away.py").write_text(AWAY)
    paths = [f"tests/{each}" for each in ("test_away.py", *tests)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not rest or net", "-p", "no:cacheprovider", *paths]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_what_processes_tell_each_other_has_one_name():
    """Clients repeat it, as another program would."""
    assert sweep.RESUME == resume.VARIABLE == process.VARIABLE
    assert sweep.RESCUE == store.RESCUE
