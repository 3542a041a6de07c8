"""A stream that takes no lines, or not all signs, raises nothing."""

import io
import os
import sys

import pytest

from hydra_engine.texts import say, warn


class Raises:
    def write(self, text):
        raise RuntimeError("no")


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", encoding="utf-8")


def full_disk():
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", encoding="utf-8")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("make", [closed_pipe, Raises, lambda: None, full_disk])
def test_what_takes_nothing_raises_nothing(name, make, monkeypatch):
    other = io.StringIO()
    monkeypatch.setattr(sys, "stderr" if name == "stdout" else "stdout", other)
    stream = make()
    monkeypatch.setattr(sys, name, stream)
    (say if name == "stdout" else warn)("a line")
    assert other.getvalue() == ""  # nor does it appear elsewhere
    if isinstance(stream, io.TextIOWrapper):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # its buffer is written as it is closed
        stream.close()


def test_a_sign_that_a_stream_lacks_is_a_question_mark(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    say("学 a")
    assert stream.buffer.getvalue() == b"? a\n"
