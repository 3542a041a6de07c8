"""Graphs that forwards keep for their backwards, among a device's residents, where there is room for what they save."""

from __future__ import annotations

import math
from collections.abc import Hashable

from hydra_engine.devices import Residents
from hydra_engine.schedule import BACKWARD, FORWARD
from hydra_engine.worker.graphs import Graph, SavedTensors
from hydra_engine.worker.unit import Claim, UnitRun


def prepare_graphs(run: UnitRun, residents: Residents) -> int | None:
    """Let a forward count or keep its graphs, or a backward go on from them; bytes that the unit then takes."""
    claim, account = run.claim, run.account
    state, shard, kind = claim.state, claim.shard, claim.unit.kind
    wanted_bytes = account.wanted_bytes
    if kind not in (FORWARD, BACKWARD) or not state.may_keep_graph(shard):
        return wanted_bytes
    num_bytes = state.measured.graph_bytes_of(shard, account.signature)
    if kind == FORWARD and num_bytes is None:
        run.graphs.saved = SavedTensors()
        return wanted_bytes
    if wanted_bytes is None or not num_bytes or shard.index < state.cut.keeps_from:
        return wanted_bytes
    if kind == BACKWARD:
        return _go_on(run, residents, wanted_bytes, num_bytes)
    following = max(each.slab_bytes for each in state.cut.shards)
    if account.ledger.can_hold(wanted_bytes + num_bytes, claim.shard.slab_bytes + following):
        run.graphs.saved, run.graphs.granted_bytes = SavedTensors(num_bytes), num_bytes
        return wanted_bytes + num_bytes
    return wanted_bytes


def _go_on(run: UnitRun, residents: Residents, wanted_bytes: int, num_bytes: int) -> int:
    """Let a backward go on from its forward's graphs, if they are here and both have room."""
    claim, account = run.claim, run.account
    key = _key(claim)
    found: list[Graph] | None = residents.pin(key, claim.state.name, lambda: math.inf)
    if found is None:
        return wanted_bytes
    # As much as with its forward, until it is known better.
    before = account.signature, account.known
    account.signature = account.signature.in_role("graph")
    account.look_up(claim)
    with_graph = wanted_bytes if account.wanted_bytes is None else account.wanted_bytes
    if not account.ledger.can_hold(with_graph + num_bytes, claim.shard.slab_bytes):
        residents.unpin(key, is_whole=False)
        account.signature, account.known = before
        return wanted_bytes
    run.graphs.key, run.graphs.graphs = key, found
    return with_graph


def settle_graphs(run: UnitRun, residents: Residents) -> None:
    """Leave a forward's graphs to its backward, with the slabs that they refer to; free those that are through."""
    claim, graphs = run.claim, run.graphs
    state, shard, saved = claim.state, claim.shard, graphs.saved
    if graphs.key is not None:
        graphs.graphs = ()
        residents.unpin(graphs.key, is_whole=False)
    if saved is None or claim.error is not None:
        return
    saved.created_bytes = None
    state.measured.learn_graph_bytes(shard, run.account.signature, saved.num_bytes)
    if not saved.all_seen:
        state.measured.uncounted.add(shard.index)
    graphs.saved = None
    if saved.graphs is None:
        return
    staging, serial, kept, slabs = state.staging, state.staging.serial, saved.graphs, dict(claim.slabs)

    def next_use_s() -> float:
        return state.progress.next_use_s(shard) if staging.serial == serial else math.inf

    def dispose() -> None:
        kept.clear()
        for region, load in slabs.items():
            residents.unpin(region.key, is_whole=load.is_whole)

    if residents.keep(_key(claim), kept, graphs.granted_bytes, state.name, next_use_s, dispose):
        claim.slabs.clear()
        run.account.held_bytes -= graphs.granted_bytes


def _key(claim: Claim) -> Hashable:
    """The graphs' key among the residents: those of a step that begins again are others."""
    state = claim.state
    return (state.name, "graph", state.staging.serial, claim.shard.index, claim.unit.part)
