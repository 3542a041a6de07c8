"""Those whom people use instead of the engine, each behind the same three calls (`trainer.Trainer`)."""

import fcntl
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path


class Missing(Exception):
    """A peer that is not installed here or does not run here: names it and tells how to get it."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer by the name of its rows."""

    name: str
    module: str
    trainer: str = "Trainer"
    is_exact: bool = True  # each step computes with the weights of the step before
    has_large_micro_batches: bool = False  # each one costs it weights or gradients on the link: as few as fit
    num_warm: int = 0  # steps at least before the first that is timed: those in which it tunes itself

    def load(self):
        """The Trainer class, once all that it compiles at first use is there; raises Missing."""
        module = self._module()
        missing = [need for need in module.NEEDS if not is_installed(need)]
        if missing:
            raise Missing(f"{self.name}: not installed; pip install --no-deps {' '.join(missing)}")
        if module.NEEDS:
            try:
                with sole_builder(self.module):
                    module.build()
            except Exception as error:  # without a GPU or a compiler, some end in errors that say nothing of it
                raise Missing(f"{self.name}: does not run here: {error!r}") from error
        return getattr(module, self.trainer)

    def prepare(self):
        """Begin to compile what it compiles at first use, beside other work: a process, or None for nothing."""
        needs = self._module().NEEDS
        if not needs or not all(map(is_installed, needs)):
            return None
        code = f"from peers import PEERS; PEERS[{self.name!r}].load()"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([sys.executable, "-c", code], env=environment, **silent)

    def version(self):
        """The version that is installed, or None for what belongs to torch."""
        needs = self._module().NEEDS
        return metadata.version(name_of(needs[0])) if needs else None

    def _module(self):
        return import_module(f".{self.module}", __name__)


@contextmanager
def sole_builder(module):
    """Let one process at a time compile a module's extensions, in a folder of their own.

    torch locks what it compiles with a file: one that a killed process left would be waited for without end.
    """
    folder = Path(tempfile.gettempdir()) / "gpu-day-built" / module
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("TORCH_EXTENSIONS_DIR", "TRAINSTREAM_CACHE_DIR"):
        os.environ[name] = str(folder)
    beside = str(Path(sys.executable).parent)  # where pip has put ninja, whether or not anybody activated it
    os.environ["PATH"] = os.pathsep.join([*os.environ.get("PATH", "").split(os.pathsep), beside])
    with open(folder / "builder", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for lock in folder.rglob("lock"):
            lock.unlink()
        yield


def name_of(need):
    """The name of a package in a line like `name==version`."""
    return need.split("==")[0]


def is_installed(need):
    """Whether there is any version of a package: another than the named one may do, and rows tell which it was."""
    try:
        metadata.version(name_of(need))
    except metadata.PackageNotFoundError:
        return False
    return True


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="resident", module="resident"),
        Peer(name="fsdp2", module="fsdp2", has_large_micro_batches=True),
        Peer(name="deepspeed", module="deepspeed", has_large_micro_batches=True),
        Peer(name="roundpipe", module="roundpipe", num_warm=4),
        Peer(name="roundpipe_stale", module="roundpipe", trainer="StaleTrainer", is_exact=False, num_warm=4),
        Peer(name="trainstream", module="trainstream", has_large_micro_batches=True, num_warm=8),
    )
}
