"""Units print and parse back, chains have the drawn order, a step's graph knows its critical path."""

import networkx as nx
import pytest

from hydra_engine.schedule import (
    KINDS,
    Unit,
    critical_path_s,
    evaluation_chain,
    step_graph,
    training_chain,
)


def drawn(text):
    """A chain as it is drawn: "f0 fb1 b0"."""
    units = [Unit.parse(f"task.{word}@0") for word in text.split()]
    return tuple((unit.kind, unit.shard) for unit in units)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["bert", "task-0", "a.b", "two words", "x.f1@2", "übung", "e", "f0"])
def test_unit_parses_back_from_what_it_prints(kind, task):
    for shard, step in ((0, 0), (7, 0), (0, 12), (123, 456789)):
        unit = Unit(task, kind, shard, step)
        assert Unit.parse(str(unit)) == unit


def test_unit_prints_task_kind_shard_and_step():
    assert str(Unit("bert", "f", 2, 5)) == "bert.f2@5"
    assert str(Unit("bert", "fb", 11, 0)) == "bert.fb11@0"
    assert Unit.parse("bert.b3@40") == ("bert", "b", 3, 40)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bert",
        "bert.f2",
        "bert.f@5",
        "bert.2@5",
        "bert.x2@5",
        "bert.bf2@5",
        "bert.F2@5",
        "bertf2@5",
        ".f2@5",
        "f2@5",
        "bert.f-2@5",
        "bert.f2@-5",
        "bert.f2@5.0",
        "bert.f2@5 ",
        "bert.f2@5\n",
        "bert.f2@",
        "bert.f2@5@6",
    ],
)
def test_malformed_unit_is_refused(text):
    with pytest.raises(ValueError, match="unit") as refusal:
        Unit.parse(text)
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize(
    ("num_shards", "lowest_backward", "expected"),
    [
        (1, 0, "fb0"),
        (2, 0, "f0 fb1 b0"),
        (2, 1, "f0 fb1"),
        (3, 0, "f0 f1 fb2 b1 b0"),
        (5, 0, "f0 f1 f2 f3 fb4 b3 b2 b1 b0"),
        (5, 2, "f0 f1 f2 f3 fb4 b3 b2"),  # shards 0 and 1 are frozen: no gradient flows below 2
        (5, 3, "f0 f1 f2 f3 fb4 b3"),
        (5, 4, "f0 f1 f2 f3 fb4"),
    ],
)
def test_training_chain_is_the_drawing(num_shards, lowest_backward, expected):
    assert training_chain(num_shards, lowest_backward) == drawn(expected)


@pytest.mark.parametrize(("num_shards", "expected"), [(1, "e0"), (2, "e0 e1"), (5, "e0 e1 e2 e3 e4")])
def test_evaluation_chain_is_the_drawing(num_shards, expected):
    assert evaluation_chain(num_shards) == drawn(expected)


@pytest.mark.parametrize(("num_shards", "lowest_backward"), [(1, 0), (2, 0), (5, 0), (5, 2)])
def test_critical_path_is_the_sum_of_the_chain(num_shards, lowest_backward):
    chain = training_chain(num_shards, lowest_backward)
    unit_s = {node: 2.0**position for position, node in enumerate(chain)}  # every sum of some of them is another
    graph = step_graph(chain, unit_s)
    assert critical_path_s(graph) == sum(unit_s.values())
    assert critical_path_s(graph) == nx.dag_longest_path_length(graph)


def test_step_graph_is_the_chain_with_costs_on_nodes_and_out_edges():
    chain = training_chain(3, 0)
    unit_s = {node: float(position + 1) for position, node in enumerate(chain)}
    graph = step_graph(chain, unit_s)
    assert list(nx.topological_sort(graph)) == [*chain, "end"]
    assert {node: graph.nodes[node]["seconds"] for node in chain} == unit_s
    assert [graph.edges[edge]["weight"] for edge in nx.topological_sort(nx.line_graph(graph))] == [1, 2, 3, 4, 5]


def test_critical_path_of_units_that_take_no_time_is_zero():
    chain = training_chain(3, 0)
    assert critical_path_s(step_graph(chain, dict.fromkeys(chain, 0.0))) == 0.0
