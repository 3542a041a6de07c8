"""Packages for the machine of the GPU day: what is refused, what is printed, what is installed."""

import subprocess
import sys
import zipfile

import pytest

from tests.test_benchmarks import loaded, main_of


@pytest.fixture
def wheels(monkeypatch):
    return loaded(main_of("gpu_day").with_name("wheels.py"), monkeypatch)


def write_wheel(folder, name, version="1.0", tags="py3-none-any", files=()):
    """A wheel of one module, `name`.py, that knows its version."""
    path = folder / f"{name}-{version}-{tags}.whl"
    info = f"{name}-{version}.dist-info"
    contents = {
        f"{name}.py": f"version = {version!r}\n",
        **dict.fromkeys(files, ""),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tags}\n",
    }
    record = f"{info}/RECORD"
    contents[record] = "".join(f"{each},,\n" for each in [*contents, record])
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in contents.items():
            archive.writestr(each, text)
    return path


def test_versions_are_pinned_once_and_each_need_is_a_package(wheels):
    names = [package.name for package in wheels.PACKAGES]
    assert len(set(names)) == len(names)
    assert {package.needed_by for package in wheels.PACKAGES} <= {"benchmark", *names}
    assert all(package.version[0].isdigit() for package in wheels.PACKAGES)
    assert [package.name for package in wheels.PACKAGES if package.from_source] == ["deepspeed"]


def test_more_bytes_than_the_limit_are_refused(wheels, tmp_path):
    size = write_wheel(tmp_path, "small").stat().st_size
    wheels.check_size(tmp_path, size)
    with pytest.raises(RuntimeError, match=f"take {size} bytes, limit {size - 1}; drop the largest from PACKAGES"):
        wheels.check_size(tmp_path, size - 1)


def test_table_has_a_row_per_wheel_the_largest_first_and_the_sum(wheels, tmp_path):
    small = write_wheel(tmp_path, "pydantic_core", "2.0", "cp312-cp312-manylinux_2_17_x86_64").stat().st_size
    large = write_wheel(tmp_path, "deepspeed", files=wheels.DEEPSPEED_SOURCES).stat().st_size
    rows = [line.split() for line in wheels.table(tmp_path).splitlines()]
    assert rows == [
        ["package", "version", "bytes", "needed", "by"],
        ["deepspeed", "1.0", f"{large:,}", "benchmark"],
        ["pydantic_core", "2.0", f"{small:,}", "pydantic"],
        ["sum", f"{large + small:,}", "limit", "62,914,560"],
    ]


def test_a_deepspeed_without_what_is_compiled_there_is_refused(wheels, tmp_path):
    wheels.check_deepspeed(write_wheel(tmp_path, "deepspeed", files=wheels.DEEPSPEED_SOURCES))
    *kept, lost = wheels.DEEPSPEED_SOURCES
    with pytest.raises(RuntimeError, match=f"lacks \\['{lost}'\\]; pin another version"):
        wheels.check_deepspeed(write_wheel(tmp_path, "deepspeed", files=kept))
    tags = "cp312-cp312-linux_x86_64"
    with pytest.raises(RuntimeError, match="is not pure Python"):
        wheels.check_deepspeed(write_wheel(tmp_path, "deepspeed", tags=tags, files=wheels.DEEPSPEED_SOURCES))


def test_gathered_wheels_replace_those_of_before(wheels, tmp_path, monkeypatch):
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "deepspeed", "0.1")

    def write(package, into):
        files = wheels.DEEPSPEED_SOURCES if package.from_source else ()
        write_wheel(into, package.name.replace("-", "_"), package.version, files=files)

    monkeypatch.setattr(wheels, "download", write)
    monkeypatch.setattr(wheels, "build", write)
    wheels.gather(folder)
    assert sorted(tuple(wheel.name.split("-")[:2]) for wheel in folder.iterdir()) == sorted(
        (package.name.replace("-", "_"), package.version) for package in wheels.PACKAGES
    )


def test_what_pip_cannot_do_is_told(wheels, tmp_path):
    with pytest.raises(RuntimeError, match=r"pip install --no-index .* ended with 1: .*no_such"):
        wheels.pip("install", "--no-index", "--target", str(tmp_path), str(tmp_path / "no_such-1.0-py3-none-any.whl"))


def test_wheels_are_installed_once_and_those_of_another_python_left_out(wheels, tmp_path, monkeypatch):
    folder, cache = tmp_path / "wheels", tmp_path / "cache"
    folder.mkdir()
    cache.mkdir()
    write_wheel(folder, "first_peer", "1.5")
    write_wheel(folder, "second_peer", tags="cp27-cp27m-manylinux1_x86_64")
    installed = wheels.install(folder, cache)
    assert list(cache.iterdir()) == [installed]
    shown = "import first_peer; print(first_peer.version, first_peer.__file__)"
    printed = subprocess.check_output([sys.executable, "-c", shown], env={"PYTHONPATH": str(installed)}, text=True)
    assert printed.split() == ["1.5", str(installed / "first_peer.py")]
    assert not (installed / "second_peer.py").exists()
    with monkeypatch.context() as patched:
        patched.setattr(wheels, "pip", None)
        assert wheels.install(folder, cache) == installed
    write_wheel(folder, "first_peer", "1.5", files=["more.py"])
    assert wheels.install(folder, cache) != installed


def test_nothing_is_installed_without_wheels(wheels, tmp_path):
    assert wheels.install(tmp_path / "nowhere", tmp_path) is None
    assert list(tmp_path.iterdir()) == []
