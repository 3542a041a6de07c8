"""`hydra-engine train`, `report`, `simulate` and `devices`; version, help and exit codes of all."""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_engine
from hydra_engine import Callback, ModelTask, Report, TaskCost
from hydra_engine.cli import command, main
from tests.refused import names, refused

ROOT = Path(__file__).parents[2]
HERE = "tests.cli.test_verbs"


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


def exits():
    sys.exit(0)


def exits_in_training():
    return [task("a", Breaks(SystemExit(0)))]


def interrupts_in_training():
    return [task("a", Breaks(KeyboardInterrupt()))]


def exits_while_planned():
    loader = Breaks(SystemExit(0))
    loader.__class__ = type("ExitsAtOnce", (Breaks,), {"__iter__": lambda self: sys.exit(0)})
    return [task("a", loader)]


def chinese():
    return [task("学")]


def all_break():
    return [task("b", Breaks(OSError("the disk is gone")))]


def breaks_at_once():
    [broken] = all_break()
    broken.loss_fn = Breaks(OSError("the disk is gone")).fail
    return [task("a"), broken]


def one_breaks():
    return [task("a"), *all_break()]


def sample():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), (torch.randn(8, 64), torch.randn(8, 64)), F.mse_loss


def costs():
    return [TaskCost(name="a", unit_s=[1.0, 2.0, 1.0], num_steps=5)]


@pytest.fixture
def said(capsys):
    """Runs a line, and returns its exit code, its lines, and what it wrote to stderr."""

    def said(line):
        code = main(shlex.split(line))
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return said


# --- train and report ---


def test_tasks_are_trained_and_their_report_is_read(said, tmp_path):
    path = tmp_path / "run.json"
    code, lines, err = said(f"train {HERE}:pair --devices 1MiB 1MiB --report {path}")
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in lines if line.split()[:2] in (["a", "finished"], ["b", "finished"])] == [
        ["a", "finished", "8"],
        ["b", "finished", "8"],
    ]
    assert said(f"report {path}") == (0, Report.load(path).summary().splitlines(), "")
    assert said(f"train {HERE}:task --devices 1MiB --quiet") == (0, [], "")


