"""Scaling and ablation, small and in this process; and what is said of figures that moved."""

import csv
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from hydra_engine import DeviceChange, TaskCost
from hydra_engine.schedule import Placed, Unit
from tests.test_benchmarks import FOLDER, ROOT, loaded, main_of


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def readme(tmp_path, monkeypatch):
    """A folder of a README with a place for each table, which a benchmark writes to in place of its own."""

    def of(module, *names):
        page = tmp_path / "README.md"
        page.write_text("".join(f"<!-- {name}: by its command -->\n<!-- end of {name} -->\n" for name in names))
        monkeypatch.setattr(module, "HERE", tmp_path)
        return page

    return of


def rows_of(page, name):
    """Cells of the table between the two comments."""
    text = page.read_text().partition(f"<!-- {name}: by its command -->")[2].partition(f"<!-- end of {name}")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()][2:]


# -- scaling


class StatedCosts:
    """Costs of tasks that take no measuring: three shards, ten seconds a step."""

    def __init__(self, benchmark):
        self.mixed = benchmark.Costs.mixed.__get__(self)

    def task(self, name, kind, num_steps, num_micro_batches=6):
        options = {"graph_bytes": [1.0, 1.0, 0.0], "boundary_bytes": [0.0, 0.0, 0.0], "update_s": 0.01}
        return TaskCost(
            name=name,
            unit_s=[1.0, 1.0, 2.0, 3.0, 3.0],
            num_steps=num_steps,
            num_micro_batches=num_micro_batches,
            **options,
        )


@pytest.fixture
def scaling(monkeypatch, threads):
    """The benchmark with stated costs, and with tens where it has thousands."""
    module = loaded(main_of("scaling"), monkeypatch)
    small = {"COSTS": StatedCosts(module), "STEPS": (2, 4), "UNIT_S": 0.0, "NUM_DEVICES": (1, 8)}
    for name, value in (small | {"MANY_TASKS": 20, "MANY_DEVICES": 10, "MANY_STEPS": (2, 3)}).items():
        monkeypatch.setattr(module, name, value)
    return module


