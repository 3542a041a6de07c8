"""A run's socket: one line each way, for its owner alone, and no client holds up another one or the run."""

import json
import os
import socket
import stat
import threading
from contextlib import ExitStack, contextmanager

import pytest

from hydra_engine import control
from tests.refused import names, refused


class FakePool:
    """Devices by place; refuses as the orchestrator does."""

    def __init__(self, **devices):
        self.devices = devices
        self.orders = []

    def add_device(self, device):
        self.orders.append(("add", device, threading.current_thread().name))
        if self.devices.get(device) == "in":
            raise ValueError(f"add_device: {device!r} is in already")
        self.devices[device] = "in"
        return device

    def remove_device(self, name, grace_s=None):
        self.orders.append(("remove", name, grace_s))
        if name == "lost":
            raise KeyError("a bug")
        if self.devices.get(name) != "in":
            raise ValueError(f"remove_device: {name!r},\nknown: {list(self.devices)}")
        self.devices[name] = "leaving"


@contextmanager
def steered(pool, directory, **options):
    messages = []
    with control.steered(pool, directory, messages, **options):
        yield messages


@contextmanager
def connected(directory):
    """A client that has said nothing yet."""
    with control._path(directory) as path, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.settimeout(60)
        yield connection


def test_devices_are_listed_added_and_removed(tmp_path):
    pool = FakePool(a="in", b="out")
    with steered(pool, tmp_path) as messages:
        assert control.ask(tmp_path, {"do": "list"})["devices"] == {"a": "in", "b": "out"}
        assert control.ask(tmp_path, {"do": "add", "name": "b"}) == {"devices": {"a": "in", "b": "in"}, "name": "b"}
        answer = control.ask(tmp_path, {"do": "remove", "name": "a", "grace_s": 2.5})
        assert answer == {"devices": {"a": "leaving", "b": "in"}, "name": "a"}
        control.ask(tmp_path, {"do": "remove", "name": "b"})
    assert pool.orders == [("add", "b", "hydra-order"), ("remove", "a", 2.5), ("remove", "b", None)]
    assert messages == []


def test_what_the_pool_refuses_comes_back_as_one_line(tmp_path):
    with steered(FakePool(a="in"), tmp_path):
        for name, told in (("c", "remove_device: 'c', known: ['a']"), ("lost", "KeyError: 'a bug'")):
            with refused(ValueError) as error:
                control.ask(tmp_path, {"do": "remove", "name": name})
            assert str(error.value) == told
        assert control.ask(tmp_path, {"do": "list"})["devices"] == {"a": "in"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"nonsense\n", "Expecting value"),
        (b"\xff\xfe\n", "codec decode"),
        (b"[" * 60000 + b"\n", "recursion"),
        (b"7\n", "TypeError"),
        (b"{}\n", "KeyError 'do'"),
        (b'{"do": "stop"}\n', "'stop' add remove"),
        (b'{"do": "add", "name": 7}\n', "name 7"),
        (b'{"do": "remove", "name": "a", "grace_s": -1}\n', "grace -1"),
        (b'{"do": "remove", "name": "a", "grace_s": NaN}\n', "grace nan"),
        (b'{"do": "remove", "name": "a", "grace_s": true}\n', "grace True"),
    ],
    ids=["no json", "no text", "nested", "a number", "empty", "unknown", "name", "negative", "nan", "bool"],
)
def test_bad_orders_are_answered_and_change_nothing(tmp_path, line, says):
    pool = FakePool(a="in")
    with steered(pool, tmp_path):
        with connected(tmp_path) as connection:
            connection.sendall(line)
            answer = json.loads(control._read_line(connection, 60))
        names(answer["error"], says=says)
        assert "\n" not in answer["error"]
        assert control.ask(tmp_path, {"do": "list"})["devices"] == {"a": "in"}
    assert pool.orders == []


def test_clients_that_say_nothing_or_too_much_or_go_hold_up_nobody(tmp_path):
    with steered(FakePool(a="in"), tmp_path, read_s=0.05), connected(tmp_path), connected(tmp_path) as half:
        half.sendall(b'{"do": ')
        with connected(tmp_path) as endless:
            endless.sendall(b"x" * (control.MOST_BYTES + 1))
        with connected(tmp_path):
            pass
        assert control.ask(tmp_path, {"do": "list"})["devices"] == {"a": "in"}


def test_a_client_that_hangs_does_not_hold_up_the_end_of_the_run(tmp_path):
    with ExitStack() as client, steered(FakePool(), tmp_path, read_s=0.05) as messages:
        client.enter_context(connected(tmp_path))
    assert messages == []


def test_only_the_owner_may_open_it(tmp_path, monkeypatch):
    with steered(FakePool(a="in"), tmp_path):
        found = os.stat(tmp_path / control.NAME)
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o600
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)  # the run's, as the server knows it
        with refused(ValueError, says="somebody"):
            control.ask(tmp_path, {"do": "list"})


def test_nothing_stays_behind(tmp_path):
    with steered(FakePool(), tmp_path):
        assert [each.name for each in tmp_path.iterdir()] == [control.NAME]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_may_have_any_length(tmp_path):
    directory = tmp_path.joinpath(*["d" * 100] * 5)
    directory.mkdir(parents=True)
    with steered(FakePool(a="in"), directory) as messages:
        assert control.ask(directory, {"do": "list"})["devices"] == {"a": "in"}
    assert messages == []


def test_the_socket_of_a_run_that_was_killed_is_replaced(tmp_path):
    killed = control._listen(tmp_path)
    killed.close()
    with refused(ConnectionError, says=tmp_path):
        control.ask(tmp_path, {"do": "list"})
    with steered(FakePool(a="in"), tmp_path) as messages:
        assert control.ask(tmp_path, {"do": "list"})["devices"] == {"a": "in"}
    assert messages == []


def test_without_a_socket_the_run_goes_on_and_says_so(tmp_path):
    (tmp_path / control.NAME).write_text("the user's own")
    with steered(FakePool(), tmp_path) as messages:
        pass
    [message] = messages
    names(message, says=f"{tmp_path} socket")
    assert (tmp_path / control.NAME).read_text() == "the user's own"


@pytest.mark.parametrize("where", ["", "nowhere", "file"])
def test_where_no_run_is_at_work_that_is_said(tmp_path, where):
    (tmp_path / "file").touch()
    with refused(ConnectionError, says=tmp_path / where) as caught:
        control.ask(tmp_path / where, {"do": "list"})
    assert "\n" not in str(caught.value)


def test_a_run_that_does_not_answer_is_not_waited_for_long(tmp_path):
    listening = control._listen(tmp_path)  # and nobody accepts
    with listening, refused(TimeoutError, says="0.05"):
        control.ask(tmp_path, {"do": "list"}, answer_s=0.05)


def test_a_run_that_ends_before_it_answers_is_no_run(tmp_path):
    with control._listen(tmp_path) as listening:
        run = threading.Thread(target=lambda: listening.accept()[0].close())
        run.start()
        with refused(ConnectionError, says=tmp_path):
            control.ask(tmp_path, {"do": "list"})
        run.join()
