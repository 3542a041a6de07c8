"""Imports go one way, one file knows CUDA, and the package names what is public."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import hydra_engine
import partitioners

# A module imports only from groups strictly above its own. "integrations" stands for all modules of that folder.
GROUPS = (
    (
        "_version",
        "allocation",
        "attributes",
        "ceilings",
        "contention",
        "deadlines",
        "disk",
        "dram",
        "errors",
        "graphs",
        "host",
        "libraries",
        "moving_tensor",
        "promise",
        "ready",
        "restart",
        "revocable_lock",
        "schedule",
        "trace",
    ),
    (
        "arena",
        "batches",
        "boundary",
        "costs",
        "folder_lock",
        "hashed_file",
        "lanes",
        "ledger",
        "parts",
        "policies",
        "randomness",
        "report",
        "sample",
    ),
    (
        "bound_copy",
        "callbacks",
        "indices",
        "manifest",
        "means",
        "model_watch",
        "opened",
        "retries",
        "saved_state",
        "signature",
        "tensor_file",
    ),
    ("emulated", "loader_draws", "loader_generators"),
    ("device", "drawing", "events", "loader_position", "nested", "plan_ahead", "progress", "shard", "task"),
    ("checkpoint", "frozen", "probe", "rollback", "task_position"),
    (
        "blocked",
        "compiled",
        "interrupt",
        "loss_scale",
        "memory",
        "micro_batch",
        "new_checkpoint",
        "notifier",
        "own_forward",
        "plan_text",
        "pool",
        "residency",
        "resume",
        "scheduled",
        "stepping",
        "unit_bytes",
    ),
    ("borrowed_pool", "checkpoint_directory", "evaluation_task", "executor", "optimizer", "reader", "task_state"),
    ("scheduler", "snapshot", "spiller", "trial", "work"),
    ("keeping", "refit", "resumed", "saver", "simulated", "worker"),
    ("checkpoint_store", "rehearsal", "simulator"),
    ("planner",),
    ("running", "sharing"),
    ("committing", "saving"),
    ("run",),
    ("orchestrator",),
    ("integrations", "plots", "sweep"),
    ("cli",),
    ("__main__",),
)
# Between modules of one group, and against the order: none but these (importer, imported).
EXCEPTIONS = ()
# May be imported inside a function, so that the package works without them.
OPTIONAL = ("matplotlib", "optuna", "pandas", "ray", "sklearn")
# Only modules of hydra_engine/integrations import these.
INTEGRATED = ("lightning", "peft", "safetensors", "transformers")
# The one module that may mention CUDA, streams and pinning.
DEVICE = "device"

CUDA_WORDS = re.compile(r"torch\.cuda|pin_memory|is_pinned|cudaHostRegister|cudart|torch\.Stream|torch\.Event|\.cuda\(")
CUDA_STRING = re.compile(r"\bcuda\b")

ENGINE = Path(hydra_engine.__file__).parent
PARTITIONERS = Path(partitioners.__file__).parent
RANK = {name: rank for rank, group in enumerate(GROUPS) for name in group}


def modules_of(package):
    """Path of every module, by its name in the package: "device", "integrations.lightning", "__init__"."""
    return {".".join(path.relative_to(package).with_suffix("").parts): path for path in sorted(package.rglob("*.py"))}


ENGINE_MODULES = modules_of(ENGINE)
PARTITIONER_MODULES = modules_of(PARTITIONERS)
ALL_PATHS = [*ENGINE_MODULES.values(), *PARTITIONER_MODULES.values()]


def place(name):
    """The table's name of a module: its folder's, if it lies in one."""
    return name.partition(".")[0]


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_names(path):
    """Dotted names that a module imports, with line; "a.b" for `from a import b`, where b may be a module or not."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import; imports are absolute"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def engine_imports(name):
    """Table names of the engine's modules that module `name` imports, with line; "" for the package itself."""
    for dotted, line in imported_names(ENGINE_MODULES[name]):
        package, _, rest = dotted.partition(".")
        if package == "hydra_engine":
            imported = place(rest)
            yield (imported if imported in {place(module) for module in ENGINE_MODULES} else ""), line


def own_modules():
    return [name for name in ENGINE_MODULES if name != "__init__"]


@pytest.mark.parametrize("name", own_modules())
def test_module_imports_only_from_groups_above(name):
    assert place(name) in RANK, f"{name}: not in the table; put it into GROUPS, as low as its imports allow"
    for imported, line in engine_imports(name):
        assert imported, f"{name}:{line}: imports the package itself; import the module that defines the name"
        assert imported in RANK, f"{name}:{line}: imports {imported}, which is not in the table"
        inside_folder = imported == place(name) and "." in name
        assert RANK[imported] < RANK[place(name)] or inside_folder or (name, imported) in EXCEPTIONS, (
            f"{name}:{line}: imports {imported}, which is not in a group above"
        )


@pytest.mark.parametrize("name", PARTITIONER_MODULES)
def test_partitioners_never_import_the_engine(name):
    packages = {dotted.partition(".")[0] for dotted, _ in imported_names(PARTITIONER_MODULES[name])}
    assert "hydra_engine" not in packages


@pytest.mark.parametrize("path", ALL_PATHS, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_no_import_inside_a_function(path):
    functions = [node for node in ast.walk(parse(path)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Import):
            packages = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            packages = [(node.module or "").partition(".")[0]]
        else:
            continue
        assert set(packages) <= set(OPTIONAL), f"{path.name}:{node.lineno}: import inside a function"


@pytest.mark.parametrize("name", [name for name in ENGINE_MODULES if place(name) != DEVICE])
def test_only_one_module_mentions_cuda(name):
    path = ENGINE_MODULES[name]
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        assert not CUDA_WORDS.search(text), f"{name}:{line}: {text.strip()!r} belongs in {DEVICE}.py"
    tree = parse(path)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            assert not CUDA_STRING.search(node.value), f"{name}:{node.lineno}: {node.value!r} belongs in {DEVICE}.py"


@pytest.mark.parametrize("package", [hydra_engine, partitioners], ids=lambda package: package.__name__)
def test_package_names_what_is_public(package):
    assert len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        assert hasattr(package, name), f"{package.__name__}.__all__ names {name}, which does not exist"


def test_public_names_of_the_issue_exist():
    wanted = {"CudaDevice", "EmulatedDevice", "Model", "ModelOrchestrator", "ModelTask", "split", "stream_seed"}
    assert wanted <= set(hydra_engine.__all__)
    assert {"Pilot", "Presharded"} <= set(partitioners.__all__)


@pytest.mark.parametrize("name", [name for name in own_modules() if name != "__main__"])
def test_module_can_be_imported(name):
    try:
        importlib.import_module(f"hydra_engine.{name}")
    except ImportError as error:
        if place(name) != "integrations" or error.name.startswith("hydra_engine"):
            raise
        pytest.skip(f"needs {error.name}, of an extra that is not installed")


@pytest.mark.parametrize("name", [name for name in ENGINE_MODULES if place(name) != "integrations"])
def test_only_integrations_import_the_libraries_they_are_for(name):
    packages = {dotted.partition(".")[0] for dotted, _ in imported_names(ENGINE_MODULES[name])}
    assert packages.isdisjoint(INTEGRATED)