def test_scaling_has_the_promised_share_of_the_bound(scaling, readme, tmp_path):
    page = readme(scaling, "devices")
    path = tmp_path / "figures" / "scaling.json"
    assert scaling.main(["devices", "--write", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert figures["64 tasks, 8 devices, simulated: share of the bound"]["values"][0] >= 0.95
    assert [row[:2] for row in rows_of(page, "devices")] == [["64", "1"], ["64", "8"], ["20", "10"]]


def test_one_task_of_six_micro_batches_uses_three_devices_and_of_one_does_not(scaling, readme, monkeypatch):
    monkeypatch.setattr(scaling, "NUM_TASKS", 3)
    page = readme(scaling, "tail")
    assert scaling.main(["tail", "--write"]) == 0
    assert scaling.FIGURES.by_name["devices of 3 that one task uses"]["values"] == [3.0]
    rows = [row for row in rows_of(page, "tail") if row[0] == "1"]
    assert {row[2] for row in rows} == {"1.00"}  # one micro-batch: flat
    spread = {row[1]: float(row[3]) for row in rows}
    assert spread["6"] > spread["3"] > spread["2"] > spread["1"] == 1.0
    assert {row[1]: row[4] for row in rows}["3"] == "1 and 3"


def test_scaling_is_judged_by_its_limit(scaling, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "NUM_TASKS", 8)
    monkeypatch.setattr(scaling, "GOAL", 1.01)
    assert scaling.main(["devices"]) == 1
    assert scaling.main(["devices", "--no-judge"]) == 0
    assert "devices: NOT within its limit" in capsys.readouterr().out


def test_backwards_are_counted_that_go_without_the_device_of_their_forward(scaling):
    units = [("a.f0", 0), ("a.f1", 1), ("a.fb2", 1), ("a.b1", 1), ("a.b0", 1), ("b.f0", 1), ("b.fb1", 0), ("b.b0", 0)]
    schedule = [Placed(Unit.parse(f"{unit}@0"), device, 0.0, 1.0) for unit, device in units]
    assert scaling.elsewhere(SimpleNamespace(schedule=schedule)) == 2 / 3  # a.b0 and b.b0


def test_changes_give_as_many_devices_as_were_recorded(scaling):
    with scaling.TRACE.open() as lines:
        recorded = {int(row["second"]): int(row["devices"]) for row in csv.DictReader(lines)}
    is_in, number_at = [True] * scaling.TRACE_DEVICES, {}
    for change in scaling.changes(hour_s=3600):
        assert is_in[change.device] is not change.is_in
        is_in[change.device] = change.is_in
        number_at[change.at_s] = sum(is_in)
    assert number_at == recorded
    assert (min(recorded), min(recorded.values()), max(recorded.values())) == (0, 2, scaling.TRACE_DEVICES)


def test_changes_of_a_run_that_begins_later(scaling):
    changes = [DeviceChange(1.0, 0, False), DeviceChange(2.0, 1, False), DeviceChange(3.0, 0, True)]
    assert scaling.since(2.0, changes) == [
        DeviceChange(0.0, 0, False),
        DeviceChange(0.0, 1, False),
        DeviceChange(1.0, 0, True),
    ]
    assert scaling.since(3.0, changes) == [DeviceChange(0.0, 1, False)]


def test_scaling_by_the_trace_with_fixed_and_adaptive_batches(scaling, readme, monkeypatch):
    page = readme(scaling, "shared", "adaptive", "tasks", "sizes")
    monkeypatch.setattr(scaling, "NUM_TASKS", 9)
    monkeypatch.setattr(scaling, "WORKLOADS", {"9 tasks": (9, 6), "64 tasks": (9, 1)})
    monkeypatch.setattr(scaling, "NOISE", ((0.5, 4), (32.0, 8)))
    assert scaling.main(["shared", "adaptive", "--write"]) == 0
    assert [row[0] for row in rows_of(page, "shared")] == ["9 tasks", "64 tasks"]
    for row in rows_of(page, "adaptive"):
        sizes = [int(each) for each in row[1].split()]
        assert sizes == sorted(sizes)  # as the noise, they grow
        assert row[0] != "1" or sizes[0] < sizes[-1]
        fixed_s, own_s = (float(cell.removesuffix(" s")) for cell in row[2:4])
        assert own_s <= fixed_s


def test_scaling_runs_the_engine_on_three_devices(scaling, readme, monkeypatch):
    page = readme(scaling, "measured")
    monkeypatch.setattr(scaling, "KINDS", {"middle": scaling.Kind(24, (2, 6), 6, 6)})
    assert scaling.main(["measured", "--repeats", "1", "--steps", "3", "--no-judge", "--write"]) == 0
    assert {tuple(row[:2]) for row in rows_of(page, "measured")} >= {("4", "1"), ("4", "2"), ("1", "1"), ("1", "2")}


def test_costs_of_scaling_are_measured_once(scaling, monkeypatch):
    monkeypatch.setattr(scaling, "KINDS", {"narrow": scaling.Kind(24, (2, 6), 6, 6)})
    costs, calls = scaling.Costs(), []
    measured = scaling.kinds.measured
    monkeypatch.setattr(scaling.kinds, "measured", lambda *each: calls.append(each) or measured(*each))
    first, second = costs.mixed(2, (1, 3), 2)
    assert len(calls) == 1
    assert first.unit_s == second.unit_s
    assert (first.setup_s, first.num_micro_batches, len(first.unit_s)) == (0.0, 2, 3)


# -- ablation


@pytest.fixture
def ablation(monkeypatch, threads):
    return loaded(main_of("ablation"), monkeypatch)


def test_ablation_adds_one_technique_after_the_other(ablation):
    titles, used = zip(*ablation.stages(), strict=True)
    assert titles[0] == "spilling alone"
    assert [len(each) for each in used] == [0, 1, 2, 3, 4, 5]
    assert used[-2] == ablation.ALL
    assert {frozenset(ablation.ALL - each) for _, each in ablation.without()} == {frozenset([n]) for n in ablation.ALL}


def test_shares_of_an_ablation_add_up(ablation):
    found = list(ablation.changes([("a", 10.0), ("b", 6.0), ("c", 8.0), ("d", 5.0)]))
    assert [each[0] for each in found] == list("abcd")
    assert [each[2] for each in found] == pytest.approx([0.0, 0.4, -0.2, 0.3])
    assert found[-1][3] == 2.0


def test_ablation_simulates_each_technique(ablation):
    task = TaskCost(
        name="a", unit_s=[1.0, 2.0, 2.0], load_bytes=1.0, gradient_bytes=1.0, update_s=3.0, graph_bytes=[1.0, 0]
    )
    device = ablation.bound.DeviceCost(load_bytes_per_s=1.0, store_bytes_per_s=1.0, memory_bytes=100)
    run = SimpleNamespace(device=device, host=ablation.bound.HostCost())
    seconds = {title: ablation.stated_s(task, run, 2, used) for title, used in ablation.stages()}
    assert seconds["spilling alone"] > seconds["+ SHARP"] > seconds["+ overlapped optimizer"]
    assert seconds["+ residency"] < seconds["spilling alone"] / 1.5
    assert ablation.stated_s(task, run, 1, frozenset()) == seconds["spilling alone"] / 2  # one after the other


def test_ablation_runs_the_engine_with_each_technique(ablation, readme, monkeypatch, tmp_path):
    page = readme(ablation, "emulated")
    monkeypatch.setattr(ablation, "KIND", ablation.kinds.Kind(24, (2, 6), 2, 2))
    monkeypatch.setattr(ablation, "NUM_TASKS", 2)
    monkeypatch.setattr(ablation, "LITTLE", "2MiB")
    path = tmp_path / "figures.json"
    ablation.main(["emulated", "--repeats", "1", "--steps", "2", "--write", "--json", str(path)])
    rows = rows_of(page, "emulated")
    assert [row[0] for row in rows[:2]] == ["spilling alone", "+ SHARP"]
    assert len(rows) == 6 + 4
    assert json.loads(path.read_text())["figures"]["2 models, emulated: MB loaded with residency"]["values"][0] > 0


# -- figures that moved


@pytest.fixture
def regressions(monkeypatch, tmp_path):
    module = loaded(FOLDER / "regressions.py", monkeypatch)
    monkeypatch.setattr(module, "EXPECTED", tmp_path / "expected.json")
    monkeypatch.setattr(module, "HERE", tmp_path)
    (tmp_path / "README.md").write_text("<!-- table: by its command -->\n<!-- end of table -->\n")
    (tmp_path / "bench").mkdir()
    return module


def measured(regressions, tmp_path, **figures):
    """Write figures of a benchmark called overhead: name -> (values, better, limit)."""
    found = regressions.figures.Figures("overhead")
    for name, (values, better, limit) in figures.items():
        found.add(name, values, better=better, limit=limit)
    found.save(tmp_path / "bench" / "overhead.json")


def judged(regressions, monkeypatch, capsys, *options):
    """The exit code of a comparison, and a word for each figure."""
    monkeypatch.setattr(sys, "argv", ["regressions.py", str(regressions.HERE / "bench"), *options])
    with pytest.raises(SystemExit) as ended:
        regressions.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "overhead/" in line]
    return ended.value.code, {line[18:].partition(":")[0]: line[:18].strip() for line in lines}


def store(regressions, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["regressions.py", str(regressions.HERE / "bench"), "--store"])
    regressions.main()


@pytest.fixture
def known(regressions, monkeypatch, tmp_path):
    regressions.EXPECTED.write_text("{}")
    measured(regressions, tmp_path, ratio=([1.0, 1.1, 1.2], "less", 1.3), speed=([5.0, 6.0, 7.0], "more", None))
    store(regressions, monkeypatch)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("ratio", "speed", "code", "words"),
    [
        (1.1, 6.0, 0, ("as before", "as before")),
        (1.0, 7.0, 0, ("as before", "as before")),  # the ends of the range
        (0.9, 8.0, 0, ("better", "better")),
        (1.25, 6.0, 1, ("WORSE", "as before")),
        (1.1, 4.0, 1, ("as before", "WORSE")),
        (1.4, 6.0, 1, ("BEYOND ITS LIMIT", "as before")),
    ],
)
def test_figures_that_moved_are_named(regressions, monkeypatch, capsys, tmp_path, ratio, speed, code, words):
    measured(regressions, tmp_path, ratio=([0.0, ratio, 9.0], "less", 1.3), speed=([speed], "more", None))
    found = dict(zip(("overhead/ratio", "overhead/speed"), words, strict=True))
    assert judged(regressions, monkeypatch, capsys) == (code, found)


