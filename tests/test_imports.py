"""Rooms import downwards and through faces only, clients public names only, and one file knows CUDA."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

import hydra_engine
import partitioners
from tests.structure import CLIENTS

# Bottom to top: a room imports from the rooms before it, and of each only what its `__init__` names; of no client.
ROOMS = (
    "system",
    "native",
    "capture",
    "schedule",
    "tasks",
    "data",
    "devices",
    "host",
    "worker",
    "checkpoints",
    "planning",
    "progress",
    "run",
    "verify",
)
# Modules that are public as such: of each what its `__all__` names.
PUBLIC = ("control", "texts", "verify")
# Modules beside the rooms, which import none of them and which all may import.
GROUND = ("_started_in", "_version", "control", "errors", "texts", "trace")
MOST_MODULES = 12  # of a room
# What a room may not import: its decisions are made without them.
WITHOUT = {
    "schedule": ("concurrent", "queue", "random", "signal", "threading", "time", "torch"),
    "tasks": ("concurrent", "queue", "threading", "time"),
    "display": ("concurrent", "queue", "threading", "time", "torch"),
    "progress": ("concurrent", "torch"),
    "pictures": ("concurrent", "queue", "threading", "time", "torch"),
}
# Modules of planning that predict runs, from numbers alone.
SIMULATOR = ("costs", "cuts", "simulate", "world")
# May be imported inside a function, so that the package works without them.
OPTIONAL = (
    *("IPython", "matplotlib", "optuna", "peft", "pynvml", "ray", "rich"),
    *("sklearn", "tensorboard", "wandb"),
)
# Importing torch's symbols takes a second, and most runs do without.
TAKES_A_SECOND = ("sizes.py",)
# Only modules of hydra_engine/integrations import these.
INTEGRATED = ("lightning", "peft", "transformers")
# The modules that may mention CUDA, streams and pinning.
CUDA = ("devices.cuda", "devices.page_locked")
# Its help shows names of GPUs as users type them.
TELLS_NAMES = ("cli.command",)

CUDA_WORDS = re.compile(r"torch\.cuda|pin_memory|is_pinned|cudaHostRegister|cudart|torch\.Stream|torch\.Event|\.cuda\(")
CUDA_STRING = re.compile(r"\bcuda\b")

ENGINE = Path(hydra_engine.__file__).parent
PARTITIONERS = Path(partitioners.__file__).parent
PACKAGES = (
    hydra_engine,
    partitioners,
    *(
        importlib.import_module(f"hydra_engine.{room}")
        for room in {*ROOMS, *CLIENTS, *PUBLIC}
        if room != "integrations"
    ),
)
# Rooms whose face is what it imports; the others say themselves what they show.
INNER = [each.__name__.rpartition(".")[2] for each in PACKAGES if not hasattr(each, "__all__")]


def modules_of(package):
    """Path of every module, by its name in the package: "errors", "host", "host.pool"."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


ENGINE_MODULES = modules_of(ENGINE)
PARTITIONER_MODULES = modules_of(PARTITIONERS)
ALL_PATHS = [*ENGINE_MODULES.values(), *PARTITIONER_MODULES.values()]


def room_of(name):
    """The first part of a module's name."""
    return name.partition(".")[0]


@cache
def nodes_of(path):
    """All of a file's syntax."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))))


@cache
def imports_of(path):
    """(module, imported names, line) of every import."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += ((alias.name, (), node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import; imports are absolute"
            found.append((node.module, tuple(alias.name for alias in node.names), node.lineno))
    return found


@cache
def own_imports(name):
    """(dotted name within the package, imported names, line) of what a module imports of the engine."""
    split = [(*module.partition(".")[::2], names, line) for module, names, line in imports_of(ENGINE_MODULES[name])]
    return [(rest, names, line) for package, rest, names, line in split if package == "hydra_engine"]


@cache
def face_of(room):
    """Names that a room's `__init__` imports of its modules: what it shows to others."""
    return {each for _, names, _ in own_imports(room) for each in names}


def packages_of(path):
    return {module.partition(".")[0] for module, _, _ in imports_of(path)}


def inner_modules():
    return [name for name in ENGINE_MODULES if name not in ("__init__", "__main__")]


