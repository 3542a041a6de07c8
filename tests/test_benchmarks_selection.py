"""The benchmark of a selection, with models of a few thousand weights; processes only where a side needs several."""

import importlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.test_benchmarks import loaded, main_of, modules_of

FOLDER = main_of("selection").parent


@pytest.fixture
def selection(monkeypatch):
    """Modules of the benchmark by name."""
    with modules_of("selection", ("grid", "sides"), monkeypatch) as found:
        found.main = loaded(main_of("selection"), monkeypatch)
        yield found


@pytest.fixture
def scale(selection):
    """The tiny one with models of a few thousand weights."""
    size = selection.grid.Size(width=16, num_blocks=3, num_heads=2)
    return replace(
        selection.grid.TINY,
        text=selection.grid.Text(length=4, vocabulary=16),
        text_size=size,
        images=selection.grid.Images(image=16, patch=8),
        image_sizes=[replace(size, num_blocks=number) for number in (1, 3)],
        text_micro=8,
        num_steps=2,
    )


def setting_of(selection, scale, jobs, memory="1MiB"):
    return selection.sides.Setting(scale=scale, jobs=jobs, memory=memory)


def in_this_process(selection, name, setting):
    """A side's outcome, its processes' work done here, one after the other."""
    side, found = selection.sides.SIDES[name], []
    shares = side.shares(setting.jobs, setting.scale.num_devices)
    for rank, jobs in enumerate(shares):
        training = side.train(jobs, setting, rank, len(shares))
        next(training)
        found.append(next(training))
        next(training, None)
    return selection.sides.Outcome(shares=found, num_devices=setting.scale.num_devices)


def test_the_grid_is_three_batch_sizes_by_four_learning_rates(selection):
    jobs = selection.grid.TINY.selection()
    assert len({(job.batch_size, job.lr) for job in jobs}) == len(jobs) == 12
    assert {job.batch_size for job in jobs} == {8, 16, 32}
    assert {job.lr for job in jobs} == {1e-3, 1e-4, 1e-5, 1e-6}
    assert len({job.name for job in jobs}) == 12


def test_large_models_have_as_many_weights_as_the_paper_says(selection):
    billions = selection.grid.H200.selection()[0].param_bytes / 4e9
    assert billions == pytest.approx(1.0, abs=0.05)
    found = [job.param_bytes / 4e9 for job in selection.grid.H200.vision()[::2]]
    assert found == pytest.approx([0.3, 0.6, 0.8, 1.0, 1.5, 2.0], rel=0.1)


def test_the_longest_job_goes_to_whoever_has_least(selection, scale):
    jobs = scale.selection()
    shares = selection.grid.longest_first(jobs, 2)
    assert sorted(job.name for share in shares for job in share) == sorted(job.name for job in jobs)
    assert [[job.batch_size for job in share] for share in shares] == [[32, 32, 16, 16, 8, 8]] * 2


@pytest.mark.parametrize("kind", ["selection", "vision"])
def test_the_engine_and_whole_tasks_have_the_bits_of_plain_pytorch(kind, selection, scale):
    jobs = [job for k, job in enumerate(getattr(scale, kind)()) if k in (0, 2, 3)]
    setting = setting_of(selection, scale, jobs, scale.memory(jobs, 2.0))
    plain, *others = (in_this_process(selection, name, setting) for name in ("a", "ours", "b", "c", "f"))
    assert all(len(losses) == scale.num_steps for losses in plain.losses.values())
    for other in others:
        assert other.losses == plain.losses
    assert all(other.crossed_bytes("loaded_bytes") > 0 for other in others[:3])
    assert others[3].crossed_bytes("loaded_bytes") is None


def test_the_bound_is_of_units_measured_alone(selection, scale):
    jobs = scale.selection()[:2]
    setting = setting_of(selection, scale, jobs)
    outcome = in_this_process(selection, "c", setting)
    [one] = selection.main.bounds(jobs, [outcome], 1)
    unit_kinds = ("f", "fb", "b")
    units_s = sum(s for job in jobs for key, s in outcome.costs[job.name].items() if key[0] in unit_kinds)
    assert one >= scale.num_steps * units_s * (1 - 1e-9)
    assert selection.main.bounds(jobs, [outcome], 2)[0] <= one


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of views in place, of which there are none
def test_fsdp2_learns_nearly_the_same(selection, scale):
    jobs = scale.selection()[:2]
    setting = setting_of(selection, scale, jobs)
    plain, offloaded = (in_this_process(selection, name, setting).losses for name in ("a", "e"))
    assert offloaded.keys() == plain.keys()
    for name, losses in plain.items():
        assert offloaded[name] == pytest.approx(losses, rel=1e-5)


@pytest.mark.rest
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_pipeline_of_two_processes_learns_nearly_the_same(name, selection, scale):
    job = scale.selection()[0]
    assert job.num_micro_batches == 1  # fewer than there are stages
    setting = setting_of(selection, scale, [job])
    plain = in_this_process(selection, "a", setting).losses
    outcome = selection.sides.run(name, setting)
    assert len(outcome.shares) == 2
    assert outcome.losses[job.name] == pytest.approx(plain[job.name], rel=1e-5)


