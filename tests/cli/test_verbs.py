"""`hydra-engine train`, `report`, `simulate` and `devices`; version, help and exit codes of all."""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_engine
from hydra_engine import Callback, ModelTask, Report, TaskCost
from hydra_engine.cli import command
from tests.refused import names

ROOT = Path(__file__).parents[2]
HERE = "tests.cli.test_verbs"
VERBS = re.findall(r"^    (\w+) ", command.parser().format_help(), flags=re.MULTILINE)


# --- functions that the lines name ---


class Interrupts(Callback):
    """Sends Ctrl-C after the third step, once."""

    def on_step(self, report):
        marker = os.environ.get("INTERRUPT_ONCE")
        if marker and report.steps >= 3:
            with suppress(FileExistsError):
                Path(marker).touch(exist_ok=False)  # each task has a thread for its callbacks, and only one may send it
                os.kill(os.getpid(), signal.SIGINT)


def task(name="a", batches=None):
    if batches is None:
        batches = [(torch.ones(2, 4), torch.ones(2, 1))] * 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return ModelTask(model, F.mse_loss, batches, 0.1, 2, name=name, seed=0, callbacks=[Interrupts()])


def pair():
    return [task("a"), task("b")]


class Breaks:
    """Two batches, and then an error, or an exit as of a program that is through."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        yield from [(torch.ones(2, 4), torch.ones(2, 1))] * 2
        raise self.error

    def fail(self, *_):
        raise self.error


def breaks_at_once():
    [broken] = SHORT["all_break"]()
    broken.loss_fn = Breaks(OSError("the disk is gone")).fail
    return [task("a"), broken]


class ExitsAtOnce:
    def __iter__(self):
        sys.exit(0)


def sample():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), (torch.randn(8, 64), torch.randn(8, 64)), F.mse_loss


# Short ones, by their names.
SHORT = {
    "exits": lambda: sys.exit(0),
    "exits_in_training": lambda: [task("a", Breaks(SystemExit(0)))],
    "exits_while_planned": lambda: [task("a", ExitsAtOnce())],
    "interrupts_in_training": lambda: [task("a", Breaks(KeyboardInterrupt()))],
    "chinese": lambda: [task("学")],
    "all_break": lambda: [task("b", Breaks(OSError("the disk is gone")))],
    "one_breaks": lambda: [task("a"), *SHORT["all_break"]()],
    "costs": lambda: [TaskCost(name="a", unit_s=[1.0, 2.0, 1.0], num_steps=5)],
}
globals().update(SHORT)


@pytest.fixture
def saved(said, tmp_path):
    """The report of a training."""
    path = tmp_path / "run.json"
    assert said(f"train {HERE}:task --devices 1MiB --quiet --report {path}") == (0, [], [])
    return path


# --- train and report ---


def test_tasks_are_trained_and_their_report_is_read(said, tmp_path):
    path = tmp_path / "run.json"
    code, lines, _ = said(f"train {HERE}:pair --devices 1MiB 1MiB --report {path}")
    assert code == 0
    assert [line.split()[:3] for line in lines if line.split()[:2] in (["a", "finished"], ["b", "finished"])] == [
        ["a", "finished", "8"],
        ["b", "finished", "8"],
    ]
    assert said(f"report {path}") == (0, Report.load(path).summary().splitlines(), [])


def test_pictures_are_written_where_asked_and_never_replace_the_report(said, refused, saved, tmp_path):
    plot, trace, before = tmp_path / "timeline.svg", tmp_path / "trace.json", saved.read_bytes()
    code, lines, _ = said(f"report {saved} --plot {plot} --trace {trace}")
    assert (code, lines[-2:]) == (0, [f"written: {plot}", f"written: {trace}"])
    assert "<svg" in plot.read_text()
    assert trace.stat().st_size > 0
    code, _, errors = said(f"report {saved} --plot {tmp_path / 'timeline.doc'}")
    assert (code, len(errors)) == (2, 1)
    assert errors[0].startswith("hydra-engine report: --plot: ")
    for option in ("--plot", "--trace"):
        line = refused(f"report {saved} {option} {tmp_path / '.' / 'run.json'}", "run.json")
        assert line.startswith(f"hydra-engine report: {option}: ")
    assert saved.read_bytes() == before


@pytest.mark.parametrize("path", [".", "missing/run.json"])
def test_a_report_that_cannot_be_saved_is_refused_before_training(refused, tmp_path, path):
    line = refused(f"train {HERE}:task --devices 1MiB --report {tmp_path / path}", "--report:")
    assert line.startswith("hydra-engine train: --report: ")


@pytest.mark.parametrize(
    ("function", "code", "says", "status"),
    [
        ("all_break", 1, "OSError: disk --debug", "failed"),
        ("exits", 2, f"{HERE}:exits: SystemExit: (test_verbs.py:", None),
        ("exits_in_training", 1, "SystemExit: 0", "failed"),
        ("interrupts_in_training", 1, "KeyboardInterrupt", "failed"),
        ("exits_while_planned", 1, "SystemExit: 0", None),
    ],
)
def test_what_ends_the_users_code_is_no_success_and_has_a_report(said, function, code, says, status, tmp_path):
    path = tmp_path / "run.json"
    found, _, errors = said(f"train {HERE}:{function} --devices 1MiB --quiet --report {path}")
    assert (found, len(errors)) == (code, 1)
    assert errors[0].startswith("hydra-engine train: ")
    names(errors[0], says=says)
    assert path.exists() == (status is not None)
    assert status is None or [each.status for each in Report.load(path).tasks.values()] == [status]


def test_a_module_that_exits_is_refused(refused, tmp_path, monkeypatch):
    (tmp_path / "a_program.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    refused("train a_program:tasks --devices 1MiB", "'a_program' SystemExit: (a_program.py:2")


@pytest.mark.parametrize("function", ["one_breaks", "all_break"])
def test_neither_a_failed_task_nor_a_failed_save_hides_the_other(said, function, tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr(Report, "save", fails)
    code, _, errors = said(f"train {HERE}:{function} --devices 1MiB --quiet --report {tmp_path / 'run.json'}")
    assert code == 1
    text = "\n".join(errors)
    names(text, says="--report: left gone")
    assert ("1 of 2" in text) == (function == "one_breaks")


@pytest.mark.rest
def test_a_closed_pipe_and_signs_that_a_terminal_lacks_lose_no_report(tmp_path):
    def trained(path, **options):
        argv = [sys.executable, "-m", "hydra_engine", "train", f"{HERE}:chinese", "--devices", "1MiB"]
        environment = os.environ | {"PYTHONIOENCODING": "ascii:strict", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*argv, "--report", path], cwd=ROOT, env=environment, **options)

    reader, writer = os.pipe()
    os.close(reader)
    piped = trained(tmp_path / "piped.json", stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    shown = trained(tmp_path / "shown.json", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = shown.communicate()
    assert (shown.returncode, err) == (0, "")
    assert "?     finished  8" in out
    _, err = piped.communicate()
    assert piped.returncode == 0
    assert err == ""
    for path in (tmp_path / "piped.json", tmp_path / "shown.json"):
        assert Report.load(path).tasks["学"].status == "finished"


def test_tasks_are_compared_with_plain_pytorch(said):
    code, lines, _ = said(f"verify {HERE}:pair --steps 2")
    assert (code, lines[-1]) == (0, "same, bit for bit")
    assert [line for line in lines if line.startswith(("a: ", "b: "))] == [
        "a: 2 steps of plain PyTorch; 2 layers",
        "b: 2 steps of plain PyTorch; 2 layers",
    ]


def test_what_is_not_as_plain_pytorch_is_a_failure(said):
    code, lines, errors = said(f"verify {HERE}:breaks_at_once --steps 4")
    assert (code, lines[-1]) == (1, "not the same")
    assert "  plain PyTorch fails: OSError: the disk is gone" in lines
    names(errors[-1], task="b", says="plain PyTorch")


def test_a_dry_run_plans_and_trains_nothing(said, tmp_path):
    code, lines, _ = said(f"train {HERE}:pair --devices 1MiB --dry-run --checkpoint-dir {tmp_path / 'runs'}")
    assert code == 0
    assert lines[0].startswith("plan for EmulatedDevice(1 MiB)")
    assert not (tmp_path / "runs").exists()


def test_a_failure_is_one_line_and_the_others_are_trained(said):
    code, lines, (first, second) = said(f"train {HERE}:one_breaks --devices 1MiB")
    assert code == 1
    assert [line.split()[:3] for line in lines if line.startswith("a  ")][-1][1:] == ["finished", "8"]
    names(first, task="b", says="OSError: disk")
    names(second, task="b", says="1 2")
    code, _, errors = said(f"train {HERE}:all_break --devices 1MiB --quiet --debug")
    assert code == 1
    assert "OSError: the disk is gone" in errors  # of the traceback


@pytest.mark.rest
def test_ctrl_c_names_the_command_that_goes_on(tmp_path):
    marker, runs, report = tmp_path / "interrupted", tmp_path / "runs", tmp_path / "run.json"
    environment = os.environ | {"INTERRUPT_ONCE": str(marker), "OMP_NUM_THREADS": "1"}

    def ended(*line):
        argv = [sys.executable, "-m", "hydra_engine", *line]
        return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    options = ("--devices", "1MiB", "--checkpoint-dir", str(runs), "--report", str(report))
    first = ended("train", f"{HERE}:pair", *options)
    assert first.returncode == 130, first.stderr
    assert first.stderr.splitlines()[-1] == (
        f"hydra-engine train: ended by Ctrl-C; go on with `hydra-engine resume {runs}`"
    )
    assert "Traceback" not in first.stderr
    again = ended("train", f"{HERE}:pair", *options)
    assert again.returncode == 2
    assert f"go on from it with `hydra-engine resume {runs}`" in again.stderr
    second = ended("resume", str(runs))
    assert (second.returncode, second.stderr) == (0, "")
    whole = Report.load(report)
    assert {name: (each.status, each.steps) for name, each in whole.tasks.items()} == dict.fromkeys(
        "ab", ("finished", 8)
    )
    assert whole.tasks["a"].losses == whole.tasks["b"].losses


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("train x:y --devices 1B", "`hydra-engine train x:y --devices 1B`"),
        ("train x:y --checkpoint-dir {saved}", "`hydra-engine resume {saved}`"),
        ("train x:y --checkpoint-dir {empty}", "`hydra-engine train x:y --checkpoint-dir {empty}`"),
        ("sweep x:y --checkpoint-dir {saved}", "`hydra-engine sweep x:y --checkpoint-dir {saved}`"),
        ("plan x:y --memory 1GiB", "`hydra-engine plan x:y --memory 1GiB`"),
    ],
)
@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_interrupt_names_a_command(said, tmp_path, monkeypatch, line, told, error, code):
    def raises(options):
        raise error

    monkeypatch.setattr(command, "import_module", lambda name: SimpleNamespace(run=raises))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "checkpoint-00000001.json").touch()
    places = {"saved": tmp_path / "saved", "empty": tmp_path / "empty"}
    found, lines, errors = said(line.format(**places))
    assert (found, lines, len(errors)) == (code, [], 1)
    assert errors[0].startswith(f"hydra-engine {line.split()[0]}: ")
    assert told.format(**places) in errors[0]


# --- simulate ---


def test_numbers_of_devices_are_compared(said):
    code, lines, _ = said(f"simulate {HERE}:costs --copies 4 --devices 1 2 4")
    assert code == 0
    assert [line.split() for line in lines[2:7]] == [
        ["devices", "makespan", "at", "least", "busy", "speedup"],
        ["-------", "--------", "--------", "----", "-------"],
        ["1", "80", "s", "80", "s", "100%", "1.00"],
        ["2", "40", "s", "40", "s", "100%", "2.00"],
        ["4", "20", "s", "20", "s", "100%", "4.00"],
    ]


def test_a_model_is_simulated_as_it_is_planned(said):
    options = "--memory 512KiB --device cpu"
    _, planned, _ = said(f"plan {HERE}:sample {options}")
    code, lines, _ = said(f"simulate {HERE}:sample {options} --steps 1000 --devices 1")
    assert code == 0
    value, unit = next(line for line in planned if line.startswith("step of one task")).split(": ")[1].split()[:2]
    step_s = float(value) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]
    value, unit = lines[-2].split()[1:3]
    makespan_s = float(value) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]
    assert makespan_s == pytest.approx(1000 * step_s, rel=0.25)


# --- the others ---


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what there is without a GPU")
def test_devices_of_this_machine_are_listed(said):
    code, lines, _ = said("devices")
    assert code == 0
    assert re.fullmatch(r"emulated:0: [\d.]+ [KMGT]iB", lines[0])
    assert lines[1:] == ["this process sees no GPU: a run takes one emulated device of half the free DRAM"]


def test_the_version_is_the_packages(said):
    assert said("--version") == (0, [f"hydra-engine {hydra_engine.__version__}"], [])


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_in_examples_that_are_lines_of_the_verb(verb, said):
    examples = said(f"{verb} --help")[1]
    examples = examples[examples.index("examples:") + 1 :]
    assert examples
    for example in examples:
        own, _ = command.split_command(shlex.split(example)[1:])
        assert command.parser().parse_args(own).command == verb


def test_the_page_lists_every_verb_and_exit_code():
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert len(VERBS) == 9
    assert set(re.findall(r"^\| `(\w+)` \|", page.partition("## ")[0], flags=re.MULTILINE)) == set(VERBS)
    codes = {command.DONE, command.FAILED, command.REFUSED, command.LOST, command.INTERRUPTED, command.TERMINATED}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)} == codes
