"""What a fresh clone promises about itself."""

from importlib.metadata import version
from pathlib import Path

import hydra_engine

ROOT = Path(__file__).resolve().parents[1]


def test_changelog_is_about_this_version():
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0] == f"## {hydra_engine.__version__}" == f"## {version('hydra_engine')}"


def test_readme_shows_the_two_examples_as_they_are():
    readme = (ROOT / "README.md").read_text()
    shown = readme.partition("```diff\n")[2].partition("```")[0].splitlines()
    removed = [line[1:] for line in shown if line.startswith("-")]
    added = [line[1:] for line in shown if line.startswith("+")]
    assert "\n".join(removed) in (ROOT / "examples" / "plain.py").read_text()
    assert "\n".join(added) in (ROOT / "examples" / "with_hydra.py").read_text()
