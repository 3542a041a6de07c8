"""Sums are added to anywhere, read inside synchronized() only, and go on after a restart."""

import pytest
import torch
import torch.distributed as dist

from hydra_engine.adaptive import Accumulator
from tests.refused import refused


def restarted(accumulator, **added):
    """Another accumulator that goes on from the state of one."""
    other = Accumulator()
    other.load_state_dict(accumulator.state_dict())
    other.update(added)
    return other


def read(accumulator):
    with accumulator.synchronized():
        return dict(accumulator)


def test_sums_go_on_over_blocks_and_restarts_until_they_are_cleared():
    accumulator = Accumulator()
    accumulator["a"] += 15
    assert "a" not in accumulator
    with accumulator.synchronized():
        assert "a" in accumulator
        assert accumulator["a"] == 15
    assert "a" not in accumulator
    accumulator["a"] -= 5
    accumulator = restarted(accumulator)
    accumulator.update({"a": 6, "b": 6})
    assert len(accumulator) == 0
    assert list(accumulator) == []
    assert read(accumulator) == {"a": 16, "b": 6}
    accumulator = restarted(accumulator)
    accumulator -= {"b": 10, "c": 10}
    with accumulator.synchronized():
        assert dict(accumulator) == {"a": 16, "b": -4, "c": -10}
        accumulator.clear()
    assert read(accumulator) == {}


def test_a_state_within_an_epoch_has_what_was_added_since_the_last_block():
    accumulator = Accumulator(loss=1.5)
    accumulator["loss"] += 0.25
    assert accumulator.state_dict() == {"sums": {"loss": 1.75}}
    accumulator["loss"] += 1
    assert read(restarted(accumulator, loss=1)) == {"loss": 3.75}
    assert read(accumulator) == {"loss": 2.75}


def test_a_restart_gives_the_sums_of_a_run_without_one():
    def added(accumulator, numbers):
        for number in numbers:
            accumulator["n"] += 1
            accumulator["x"] += torch.tensor(number)
        return accumulator

    whole = added(Accumulator(), (0.1, 0.2, 0.7, 1e-9))
    parts = added(restarted(added(Accumulator(), (0.1, 0.2))), (0.7, 1e-9))
    assert read(parts) == read(whole)


def test_inside_a_block_it_is_a_dict():
    accumulator = Accumulator({"loss": 6.0, "n": 4})
    with accumulator.synchronized() as same:
        assert same is accumulator
        accumulator["mean"] = accumulator["loss"] / accumulator["n"]
        accumulator["n"] += 1
        del accumulator["loss"]
        assert dict(accumulator) == {"mean": 1.5, "n": 5}
        assert repr(accumulator) == "Accumulator({'n': 5, 'mean': 1.5})"
        with accumulator.synchronized():
            assert accumulator["mean"] == 1.5
        assert accumulator["mean"] == 1.5
        with refused(KeyError, says="loss"):
            accumulator["loss"]
    assert repr(accumulator) == "Accumulator(outside of synchronized())"


def test_a_block_that_raises_is_left():
    accumulator = Accumulator(n=1)
    with pytest.raises(ZeroDivisionError), accumulator.synchronized():
        accumulator["n"] / 0
    assert len(accumulator) == 0


def test_tensors_are_summed_without_their_graph_in_float64():
    accumulator = Accumulator()
    weight = torch.tensor(1e8, requires_grad=True)
    for _ in range(4):
        accumulator["x"] += weight * 1.0
        accumulator["x"] += 1.0
        accumulator["count"] += torch.tensor(200, dtype=torch.uint8)
        accumulator["hits"] -= torch.tensor(True)
    kept = accumulator._added["x", weight.device]
    assert not kept.requires_grad
    assert read(accumulator) == {"x": 4e8 + 4, "count": 800, "hits": -4}
    assert type(read(accumulator)["x"]) is float


def test_a_tensor_that_changes_later_was_added_as_it_was():
    accumulator = Accumulator()
    value = torch.tensor(2.0, dtype=torch.float64)
    accumulator["x"] += value
    value.fill_(5)
    assert read(accumulator) == {"x": 2.0}


def test_reset_forgets_everything():
    accumulator = Accumulator(a=1)
    accumulator["a"] += 1
    accumulator.reset()
    assert read(accumulator) == {}


@pytest.mark.parametrize(
    "use",
    [
        lambda sums: sums["a"] / sums["b"],
        lambda sums: 1 / sums["a"],
        lambda sums: 1 + sums["a"],
        lambda sums: sums["a"] * 2,
        lambda sums: float(sums["a"]),
        lambda sums: f"{sums['a']:.2f}",
        lambda sums: sums["a"] == 3,
        lambda sums: sums["a"] < 3,
        lambda sums: bool(sums["a"]),
    ],
)
def test_reading_outside_of_a_block_is_refused(use):
    accumulator = Accumulator(a=3, b=1)
    with refused(RuntimeError, says="['a'] read synchronized()"):
        use(accumulator)
    assert read(accumulator) == {"a": 3, "b": 1}


def test_setting_deleting_and_clearing_outside_of_a_block_is_refused():
    accumulator = Accumulator(a=3)
    with refused(TypeError, says="['a'] = synchronized()"):
        accumulator["a"] = 4
    with refused(TypeError, says="['b'] ="):
        accumulator["b"] = accumulator["a"] + 1
    with refused(TypeError, says="['a'] ="):
        accumulator["a"] = Accumulator()["a"]
    with refused(RuntimeError, says="del ['a']"):
        del accumulator["a"]
    with refused(RuntimeError, says="clear() synchronized() reset()"):
        accumulator.clear()
    assert read(accumulator) == {"a": 3}


def test_only_single_numbers_are_added():
    accumulator = Accumulator()
    with refused(says="[2] .sum()"):
        accumulator["a"] += torch.ones(2)
    with refused(TypeError, says="str tensor"):
        accumulator["a"] += "1"
    with refused(TypeError, says="_Sum"):
        accumulator["a"] += accumulator["b"]
    assert read(accumulator) == {}


def test_another_state_is_refused():
    with refused(says="epoch sums"):
        Accumulator().load_state_dict({"epoch": 1})


def test_replicas_are_added_up_in_their_order(monkeypatch):
    def gather(every, own):
        assert own == {"a": 1, "b": 2.5}
        every[:] = [{"a": 10}, own, {"c": -1}]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    accumulator = Accumulator(a=100)
    accumulator.update(a=1, b=torch.tensor(2.5))
    assert accumulator.state_dict() == {"sums": {"a": 111, "b": 2.5, "c": -1}}