def in_functions(path):
    """(package, line) of every import inside a function."""
    functions = [node for node in nodes_of(path) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    lines = {node.lineno for function in functions for node in ast.walk(function) if hasattr(node, "lineno")}
    return [(module.partition(".")[0], line) for module, _, line in imports_of(path) if line in lines]


def test_every_module_is_in_a_room_or_on_the_ground():
    assert {room_of(name) for name in inner_modules()} == {*ROOMS, *CLIENTS, *GROUND}


def test_a_room_can_be_read_in_an_afternoon():
    sizes = {room: sum(name.startswith(f"{room}.") for name in ENGINE_MODULES) for room in (*ROOMS, *CLIENTS)}
    assert {room: size for room, size in sizes.items() if size > MOST_MODULES} == {}


def test_imports_point_down_and_enter_rooms_by_their_faces():
    for name in (name for name in inner_modules() if room_of(name) not in CLIENTS):
        mine = room_of(name)
        for imported, names, line in own_imports(name):
            where = f"{name}:{line}: imports {imported or names}"
            if imported in GROUND:
                continue
            assert mine not in GROUND, f"{where}, and stands below all rooms"
            room = room_of(imported)
            assert room in ROOMS, f"{where}; import from the room that defines the name"
            if room == mine:
                continue
            assert ROOMS.index(room) < ROOMS.index(mine), f"{where}, which is not below {mine}"
            assert imported == room, f"{where}; import from hydra_engine.{room}, and name it there"
            assert set(names) <= face_of(room), f"{where}, which the face of {room} does not name"


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_imports_public_names_alone(client):
    for name in (name for name in ENGINE_MODULES if room_of(name) == client):
        for imported, names, line in own_imports(name):
            if room_of(imported) == client:
                continue
            where = f"{name}:{line}: imports {imported} {names}"
            assert imported in ("", *PUBLIC, *CLIENTS), where
            assert set(names) <= set(importlib.import_module(f"hydra_engine.{imported}".rstrip(".")).__all__), where


def test_a_face_names_what_others_use():
    imports = [(at, each) for name in ENGINE_MODULES for at, names, _ in own_imports(name) for each in names]
    for room in INNER:
        assert face_of(room) <= {each for at, each in imports if at == room}, room


def test_no_modules_of_a_room_import_each_other_in_a_circle():
    for room in (*ROOMS, *CLIENTS):
        imported = {}
        for name in (name for name in ENGINE_MODULES if name.startswith(f"{room}.")):
            found = set()
            for module, names, _ in own_imports(name):
                found |= {f"{module}.{each}" for each in names} if module == room else {module}
            imported[name] = found & ENGINE_MODULES.keys()
        while imported:
            free = {name for name, found in imported.items() if not found & imported.keys()}
            assert free, f"a circle among {sorted(imported)}"
            for name in free:
                del imported[name]


@pytest.mark.parametrize("room", WITHOUT)
def test_a_room_does_without_what_it_must_not_know(room):
    for name in (name for name in ENGINE_MODULES if room_of(name) == room):
        assert packages_of(ENGINE_MODULES[name]).isdisjoint(WITHOUT[room]), name


@pytest.mark.parametrize("name", SIMULATOR)
def test_the_simulator_does_without_torch(name):
    assert "torch" not in packages_of(ENGINE_MODULES[f"planning.{name}"])


def test_partitioners_never_import_the_engine():
    for name, path in PARTITIONER_MODULES.items():
        assert "hydra_engine" not in packages_of(path), name


def test_no_import_inside_a_function():
    for path in ALL_PATHS:
        for package, line in in_functions(path):
            is_late = package == "torch" and path.name in TAKES_A_SECOND
            assert is_late or package in OPTIONAL, f"{path}:{line}: import inside a function"


def test_only_two_modules_mention_cuda():
    for name in (name for name in ENGINE_MODULES if name not in (*CUDA, *TELLS_NAMES)):
        path = ENGINE_MODULES[name]
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not CUDA_WORDS.search(text), f"{name}:{line}: {text.strip()!r} belongs in {CUDA}"
        prose = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}  # docstrings
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                assert not CUDA_STRING.search(node.value), f"{name}:{node.lineno}: {node.value!r} belongs in {CUDA}"


def test_package_names_what_is_public():
    for package in (package for package in PACKAGES if hasattr(package, "__all__")):
        assert len(set(package.__all__)) == len(package.__all__), package.__name__
        for name in package.__all__:
            assert hasattr(package, name), f"{package.__name__}.__all__ names {name}, which does not exist"


def test_public_names_exist():
    wanted = {"CudaDevice", "EmulatedDevice", "Model", "ModelOrchestrator", "ModelTask", "split", "stream_seed"}
    assert wanted <= set(hydra_engine.__all__)
    assert {"Pilot", "Presharded"} <= set(partitioners.__all__)


# Tests of integrations import these at their head; the library behind them takes seconds.
IMPORTED = [
    pytest.param(room, marks=pytest.mark.rest) if room == "integrations" else room
    for room in (*ROOMS, *CLIENTS, *GROUND)
]


@pytest.mark.parametrize("room", IMPORTED)
def test_module_can_be_imported(room):
    missing = []
    for name in (name for name in inner_modules() if room_of(name) == room):
        try:
            importlib.import_module(f"hydra_engine.{name}")
        except ImportError as error:
            if room != "integrations" or error.name.startswith("hydra_engine"):
                raise
            missing.append(f"{name} needs {error.name}")
    if missing:
        pytest.skip(f"of an extra that is not installed: {'; '.join(missing)}")


def test_only_integrations_import_the_libraries_they_are_for():
    for name in (name for name in ENGINE_MODULES if room_of(name) != "integrations"):
        assert packages_of(ENGINE_MODULES[name]).isdisjoint(INTEGRATED), name
