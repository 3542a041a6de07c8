"""The shape of the code, measured: what somebody new has to find their way through.

python -m tests.structure                 # of this checkout
python -m tests.structure FOLDER ...      # of others' `hydra_engine` too, side by side
"""

import ast
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import NamedTuple

OPENINGS = ("What", "Whether", "Where", "Of")  # of docstrings that name no thing and say nothing to do
AIMS = {
    "names at the top": "10 rooms + wings",
    "modules of the largest room": "12",
    "lines of the largest room": "2,500",
    "longest class, lines": "300",
    "most attributes of a class": "15",
    "most parameters, ModelTask aside": "7",
    "docstrings that open with What, Whether, Where, Of": "under 5 %",
}


class Class(NamedTuple):
    """One class: its place, lines and attributes."""

    name: str
    num_lines: int
    num_attributes: int


def attributes(node):
    """Names that a class gives its objects: fields of a dataclass, and whatever its methods set on `self`."""
    found = set()
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found.add(each.target.id)
    for each in ast.walk(node):
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        for target in targets if isinstance(each, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else ():
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                    found.add(part.attr)
    return found


def parameters(node):
    """Parameters of a function, `self` and `cls` aside."""
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(each.arg not in ("self", "cls") for each in every)


def own_lines(node):
    """Lines of a function without its docstring."""
    first = node.body[0]
    is_documented = ast.get_docstring(node) is not None
    documented = first.end_lineno - first.lineno + 1 if is_documented else 0
    return node.end_lineno - node.lineno + 1 - documented


def measured(folder):
    """Figures of a package, by name, as text."""
    paths = sorted(folder.rglob("*.py"))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    classes, functions, docstrings = [], [], []
    for path, tree in trees.items():
        where = path.relative_to(folder).with_suffix("").as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                size = node.end_lineno - node.lineno + 1
                classes.append(Class(f"{where}.{node.name}", size, len(attributes(node))))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.append((f"{where}.{node.name}", parameters(node), own_lines(node)))
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                docstrings.append(ast.get_docstring(node).split()[0].rstrip(",:"))
    rooms = Counter()
    room_lines = Counter()
    for path in paths:
        room = path.relative_to(folder).parts[0] if path.parent != folder else "(top)"
        rooms[room] += path.name != "__init__.py"
        room_lines[room] += lines[path]
    top = {path.relative_to(folder).parts[0] for path in paths if path.name not in ("__init__.py", "__main__.py")}
    in_task = [name for name, _, _ in functions if name.startswith(("task.", "tasks/task.")) and "__init__" in name]
    others = [each for each in functions if each[0] not in in_task]
    longest = max(classes, key=lambda each: each.num_lines)
    widest = max(classes, key=lambda each: each.num_attributes)
    most = max(others, key=lambda each: each[1])
    sizes = sorted(size for _, _, size in functions)
    opening = sum(word in OPENINGS for word in docstrings)
    named = Counter(name.rpartition(".")[2].lstrip("_") for name, _, _ in classes)
    biggest, longest_room = rooms.most_common(1)[0], room_lines.most_common(1)[0]
    return {
        "modules, lines": f"{len(paths)}, {sum(lines.values()):,}",
        "names at the top": str(len(top)),
        "modules of the largest room": f"{biggest[1]} ({biggest[0]})",
        "lines of the largest room": f"{longest_room[1]:,} ({longest_room[0]})",
        "longest class, lines": f"{longest.num_lines} ({longest.name})",
        "classes past 300 lines": str(sum(each.num_lines > 300 for each in classes)),
        "most attributes of a class": f"{widest.num_attributes} ({widest.name})",
        "classes past 15 attributes": str(sum(each.num_attributes > 15 for each in classes)),
        "most parameters, ModelTask aside": f"{most[1]} ({most[0]})",
        "functions past 7 parameters": str(sum(each[1] > 7 for each in others)),
        "function length: median, 90 %, most": f"{median(sizes):.0f}, {sizes[len(sizes) * 9 // 10]}, {sizes[-1]}",
        "docstrings that open with What, Whether, Where, Of": f"{opening / len(docstrings):.1%} of {len(docstrings):,}",
        "class names that two modules use": ", ".join(sorted(n for n, k in named.items() if k > 1)) or "none",
    }


def main(folders):
    """Print a table: a row for each figure, a column for each package, and the aim."""
    columns = [measured(Path(folder)) for folder in folders]
    rows = [("", *folders, "aim")]
    rows += [(name, *(column[name] for column in columns), AIMS.get(name, "")) for name in columns[0]]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main([str(Path(__file__).parents[1] / "hydra_engine"), *sys.argv[1:]])
