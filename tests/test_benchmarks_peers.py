"""Peers of the benchmark on a GPU: those that belong to torch train here, the others say that they are missing."""

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from hydra_engine import ModelTask
from tests import exact
from tests.test_benchmarks import modules_of

CPU = torch.device("cpu")


@pytest.fixture
def gpu_day(monkeypatch):
    """Modules of the benchmark by name, as its own folder has them."""
    with modules_of("gpu_day", ("scales", "bounds", "models", "peers", "peers.rows"), monkeypatch) as found:
        yield found


@pytest.fixture
def scale(gpu_day):
    return replace(gpu_day.scales.EMULATED, length=32, micro_tokens=128)


@pytest.fixture
def own_folder(gpu_day, monkeypatch, tmp_path):
    """Nothing is compiled, and the environment is left as it was."""
    for name in ("TORCH_EXTENSIONS_DIR", "TRAINSTREAM_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(gpu_day.peers.tempfile, "tempdir", str(tmp_path))


def losses_of(gpu_day, scale, name, tokens, num_steps):
    size = scale.size
    options = {"device": CPU, "cap_bytes": None, "micro_tokens": scale.micro_tokens}
    trainer = gpu_day.peers.PEERS[name].load()(scale, size, **options)
    try:
        return [float(trainer.step(*batch)) for batch in gpu_day.models.batches(scale, num_steps, tokens)]
    finally:
        trainer.close()


@pytest.mark.parametrize("name", ["deepspeed", "roundpipe", "roundpipe_stale", "trainstream"])
def test_a_peer_that_is_missing_says_so_by_name(name, gpu_day, monkeypatch):
    def refuse(_):
        raise gpu_day.peers.metadata.PackageNotFoundError

    monkeypatch.setattr(gpu_day.peers.metadata, "version", refuse)
    peer = gpu_day.peers.PEERS[name]
    with pytest.raises(gpu_day.peers.Missing, match=rf"{name}: not installed; pip install .*{peer.module}=="):
        peer.load()
    assert peer.prepare() is None


def test_a_peer_that_does_not_run_here_says_why(gpu_day, own_folder, monkeypatch):
    monkeypatch.setattr(gpu_day.peers.metadata, "version", lambda _: "0")
    monkeypatch.setitem(sys.modules, "roundpipe", None)
    with pytest.raises(gpu_day.peers.Missing, match="roundpipe: does not run here: ModuleNotFoundError"):
        gpu_day.peers.PEERS["roundpipe"].load()


def test_a_lock_that_a_killed_builder_left_is_forgotten(gpu_day, own_folder):
    with gpu_day.peers.sole_builder("deepspeed"):
        built = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "cpu_adam"
        built.mkdir()
        (built / "lock").touch()
    with gpu_day.peers.sole_builder("deepspeed"):
        assert list(built.iterdir()) == []


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of views in place, of which there are none
def test_resident_fsdp2_and_the_engine_train_the_same(gpu_day, scale):
    size, tokens, num_steps = scale.size, scale.tokens[0], 4
    ours = gpu_day.models.make_model(scale, size, "cpu")
    task = ModelTask(
        ours,
        gpu_day.models.loss_fn,
        gpu_day.models.batches(scale, num_steps, tokens),
        gpu_day.models.LR,
        name="engine",
        optimizer=gpu_day.models.ADAMW,
        precision="bfloat16",
        accumulation_steps=tokens // scale.micro_tokens,
        seed=0,
    )
    report = exact.silent([task], scale.memory).train_models()
    report.raise_failures()
    losses = report.tasks["engine"].losses
    assert losses[0] - losses[-1] > 0.05  # so that agreement means something
    for name in ("resident", "fsdp2"):
        found = losses_of(gpu_day, scale, name, tokens, num_steps)
        assert gpu_day.bounds.difference(found, losses) < 0.03, (name, found, losses)


def test_a_difference_is_a_share_of_the_fall(gpu_day):
    assert gpu_day.bounds.difference([5.0, 4.5, 4.0], [5.0, 4.6, 4.0]) == pytest.approx(0.1)
    assert gpu_day.bounds.difference([5.0, 5.0, 5.0], [5.0, 4.6, 4.0]) == pytest.approx(1.0)
    assert gpu_day.bounds.difference([5.0, 4.0], [5.0, 5.0]) == float("inf")


class FakeTrainer:
    """Fits no micro-batch above `most` tokens, from its second step on; may fail otherwise."""

    def __init__(self, scale, size, *, device, cap_bytes, micro_tokens, most=None, error=None, log=None):
        self.micro_tokens, self.most, self.error, self.log, self.num_steps = micro_tokens, most, error, log, 0
        log.append(("built", micro_tokens, cap_bytes))

    def step(self, inputs, target):
        if self.error is not None:
            raise self.error
        if self.most is not None and self.num_steps > 0 and self.micro_tokens > self.most:
            raise torch.OutOfMemoryError("no room\nfor it")
        self.num_steps += 1
        return torch.tensor(5.0 - self.num_steps)

    def close(self):
        self.log.append(("closed", self.micro_tokens))


def run_fake(gpu_day, scale, log, tokens=(256,), **options):
    peers = {"fake": gpu_day.peers.Peer(name="fake", module="resident", num_warm=3)}
    trainer = partial(FakeTrainer, log=log, **options)
    object.__setattr__(peers["fake"], "load", lambda: trainer)
    group = gpu_day.scales.Group(method="fake", size=scale.size, memory="4MiB", tokens=tokens)
    rows = []
    gpu_day.rows.run_peer(scale, group, CPU, rows.append, peers)
    return rows


def test_micro_batches_halve_until_they_fit(gpu_day, scale):
    log = []
    first, second = run_fake(gpu_day, scale, log, tokens=(256, 128), most=scale.micro_tokens // 4)
    sizes = [scale.micro_tokens, scale.micro_tokens // 2, scale.micro_tokens // 4]
    assert [entry[1] for entry in log if entry[0] == "built"] == sizes  # and the second row goes on with the last
    assert [entry[1] for entry in log if entry[0] == "closed"] == sizes
    assert [entry[2] for entry in log if entry[0] == "built"] == [4 * 2**20] * 3
    assert first["status"] == second["status"] == "ok"
    assert (first["micro_batches"], second["micro_batches"]) == (256 // sizes[-1], 128 // sizes[-1])
    assert first["losses"] == [5.0 - k for k in range(1, 3 + scale.num_steps + 1)]  # the warm steps' as well
    assert first["num_steps"] == scale.num_steps
    assert (first["steps_before"], second["steps_before"]) == (0, len(first["losses"]))


def test_a_sequence_that_does_not_fit_is_a_failed_row_that_says_so(gpu_day, scale):
    [row] = run_fake(gpu_day, scale, [], most=0)
    assert row["status"] == "failed"
    assert row["reason"] == f"MemoryError: not one sequence of {scale.length} tokens fits: out of memory: no room"


def test_a_trainer_that_fails_is_a_failed_row_and_the_next_row_has_a_new_one(gpu_day, scale):
    log = []
    rows = run_fake(gpu_day, scale, log, tokens=(256, 128), error=ValueError("of another kind"))
    assert [row["status"] for row in rows] == ["failed", "failed"]
    assert all(row["reason"] == "ValueError: of another kind" for row in rows)
    assert [entry[0] for entry in log] == ["built", "closed"] * 2