def test_pictures_are_written_where_asked(said, tmp_path):
    report, plot, trace = (tmp_path / name for name in ("run.json", "timeline.svg", "trace.json"))
    assert said(f"train {HERE}:task --devices 1MiB --quiet --report {report}")[0] == 0
    code, lines, err = said(f"report {report} --plot {plot} --trace {trace}")
    assert (code, err, lines[-2:]) == (0, "", [f"written: {plot}", f"written: {trace}"])
    assert "<svg" in plot.read_text()
    assert trace.stat().st_size > 0
    code, _, err = said(f"report {report} --plot {tmp_path / 'timeline.doc'}")
    assert code == 2
    assert err.startswith("hydra-engine report: --plot: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("option", ["--plot", "--trace"])
def test_a_picture_never_replaces_its_report(said, tmp_path, option):
    report = tmp_path / "run.json"
    assert said(f"train {HERE}:task --devices 1MiB --quiet --report {report}")[0] == 0
    before = report.read_bytes()
    code, _, err = said(f"report {report} {option} {tmp_path / '.' / 'run.json'}")
    assert (code, report.read_bytes()) == (2, before)
    assert err.startswith(f"hydra-engine report: {option}: ")


@pytest.mark.parametrize("path", [".", "missing/run.json"])
def test_a_report_that_cannot_be_saved_is_refused_before_training(said, tmp_path, path):
    code, lines, err = said(f"train {HERE}:task --devices 1MiB --report {tmp_path / path}")
    assert (code, lines) == (2, [])
    assert err.startswith("hydra-engine train: --report: ")


def test_the_report_is_saved_where_all_tasks_fail(said, tmp_path):
    path = tmp_path / "run.json"
    assert said(f"train {HERE}:all_break --devices 1MiB --quiet --report {path}")[0] == 1
    assert Report.load(path).tasks["b"].status == "failed"


@pytest.mark.parametrize(
    ("function", "code", "says"),
    [
        ("exits", 2, f"{HERE}:exits: SystemExit: (test_verbs.py:"),
        ("exits_in_training", 1, "SystemExit: 0"),
        ("interrupts_in_training", 1, "KeyboardInterrupt"),
        ("exits_while_planned", 1, "SystemExit: 0"),
    ],
)
def test_an_exit_of_the_users_code_is_no_success(said, function, code, says, tmp_path):
    path = tmp_path / "run.json"
    found, _, err = said(f"train {HERE}:{function} --devices 1MiB --quiet --report {path}")
    assert (found, err.count("\n")) == (code, 1)
    assert err.startswith("hydra-engine train: ")
    names(err, says=says)
    assert path.exists() == function.endswith("in_training")


def test_a_module_that_exits_is_refused(said, tmp_path, monkeypatch):
    (tmp_path / "a_program.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    code, _, err = said("train a_program:tasks --devices 1MiB")
    assert code == 2
    assert err.startswith("hydra-engine train: ")
    names(err, says="'a_program' SystemExit: (a_program.py:2")


@pytest.mark.parametrize("function", ["one_breaks", "all_break"])
def test_neither_a_failed_task_nor_a_failed_save_hides_the_other(said, function, tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr(Report, "save", fails)
    code, _, err = said(f"train {HERE}:{function} --devices 1MiB --quiet --report {tmp_path / 'run.json'}")
    assert code == 1
    names(err, says="--report: left gone")
    assert ("1 of 2" in err) == (function == "one_breaks")


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
    code, lines, err = said(f"verify {HERE}:pair --steps 2")
    assert (code, lines[-1], err) == (0, "same, bit for bit", "")
    assert [line for line in lines if line.startswith(("a: ", "b: "))] == [
        "a: 2 steps of plain PyTorch; 2 layers",
        "b: 2 steps of plain PyTorch; 2 layers",
    ]


def test_what_is_not_as_plain_pytorch_is_a_failure(said):
    code, lines, err = said(f"verify {HERE}:breaks_at_once --steps 4")
    assert (code, lines[-1]) == (1, "not the same")
    assert "  plain PyTorch fails: OSError: the disk is gone" in lines
    names(err, task="b", says="plain PyTorch")


def test_a_dry_run_plans_and_trains_nothing(said, tmp_path):
    code, lines, err = said(f"train {HERE}:pair --devices 1MiB --dry-run --checkpoint-dir {tmp_path / 'runs'}")
    assert (code, err) == (0, "")
    assert lines[0].startswith("plan for EmulatedDevice(1 MiB)")
    assert not (tmp_path / "runs").exists()


def test_a_failure_is_one_line_and_the_others_are_trained(said, capsys):
    code, lines, err = said(f"train {HERE}:one_breaks --devices 1MiB")
    assert code == 1
    assert [line.split()[:3] for line in lines if line.startswith("a  ")][-1][1:] == ["finished", "8"]
    first, second = err.splitlines()
    names(first, task="b", says="OSError: disk")
    names(second, task="b", says="1 2")
    code, _, err = said(f"train {HERE}:all_break --devices 1MiB --quiet")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("hydra-engine train: ")
    names(err, says="OSError: disk --debug")
    with refused(OSError, says="disk"):
        main(shlex.split(f"train {HERE}:all_break --devices 1MiB --quiet --debug"))


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
def test_an_interrupt_names_a_command(said, tmp_path, monkeypatch, line, told):
    raises_when_run(monkeypatch, KeyboardInterrupt())
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "checkpoint-00000001.json").touch()
    places = {"saved": tmp_path / "saved", "empty": tmp_path / "empty"}
    code, lines, err = said(line.format(**places))
    assert (code, lines, err.count("\n")) == (130, [], 1)
    assert err.startswith(f"hydra-engine {line.split()[0]}: ")
    assert told.format(**places) in err


def test_sigterm_ends_a_command_with_its_code(monkeypatch):
    raises_when_run(monkeypatch, SystemExit(143))
    with pytest.raises(SystemExit) as ended:
        main(["train", "x:y"])
    assert ended.value.code == 143


def raises_when_run(monkeypatch, error):
    """Let every command raise this."""

    class Raises:
        @staticmethod
        def run(options):
            raise error

    monkeypatch.setattr(command, "import_module", lambda name: Raises)


# --- simulate ---


def test_numbers_of_devices_are_compared(said):
    code, lines, err = said(f"simulate {HERE}:costs --copies 4 --devices 1 2 4")
    assert (code, err) == (0, "")
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
    code, lines, err = said(f"simulate {HERE}:sample {options} --steps 1000 --devices 1")
    assert (code, err) == (0, "")
    value, unit = next(line for line in planned if line.startswith("step of one task")).split(": ")[1].split()[:2]
    step_s = float(value) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]
    value, unit = lines[-2].split()[1:3]
    makespan_s = float(value) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]
    assert makespan_s == pytest.approx(1000 * step_s, rel=0.25)


# --- the others ---


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what there is without a GPU")
def test_devices_of_this_machine_are_listed(said):
    code, lines, err = said("devices")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"emulated:0: [\d.]+ [KMGT]iB", lines[0])
    assert lines[1:] == ["this process sees no GPU: a run takes one emulated device of half the free DRAM"]


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hydra-engine {hydra_engine.__version__}\n"


@pytest.mark.parametrize("verb", command.VERBS)
def test_help_ends_in_examples_that_are_lines_of_the_verb(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    examples = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert examples
    for example in examples:
        own, _ = command.split_command(shlex.split(example)[1:])
        assert command.parser().parse_args(own).command == verb


def test_the_page_lists_every_verb_and_exit_code():
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert [verb for verb in command.VERBS if f"`{verb}`" not in page] == []
    codes = {command.DONE, command.FAILED, command.REFUSED, command.LOST, command.INTERRUPTED, command.TERMINATED}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)} == codes
