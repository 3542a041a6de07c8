"""The bytes of a device: asked for, granted in order, given back. Nobody waits inside a lane for memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hydra_engine.errors import DeviceOutOfMemory


@dataclass(eq=False, kw_only=True)
class Ticket:
    """A request for bytes: granted once, in its turn, or refused, or cancelled before. Callbacks must not block."""

    # None: all that is free, once nothing else is active. A function is asked when it is the ticket's turn.
    num_bytes: int | Callable[[], int] | None
    granted: Callable[[int], None]
    refused: Callable[[Exception], None]
    activates: bool = False  # from its grant on something runs that will release bytes by itself


class Ledger:
    """Bytes of a device in use, never above its budget.

    Requests are granted strictly in order, each as soon as it fits: a unit that is about to run asks before the next
    unit's slab does, so a claim can never starve the unit in front of it. A request at the head that does not fit
    while nothing is active, so that nothing will be released by itself, is refused.

    Attributes:
        reclaim: releases what is kept for later until so many bytes are free, or nothing of it is left.
        lock: held by whoever changes anything here, and while callbacks run, so that they run in the order of the
            grants; reentrant for a callback that asks.
    """

    def __init__(self, device: str, memory_bytes: int) -> None:
        self.device = device
        self.memory_bytes = memory_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._num_active = 0
        self._closed = False
        self._is_pumping = False
        self._waiting: deque[Ticket] = deque()
        self.reclaim: Callable[[int], None] = lambda _: None
        self.lock = threading.RLock()

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - self.used_bytes

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def request(self, ticket: Ticket) -> None:
        """Queue a request."""
        with self.lock:
            if not self._closed:
                self._waiting.append(ticket)
            self._pump()

    def cancel(self, ticket: Ticket) -> bool:
        """Withdraw a request; False when it is no longer waiting."""
        with self.lock:
            if ticket not in self._waiting:
                return False
            self._waiting.remove(ticket)
            self._pump()
            return True

    def close(self) -> None:
        """Forget who waits, and grant nothing more."""
        with self.lock:
            self._waiting.clear()
            self._closed = True

    def activate(self) -> None:
        """Announce a release, so that nobody is refused before it."""
        with self.lock:
            self._num_active += 1

    def release(self, num_bytes: int, *, deactivates: bool = False) -> None:
        """Give bytes back, and at the end of a unit its activity with them."""
        with self.lock:
            self.used_bytes -= num_bytes
            self._num_active -= deactivates
            assert self.used_bytes >= 0, self.used_bytes
            assert self._num_active >= 0, self._num_active
            self._pump()

    def grow(self, num_bytes: int) -> None:
        """Take more at once, for a unit that turns out larger than known; raises DeviceOutOfMemory."""
        if not self.take(num_bytes):
            raise DeviceOutOfMemory(self.device, num_bytes, self.free_bytes, self.memory_bytes)

    def take(self, num_bytes: int) -> bool:
        """Take more at once, whoever waits; False where there is no room."""
        with self.lock:
            self._make_room(num_bytes)
            fits = num_bytes <= self.free_bytes
            if fits:
                self.used_bytes += num_bytes
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            self._pump()  # more may have been given up than was taken
            return fits

    def _make_room(self, num_bytes: int) -> None:
        """Have what is kept given up, for whoever asks here: nobody else is granted anything of it meanwhile."""
        if num_bytes > self.free_bytes:
            was_pumping, self._is_pumping = self._is_pumping, True
            try:
                self.reclaim(num_bytes)
            finally:
                self._is_pumping = was_pumping

    def settle(self, held_bytes: int, num_bytes: int) -> None:
        """A unit that was granted everything turned out to need `num_bytes`."""
        if num_bytes > held_bytes:
            self.grow(num_bytes - held_bytes)
            return
        with self.lock:
            self.used_bytes -= held_bytes - num_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            self._pump()

    def _pump(self) -> None:
        if self._is_pumping:  # what a callback asks for or gives back is looked at after it
            return
        self._is_pumping = True
        try:
            self._grant()
        finally:
            self._is_pumping = False

    def _grant(self) -> None:
        while self._waiting:
            ticket = self._waiting[0]
            wanted = self._wanted(ticket)
            if wanted is None:
                if self._num_active == 0:
                    self._make_room(self.memory_bytes)
                    wanted = self.free_bytes
            else:
                wanted = self._made_room(ticket, wanted)
            if wanted is not None and wanted <= self.free_bytes:
                self._waiting.popleft()
                self.used_bytes += wanted
                if ticket.num_bytes is not None:  # who takes all does not use all: `settle` tells
                    self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                self._num_active += ticket.activates
                ticket.granted(wanted)
            elif self._num_active == 0:
                self._waiting.popleft()
                ticket.refused(DeviceOutOfMemory(self.device, wanted or 0, self.free_bytes, self.memory_bytes))
            else:
                return

    def _made_room(self, ticket: Ticket, wanted: int) -> int:
        """Make room for a ticket as far as that goes; what it wants then: more, if what it counted on was given up."""
        free = -1
        while free < self.free_bytes < wanted:
            free = self.free_bytes
            self._make_room(wanted)
            wanted = self._wanted(ticket) or 0
        return wanted

    @staticmethod
    def _wanted(ticket: Ticket) -> int | None:
        return ticket.num_bytes() if callable(ticket.num_bytes) else ticket.num_bytes
