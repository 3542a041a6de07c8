"""What loggers write can be read back, and a task that goes on has each of its steps there once."""

import json
import math
import sys

import pytest

from hydra_engine.loggers import CsvLogger, JsonLinesLogger, TensorBoardLogger, WandbLogger
from tests.loggers.support import KINDS, FakeWandb, read_events, tear
from tests.refused import refused
from tests.run.test_loggers import start_of, step_of, validation_of


@pytest.fixture(params=KINDS)
def kind(request):
    if request.param == "tensorboard":
        pytest.importorskip("tensorboard")
    return KINDS[request.param]


def log(logger, start, calls, *, ends=True):
    """Tell a logger of one task."""
    logger.begin_task(start)
    for each in calls:
        (logger.log_validation if hasattr(each, "metrics") else logger.log_step)(each)
    if ends:
        logger.end_task(start.task, "finished")
        logger.close()


def told(calls):
    """The rows that these calls leave."""
    values = [(each.step, dict(each.values())) for each in calls]
    return [(step, {k: v for k, v in row.items() if k != "samples_per_s"}) for step, row in values]


def approximately(rows):
    """TensorBoard keeps float32."""
    return [(step, pytest.approx(row, rel=1e-6, nan_ok=True)) for step, row in rows]


EVERY = [*(step_of(k, rates=(0.5, 0.25), norm=3.0) for k in (1, 2)), validation_of(2, accuracy=0.5, top=1), step_of(3)]


def test_every_value_is_written(tmp_path, kind):
    make, suffix, read = kind
    log(make(tmp_path / "new" / "folder"), start_of(), EVERY)
    assert read(tmp_path / "new" / "folder" / f"a{suffix}") == approximately(told(EVERY))
    assert told(EVERY)[0] == (1, {"loss": 1.0, "lr_0": 0.5, "lr_1": 0.25, "grad_norm": 3.0})
    assert told(EVERY)[2] == (2, {"validation_loss": 1.0, "metrics_accuracy": 0.5, "metrics_top": 1})


# The last step and the last validation of what a task goes on from, which a killed process had logged more of.
@pytest.mark.parametrize(
    ("steps", "validated_at", "is_torn"),
    [(0, None, True), (1, None, False), (4, 2, True), (4, 4, False), (6, 6, True), (6, 6, False)],
)
def test_a_task_that_goes_on_has_each_step_once(tmp_path, kind, steps, validated_at, is_torn):
    make, suffix, read = kind
    all_of = [each for k in range(1, 7) for each in (step_of(k), *([validation_of(k, m=k)] if k % 2 == 0 else []))]
    killed = make(tmp_path)
    log(killed, start_of(), all_of, ends=False)
    if is_torn:
        tear(tmp_path / f"a{suffix}")
    start = start_of(steps=steps, validated_at=validated_at, is_new=False)
    rest = [each for each in all_of if not start.has(each.step, validation=hasattr(each, "metrics"))]
    log(make(tmp_path), start, rest)
    assert read(tmp_path / f"a{suffix}") == approximately(told(all_of))
    assert [path.name for path in tmp_path.iterdir()] == [f"a{suffix}"]
    killed.close()


def test_event_files_of_others_in_a_tasks_folder_stay(tmp_path):
    """A user's `SummaryWriter(logs/a)` writes there as well; a resume may cut none of that."""
    pytest.importorskip("tensorboard")
    log(TensorBoardLogger(tmp_path), start_of(), [step_of(1), step_of(2)])
    log(TensorBoardLogger(tmp_path), start_of("a-2"), [step_of(1, "a-2"), step_of(2, "a-2")])
    [own] = (tmp_path / "a").iterdir()
    mine = [own.with_name(name) for name in ("events.out.tfevents.1.host.7.0", "zzz.tfevents.v2")]
    for path in mine:
        path.write_bytes(own.read_bytes())
    others = {path: path.read_bytes() for path in (*mine, *(tmp_path / "a-2").iterdir())}
    log(TensorBoardLogger(tmp_path), start_of(steps=1, is_new=False), [step_of(2, loss=7.0)])
    assert {path: path.read_bytes() for path in others} == others
    for path in mine:
        path.unlink()
    assert read_events(tmp_path / "a") == approximately(told([step_of(1), step_of(2, loss=7.0)]))


def test_what_comes_again_may_be_other_than_it_was(tmp_path, kind):
    make, suffix, read = kind
    log(make(tmp_path), start_of(), [step_of(1), step_of(2), step_of(3)])
    again = [step_of(2, loss=7.0), validation_of(2, new=1.0)]
    log(make(tmp_path), start_of(steps=1, is_new=False), again)
    assert read(tmp_path / f"a{suffix}") == approximately(told([step_of(1), *again]))


def test_a_paused_task_goes_on_with_the_same_logger(tmp_path, kind):
    make, suffix, read = kind
    logger = make(tmp_path)
    log(logger, start_of(), [step_of(1)], ends=False)
    logger.end_task("a", "paused")
    log(logger, start_of(steps=1), [step_of(2), step_of(3)])
    assert read(tmp_path / f"a{suffix}") == approximately(told([step_of(1), step_of(2), step_of(3)]))


def test_a_task_that_begins_anew_leaves_what_was_there(tmp_path, kind):
    make, suffix, read = kind
    for k in (1, 2, 3):
        log(make(tmp_path), start_of(), [step_of(1, loss=float(k))])
    # A fork begins anew at a step of its parent's.
    log(make(tmp_path), start_of(steps=5, is_new=True), [step_of(6, loss=4.0)])
    found = {path.name: read(path)[0][1]["loss"] for path in tmp_path.iterdir()}
    assert found == {f"a.1{suffix}": 1, f"a.2{suffix}": 2, f"a.3{suffix}": 3, f"a{suffix}": 4}


