"""Carry to a machine without a network the Python packages that it lacks.

    python benchmarks/gpu_day/wheels.py     # gather them, on a machine with a network; `make gpu-wheels` does the same

There `install()` puts them into a folder of their own, for PYTHONPATH. torch, numpy and what else that machine has are
not among them.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "wheels"
LIMIT_BYTES = 60 * 2**20

# What that machine runs. pip matches a platform's name exactly, so every name that a wheel may have is listed.
PYTHON = "3.12"
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 24, 17, 12, 5)),
    *(f"manylinux{year}_x86_64" for year in (2014, 2010, 1)),
)


class Package(NamedTuple):
    name: str
    version: str
    needed_by: str
    from_source: bool = False  # no wheel of it is published


# Requirements of these (`Requires-Dist` in their METADATA) that are not listed are on that machine.
PACKAGES = (
    Package("roundpipe", "0.1.1", "benchmark"),
    Package("trainstream", "0.4.1", "benchmark"),
    Package("deepspeed", "0.19.8", "benchmark", from_source=True),
    Package("beartype", "0.22.9", "roundpipe"),
    Package("hjson", "3.1.0", "deepspeed"),
    Package("pydantic", "2.14.3", "deepspeed"),
    Package("pydantic-core", "2.50.4", "pydantic"),
    Package("annotated-types", "0.8.0", "pydantic"),
    Package("typing-inspection", "0.4.5", "pydantic"),
    Package("typing-extensions", "4.16.0", "pydantic"),
)

# What DeepSpeed compiles there when its CPU Adam is first used, and what compiles it. A wheel without them imports all
# the same, and fails minutes into the benchmark.
DEEPSPEED_SOURCES = (
    "deepspeed/ops/op_builder/builder.py",
    "deepspeed/ops/op_builder/cpu/cpu_adam.py",
    "deepspeed/ops/csrc/adam/cpu_adam.cpp",
    "deepspeed/ops/csrc/adam/cpu_adam_impl.cpp",
    "deepspeed/ops/csrc/includes/cpu_adam.h",
    "deepspeed/ops/csrc/includes/simd.h",
)


def gather(folder=FOLDER):
    """Download or build the wheel of each of `PACKAGES`, and put them into `folder` in place of what it holds."""
    with tempfile.TemporaryDirectory() as name:
        gathered = Path(name)
        for package in PACKAGES:
            (build if package.from_source else download)(package, gathered)
        check_deepspeed(wheel_of("deepspeed", gathered))
        check_size(gathered)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for wheel in gathered.glob("*.whl"):
            shutil.move(wheel, folder)


def download(package, folder):
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON, *platforms]
    pip("download", "--no-deps", *target, "--dest", str(folder), f"{package.name}=={package.version}")


def build(package, folder):
    # DeepSpeed's setup compiles nothing then, so the wheel holds only Python and sources, and any Python may build it.
    source = ["--no-binary", package.name, f"{package.name}=={package.version}"]
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), *source, DS_BUILD_OPS="0")


def pip(*arguments, **environment):
    command = [sys.executable, "-m", "pip", "-qq", *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")


def check_deepspeed(wheel):
    """Raise unless `wheel` runs on any machine and holds what is compiled there."""
    with zipfile.ZipFile(wheel) as archive:
        lacking = sorted(set(DEEPSPEED_SOURCES) - set(archive.namelist()))
    if lacking or not wheel.name.endswith("-py3-none-any.whl"):
        raise RuntimeError(
            f"{wheel.name}: is not pure Python, or lacks {lacking}; pin another version in PACKAGES, or correct "
            "DEEPSPEED_SOURCES"
        )


def check_size(folder, limit_bytes=LIMIT_BYTES):
    num_bytes = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if num_bytes > limit_bytes:
        raise RuntimeError(
            f"the wheels take {num_bytes} bytes, limit {limit_bytes}; drop the largest from PACKAGES:\n{table(folder)}"
        )


def wheel_of(name, folder):
    [wheel] = folder.glob(f"{name.replace('-', '_')}-*.whl")
    return wheel


def table(folder=FOLDER):
    """Return the wheels in `folder`, the largest first, and their sum."""
    needed_by = {package.name.replace("-", "_"): package.needed_by for package in PACKAGES}
    rows = []
    for wheel in folder.glob("*.whl"):
        name, version, *_ = wheel.name.split("-")
        rows.append((name, version, wheel.stat().st_size, needed_by.get(name, "-")))
    rows.sort(key=lambda row: -row[2])
    rows.append(("sum", "", sum(row[2] for row in rows), f"limit {LIMIT_BYTES:,}"))
    header = f"{'package':<20}{'version':<10}{'bytes':>12}  needed by"
    return "\n".join([header, *(f"{name:<20}{version:<10}{size:>12,}  {why}" for name, version, size, why in rows)])


def install(folder=FOLDER, cache=None):
    """Return a folder for PYTHONPATH in which the wheels of `folder` are installed, or None without any.

    Each set of wheels is installed once into `cache` (default: the folder of temporary files). Wheels for another
    Python than the present one are left out.
    """
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = [wheel for wheel in sorted(folder.glob("*.whl")) if wheel.name.split("-")[-2] in ("none", "abi3", version)]
    if not wheels:
        return None
    contents = hashlib.sha256(version.encode())
    for wheel in wheels:
        contents.update(wheel.name.encode() + wheel.read_bytes())
    cache = Path(tempfile.gettempdir() if cache is None else cache)
    installed = cache / f"gpu-day-{contents.hexdigest()[:16]}"
    if not installed.exists():
        # Whole or not at all, also where two begin at once or one is killed.
        with tempfile.TemporaryDirectory(dir=cache) as partial:
            target = Path(partial) / "site"
            options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(target)]
            pip("install", *options, *map(str, wheels))
            try:
                target.rename(installed)
            except OSError:
                if not installed.exists():
                    raise
    return installed


if __name__ == "__main__":
    gather()
    print(table())