@pytest.mark.usefixtures("known")
def test_figures_that_are_missing_or_new_are_named(regressions, monkeypatch, capsys, tmp_path):
    measured(regressions, tmp_path, ratio=([1.1], "less", 1.3), other=([3.0], "more", None))
    code, words = judged(regressions, monkeypatch, capsys)
    assert (code, words) == (1, {"overhead/ratio": "as before", "overhead/speed": "MISSING", "overhead/other": "new"})
    assert judged(regressions, monkeypatch, capsys, "--only", "other") == (1, {})  # it wrote no file


@pytest.mark.usefixtures("known")
def test_a_benchmark_that_wrote_no_figures_is_named(regressions, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["regressions.py", str(regressions.HERE / "bench"), "--only", "overhead", "dram"])
    with pytest.raises(SystemExit) as ended:
        regressions.main()
    lines = capsys.readouterr().out.splitlines()
    assert (ended.value.code, lines[-1]) == (1, "MISSING           dram: it wrote no figures")
    assert judged(regressions, monkeypatch, capsys, "--only", "overhead")[0] == 0


@pytest.mark.usefixtures("known")
def test_stored_figures_have_median_spread_limit_and_commit(regressions, monkeypatch, tmp_path):
    measured(regressions, tmp_path, speed=([6.0, 6.5], "more", None))
    again = json.loads((tmp_path / "bench" / "overhead.json").read_text())
    (tmp_path / "bench" / "overhead-2.json").write_text(json.dumps(again))  # of another run
    store(regressions, monkeypatch)
    stored = json.loads(regressions.EXPECTED.read_text())
    assert stored.keys() == {"overhead/ratio", "overhead/speed"}  # others stay
    ratio = {"median": 1.1, "low": 1.0, "high": 1.2, "better": "less", "limit": 1.3, "commit": again["commit"]}
    assert stored["overhead/ratio"] == ratio
    assert (stored["overhead/speed"]["median"], stored["overhead/speed"]["high"]) == (6.25, 6.5)


