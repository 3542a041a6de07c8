"""What goes between DRAM and a device that steps a shard's optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from hydra_engine.host.layout import Shard


class DeviceStep(NamedTuple):
    """What a device needs to step a shard's optimizer, and what that leaves, by slot."""

    masters: dict[int, Tensor]  # of parameters that are narrow on the device
    states: dict[int, dict[str, Any]]


class DeviceStepper(Protocol):
    """Steps the optimizer on a device; `hydra_engine.optimizer.TaskOptimizer` is one."""

    commits: bool  # False: a rehearsal, whose weights and states nobody keeps

    @property
    def counts_on_device(self) -> bool:
        """Whether scalars of its state, a count of steps, are where the parameters are."""

    def host_step(self, shard: Shard) -> DeviceStep:
        """What is in DRAM."""

    def step(
        self, shard: Shard, loaded: DeviceStep, parameters: Sequence[nn.Parameter], gradients: dict[int, Tensor | None]
    ) -> DeviceStep:
        """Step on the device; weights change in place."""

    def secure(self, slots: Sequence[int], /) -> None:
        """Wait until these parameters and their states in DRAM may change."""

    def keep(self, shard: Shard, states: dict[int, dict[str, Any]]) -> None:
        """Take over states that are in DRAM again."""
