"""Ceilings: measured through a device's lanes, stored in one file, used by plans, and never in the way of one."""

import importlib
import json
import os
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.devices import rates as stored_ceilings
from hydra_engine.devices.lanes import LOAD, STORE
from hydra_engine.devices.probe import dram_bytes_per_s, measure, plain_host_bytes, probe
from hydra_engine.devices.rates import MEASURED_NOW, STATED, STORED, Ceilings, load_all, path, save, stored
from hydra_engine.planning.planner import PlannedTask
from hydra_engine.trace import Trace
from partitioners import STATED_RATES, Budget
from tests.refused import names, refused

probing = importlib.import_module("hydra_engine.devices.probe")  # the face names its function so

CPU = Ceilings(
    name="cpu",
    up_bytes_per_s=8e9,
    down_bytes_per_s=7e9,
    both_up_bytes_per_s=5e9,
    both_down_bytes_per_s=4e9,
    dram_bytes_per_s=20e9,
    matmul_flops={"float32": 1e11, "bfloat16": 2e11, "float16": 3e11},
    measured="2026-01-02T03:04:05+00:00",
    torch_version="2.11.0",
    num_threads=2,
)
CARD = replace(CPU, name="Some Card 80GB", up_bytes_per_s=50e9)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Where ceilings are stored in this test: nothing is there, nor the folder."""
    file = tmp_path / "cache" / "ceilings.json"
    monkeypatch.setenv("HYDRA_ENGINE_CEILINGS", str(file))
    return file


@pytest.fixture
def shortly(monkeypatch):
    """Little is measured."""
    monkeypatch.setattr(stored_ceilings, "DRAM_BYTES", 2**20)
    monkeypatch.setattr(stored_ceilings, "MATMUL_S", 1e-5)


# --- the file ---


def test_what_is_saved_is_loaded(file):
    assert load_all().get("cpu") is None
    assert save(CPU) == file
    assert load_all().get("cpu") == replace(CPU, origin=STORED)
    assert load_all().get("Some Card 80GB") is None


def test_kinds_of_devices_have_an_entry_each_and_the_last_one_counts(file):
    save(CPU, CARD)
    save(replace(CPU, up_bytes_per_s=9e9))
    assert (load_all().get("cpu").up_bytes_per_s, load_all().get("Some Card 80GB").up_bytes_per_s) == (9e9, 50e9)
    assert os.listdir(file.parent) == ["ceilings.json"]
    assert "origin" not in file.read_text()


def test_place_is_the_users_cache_unless_named(monkeypatch, tmp_path):
    monkeypatch.delenv("HYDRA_ENGINE_CEILINGS")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert path() == tmp_path / "xdg" / "hydra_engine" / "ceilings.json"
    for invalid in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", invalid)
        assert path() == tmp_path / ".cache" / "hydra_engine" / "ceilings.json"
    monkeypatch.setenv("HYDRA_ENGINE_CEILINGS", "~/mine.json")
    assert path() == tmp_path / "mine.json"


def entry(**changed):
    return json.dumps({"format": "hydra_engine ceilings", "version": 1, "devices": {"cpu": changed}})


COMPLETE = {name: value for name, value in vars(CPU).items() if name != "origin"}
DAMAGED = {
    "cut off": entry(**COMPLETE)[:-20],
    "not ours": '{"devices": {}}',
    "not a dict": "[]",
    "another version": entry(**COMPLETE).replace('"version": 1', '"version": 2'),
    "no entries": '{"format": "hydra_engine ceilings", "version": 1}',
    "an entry that is none": '{"format": "hydra_engine ceilings", "version": 1, "devices": {"cpu": 3}}',
    "a figure missing": entry(**{name: value for name, value in COMPLETE.items() if name != "measured"}),
    "a figure too many": entry(**COMPLETE, more=1),
    "of another name": entry(**COMPLETE | {"name": "gpu"}),
    "not a rate": entry(**COMPLETE | {"down_bytes_per_s": "fast"}),
    "a rate of nothing": entry(**COMPLETE | {"both_up_bytes_per_s": 0}),
    "no number": entry(**COMPLETE | {"matmul_flops": {"float32": float("nan")}}),
    "no rates by dtype": entry(**COMPLETE | {"matmul_flops": 3.0}),
    "no date": entry(**COMPLETE | {"measured": 3}),
}


def test_damaged_file_is_refused_by_name_with_the_remedy_and_left_alone(file):
    file.parent.mkdir()
    for kind, text in DAMAGED.items():
        file.write_text(text)
        for access in (lambda: load_all().get("cpu"), lambda: save(CPU)):
            with refused(ValueError, says=f"{file} hydra-engine probe"):
                access()
        assert file.read_text() == text, kind


def test_bytes_that_are_no_text_and_a_folder_are_refused_too(file):
    file.parent.mkdir()
    file.write_bytes(b"\xff\xfe\x00")
    with refused(ValueError, says="UnicodeDecodeError"):
        load_all().get("cpu")
    file.unlink()
    file.mkdir()
    with refused(ValueError, says="IsADirectoryError"):
        load_all().get("cpu")


def test_damaged_file_costs_a_plan_one_line(file, capsys):
    assert stored("cpu") is None
    assert capsys.readouterr().err == ""
    file.parent.mkdir()
    file.write_text("{")
    device = EmulatedDevice("1MiB")
    assert [device.ceilings().origin for _ in range(3)] == [MEASURED_NOW] * 3
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    names(line, says=f"{file} hydra-engine probe")


def test_failed_write_leaves_the_old_file_and_nothing_beside_it(file, monkeypatch):
    save(CPU)

    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(stored_ceilings.os, "replace", fail)
    with refused(OSError, says="disk full"):
        save(CARD)
    assert load_all().get("cpu") == replace(CPU, origin=STORED)
    assert os.listdir(file.parent) == ["ceilings.json"]


def test_without_a_home_nothing_is_written(monkeypatch):
    monkeypatch.setenv("HYDRA_ENGINE_CEILINGS", "~no such user/ceilings.json")
    assert stored("cpu") is None
    with refused(ValueError, says="HYDRA_ENGINE_CEILINGS"):
        save(CPU)


def test_rates_are_finite_and_above_0():
    for rate in (0, -1.0, float("inf"), float("nan"), True, "1e9", None):
        with refused(ValueError, says=f"down_bytes_per_s {rate!r} 0"):
            replace(CPU, down_bytes_per_s=rate)
        with refused(ValueError, says=f"matmul_flops float32 {rate!r}"):
            replace(CPU, matmul_flops={"float32": rate})


# --- measuring ---


def test_every_figure_is_measured_and_can_be_stored(file, shortly):
    found = probe(EmulatedDevice("4MiB"), num_workers=2, num_threads=1)
    assert (found.name, found.origin, found.num_threads) == ("cpu", MEASURED_NOW, 1)
    assert found.torch_version == torch.__version__
    assert set(found.matmul_flops) == {"float32", "bfloat16", "float16"}
    assert found.dram_bytes_per_s > 0
    save(found)
    assert load_all().get("cpu") == replace(found, origin=STORED)


def test_measured_link_is_no_faster_than_the_emulated_one(shortly):
    found = probe(EmulatedDevice("1MiB", bandwidth="100MB"), num_workers=1, num_threads=1)
    assert found.name == "emulated"
    rates = (found.up_bytes_per_s, found.down_bytes_per_s, found.both_up_bytes_per_s, found.both_down_bytes_per_s)
    assert max(rates) <= 100e6


@pytest.fixture
def opened():
    device = EmulatedDevice("1MiB").open(0, Trace(), 1)
    yield device
    device.close()


class Watched:
    """A device that notes what goes on in its lanes."""

    def __init__(self, opened):
        self.opened, self.log, self.lock = opened, [], threading.Lock()

    def __getattr__(self, name):
        return getattr(self.opened, name)

    def copy(self, lane, pairs):
        assert threading.current_thread().name.endswith(f"-{lane}")
        self.note("begin", lane)
        self.opened.copy(lane, pairs)

    def finish(self):
        self.opened.finish()
        self.note("end", threading.current_thread().name.rpartition("-")[2])

    def note(self, what, lane):
        with self.lock:
            self.log.append((what, lane))


@pytest.mark.parametrize("lanes", [(LOAD, STORE), (STORE, LOAD)])
def test_the_faster_way_goes_on_until_the_slower_one_is_timed(opened, lanes):
    num_copies, are_many = 0, threading.Event()

    def fast():
        nonlocal num_copies
        num_copies += 1
        if num_copies > 100:
            are_many.set()

    def slow():
        assert are_many.wait(60)

    assert len(probing._both_s(opened, list(zip(lanes, (fast, slow), strict=True)))) == 2


def test_copies_go_through_their_lanes_alone_and_then_together(shortly):
    opened = EmulatedDevice("1MiB", chaos=1).open(0, Trace(), 1)
    watched = Watched(opened)
    measure(watched, "cpu", num_workers=1, num_threads=1, new_host_bytes=plain_host_bytes)
    opened.close()
    num = 1 + stored_ceilings.NUM_REPEATS
    alone = [(what, lane) for lane in (LOAD, STORE) for _ in range(num) for what in ("begin", "end")]
    assert watched.log[: 4 * num] == alone
    both = [event for event in watched.log[4 * num :] if event[1] in (LOAD, STORE)]
    for lane in (LOAD, STORE):
        assert both.count(("end", lane)) == both.count(("begin", lane)) >= num
    assert {lane for _, lane in watched.log} == {LOAD, STORE, "compute"}


def test_copies_are_from_and_to_the_memory_that_is_given(shortly, opened):
    made, used = [], set()

    def new_host_bytes(num_bytes):
        made.append(plain_host_bytes(num_bytes))
        return made[-1]

    class Noting(Watched):
        def copy(self, lane, pairs):
            used.update(tensor.data_ptr() for pair in pairs for tensor in pair)
            super().copy(lane, pairs)

    measure(Noting(opened), "cpu", num_workers=1, num_threads=1, new_host_bytes=new_host_bytes)
    assert opened.arena.take(2**20).num_bytes == 2**20  # all slabs are given back
    assert [each.nbytes for each in made] == [2**18, 2**18]
    assert used >= {each.data_ptr() for each in made}


@pytest.mark.parametrize("lane", [LOAD, STORE, "compute"])
def test_what_fails_in_a_lane_is_raised_and_nothing_hangs(shortly, opened, lane):
    class Failing(Watched):
        num_left = 12  # while both ways are timed

        def finish(self):
            super().finish()
            if threading.current_thread().name.endswith(f"-{lane}"):
                self.num_left -= 1
                if not self.num_left:
                    raise RuntimeError(f"{lane} is broken")

    with refused(RuntimeError, says=f"{lane} is broken"):
        measure(Failing(opened), "cpu", num_workers=1, num_threads=1)


def test_matrices_grow_until_a_product_takes_long_or_memory_ends(monkeypatch, opened):
    sizes, mm = [], torch.mm

    def noting(left, right, *, out):
        sizes.append(len(left))
        return mm(left, right, out=out)

    monkeypatch.setattr(torch, "mm", noting)
    monkeypatch.setattr(stored_ceilings, "MATMUL_S", 0.0)
    stored_ceilings.matmul_flops(opened.torch_device, torch.float32, 2**30, opened.finish)
    assert set(sizes) == {64}
    monkeypatch.setattr(stored_ceilings, "MATMUL_S", 1e9)
    stored_ceilings.matmul_flops(opened.torch_device, torch.float32, 3 * 4 * 128**2, opened.finish)
    assert set(sizes) == {64, 128}


def test_no_generator_of_the_process_is_drawn_from(shortly):
    before = torch.get_rng_state()
    probe(EmulatedDevice("1MiB"), num_workers=1, num_threads=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_device_too_small_to_measure_on_is_refused():
    with refused(ValueError, says="device 100 192"):
        probe(EmulatedDevice("100KiB"), num_workers=1, num_threads=1)


def test_dram_traffic_counts_reads_and_writes(monkeypatch):
    monkeypatch.setattr(stored_ceilings, "DRAM_BYTES", 2**20)
    monkeypatch.setattr(stored_ceilings, "median_s", lambda work, repeats: work() or 0.5)
    assert dram_bytes_per_s(4, 1) == 2 * 2**20 / 0.5


# --- plans ---


def plan_of(*devices, **options):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    loader = [(torch.randn(4, 8), torch.randint(4, (4,)))]
    task = ModelTask(model, F.cross_entropy, loader, 0.1, name="net", **options)
    orchestra = ModelOrchestrator([task], devices=list(devices))
    orchestra.verbose = 0
    return orchestra.generate()


def test_stated_bandwidth_comes_before_what_is_stored(file):
    save(CPU)
    found = EmulatedDevice("1MiB", bandwidth="1MB").ceilings()
    assert (found.link_bytes_per_s, found.up_bytes_per_s, found.origin) == (1e6, 1e6, STATED)


def test_what_is_stored_comes_before_measuring(file, monkeypatch):
    device = EmulatedDevice("1MiB")
    assert device.ceilings().origin == MEASURED_NOW
    save(CPU)
    monkeypatch.setattr("hydra_engine.devices.cuda.time", None)  # nothing is timed any more
    assert device.ceilings() == replace(CPU, origin=STORED)
    assert device.ceilings().link_bytes_per_s == 4e9  # the slower way, both at once


def test_plan_says_where_its_rates_come_from(file):
    assert "rates of cpu: measured now" in str(plan_of(EmulatedDevice("8MiB"))).splitlines()
    assert "rates of" not in str(plan_of(EmulatedDevice("8MiB", bandwidth="1GiB")))
    save(CPU)
    lines = str(plan_of(EmulatedDevice("8MiB"), EmulatedDevice("8MiB"))).splitlines()
    assert [line for line in lines if "rates of" in line] == ["rates of cpu: stored on 2026-01-02"]


def test_loads_and_stores_are_predicted_at_their_own_rates(file, monkeypatch):
    save(CPU)
    seen = []

    def predict(task, devices, *, host=None):
        seen.extend(devices)
        raise LookupError

    monkeypatch.setattr("hydra_engine.planning.planner.predict_spreads", predict)
    with pytest.raises(LookupError):
        plan_of(EmulatedDevice("8MiB"), EmulatedDevice("8MiB", bandwidth="4500000000"), accumulation_steps=2)
    assert {(cost.load_bytes_per_s, cost.store_bytes_per_s) for cost in seen} == {(4.5e9, 4e9)}


@pytest.mark.parametrize(("dram", "expected"), [(3e3, 1e3), (1e18, 1e15)])
def test_an_update_is_no_faster_than_dram(file, monkeypatch, dram, expected):
    monkeypatch.setattr("hydra_engine.planning.planner.update_bytes_per_s", lambda _: 1e15)  # what a cache holds
    save(replace(CPU, dram_bytes_per_s=dram))
    planned = PlannedTask(ModelTask([nn.Linear(8, 4)], F.cross_entropy, [], 0.1), "net")
    budget = planned.estimate.budget(Budget(memory_bytes=2**23), EmulatedDevice("8MiB"))
    assert budget.update_bytes_per_s == expected  # weights are read and written, gradients read


def test_layers_that_are_not_timed_are_counted_at_the_stored_rate_of_products(file, monkeypatch):
    save(replace(CPU, matmul_flops={"float32": 123e9}))
    planned = PlannedTask(ModelTask([nn.Linear(8, 4)], F.cross_entropy, [], 0.1), "net")
    assert planned.estimate.kernel_rates() == STATED_RATES["cpu", "float32"]
    planned.estimate.rates(EmulatedDevice("8MiB"))
    assert planned.estimate.kernel_rates().flops_per_s == 123e9
