"""A wheel and a source distribution: both hold the package, and install where nothing but torch is."""

import configparser
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import hydra_engine

ROOT = Path(__file__).resolve().parents[1]
BUILD = "from setuptools import build_meta as build; build.build_{}({!r})"
FILES = (
    "hydra_engine",
    "partitioners",
    "setup.cfg",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
)

pytestmark = pytest.mark.rest


def built(kind, source, folder):
    """Build a distribution from a folder of sources; its path."""
    code = BUILD.format(kind, str(folder))
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    [path] = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Paths of the sdist, of the wheel that is built from it, and of the folder that was unpacked between."""
    base = tmp_path_factory.mktemp("dist")
    source = base / "source"
    for name in FILES:
        files = [ROOT / name] if (ROOT / name).is_file() else [p for p in (ROOT / name).rglob("*") if p.is_file()]
        for path in (each for each in files if "__pycache__" not in each.parts):
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    for name in ("sdist", "wheel", "unpacked"):
        (base / name).mkdir()
    sdist = built("sdist", source, base / "sdist")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(base / "unpacked", filter="data")
        else:
            archive.extractall(base / "unpacked")
    [unpacked] = (base / "unpacked").iterdir()
    return sdist, built("wheel", unpacked, base / "wheel"), unpacked


def test_the_wheel_made_from_the_sdist_holds_every_module(distributions):
    sdist, wheel, _ = distributions
    assert sdist.name == f"hydra_engine-{hydra_engine.__version__}.tar.gz"
    assert wheel.name == f"hydra_engine-{hydra_engine.__version__}-py3-none-any.whl"
    held = set(zipfile.ZipFile(wheel).namelist())
    kinds = (".py", ".md", ".h", ".cpp", ".cu")
    for package in ("hydra_engine", "partitioners"):
        own = [path for path in (ROOT / package).rglob("*") if path.suffix in kinds or path.name == "py.typed"]
        assert {str(path.relative_to(ROOT)) for path in own} <= held
    assert not [name for name in held if name.startswith(("tests", "examples", "docs", "benchmarks"))]


def test_the_wheel_runs_the_demo_in_an_environment_of_its_own(distributions, tmp_path):
    _, wheel, _ = distributions
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    # torch and what it needs are those of this environment; the engine is the wheel's.
    libraries = Path(torch.__file__).parents[1]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, str(wheel)], cwd=tmp_path, check=True, capture_output=True)
    (own / "libraries.pth").write_text(f"{libraries}\n")
    program = tmp_path / "env" / "bin" / "hydra-engine"
    where = [python, "-c", "import hydra_engine; print(hydra_engine.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, check=True, env={}).stdout
    assert own in Path(found.strip()).parents
    line = [program, "demo", "--steps", "2"]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, env={})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].endswith("and deep has every bit that plain PyTorch gives it alone.")


def test_an_editable_install_is_a_path_which_type_checkers_follow(distributions, tmp_path):
    *_, source = distributions
    with zipfile.ZipFile(built("editable", source, tmp_path)) as wheel:
        [path] = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert wheel.read(path).decode().splitlines() == [str(source)]


def test_every_extra_is_documented():
    settings = configparser.RawConfigParser()
    settings.read(ROOT / "setup.cfg")
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert [extra for extra in settings["options.extras_require"] if f"`{extra}`" not in page] == []
