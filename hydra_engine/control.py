"""The socket by which `hydra-engine devices` steers a run: in the run's directory, for its owner alone.

    client                                              server, a thread of the run
    {"do": "list"}                               ---->
    {"do": "add", "name": "cuda:1"}              ---->
    {"do": "remove", "name": ..., "grace_s": 30} ---->
                                                 <----  {"devices": {"cuda:0": "in"}, "name": "cuda:1"}
                                                 <----  {"error": "..."}

One line of JSON each way, and the connection ends. The server takes one client after the other, and none has longer
than `READ_S` to say what it wants. Nothing of the package is imported, so that the command needs no torch.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

__all__ = ["ask"]

NAME = "CONTROL"
MOST_BYTES = 2**16  # of a line, either way
READ_S = 1.0  # that a client has to send its line, and to take the answer: the next one waits meanwhile
ANSWER_S = 60.0  # that a client waits: a GPU that is added is opened first
PATIENCE_S = 10.0  # that the end of a run waits for an answer that is under way
ORDER, MOST_ORDERS = "hydra-order", 16  # threads that answer, at the same time


class Pool(Protocol):
    """Devices that come and go; `ModelOrchestrator` is one. From any thread."""

    @property
    def devices(self) -> Mapping[str, str]:
        """Return the place of each device, "in", "leaving" or "out"."""

    def add_device(self, device: Any) -> str:
        """Add a device, or one that was removed, by its name. Return its name; ValueError for what cannot be."""

    def remove_device(self, name: str, grace_s: float | None = None) -> None:
        """Let a device go; ValueError for what cannot be."""


@contextmanager
def steered(
    pool: Pool, directory: str | os.PathLike[str], messages: list[str], *, read_s: float = READ_S
) -> Iterator[None]:
    """Let the owner of this directory, which one run has for itself, steer a pool during the block.

    Where there can be no socket, `messages` says so, and nothing else happens.
    """
    listening = None
    try:
        listening = _listen(directory)
    except OSError as error:
        messages.append(
            f"{os.fspath(directory)} takes no socket, so `hydra-engine devices` does not reach this run: {error}; give "
            f"a checkpoint_dir on a local disk"
        )
    if listening is None:
        yield
        return
    answering: list[threading.Thread] = []
    thread = threading.Thread(
        target=_serve, args=(listening, pool, messages, read_s, answering), name="hydra-control", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        with suppress(OSError), _path(directory) as path:
            os.unlink(path)
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # which ends accept()
        deadline_s = time.monotonic() + PATIENCE_S
        thread.join(PATIENCE_S)
        for each in answering:
            each.join(max(0.0, deadline_s - time.monotonic()))
        if any(each.is_alive() for each in answering):
            messages.append(f"`hydra-engine devices`: an order did not end; its thread {ORDER!r} was left behind")
        listening.close()


def ask(directory: str | os.PathLike[str], order: Mapping[str, Any], *, answer_s: float = ANSWER_S) -> dict[str, Any]:
    """Send an order to the run that saves in a directory, and return its answer.

    Raises ValueError with what the run says of an order that it refuses, OSError where no run takes orders.
    """
    where = os.fspath(directory)
    rule = "limit: the checkpoint_dir of a run of yours, while it trains"
    try:
        with _path(directory) as path, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(answer_s)
            connection.connect(path)
            connection.sendall(json.dumps(order).encode() + b"\n")
            answer = json.loads(_read_line(connection, answer_s))
    except (FileNotFoundError, NotADirectoryError, ConnectionError) as error:
        raise ConnectionError(f"RUN: no run takes orders in {where}, {rule}; give that directory") from error
    except PermissionError as error:
        raise PermissionError(f"RUN: {where} belongs to somebody else, {rule}; ask its owner") from error
    except TimeoutError as error:
        raise TimeoutError(
            f"RUN: the run in {where} has not answered for {answer_s:g} seconds; see how it is with `list`"
        ) from error
    if "error" in answer:
        raise ValueError(str(answer["error"]))
    return dict(answer)


@contextmanager
def _path(directory: str | os.PathLike[str]) -> Iterator[str]:
    """Give the socket's path, through the directory's descriptor: a longer one than 107 bytes is no address."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)


def _listen(directory: str | os.PathLike[str]) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _path(directory) as path:
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):  # of a run that was killed
                    os.unlink(path)
            listening.bind(path)
            os.chmod(path, 0o600)  # nobody can connect yet
        listening.listen()
    except BaseException:
        listening.close()
        raise
    return listening


def _serve(
    listening: socket.socket, pool: Pool, messages: list[str], read_s: float, answering: list[threading.Thread]
) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError as error:
            if error.errno != errno.EINVAL:  # as after shutdown()
                messages.append(f"`hydra-engine devices` reaches this run no more: {error}")
            return
        # An order may wait, for a device that leaves, and others must not wait with it.
        answering[:] = [each for each in answering if each.is_alive()]
        if len(answering) == MOST_ORDERS:
            connection.close()
            continue
        answering.append(threading.Thread(target=_answer, args=(connection, pool, read_s), name=ORDER, daemon=True))
        answering[-1].start()


def _answer(connection: socket.socket, pool: Pool, read_s: float) -> None:
    with connection, suppress(OSError):  # it has gone, or takes too long
        line = _read_line(connection, read_s)
        answer = _obeyed(pool, line) if _is_owner(connection) else {"error": "RUN: this run is somebody else's"}
        connection.settimeout(read_s)
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _read_line(connection: socket.socket, limit_s: float) -> bytes:
    deadline_s, line = time.monotonic() + limit_s, b""
    while not line.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        received = connection.recv(MOST_BYTES)
        if not received or len(line) + len(received) > MOST_BYTES:
            raise ConnectionError
        line += received
    return line


def _is_owner(connection: socket.socket) -> bool:
    """Return True if the other end is the user who runs this: some file systems ignore the mode of a socket."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


def _obeyed(pool: Pool, line: bytes) -> dict[str, Any]:
    try:
        order = json.loads(line)
        what, name, grace_s = order["do"], order.get("name", ""), order.get("grace_s")
        is_grace = grace_s is None or (type(grace_s) in (int, float) and 0 <= grace_s <= threading.TIMEOUT_MAX)
        if not isinstance(name, str) or not is_grace:
            raise ValueError(f"{name!r} and a grace of {grace_s!r}, limit: a name, and seconds of 0 or more, or none")
        if what == "add":
            name = pool.add_device(name)
        elif what == "remove":
            pool.remove_device(name, grace_s)
        elif what != "list":
            raise ValueError(f"{what!r}, known: list, add, remove; the run may be of another version")
        return {"devices": dict(pool.devices), "name": name}
    except Exception as error:  # the thread goes on, whatever was asked
        known = isinstance(error, (ValueError, RuntimeError)) and str(error)
        return {"error": " ".join(str(error).split()) if known else f"{type(error).__name__}: {error}"}
