"""A source file of this room as a shared library: compiled once for this machine, beside whatever else is at work."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import torch

from hydra_engine.system import cache_folder

# No sum of products is contracted but where the source says so. The others let loops become vectors and change no bit:
# nobody reads errno, nor the flags that a division by zero leaves.
FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
OF_CAPABILITY = {"AVX2": AVX2, "AVX512": AVX512}  # by which torch chooses its kernels; others: the compiler's default

COMPILERS = ("c++", "g++", "clang++")
VARIABLE = "HYDRA_ENGINE_NATIVE"  # "0": nothing is compiled, and nothing that was is loaded
REMEDY = "install one (g++ or clang++), or name it in CXX"

# Arguments: the new file, its place, the log, the compiler and its own. The last step is atomic: a file that has its
# name is whole.
BUILD = 'new=$1; place=$2; log=$3; shift 3; "$@" -o "$new" 2> "$log" && mv -f "$new" "$place"'


class Library:
    """A shared library that is built in the background, at most once by all processes of a user together.

    A build holds a lock on its folder's lock file, through the compiler itself: it ends when that ends, also when it is
    killed. Who finds the lock held goes on without the library, and looks again.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._mutex = threading.Lock()
        self._build: subprocess.Popen[bytes] | None = None  # begun by this process
        self._loaded: ctypes.CDLL | None = None
        self.missing_because = ""  # why it will never be there; "": it is, or may come yet

    def load(self) -> ctypes.CDLL | None:
        """Return the library if it is there; begin to build it if nobody does. Never waits for a compiler."""
        if _is_off():
            return None
        if self._loaded is None and not self.missing_because:
            with self._mutex:
                try:
                    self._look()
                except OSError as error:
                    self.missing_because = f"{type(error).__name__}: {error}"
        return self._loaded

    def wait(self) -> ctypes.CDLL | None:
        """Return the library after the build in progress, whoever makes it; None: it is not there."""
        if self.load() is None and not self.missing_because and not _is_off():
            if self._build is not None:
                self._build.wait()
            else:
                with self._place().with_suffix(".lock").open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_SH)
        return self.load()

    def _look(self) -> None:
        is_building = self._build is not None and self._build.poll() is None
        if self._loaded is not None or self.missing_because or is_building:
            return
        place = self._place()
        if place.exists():
            self._loaded = ctypes.CDLL(str(place))
        elif self._build is not None:
            log = place.with_suffix(".log")
            told = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            code = f"the compiler ended with exit code {self._build.returncode}"
            self.missing_because = ": ".join((code, *told[:1]))
        else:
            self._begin(place)

    def _place(self) -> Path:
        """The file: its name tells source, headers, flags and kind of machine apart, so it may lie in a shared home."""
        sources = [self._source, *sorted(self._source.parent.glob("*.h"))]
        texts = [each.read_text(encoding="utf-8") for each in sources]
        told = (*texts, *self._flags(), platform.system(), platform.machine())
        digest = hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]
        return cache_folder() / "native" / f"{self._source.stem}-{digest}.so"

    def _flags(self) -> tuple[str, ...]:
        return (*FLAGS, *OF_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), ()))

    def _begin(self, place: Path) -> None:
        compiler = _compiler()
        if not compiler:
            self.missing_because = f"no C++ compiler was found; {REMEDY}"
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        with open(descriptor) as lock, suppress(BlockingIOError):  # another process builds it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if place.exists():  # since we looked
                return
            new, log = place.with_suffix(".new"), place.with_suffix(".log")
            self._build = subprocess.Popen(
                ["sh", "-c", BUILD, "sh", new, place, log, *compiler, *self._flags(), self._source],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                start_new_session=True,  # Ctrl-C is for training
            )


def _is_off() -> bool:
    return os.environ.get(VARIABLE) == "0"


def _compiler() -> list[str]:
    """Return the command of a C++ compiler: what CXX names, or the first one on the path; empty: there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return named if shutil.which(named[0]) else []
    return next(([found] for found in map(shutil.which, COMPILERS) if found), [])
