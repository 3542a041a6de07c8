"""The inbox loses no event to Ctrl-C or a helper; the first signal is raised where it is safe, a second ends all."""

import os
import signal
import sys
import threading
import warnings
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace

import pytest

from hydra_engine.run import signals as interrupt
from hydra_engine.run.signals import Inbox, Overdue, Signals
from hydra_engine.schedule.events import DataEnded, DataFailed, DeviceAdded, StopRequested
from tests.covering import covering
from tests.refused import names

# What each is raised as.
RAISED = {signal.SIGINT: (KeyboardInterrupt, None), signal.SIGTERM: (SystemExit, 143)}

END = os._exit


class Exited(BaseException):
    """In place of the end of the process."""


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def handlers():
    return [signal.getsignal(number) for number in RAISED]


@pytest.fixture(autouse=True)
def exits(monkeypatch):
    """The exit codes that the process would have ended with; and handlers are put back."""
    codes, before = [], handlers()
    usual = [signal.default_int_handler, signal.SIG_DFL]
    for number, handler in zip(RAISED, usual, strict=True):  # in a job in the background SIGINT is ignored
        signal.signal(number, handler)

    def end(code):
        codes.append(code)
        raise Exited

    monkeypatch.setattr(interrupt.os, "_exit", end)
    monkeypatch.setattr(interrupt, "time", SimpleNamespace(monotonic=count(0.0, interrupt.ECHO_S).__next__))
    yield codes
    assert handlers() == usual
    for number, handler in zip(RAISED, before, strict=True):
        signal.signal(number, handler)


@contextmanager
def signalled(kind, *, deferred=False):
    """Within it signals are handled, and `kind` comes of it. Gives the signals, and what holds the error later."""
    signals = Signals()
    with pytest.raises(kind) as found, signals, signals.deferred() if deferred else nullcontext():
        yield signals, found


@pytest.fixture
def prompt(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)


def inbox_of(*events):
    inbox = Inbox()
    for event in events:
        inbox.put(event)
    return inbox


def take(inbox):
    """The next event."""
    with inbox as event:
        return event


def take_all(inbox):
    found = []
    while not inbox.is_empty:
        found.append(take(inbox))
    return found


def test_events_come_in_order():
    events = [DeviceAdded(0), DeviceAdded(1), DataEnded("task")]
    assert take_all(inbox_of(*events)) == events


def test_a_stop_comes_before_what_was_told_earlier():
    events = [DeviceAdded(0), DataFailed("task", RuntimeError("a worker was killed"), "reading"), DeviceAdded(1)]
    inbox = inbox_of(*events)
    assert take(inbox) == events[0]
    inbox.put(StopRequested())
    assert take_all(inbox) == [StopRequested(), *events[1:]]


def test_who_tells_something_may_handle_it_without_waking_anybody():
    inbox, handled = Inbox(), []
    for event in (DeviceAdded(0), DeviceAdded(1), DataEnded("task"), DeviceAdded(2)):
        inbox.leave(event)
    inbox.let_help(handled.append, (DeviceAdded,))
    inbox.help()
    assert handled == [DeviceAdded(0), DeviceAdded(1)]  # those of its kinds, in order
    assert take(inbox) == DataEnded("task")


@pytest.mark.parametrize("reason", ["another thread has the turn", "a stop was told", "it is over"])
def test_nobody_handles_events_of_whom(reason):
    inbox, handled = Inbox(), []
    inbox.leave(DeviceAdded(0))
    inbox.let_help(handled.append, (DeviceAdded,))
    if reason == "a stop was told":
        inbox.put(StopRequested())
    elif reason == "it is over":
        inbox.end_help()
    thread = threading.Thread(target=inbox.help)
    with inbox.turn if reason == "another thread has the turn" else nullcontext():
        thread.start()
        thread.join()
    assert handled == []
    assert DeviceAdded(0) in take_all(inbox)


