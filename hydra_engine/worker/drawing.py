"""Random numbers that one micro-batch draws: which stream gives them, and where they leave it."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from hydra_engine.data import RandomState, Redirected, Stream, TaskGenerator, capture, installed
from hydra_engine.devices import DeviceGenerator


@dataclass(eq=False, kw_only=True)
class Drawing:
    """Gives one micro-batch, which runs inside it, the random numbers of its task."""

    state: RandomState  # so far; after the forward, the one that the next shard goes on from
    generator: DeviceGenerator | None  # the device's, which goes on from `state`; None: kernels draw from the CPU's
    locked: bool  # the process-wide generators become the micro-batch's own
    redirects: bool  # single draws from the CPU's generator are taken from `state` instead
    is_compiled: bool  # layers are, and look for the mode that redirects them
    _before: bytes = field(default=b"", init=False)  # state of the device's generator, as the forward begins
    _locks: ExitStack | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._mode = TaskGenerator(self.state.torch)

    def __enter__(self) -> Drawing:
        if self.locked:  # in a backward, too, which may run a forward again
            with ExitStack() as entered:
                entered.enter_context(installed(Stream(self.state)))
                entered.enter_context(Redirected(self._mode))
                self._locks = entered.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._locks is not None:
            self._locks.__exit__(*exc)

    def forward(self) -> AbstractContextManager[TaskGenerator | None]:
        """Return the context of a forward, whose draws `move` the state."""
        if self.generator is not None:
            self._before = self.generator.install(self.state.device)
        if self.locked or not self.redirects:
            return nullcontext(self._mode if self.locked else None)
        return self._mode if self.is_compiled else Redirected(self._mode)

    def move(self, drawn: TaskGenerator | None) -> None:
        """Move the state by what the forward has drawn; a backward, which may run it again, does not move it."""
        if self.locked:
            now = capture()
            self.state = self.state._replace(python=now.python, numpy=now.numpy)
        if drawn is not None and (state := drawn.state) is not self.state.torch:
            self.state = self.state._replace(torch=state)
        if self.generator is not None:
            before, after = self._before, self.generator.state()
            if not self.generator.same_seed(before, after):
                raise RuntimeError(
                    "a layer seeded the device's random generator in its forward (torch.manual_seed() seeds those of "
                    "all devices), limit: before training; let it draw from a torch.Generator of its own"
                )
            if after != before:  # a seed stays one until something is drawn
                self.state = self.state._replace(device=after)
