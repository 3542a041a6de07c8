"""Weights at home: how a model is laid out in DRAM, the pool that owns it, and its optimizer."""

from hydra_engine.host.blocked import has_step_hooks, is_moment, part_of, step_natively
from hydra_engine.host.frozen import FrozenBlocks
from hydra_engine.host.home import Home, kernel_refused, no_home_because
from hydra_engine.host.hooks import has_hooks
from hydra_engine.host.layout import LayerFault, ModelLayout, Shard, Slot, Structure, writes
from hydra_engine.host.measured import KnownUnits, Measured, UnitBytes
from hydra_engine.host.optimizer import (
    TORCHS,
    Released,
    StepRecord,
    TaskOptimizer,
    is_torchs,
    kept_groups,
    make_optimizer,
    with_averages,
)
from hydra_engine.host.pool import NUM_LOANS, BestWeights, BorrowedPool, HostPool, LentWeights, kept_pools
from hydra_engine.host.staging import WHOLE, BuffersChanged, NormGroups, StepParts, square_norms, step_measures
from hydra_engine.host.state import AttributeChanges, Cut, Observed, Region, TaskState, Wanted, layout_of, share_out
