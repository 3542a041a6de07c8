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

# Rooms that use public names of the engine alone, as programs of its users do, and faces of each other.
CLIENTS = ("adaptive", "cli", "display", "elastic", "integrations", "loggers", "pictures", "sweep")
OPENINGS = ("What", "Whether", "Where", "Of", "Who", "How", "Which")  # of docstrings that name no thing
MOST_LINES, MOST_ATTRIBUTES, MOST_PARAMETERS = 300, 15, 7
# A comment above a class or function that begins with one of these says why it is better past that limit.
REASONS = {"lines": "# Past 300 lines:", "attributes": "# More than 15 attributes", "parameters": "# More than seven"}
AIMS = {
    "modules, lines: core": "31,500 lines",
    "modules, lines: clients": "9,500 lines",
    "names at the top": "10 rooms + wings",
    "modules of the largest room": "12",
    "lines of the largest room": "2,500",
    "longest class, lines": "300",
    "most attributes of a class": "15",
    "most parameters, ModelTask aside": "7",
    "docstrings that open with What, Where, How, ...": "under 5 %",
}
LISTS = ("class names that two modules use", "past a limit, and no comment says why")


class Class(NamedTuple):
    """One class: its place, lines with docstrings and without, attributes, and the limits that a comment speaks of."""

    name: str
    num_lines: int
    num_code_lines: int
    num_attributes: int
    reasons: set[str]


class Function(NamedTuple):
    """One function: its place, parameters, lines without its docstring, and the limits that a comment speaks of."""

    name: str
    num_parameters: int
    num_lines: int
    reasons: set[str]


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


def docstring_lines(node):
    """Lines of the docstring of a function or class."""
    return node.body[0].end_lineno - node.body[0].lineno + 1 if ast.get_docstring(node) is not None else 0


def code_lines(node):
    """Lines of a class without its docstring and those of all that stands in it."""
    documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return lines_of(node) - sum(docstring_lines(each) for each in ast.walk(node) if isinstance(each, documented))


def lines_of(node):
    """Lines of a function or class."""
    return node.end_lineno - node.lineno + 1


def reasons_for(node, lines):
    """Return the limits of which the comment right above a class or function says why it is past them."""
    found, k = set(), min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 2
    while k >= 0 and lines[k].lstrip().startswith("#"):
        found |= {limit for limit, text in REASONS.items() if lines[k].lstrip().startswith(text)}
        k -= 1
    return found


def measured(folder):
    """Figures of a package, by name, as text."""
    paths = sorted(folder.rglob("*.py"))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in paths}
    classes, functions, docstrings = [], [], []
    for path, tree in trees.items():
        where = path.relative_to(folder).with_suffix("").as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                each = Class(f"{where}.{node.name}", lines_of(node), code_lines(node), len(attributes(node)), set())
                classes.append(each._replace(reasons=reasons_for(node, lines[path])))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = lines_of(node) - docstring_lines(node)
                reasons = reasons_for(node, lines[path])
                functions.append(Function(f"{where}.{node.name}", parameters(node), size, reasons))
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                docstrings.append(ast.get_docstring(node).split()[0].rstrip(",:"))
    rooms = Counter()
    room_lines = Counter()
    for path in paths:
        room = path.relative_to(folder).parts[0] if path.parent != folder else "(top)"
        rooms[room] += path.name != "__init__.py"
        room_lines[room] += len(lines[path])
    top = {path.relative_to(folder).parts[0] for path in paths if path.name not in ("__init__.py", "__main__.py")}
    others = [each for each in functions if each.name != "tasks/task.__init__"]
    longest = max(classes, key=lambda each: each.num_lines)
    longest_code = max(classes, key=lambda each: each.num_code_lines)
    widest = max(classes, key=lambda each: each.num_attributes)
    most = max(others, key=lambda each: each.num_parameters)
    sizes = sorted(each.num_lines for each in functions)
    past = {
        "lines": [each for each in classes if each.num_lines > MOST_LINES],
        "attributes": [each for each in classes if each.num_attributes > MOST_ATTRIBUTES],
        "parameters": [each for each in others if each.num_parameters > MOST_PARAMETERS],
    }
    unsaid = {limit: [each for each in found if limit not in each.reasons] for limit, found in past.items()}

    def counted(limit):
        return f"{len(past[limit])}, {len(unsaid[limit])} without a reason"

    opening = sum(word in OPENINGS for word in docstrings)
    named = Counter(name.rpartition(".")[2].lstrip("_") for name in (each.name for each in classes))
    biggest, longest_room = rooms.most_common(1)[0], room_lines.most_common(1)[0]

    def size_of(of_clients):
        found = [len(lines[each]) for each in paths if (each.relative_to(folder).parts[0] in CLIENTS) == of_clients]
        return f"{len(found)}, {sum(found):,}"

    return {
        "modules, lines: core": size_of(False),
        "modules, lines: clients": size_of(True),
        "names at the top": str(len(top)),
        "modules of the largest room": f"{biggest[1]} ({biggest[0]})",
        "lines of the largest room": f"{longest_room[1]:,} ({longest_room[0]})",
        "longest class, lines": f"{longest.num_lines} ({longest.name})",
        "the same without docstrings": f"{longest_code.num_code_lines} ({longest_code.name})",
        "classes past 300 lines": counted("lines"),
        "most attributes of a class": f"{widest.num_attributes} ({widest.name})",
        "classes past 15 attributes": counted("attributes"),
        "most parameters, ModelTask aside": f"{most.num_parameters} ({most.name})",
        "functions past 7 parameters": counted("parameters"),
        "function length: median, 90 %, most": f"{median(sizes):.0f}, {sizes[len(sizes) * 9 // 10]}, {sizes[-1]}",
        "docstrings that open with What, Where, How, ...": f"{opening / len(docstrings):.1%} of {len(docstrings):,}",
        "class names that two modules use": ", ".join(sorted(n for n, k in named.items() if k > 1)) or "none",
        "past a limit, and no comment says why": ", ".join(sorted({each.name for v in unsaid.values() for each in v}))
        or "none",
    }


def main(folders):
    """Print a table: a row for each figure, a column for each package, and the aim. Lists of names come below it."""
    columns = [measured(Path(folder)) for folder in folders]
    rows = [("", *folders, "aim")]
    rows += [
        (name, *(column[name] for column in columns), AIMS.get(name, "")) for name in columns[0] if name not in LISTS
    ]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for name in LISTS:
        for folder, column in zip(folders, columns, strict=True):
            print(f"\n{name}, {folder}:\n{column[name]}")


if __name__ == "__main__":
    main([str(Path(__file__).parents[1] / "hydra_engine"), *sys.argv[1:]])