def test_who_waits_is_woken_for_what_a_helper_leaves():
    inbox, begun = Inbox(), threading.Event()
    inbox.let_help(lambda _: setattr(inbox, "deadline_s", 0.0), (DeviceAdded,))

    def helper():
        begun.wait()
        with inbox.turn:  # or the other thread takes what is left for it at once
            inbox.leave(DeviceAdded(0))
            inbox.leave(DataEnded("task"))
            inbox.help()

    thread = threading.Thread(target=helper)
    thread.start()
    begun.set()
    assert take(inbox) == DataEnded("task")
    assert take(inbox) == Overdue()  # a deadline that a helper has set
    thread.join()


@pytest.mark.parametrize("number", RAISED)
def test_first_signal_is_raised_at_once(number):
    kind, code = RAISED[number]
    with signalled(kind) as (_, found):
        signal.raise_signal(number)
        pytest.fail("not reached")
    assert getattr(found.value, "code", None) == code


@pytest.mark.parametrize("number", RAISED)
def test_first_signal_waits_for_the_end_of_what_is_not_to_be_cut_off(number):
    done = []
    with signalled(RAISED[number][0]) as (signals, _):
        with signals.deferred():
            signal.raise_signal(number)
            done.append("deferred")
        done.append("after it")
    assert done == ["deferred", "after it"]


@pytest.mark.parametrize("number", RAISED)
def test_first_signal_is_an_event_of_a_run(number):
    inbox = inbox_of(DeviceAdded(0))
    with signalled(RAISED[number][0], deferred=True) as (signals, _):
        signals.tell(inbox)
        signal.raise_signal(number)
        assert take_all(inbox) == [StopRequested(), DeviceAdded(0)]


def test_run_is_told_of_a_signal_before_it_began():
    inbox = Inbox()
    with signalled(KeyboardInterrupt, deferred=True) as (signals, _):
        ctrl_c()
        signals.tell(inbox)
        assert take(inbox) == StopRequested()


def test_signal_goes_before_another_error_and_names_it():
    with signalled(KeyboardInterrupt, deferred=True) as (_, found):
        ctrl_c()
        raise ValueError("boom")
    assert repr(found.value.__context__) == "ValueError('boom')"


def test_exit_code_of_another_cause_stays():
    with signalled(SystemExit, deferred=True) as (_, found):
        ctrl_c()
        raise SystemExit(75)
    assert found.value.code == 75


def test_signal_that_was_swallowed_is_raised_at_the_end():
    done = []
    with signalled(SystemExit):
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:
            done.append("swallowed")
    assert done == ["swallowed"]


def test_block_may_be_entered_again():
    signals = Signals()
    with pytest.raises(KeyboardInterrupt), signals:
        ctrl_c()
    with signals:
        pass
    with pytest.raises(SystemExit), signals:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("second", RAISED)
@pytest.mark.parametrize("first", RAISED)
def test_second_signal_ends_the_process_at_once(first, second, exits, capfd):
    inbox = inbox_of(DeviceAdded(0))
    with signalled(RAISED[first][0], deferred=True) as (signals, _):
        signals.tell(inbox)
        signal.raise_signal(first)
        with pytest.raises(Exited), inbox:
            signal.raise_signal(second)
    assert exits == [128 + second]
    lines = capfd.readouterr().err.splitlines()
    for line, number in zip(lines, (first, second), strict=True):
        names(line, says=f"hydra_engine {signal.Signals(number).name}")


@covering(first=list(RAISED), second=list(RAISED), at_prompt=[False, True])
def test_a_signal_that_comes_twice_at_once_is_one(first, second, at_prompt, exits, monkeypatch, capfd):
    """A terminal or `timeout` signals the group of processes, and a wrapper in it passes the signal on."""
    if at_prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    times = iter([100.0, 100.0, 100.002, 100.999, 101.0])
    monkeypatch.setattr(interrupt.time, "monotonic", times.__next__)
    inbox = inbox_of(DeviceAdded(0))
    with signalled(RAISED[first][0], deferred=True) as (signals, _):
        signals.tell(inbox)
        for number in (first, second, second, second):
            signal.raise_signal(number)
        assert take_all(inbox) == [StopRequested(), DeviceAdded(0)]
        assert exits == []
        with pytest.raises(KeyboardInterrupt if at_prompt and second == signal.SIGINT else Exited):
            signal.raise_signal(second)
    assert capfd.readouterr().err.count("another signal cuts that off") == 1


