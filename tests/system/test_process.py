"""How a process was started is known where it can be started again, and that process knows what to go on from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hydra_engine.system import process as restart

ROOT = Path(__file__).parents[2]
# The one module, without what the package's and the room's own files import: torch takes seconds.
BARE = f"""
import sys, types
for name in ("hydra_engine", "hydra_engine.system"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{str(ROOT)!r} + "/" + name.replace(".", "/")]
"""
TELL = "import json; from hydra_engine.system import process as restart; print(json.dumps(restart.command()))"
SCRIPT = BARE + TELL
# The same in a process that multiprocessing has begun.
IN_CHILD = f"""{BARE}
import multiprocessing
from hydra_engine.system import process as restart
def work():
    print("null" if restart.command() is None else "a command", flush=True)
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
"""


def command_of(*arguments, **settings):
    """What a new process says of its own command."""
    settings |= {"env": os.environ | {"PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
    return json.loads(subprocess.run([sys.executable, *arguments], check=True, **settings).stdout)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_command_of_a_script(script):
    arguments = ["-u", "train.py", "--lr", "1e-3", "two words"]
    found = command_of(*arguments, cwd=script)
    assert found == {"argv": [sys.executable, *arguments], "cwd": str(script.resolve())}


@pytest.mark.parametrize(
    "imports", [f"{BARE}import hydra_engine._started_in", pytest.param("import hydra_engine", marks=pytest.mark.rest)]
)
def test_command_is_relative_to_where_the_process_began(script, imports):
    code = f"{imports}, os; os.chdir('/'); {TELL}"
    assert command_of("-c", code, cwd=script) == {"argv": [sys.executable, "-c", code], "cwd": str(script.resolve())}


def test_command_of_a_module(script):
    assert command_of("-m", "train", cwd=script)["argv"] == [sys.executable, "-m", "train"]


def test_no_command_of_a_script_from_stdin():
    assert command_of("-", input=SCRIPT, cwd=ROOT) is None
    assert command_of(input=SCRIPT, cwd=ROOT) is None


def test_no_command_of_a_script_with_a_prompt_behind_it(script):
    assert command_of("-i", "train.py", input="", cwd=script) is None


def test_no_command_of_a_process_of_multiprocessing():
    assert command_of("-c", IN_CHILD, cwd=ROOT) is None


def test_no_command_at_a_prompt(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert restart.command() is not None
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert restart.is_interactive()
    assert restart.command() is None


def test_directory_asked_for(monkeypatch, tmp_path):
    monkeypatch.delenv(restart.VARIABLE, raising=False)
    assert restart.directory_asked_for() is None
    monkeypatch.setenv(restart.VARIABLE, "")
    assert restart.directory_asked_for() is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(restart.VARIABLE, "runs/7")
    assert restart.directory_asked_for() == tmp_path / "runs/7"
