"""The kernel of this process, watched, and one of a process that finds no compiler."""

import pytest

from hydra_engine.native import native, update
from hydra_engine.native.library import VARIABLE, Library
from hydra_engine.native.update import Native


@pytest.fixture
def taken(monkeypatch):
    """The updates that the kernel of this process makes, by size."""
    if not native().wait():
        pytest.skip(f"no native code: {native().missing_because or 'it is turned off, or another process builds it'}")
    found, step = [], Native.step

    def spy(self, optimizer, updates, *others):
        rest = step(self, optimizer, updates, *others)
        found.extend(each.parameter.numel() for each in updates if each not in rest)
        return rest

    monkeypatch.setattr(Native, "step", spy)
    return found


@pytest.fixture
def without_compiler(monkeypatch, tmp_path):
    """A kernel of a process that finds none, neither in the cache."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    return Native(Library(update.SOURCE))
