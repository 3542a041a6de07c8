"""What the documentation promises: its code runs, its links lead somewhere, and the API pages name all that is public."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
NAMES = DOCS / "names.py"  # what pages call `model`, `loader` and so on
COMPLETE = {"README.md", "docs/README.md", "docs/start.md"}  # run when pasted, without names.py

# A block of a page, and what stands in the line before it. A block that readers need not see is a comment, `<!-- python`.
BLOCK = re.compile(r"(?:^<!-- not run: (?P<why>[^\n]*) -->\n)?^(?P<fence>```|<!-- )python\n(?P<code>.*?)^(?:```|-->)$", re.M | re.S)

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


def test_every_block_of_python_is_known():
    for page in PAGES:
        fences = re.findall(r"^ *```(\w+)", page.read_text(), flags=re.MULTILINE)
        shown = [code for code in re.findall(r"^```python\n", page.read_text(), flags=re.MULTILINE)]
        assert len(shown) == sum(fence.startswith("py") for fence in fences), page


def test_blocks_that_do_not_run_are_these():
    reasons = [(name_of(page), why) for page in PAGES for _, why, _ in blocks(page) if why is not None]
    assert {page: [why for each, why in reasons if each == page] for page, _ in reasons} == NOT_RUN


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft calls it
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_blocks_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "__main__"}
    if name_of(page) not in COMPLETE:
        exec(compile(NAMES.read_text(), NAMES, "exec"), space)
    for line, why, code in blocks(page):
        if why is None:
            exec(compile("\n" * line + code, page, "exec"), space)