@pytest.mark.rest
def test_a_process_that_raises_ends_its_side_with_its_traceback(selection, scale):
    job = replace(scale.selection()[0], lr=-1.0)
    with pytest.raises(RuntimeError, match=r"(?s)\(f\) .* failed:.*Invalid learning rate"):
        selection.sides.run("f", setting_of(selection, scale, [job, replace(job, name="other")]))


def test_a_side_that_cannot_run_says_why(selection, scale, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    setting = setting_of(selection, selection.grid.H200, selection.grid.H200.selection())
    with pytest.raises(selection.sides.Refused, match="a pipeline needs two devices, h200 has 1"):
        selection.sides.run("gpipe", setting)
    setting = setting_of(selection, selection.grid.PAPER, selection.grid.PAPER.selection())
    with pytest.raises(selection.sides.Refused, match="1 GPUs, it needs 8"):
        selection.sides.run("ours", setting)


@pytest.fixture
def stated(selection, monkeypatch, tmp_path):
    """Makespans by side that are stated, and a README of its own; losses of a side that is added to `other` differ."""
    seconds, other = {}, set()
    cost = {("f", 0): 0.4, ("fb", 1): 0.6, ("b", 0): 0.8, ("update", 0): 0.0, ("update", 1): 0.0, "commit": 0.0}

    def run(name, setting):
        losses = {job.name: [2.0, 1.0 + (name in other)] for job in setting.jobs}
        share = selection.sides.Share(seconds=seconds[name], losses=losses, busy_s=seconds[name])
        share.costs = {job.name: cost for job in setting.jobs}
        return selection.sides.Outcome(shares=[share], num_devices=2)

    readme = tmp_path / "README.md"
    readme.write_text((FOLDER / "README.md").read_text())
    monkeypatch.setattr(selection.main, "run", run)
    monkeypatch.setattr(selection.main, "README", readme)
    return SimpleNamespace(seconds=seconds, other=other, readme=readme)


def bound_s(selection):
    """The bound of twelve jobs of 1.8 s per step on two devices."""
    return 12 * 1.8 * selection.main.PARTS["selection"].jobs(selection.grid.TINY)[0].num_steps / 2


def test_makespans_within_their_limits_are_good_and_written_where_asked(selection, stated, capsys, tmp_path):
    stated.seconds.update({name: 1.05 * bound_s(selection) for name in ("a", "ours", "b")}, c=2 * bound_s(selection))
    before = stated.readme.read_text()
    assert selection.main.main(["selection", "--pairs", "1", "--json", str(tmp_path / "found.json")]) == 0
    assert stated.readme.read_text() == before
    assert "over the simulator's bound, times | 1.050 | at most 1.1" in capsys.readouterr().out
    figures = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert figures["12 models of one size: over the simulator's bound, times"]["limit"] == 1.1
    assert figures["12 models of one size: losses of other bits"] == {"values": [0.0], "better": "less", "limit": 0}
    assert selection.main.main(["selection", "--pairs", "1", "--write"]) == 0
    assert "over the simulator's bound, times | 1.050 | at most 1.1" in stated.readme.read_text()


@pytest.mark.parametrize(("name", "factor"), [("c", 1.5), ("b", 0.99), ("ours", 1.2)])
def test_a_makespan_beyond_its_limit_is_named(name, factor, selection, stated, capsys):
    good_s = bound_s(selection)
    stated.seconds.update(a=good_s, ours=good_s, b=2 * good_s, c=2 * good_s)
    stated.seconds[name] = factor * good_s
    assert selection.main.main(["selection", "--pairs", "1"]) == 1
    assert capsys.readouterr().out.count("| NO |") == 1
    assert selection.main.main(["selection", "--pairs", "1", "--no-judge"]) == 0


def test_other_bits_are_named(selection, stated, capsys):
    stated.seconds.update(a=4.0, ours=4.0, f=4.0)
    stated.other.add("f")
    assert selection.main.main(["processes", "--pairs", "1"]) == 1
    assert "Bits differ: [('f', " in capsys.readouterr().out
    other = selection.main.FIGURES.by_name["4 equal models, devices that hold one each: losses of other bits"]
    assert other["values"] == [4.0]


def test_figures_of_the_table_of_all_benchmarks_are_those_of_its_parts(selection):
    rows = importlib.import_module("regressions").ROWS
    names = {f"{part.title}: {limit.title}" for part in selection.main.PARTS.values() for limit in part.limits}
    assert names >= {name for name, _ in rows["selection"][1]}


def test_every_part_has_a_place_in_the_readme(selection):
    page = (FOLDER / "README.md").read_text()
    for name in selection.main.PARTS:
        assert f"<!-- tiny {name}: by its command -->" in page
