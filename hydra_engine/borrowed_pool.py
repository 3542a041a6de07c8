"""The host pool of an evaluation: it gives the model back as it was."""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.dram import HostMemory
from hydra_engine.memory import HostPool
from hydra_engine.shard import Shard


class BorrowedPool(HostPool):
    """Weights are never written to; what layers write to their buffers is seen by later batches, and dropped."""

    def open(self, shards: Sequence[Shard] = (), host: HostMemory | None = None) -> None:
        self._gradients_of_user = [slot.parameter.grad for slot in self.layout.slots]
        super().open(shards, host)

    def close(self) -> None:
        if not self.is_open:
            return
        self.buffers = list(self.layout.buffers)
        super().close()
        for slot, gradient in zip(self.layout.slots, self._gradients_of_user, strict=True):
            slot.parameter.grad = gradient
        del self._gradients_of_user