def test_second_signal_ends_the_process_while_the_first_cleans_up(exits):
    with signalled(SystemExit):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            with pytest.raises(Exited):
                ctrl_c()
    assert exits == [130]


@pytest.mark.usefixtures("prompt")
def test_at_a_prompt_a_second_ctrl_c_waits_for_the_event_in_hand(exits):
    inbox, done = inbox_of(DeviceAdded(0), DeviceAdded(1)), []

    def work():
        ctrl_c()
        with inbox as event:
            with inbox as other:
                ctrl_c()
                done.append(other)
            done.append(event)
        done.append("not reached")

    with signalled(KeyboardInterrupt, deferred=True) as (signals, _):
        signals.tell(inbox)
        work()
    assert done == [DeviceAdded(0), StopRequested()]
    assert take(inbox) == DeviceAdded(1)  # nothing is lost
    assert exits == []


@pytest.mark.usefixtures("prompt")
@pytest.mark.parametrize("is_told", [True, False])
def test_at_a_prompt_a_second_ctrl_c_between_events_strikes_at_once(is_told, exits):
    inbox = Inbox()
    with signalled(KeyboardInterrupt, deferred=True) as (signals, _):
        if is_told:
            signals.tell(inbox)
        ctrl_c()
        ctrl_c()
        pytest.fail("not reached")
    assert inbox.is_empty != is_told
    assert exits == []


@pytest.mark.usefixtures("prompt")
def test_at_a_prompt_a_second_sigterm_ends_the_process(exits):
    with signalled(KeyboardInterrupt, deferred=True):
        ctrl_c()
        with pytest.raises(Exited):
            signal.raise_signal(signal.SIGTERM)
    assert exits == [143]


@pytest.mark.parametrize("number", RAISED)
@pytest.mark.parametrize("ignored", [True, False])
def test_handler_of_the_user_is_left_alone(number, ignored):
    seen, before, inbox = [], signal.getsignal(number), Inbox()
    handler = signal.SIG_IGN if ignored else lambda *_: seen.append("mine")
    signal.signal(number, handler)
    try:
        with Signals() as signals, signals.deferred():
            signals.tell(inbox)
            signal.raise_signal(number)
            assert signal.getsignal(number) is handler
            [other] = RAISED.keys() - {number}
            assert signal.getsignal(other) == signals._handle
        assert signal.getsignal(number) is handler
        assert inbox.is_empty
    finally:
        signal.signal(number, before)
    assert seen == ([] if ignored else ["mine"])


def test_other_threads_change_nothing():
    found = []

    def work():
        with Signals():
            found.extend(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == handlers()


def status_of_child(work):
    """How a forked process ends that calls `work`; 0 where it returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which the child does not use
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except KeyboardInterrupt:
            code = 2
        finally:
            END(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_forked_process_ends_as_ever():
    """A loader's, say: whoever ends it by SIGTERM waits for it then."""

    def twice():
        ctrl_c()
        ctrl_c()

    with Signals() as signals, signals.deferred():
        assert status_of_child(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM
        assert status_of_child(ctrl_c) == 0
        assert status_of_child(twice) == 2


def test_death_of_a_loaders_worker_is_not_raised_where_it_harms():
    """DataLoader's handler raises in the main thread, in the middle of whatever that does."""
    heard = []

    def like_dataloader(number, _):
        heard.append(number)
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    before = signal.signal(signal.SIGCHLD, like_dataloader)
    try:
        with Signals() as signals:
            with pytest.raises(RuntimeError, match="DataLoader worker"):
                signal.raise_signal(signal.SIGCHLD)
            with signals.deferred():
                signal.raise_signal(signal.SIGCHLD)
            assert signal.getsignal(signal.SIGCHLD) is like_dataloader
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert heard == [signal.SIGCHLD] * 2
