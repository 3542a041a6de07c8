"""The inbox loses no event to Ctrl-C, and a second Ctrl-C waits for the event in hand."""

import signal

import pytest

from hydra_engine.events import DataEnded, DeviceAdded, StopRequested
from hydra_engine.interrupt import Inbox


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def test_events_come_in_order():
    inbox = Inbox()
    events = [DeviceAdded(0), DeviceAdded(1), DataEnded("task")]
    for event in events:
        inbox.put(event)
    found = []
    while not inbox.is_empty:
        with inbox as event:
            found.append(event)
    assert found == events


def test_first_ctrl_c_is_an_event():
    inbox = Inbox()
    inbox.put(DeviceAdded(0))
    with inbox.interrupts():
        ctrl_c()
        with inbox as event:
            assert event == DeviceAdded(0)
        with inbox as event:
            assert event == StopRequested()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_ctrl_c_waits_for_the_event_in_hand():
    inbox, done = Inbox(), []
    for device in range(3):
        inbox.put(DeviceAdded(device))

    def work():
        ctrl_c()
        with inbox as event:
            with inbox as other:
                ctrl_c()
                done.append(other)
            done.append(event)
        done.append("not reached")

    with pytest.raises(KeyboardInterrupt), inbox.interrupts():
        work()
    assert done == [DeviceAdded(1), DeviceAdded(0)]
    with inbox as event:  # nothing is lost
        assert event == DeviceAdded(2)


def test_second_ctrl_c_between_events_strikes_at_once():
    inbox = Inbox()

    def work():
        ctrl_c()
        ctrl_c()

    with pytest.raises(KeyboardInterrupt), inbox.interrupts():
        work()
    with inbox as event:
        assert event == StopRequested()


def test_handler_of_the_user_is_left_alone():
    seen, before = [], signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda *_: seen.append("mine"))
    try:
        inbox = Inbox()
        with inbox.interrupts():
            ctrl_c()
        assert inbox.is_empty
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["mine"]
