"""A backward that goes on from its forward's graph: the same bits, within the budget, where it is worth its room."""

from copy import copy
from dataclasses import replace
from functools import lru_cache
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import ModelTask
from hydra_engine.planning.cuts import Kept
from hydra_engine.planning.planned import choose_kept, least_step_s
from hydra_engine.worker.runner import Runner
from partitioners import Presharded
from tests import exact, zoo
from tests.covering import chosen, covering
from tests.promises.test_exact import assert_engine_equals_plain


def everything_kept():
    return mock.patch("hydra_engine.planning.planner.choose_kept", return_value=Kept(0, 1.0))


class Backwards:
    """Counts backward units, and those that went on from a graph."""

    def __init__(self):
        self.num = self.num_from_graphs = 0

    def __enter__(self):
        compute = Runner.compute

        def counted(runner, run, executor):
            if run.claim.unit.kind == "b":
                self.num += 1
                self.num_from_graphs += bool(run.graphs.graphs)
            compute(runner, run, executor)

        self._patch = mock.patch.object(Runner, "compute", counted)
        self._patch.__enter__()
        return self

    def __exit__(self, *exc):
        self._patch.__exit__(*exc)


@pytest.mark.parametrize("name", chosen(["gpt", "cnn", "tied", "lstm", "branch", "frozen"], ["gpt", "cnn"]))
@covering(strength=1, num_devices=[1, 2], accumulation_steps=[1, 3])
def test_bits_are_those_of_plain_pytorch(name, num_devices, accumulation_steps):
    options = {"optimizer": torch.optim.AdamW, "lr": 0.05, "max_grad_norm": 0.5}
    with everything_kept(), Backwards() as backwards:
        assert_engine_equals_plain(
            zoo.MODELS[name], num_devices=num_devices, accumulation_steps=accumulation_steps, **options
        )
    changes_buffers = name == "cnn" and accumulation_steps > 1
    if num_devices == 1 and name != "tied" and not changes_buffers:
        assert backwards.num_from_graphs > 0.5 * backwards.num, (backwards.num_from_graphs, backwards.num)


@pytest.mark.rest
@pytest.mark.parametrize("name", ["gpt", pytest.param("cnn", marks=pytest.mark.rest)])
def test_two_tasks_on_little_memory(name):
    """Graphs are given up at any time; the forward is then run again."""
    with everything_kept(), Backwards() as backwards:
        for memory in ("8MiB", "400KiB"):
            tasks, models = [], []
            for seed in (1, 2):
                task, model = exact.task_of(name, partition="each", seed=seed, epochs=1)
                task.name = f"{name}-{seed}"
                tasks.append(task)
                models.append(model)
            report = exact.run(tasks, memory=memory, chaos=3)
            for seed, model in zip((1, 2), models, strict=True):
                exact.assert_as_expected(report, f"{name}-{seed}", model, exact.expected(name, seed=seed, epochs=1))
    assert backwards.num_from_graphs > 0


# -- what is worth it


@lru_cache
def planned_state(num_layers=8):
    """A task of equal shards, cut and rehearsed: slabs of 16 KiB, and what a forward saves."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(num_layers)]
    batches = [(torch.randn(16, 64), torch.randint(64, (16,)))]
    task = ModelTask(layers, F.cross_entropy, batches, 0.1, partitioner=Presharded(list(range(1, num_layers + 1))))
    orchestra = exact.silent([task], "16MiB")
    orchestra.generate()
    [planned] = orchestra._tasks.all
    return planned.state


class TestChoice:
    def setup_method(self):
        self.state = copy(planned_state())
        self.state.measured = copy(self.state.measured)
        self.state.measured.unit_s = {
            (kind, j): {"f": 1.0, "fb": 3.0, "b": 3.0}[kind] for kind, j in self.state.cut.chains[True]
        }
        self.slab = self.state.cut.shards[0].slab_bytes
        self.graph = max(self.state.measured.graph_bytes.values())
        self.least = max(map(self.state.shard_bytes, self.state.cut.shards)) + self.slab

    def choose(self, free_bytes, link_bytes_per_s=1e12):
        return choose_kept(self.state, self.least + free_bytes, link_bytes_per_s).keeps_from

    def predict(self, free_bytes, link_bytes_per_s=1e12):
        return choose_kept(self.state, self.least + free_bytes, link_bytes_per_s).step_s

    def test_a_rehearsal_counts_what_every_forward_saves_and_the_plan_keeps_all(self):
        assert self.state.cut.keeps_from == 0
        assert {j for j, _ in self.state.measured.graph_bytes} == set(range(7))
        # The input of the linear layer and the output of the other; not its weight, which is in the slab.
        assert self.graph == 2 * 16 * 64 * 4

    def test_graphs_are_kept_from_the_top_as_far_as_there_is_room(self):
        each = self.slab + self.graph
        assert [self.choose(k * each) for k in (0, 1, 3, 7, 50)] == [8, 6, 4, 0, 0]
        assert self.choose(each - 1) == 8

    def test_slow_links_leave_the_room_to_shards(self):
        """With room for one graph or two slabs, and a step as long as its loads: the second slab is worth more."""
        self.graph_bytes = dict.fromkeys(self.state.measured.graph_bytes, self.slab)
        self.state.measured.graph_bytes = self.graph_bytes
        assert self.choose(2 * self.slab, link_bytes_per_s=self.slab / 100) == 8
        assert self.choose(2 * self.slab, link_bytes_per_s=self.slab * 100) == 6

    def test_a_graph_that_cannot_be_kept_ends_it(self):
        self.state.cut = replace(self.state.cut, locked=frozenset({5}))
        assert self.choose(10**9) == 6

    def test_a_step_takes_what_is_computed_or_loaded(self):
        # 7 forwards of 1 s, 8 backwards of 3 s; 15 loads.
        each = self.slab + self.graph
        assert self.predict(0) == 31
        assert self.predict(7 * each) == least_step_s(self.state) == 24
        assert self.predict(0, link_bytes_per_s=self.slab / 10) == 150
        assert self.predict(7 * each, link_bytes_per_s=self.slab / 10) == 80

    def test_one_shard_keeps_nothing(self):
        state = planned_state(1)
        assert choose_kept(state, 10**9, 1e12).keeps_from == 1
