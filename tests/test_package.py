"""What a fresh clone promises about itself."""

import configparser
import os
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

import hydra_engine
from tests.structure import measured

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "hydra_engine"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ENGINE.rglob("*.md"), *ROOT.glob("benchmarks/*/*.md")]


def test_changelog_is_about_this_version():
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0] == f"## {hydra_engine.__version__}" == f"## {version('hydra_engine')}"


def test_what_the_two_commands_install_is_pinned():
    """Otherwise today's commit could fail in a year."""
    settings = configparser.ConfigParser()  # fills in the extras that an extra names
    settings.read(ROOT / "setup.cfg")
    extras = settings["options.extras_require"]
    wanted = f"{settings['options']['install_requires']}\n{extras['dev']}".split()
    names = {re.match(r"[\w-]+", each)[0].lower() for each in wanted}
    assert {"torch", "pytest", "ruff", "rich", "optuna", "mkdocs"} <= names
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text().lower(), flags=re.MULTILINE))
    assert names <= pinned


def test_type_checkers_find_what_is_installed():
    """An editable install by an import hook, as without `package_dir`, hides the packages from them."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert settings["options"]["package_dir"].split() == ["=", "."]
    for package in ("hydra_engine", "partitioners"):
        assert "py.typed" in settings["options.package_data"][package]
        assert (ROOT / package / "py.typed").is_file()


def test_what_is_past_a_limit_of_size_says_why():
    assert measured(ENGINE)["past a limit, and no comment says why"] == "none"


def test_readme_shows_the_two_examples_as_they_are():
    readme = (ROOT / "README.md").read_text()
    shown = readme.partition("```diff\n")[2].partition("```")[0].splitlines()
    removed = [line[1:] for line in shown if line.startswith("-")]
    added = [line[1:] for line in shown if line.startswith("+")]
    assert "\n".join(removed) in (ROOT / "examples" / "plain.py").read_text()
    assert "\n".join(added) in (ROOT / "examples" / "with_hydra.py").read_text()


def test_links_of_the_pages_lead_somewhere():
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for path, _, anchor in re.findall(r"\]\((?!https?:)([^)\s#]*)(#?)([^)\s]*)\)", text):
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {path}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
                assert anchor in [heading.lower().replace(" ", "-") for heading in headings], f"{page.name}: {anchor}"


def test_architecture_names_modules_and_methods_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"(?<!/)\b[a-z]+/[a-z_]+\.py\b", text)) - {"tests/test_imports.py", "tests/test_waist.py"}
    modules = {path: (ENGINE / path).read_text() for path in named}
    code = "\n".join(path.read_text() for path in ENGINE.rglob("*.py"))
    for module, name in re.findall(r"\b([a-z]+/[a-z_]+\.py) +([A-Z]\w+)", text):
        assert re.search(rf"^class {name}\b", modules[module], flags=re.MULTILINE), f"{module}: {name}"
    for name, method in re.findall(r"\b([A-Z][a-z]\w+)\.(_?[a-z]\w+)\b", text):
        bodies = re.findall(rf"^class {name}\b.*?(?=^\S|\Z)", code, flags=re.MULTILINE | re.DOTALL)
        assert any(f"    def {method}(" in body for body in bodies), f"{name}.{method}"


def test_each_name_of_the_ways_of_data_stands_in_the_file_beside_it():
    text = (ROOT / "docs" / "architecture.md").read_text()
    ways = text[text.index("## The way of a micro-batch") : text.index("### Evictions")]
    lines = re.findall(r"\b([a-z]+/[a-z_]+\.py) +((?:\w[\w.]*, )*\w[\w.]*)  ", ways)
    assert len(lines) == ways.count(".py ")
    for module, names in lines:
        code = (ENGINE / module).read_text()
        for name, _, method in (each.partition(".") for each in names.split(", ")):
            found = re.search(rf"^(?:class|def) {name}\b.*?(?=^\S|\Z)", code, flags=re.MULTILINE | re.DOTALL)
            assert found, f"{module}: {name}"
            assert not method or f"    def {method}(" in found[0], f"{module}: {name}.{method}"


def test_pages_name_files_that_exist():
    folders = ("docs", "examples", "benchmarks", "hydra_engine", "partitioners", "tests")
    for page in (page for page in PAGES if page.name != "CHANGELOG.md"):  # which also has names of before
        for path in re.findall(rf"`((?:{'|'.join(folders)})/[\w/.-]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_check_names_tests_that_exist():
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}  # of `make test`
    command = ["make", "-n", "--no-print-directory", "check"]
    commands = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    paths = re.findall(r"(?<![\w/])tests/[\w/.]+", commands)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
