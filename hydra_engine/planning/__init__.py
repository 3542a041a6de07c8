"""The cost of a run before it runs: profiles, cuts, rehearsals, predictions."""

from hydra_engine.planning.adoption import Rehearsals
from hydra_engine.planning.ahead import AheadPlan, predict_training
from hydra_engine.planning.costs import DeviceChange, DeviceCost, HostCost, TaskCost
from hydra_engine.planning.fit import Misfit, Room, has_to_fit, largest_micro_batch, refit, shared_out
from hydra_engine.planning.planned import (
    DramLimit,
    PlannedTask,
    Spreading,
    TaskContext,
    check_apart,
    check_dram,
    check_nothing_shared,
    check_shared_buffers,
    check_sharing,
    known_steps,
)
from hydra_engine.planning.planner import (
    Target,
    arena_bytes,
    check_arena,
    fits_arena,
    least_bytes,
    make_plan,
    planned_homes,
    predicted_cost,
    rehearsed_s,
    way_of,
    ways_together,
)
from hydra_engine.planning.simulate import simulate
from hydra_engine.planning.world import Simulation
