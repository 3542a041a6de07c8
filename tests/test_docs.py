"""What the documentation promises: its code runs, its links lead somewhere, the API pages name all that is public."""

import dataclasses
import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hydra_engine

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
NAMES = DOCS / "names.py"  # what pages call `model`, `loader` and so on
COMPLETE = {"README.md", "docs/README.md", "docs/start.md"}  # run when pasted, without names.py
QUICK = {"README.md"} | {f"docs/{name}.md" for name in ("errors", "evaluation", "memory", "precision", "threads")}

# A block of a page, and what stands in the line before it. One that readers need not see is a comment, `<!-- python`.
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]*) -->\n)?^(?:```|<!-- )python\n(?P<code>.*?)^(?:```|-->)$",
    flags=re.MULTILINE | re.DOTALL,
)

# All that does not run here, by page: how many blocks, and why.
NOT_RUN = {
    "docs/elastic.md": ["needs a GPU", "needs a GPU"],
    "docs/gpus.md": ["needs a GPU"],
    "docs/how-to/many-machines.md": ["needs a Ray cluster"],
    "docs/sweeps.md": ["needs a Ray cluster", "needs Ray"],
}


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page):
    """Return (line, why it is not run or None, code) of each block of Python in a page."""
    text = page.read_text()
    return [(text[: found.start("code")].count("\n"), found["why"], found["code"]) for found in BLOCK.finditer(text)]


def test_every_block_of_python_is_run_or_marked():
    for page in PAGES:
        begun = re.findall(r"^ *(?:```|~~~|<!-- *) *py", page.read_text(), flags=re.MULTILINE | re.IGNORECASE)
        assert len(begun) == len(blocks(page)), page


def test_blocks_that_do_not_run_are_these():
    reasons = [(name_of(page), why) for page in PAGES for _, why, _ in blocks(page) if why is not None]
    assert {page: [why for each, why in reasons if each == page] for page, _ in reasons} == NOT_RUN


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft calls it
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=() if name_of(page) in QUICK else pytest.mark.rest)
        for page in PAGES
        if blocks(page)
    ],
)
def test_blocks_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "__main__"}
    if name_of(page) not in COMPLETE:
        exec(compile(NAMES.read_text(), NAMES, "exec"), space)
    for line, why, code in blocks(page):
        if why is None:
            exec(compile("\n" * line + code, page, "exec"), space)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Returns the folder of the site, which was built without a warning: a link that leads nowhere is one."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr + built.stdout
    return folder


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("not_in_nav")[0]
    assert {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} == set(re.findall(r"[\w./-]+\.md", menu))


@pytest.mark.rest
def test_links_of_the_site_lead_to_its_own_pages(site):
    """Also in what the API pages make of docstrings, and without a server."""
    anchors = {}
    for page in site.rglob("*.html"):
        anchors[page] = set(re.findall(r'\bid="([^"]+)"', page.read_text()))
    for page in anchors:
        for link in re.findall(r'\b(?:href|src)="([^"]*)"', page.read_text()):
            path, _, anchor = html.unescape(link).partition("#")
            if re.match(r"[a-z]+:", path) or page.name == "404.html":
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.relative_to(site)}: {link}"
            if anchor and not anchor.startswith("__"):
                assert anchor in anchors[target], f"{page.relative_to(site)}: {link}"


def test_api_pages_name_every_public_name():
    named = set(re.findall(r"^::: (\S+)$", "\n".join(page.read_text() for page in DOCS.glob("api/*.md")), re.MULTILINE))
    assert {f"hydra_engine.{name}" for name in hydra_engine.__all__ if name != "__version__"} <= named


@pytest.mark.rest
def test_api_page_describes_every_field(site):
    page = (site / "api" / "plan-and-report.html").read_text()
    for name in ("Plan", "TaskPlan", "Report", "TaskReport", "DeviceReport", "CheckpointReport"):
        fields = {field.name for field in dataclasses.fields(getattr(hydra_engine, name))}
        assert {each for each in fields if f'id="hydra_engine.{name}.{each}"' not in page} == set()


def test_messages_of_the_page_of_errors_are_those_of_the_code():
    packages = (ROOT / "hydra_engine", ROOT / "partitioners")
    code = "\n".join(path.read_text() for package in packages for path in package.rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    told = [row.split("|")[1] for row in (DOCS / "errors.md").read_text().splitlines() if row.startswith("| ")]
    messages = [message for cell in told for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 15
    assert [message for message in messages if message not in code] == []
