"""Ctrl-C as an event."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hydra_engine.events import Event, StopRequested


@contextmanager
def interrupts(put: Callable[[Event], None]) -> Iterator[None]:
    """Turn Ctrl-C into an event: an exception could strike anywhere, also in the middle of a decision.

    A second one does what it always did.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.default_int_handler:  # the user's own; it is theirs to decide
        yield
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        put(StopRequested())

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
