"""The engine without its clients: its own tests pass where their folders are not there."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.test_imports import CLIENTS

ROOT = Path(__file__).resolve().parents[1]
# Nothing of the engine imports these either, which still know its rooms.
ABOVE = ("sweep", "integrations", "cli")
TESTS = ("schedule/test_scheduler.py", "data/test_reader.py", "run/test_loggers.py", "promises/test_overlap.py")
AWAY = f"""
import importlib.util

def test_clients_are_away():
    assert [each for each in {CLIENTS} if importlib.util.find_spec(f"hydra_engine.{{each}}")] == []
"""


def test_the_engine_trains_without_its_clients(tmp_path):
    for folder in ("hydra_engine", "partitioners", "tests"):
        away = shutil.ignore_patterns("__pycache__", *CLIENTS, *ABOVE) if folder == "hydra_engine" else None
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=away)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    (tmp_path / "tests" / "test_away.py").write_text(AWAY)
    tests = [f"tests/{each}" for each in ("test_away.py", *TESTS)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not rest or net", "-p", "no:cacheprovider", *tests]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
