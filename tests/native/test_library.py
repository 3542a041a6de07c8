"""The native code is built once, in the background, whatever happens to those who build it."""

import os
import shutil
import signal
import stat

import pytest

from hydra_engine.native.library import COMPILERS, VARIABLE, Library
from hydra_engine.native.update import SOURCE
from tests.refused import names

REAL = next(filter(None, map(shutil.which, COMPILERS)), None)
pytestmark = pytest.mark.skipif(REAL is None, reason="needs a C++ compiler")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty cache, with a small source and a compiler that notes its calls and goes on when `gate` is written to."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tiny.cpp").write_text('extern "C" { int hydra_update() { return 7; } }')
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho called >> {tmp_path}/calls\nread line < {tmp_path}/gate\nexec {REAL} "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    os.mkfifo(tmp_path / "gate")
    return tmp_path


def open_gate(folder):
    (folder / "gate").write_text("go\n")


def library(folder):
    return Library(folder / "tiny.cpp")


def num_calls(folder):
    return (folder / "calls").read_text().count("called")


def test_nobody_waits_for_a_build_and_all_have_it_afterwards(folder):
    """A lock of one `Library` keeps another one out as it does another process."""
    first, second = library(folder), library(folder)
    assert first.load() is None
    assert second.load() is None
    assert first.load() is None
    open_gate(folder)
    assert second.wait().hydra_update() == 7
    assert first.wait().hydra_update() == 7
    assert library(folder).load().hydra_update() == 7
    assert num_calls(folder) == 1
    assert first.missing_because == second.missing_because == ""


def test_a_build_that_was_killed_is_made_anew_by_the_next(folder):
    first, second = library(folder), library(folder)
    assert first.load() is None
    assert second.load() is None
    os.killpg(first._build.pid, signal.SIGKILL)
    assert first.wait() is None
    names(first.missing_because, says="compiler -9")
    while second._build is None:  # until the last process of the group is gone, which holds the lock
        assert second.load() is None
    open_gate(folder)
    assert second.wait().hydra_update() == 7


def test_a_compiler_that_fails_is_told(folder):
    (folder / "tiny.cpp").write_text("nonsense")
    mine = library(folder)
    assert mine.load() is None
    open_gate(folder)
    assert mine.wait() is None
    names(mine.missing_because, says="compiler 1: error")
    assert mine.load() is None


def test_a_cache_that_cannot_be_written_is_told(folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    mine = library(folder)
    assert mine.load() is None
    names(mine.missing_because, says="NotADirectoryError")


def test_a_file_that_is_no_library_is_told(folder):
    mine = library(folder)
    place = mine._place()
    place.parent.mkdir(parents=True)
    place.write_text("not a library")
    assert mine.load() is None
    names(mine.missing_because, says="OSError")


def test_nothing_is_built_or_loaded_where_it_is_turned_off(folder, monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    assert library(folder).load() is None
    assert library(folder).wait() is None
    assert not (folder / "cache").exists()


def test_another_source_or_header_or_other_flags_are_another_file(folder, monkeypatch):
    mine = library(folder)
    before = mine._place()
    monkeypatch.setattr("hydra_engine.native.library.FLAGS", ("-O1",))
    other = mine._place()
    (folder / "tiny.h").write_text("// more")
    with_header = mine._place()
    (folder / "tiny.cpp").write_text("// more")
    assert len({before, other, with_header, mine._place()}) == 4


@pytest.mark.rest
def test_the_source_has_no_warning(folder):
    """Compiled as the engine compiles it, for whatever torch takes this processor to be."""
    mine = Library(SOURCE)
    mine.load()
    open_gate(folder)
    assert mine.wait() is not None, mine.missing_because
    assert mine._place().with_suffix(".log").read_text() == ""