def test_table_of_the_readme_is_the_one_that_its_command_writes(monkeypatch):
    regressions = loaded(FOLDER / "regressions.py", monkeypatch)
    expected = json.loads(regressions.EXPECTED.read_text())
    head = ("benchmark", "question", "today", "command")
    assert regressions.figures.table(head, regressions.rows(expected)) in (FOLDER / "README.md").read_text()


def test_every_benchmark_has_a_row_and_every_row_a_benchmark(monkeypatch):
    regressions = loaded(FOLDER / "regressions.py", monkeypatch)
    folders = {path.parent.name for path in FOLDER.glob("*/main.py")}
    assert folders == set(regressions.ROWS)
    assert all(command == f"{name}/main.py" for name, (_, _, command) in regressions.ROWS.items())


def test_rows_say_which_figures_are_not_stored(monkeypatch):
    regressions = loaded(FOLDER / "regressions.py", monkeypatch)
    today = {link.strip("[").partition("]")[0]: found for link, _, found, _ in regressions.rows({})}
    assert {name for name, found in today.items() if found == "in its README"} == {"sweep", "durability", "gpu_day"}
    assert set(today.values()) == {"in its README", "not stored from a quiet machine yet"}
    [(name, form), *_] = regressions.ROWS["selection"][1]
    [(_, _, found, _), *_] = regressions.rows({f"selection/{name}": {"median": 1.7}})
    assert found == form.format(1.7)


def test_make_bench_runs_every_benchmark(monkeypatch):
    regressions = loaded(FOLDER / "regressions.py", monkeypatch)
    makefile = (ROOT / "Makefile").read_text()
    measured = makefile.partition("MEASURED := ")[2].partition("\n")[0].split()
    assert set(measured) == {name for name, (_, shown, _) in regressions.ROWS.items() if shown}
    recipe = makefile.partition("\nbench:")[2].partition("\n\n")[0].splitlines()
    for name in set(regressions.ROWS) - set(measured):
        assert any(f"benchmarks/{name}/main.py" in line for line in recipe)
    assert (
        [line for line in recipe if "benchmarks/" in line][-1]
        .strip()
        .startswith("$(BIN)/python benchmarks/regressions.py")
    )


def test_a_place_that_a_readme_lacks_is_named(monkeypatch, tmp_path):
    regressions = loaded(FOLDER / "regressions.py", monkeypatch)
    page = tmp_path / "README.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="0 places for table; it needs one"):
        regressions.figures.put(page, "table", "text")