def test_any_name_is_one_file_in_the_folder(tmp_path, kind):
    make, suffix, read = kind
    for name, stem in (("lr=0.1/x", "lr=0.1%2Fx"), ("..", "%2E."), ("größe 1", "gr%C3%B6%C3%9Fe 1")):
        folder = tmp_path / stem / "logs"
        log(make(folder), start_of(name), [step_of(1, name)])
        assert [path.name for path in folder.iterdir()] == [f"{stem}{suffix}"]
        assert read(folder / f"{stem}{suffix}") == told([step_of(1, name)])
        assert [path.name for path in folder.parent.iterdir()] == ["logs"]


def test_a_name_that_no_file_may_have_is_cut_and_stays_one_file(tmp_path, kind):
    make, suffix, read = kind
    for k, name in enumerate(("x" * 300, "漢" * 90, "\ud800.csv", "a\nb")):
        folder, tasks = tmp_path / str(k), [name, f"{name}-2"]
        for task in tasks:
            log(make(folder), start_of(task), [step_of(1, task)])
        paths = list(folder.iterdir())
        assert len(paths) == 2
        assert all(path.name.endswith(suffix) and len(path.name) < 220 for path in paths)
        for task in tasks:
            log(make(folder), start_of(task, steps=1), [step_of(2, task)])
        assert [[step for step, _ in read(path)] for path in paths] == [[1, 2]] * 2


def test_losses_that_are_not_finite_are_written(tmp_path, kind):
    make, suffix, read = kind
    log(make(tmp_path), start_of(), [step_of(1, loss=math.nan), step_of(2), step_of(3, loss=math.inf)])
    losses = [row["loss"] for _, row in read(tmp_path / f"a{suffix}")]
    assert [math.isfinite(loss) for loss in losses] == [False, True, False]
    assert losses[1] == 0.5


def test_rows_are_with_the_system_at_once(tmp_path, kind):
    make, suffix, read = kind
    logger = make(tmp_path)
    log(logger, start_of(), [step_of(1), validation_of(1), step_of(2)], ends=False)
    assert [step for step, _ in read(tmp_path / f"a{suffix}")] == [1, 1, 2]
    logger.close()
    logger.close()


def test_columns_of_a_csv_file(tmp_path):
    log(CsvLogger(tmp_path), start_of(), [step_of(1), validation_of(1, **{'odd, "name"\n': 3.0}), step_of(2)])
    assert (tmp_path / "a.csv").read_text().splitlines() == [
        'task,step,epoch,time,loss,lr,samples_per_s,validation_loss,"metrics_odd, ""name""',
        '"',
        "a,1,0,1000000001.0,1.0,0.5,4.0,,",
        "a,1,0,1000000001.0,,,,2.0,3.0",
        "a,2,0,1000000002.0,0.5,0.5,4.0,,",
    ]


def test_a_line_of_a_json_lines_file(tmp_path):
    log(JsonLinesLogger(tmp_path), start_of(), [step_of(1, loss=math.nan, norm=2.0)])
    row = {"task": "a", "step": 1, "epoch": 0, "time": 1000000001.0, "loss": None, "lr": 0.5, "grad_norm": 2.0}
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {**row, "samples_per_s": 4.0}


def test_a_file_that_ends_in_a_long_torn_row(tmp_path):
    path = tmp_path / "a.jsonl"
    log(JsonLinesLogger(tmp_path), start_of(), [step_of(1)])
    whole = path.read_bytes()
    for torn in (whole + b"x" * 10_000, b"x" * 10_000):
        path.write_bytes(torn)
        log(JsonLinesLogger(tmp_path), start_of(steps=1, is_new=False), [])
        assert path.read_bytes() == (whole if torn.startswith(whole) else b"")


def test_a_run_of_weights_and_biases_for_each_task(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    logger = WandbLogger("project", tmp_path / "runs", tags=["x"])
    for task in ("a", "b"):
        log(logger, start_of(task), [step_of(1, task), validation_of(1, task, m=1.0)], ends=False)
    logger.end_task("a", "failed")
    logger.close()
    log(logger, start_of("a", 1), [step_of(2)])
    failed, stopped, again = fake.runs
    step = {"loss": 1.0, "lr": 0.5, "samples_per_s": 4.0, "epoch": 0}
    assert failed.rows == stopped.rows == [(1, step), (1, {"validation_loss": 2, "metrics_m": 1})]
    assert [step for step, _ in again.rows] == [2]
    assert (failed.exit_code, stopped.exit_code, again.exit_code) == (1, 1, 0)
    assert len({each.options.pop("id") for each in fake.runs}) == 3
    assert again.options == {
        "project": "project",
        "dir": str(tmp_path / "runs"),
        "mode": "offline",
        "name": "a",
        "group": "a",
        "config": {"seed": 0, "steps_before": 1},
        "reinit": "create_new",
        "settings": {"console": "off", "silent": True},
        "tags": ["x"],
    }
    assert (tmp_path / "runs").is_dir()


@pytest.mark.parametrize(("make", "package"), [(TensorBoardLogger, "tensorboard"), (WandbLogger, "wandb")])
def test_a_package_that_is_not_there_is_named(monkeypatch, make, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with refused(ImportError, says=f"{make.__name__} {package} hydra_engine[{package}]"):
        make("logs")
