"""What mkdocs does besides: pages link to files beside docs/ (examples, benchmarks), so these are in the site too.

In the repository a page of docs/ names such a file by its path, `../examples/plain.py`. In the site, the folder docs/
is the root, and everything else lies in it under its path in the repository: code as a page that shows it.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
NOTES = re.compile(r"^<!--.*?-->\n", flags=re.DOTALL | re.MULTILINE)  # of the test that runs the blocks
CODE = {".py": "python", ".yml": "yaml", ".cfg": "ini", ".json": "json", ".txt": "text"}


def home_of(path):
    """Return where a file of the repository lies in the site, both as paths from the root."""
    inside = path.removeprefix("docs/")
    if inside == path and path == "README.md":
        return "readme.md"  # docs/README.md is the first page
    return inside if Path(path).suffix not in CODE else f"{inside}.md"


def linked(text):
    """Return the paths that a page's links name, without those in its code."""
    return [path for _, path, _ in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))]


def found(page, path):
    """Return the path from the repository's root that a page at `page` names by `path`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path))


def on_files(files, config):
    """Add the files beside docs/ that pages link to, and those that these link to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    done = set(waiting)
    while waiting:
        page = waiting.pop()
        if not page.endswith(".md"):
            continue
        for path in linked((ROOT / page).read_text()):
            target = found(page, path)
            if target in done or not (ROOT / target).is_file():  # mkdocs then says that the link leads nowhere
                continue
            done.add(target)
            waiting.append(target)
            uri = home_of(target)
            if Path(target).suffix in CODE:
                kind, code = CODE[Path(target).suffix], (ROOT / target).read_text()
                content = f"# {target}\n\n````{kind}\n{code}````\n"
                files.append(File.generated(config, uri, content=content))
            elif files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Lead the links of a page to where the site has what they name."""
    inside = page.file.src_uri
    if inside.endswith(".py.md"):
        return markdown
    here = f"docs/{inside}" if (ROOT / "docs" / inside).exists() else inside
    here = "README.md" if inside == "readme.md" else here

    def replace(match):
        uri = home_of(found(here, match[2]))
        return f"{match[1]}{posixpath.relpath(uri, posixpath.dirname(inside) or '.')}{match[3] or ''})"

    parts = re.split(r"(```.*?```)", NOTES.sub("", markdown), flags=re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)
