"""The command line: what `plan` prints, what it takes for the largest model, and every refusal in one line."""

import configparser
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine.cli import command, main
from hydra_engine.cli.plan import MOST_ROWS
from hydra_engine.planning.ahead import OPTIMIZERS, RESERVED_BYTES
from partitioners.precision import DTYPES
from tests.refused import names

ROOT = Path(__file__).parents[2]


# --- functions to plan ---


def mlp():
    """17 layers of 64 * 65 parameters, and one of 65; a batch of 8."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(17)), nn.Linear(64, 1))
    return model, (torch.randn(8, 64), torch.randn(8, 1)), F.mse_loss


def tokens():
    model = [nn.Embedding(100, 16), nn.Linear(16, 100)]
    ids = torch.randint(100, (8, 32))
    return model, (ids, ids), lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten())


class Residual(nn.Module):
    """README's `Net`."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(64, 8), nn.Linear(64, 8), nn.Linear(8, 1)

    def forward(self, x, y):
        return self.out(self.left(x) * self.right(y))


class OwnWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Residual()
        self.scale = nn.Parameter(torch.ones(1, 1))

    def forward(self, x):
        return self.inner(x) @ self.scale


RESIDUAL = ["embed (Linear)", "blocks.0 (Linear)", "blocks.1 (Linear)", "blocks.2 (Linear)", "head (Linear)"]
OWN_FORWARDS = {
    lambda: (Residual(), mlp()[1], F.mse_loss): RESIDUAL,
    lambda: (TwoInputs(), ((torch.randn(8, 64), torch.randn(8, 64)), torch.randn(8, 1)), F.mse_loss): [
        *("left (Linear)", "right (Linear)", "out (Linear)"),
    ],
    lambda: (OwnWeights(), mlp()[1], F.mse_loss): [
        *(f"inner.{name}" for name in RESIDUAL),
        "forward of OwnWeights after inner",
    ],
}


def huge():
    """Four weights of 4 TiB."""
    model = nn.Sequential(*(nn.Linear(2**20, 2**20, bias=False) for _ in range(4)))
    return model, (torch.randn(8, 2**20), torch.randn(8, 2**20)), F.mse_loss


def reads_values():
    model, batch, loss_fn = mlp()
    return model, batch, loss_fn if batch[0].sum().item() > 0 else F.l1_loss


def prints_values():
    return torch.randn(3).tolist()


def raises():
    raise KeyError("no such dataset")


def wrong_width():
    model, batch, loss_fn = mlp()
    model[3] = nn.Linear(63, 64)
    return model, batch, loss_fn


class Fails(nn.Module):
    def forward(self, x):
        raise LookupError("a layer's own trouble")


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


# Short ones, by their names.
SHORT = {
    "takes_arguments": lambda width: mlp(),
    "a_pair": lambda: mlp()[:2],
    "nothing": lambda: None,
    "no_model": lambda: (3, *mlp()[1:]),
    "no_modules": lambda: ([print], *mlp()[1:]),
    "no_layers": lambda: ([], *mlp()[1:]),
    "no_batch": lambda: (nn.Linear(2, 2), torch.ones(2, 2), F.mse_loss),
    "no_loss": lambda: (*mlp()[:2], "mse"),
    "failing_layer": lambda: ([nn.Linear(64, 1), Fails()], mlp()[1], F.mse_loss),
    "branching_layer": lambda: ([nn.Linear(64, 1), Branch()], mlp()[1], F.mse_loss),
    "NOT_CALLABLE": 3,
}
globals().update(SHORT)


# --- what it prints ---


HERE = "tests.cli.test_main"
FIXED = "--memory 64MiB --device cpu"  # unless an option behind them says otherwise
NARROW = "--precision bfloat16 --partitioner balanced:18"
RATES = (
    "\nstated rates: {} TFLOP/s, device memory {} GB/s, link {} GB/s each way, DRAM {} GB/s "
    "for 28 bytes per parameter\n"
)


@pytest.fixture
def plan(said):
    """Runs `plan` on a function of this file, with options, and returns the lines it printed."""

    def plan(line):
        name, _, options = line.partition(" ")
        code, lines, _ = said(f"plan {HERE}:{name} {FIXED} {options}")
        assert code == 0
        return lines

    return plan


# A function and options, and what the output has; behind a "!" what it has not.
SHOWN = [
    ("mlp", " samples/s\n", RATES.format(0.05, 10, 25, 50), "!estimates", "!devices", "!own forward"),
    ("mlp", f"{HERE}:mlp: 18 layers, 70,785 parameters\ncpu of 64 MiB; float32; batch of 8 samples in 1 micro-batch\n"),
    ("mlp --batch 16 --micro-batches 2", "; batch of 16 samples in 2 micro-batches\ntimes are counted, not measured\n"),
    (
        "mlp --precision bfloat16 --memory 24GiB --device gpu",
        "\ngpu of 24 GiB, 1 GiB of it reserved; bfloat16; batch of ",
    ),
    ("mlp --memory 24GiB --device gpu", " in 1 micro-batch\nestimates: no such device was measured\n"),
    ("tokens", "!own forward"),
    ("mlp --partitioner pilot", "weights 276.5 KiB + gradients 276.5 KiB + adamw 553 KiB (16 bytes per parameter)"),
    ("mlp --partitioner pilot", "+ buffers 0 B + boundaries 2 KiB\n"),
    ("mlp --optimizer sgd", "sgd 0 B (8 bytes per parameter)"),
    ("mlp --flops 1e6", "\nbound by: compute ("),
    ("mlp --link 1MB/s", "\nbound by: link ("),
    ("mlp --dram-bandwidth 1MB/s", "\nbound by: host optimizer ("),
    ("mlp --link 1MB/s --dram-bandwidth 100MB/s", "\nwith 18 of 18 layers at home on the device, cut into 1 shard, a "),
    ("mlp --link 1PB/s --dram-bandwidth 1PB/s", "!at home"),
    (
        "mlp --devices 4",
        "\n4 devices with 4 such tasks or more (a task's step uses one device at a time)",
        " of DRAM\n",
    ),
    ("mlp --flops 2T --memory-bandwidth 1.5TB/s --link 12GB --dram-bandwidth 1GiB/s", RATES.format(2, 1500, 12, 1.074)),
    *((f"mlp --flops '{each}'", "\nstated rates: 80 TFLOP/s") for each in ("80e12", "80T", "80 TFLOP/s", "80tflops")),
    ("mlp --flops 80000000000000", "\nstated rates: 80 TFLOP/s"),
    ("mlp --dram 1.1MiB", "\nDRAM: "),
    ("mlp --precision bfloat16 --dram 1MiB", "\nDRAM: 970."),  # split, or it does not fit
    (f"mlp {NARROW}", "= weights 414.8 KiB + gradients 138.3 KiB + adamw 553 KiB (16 bytes"),
    (f"mlp {NARROW} --split-weights", "= split weights 276.5 KiB + gradients 138.3 KiB + adamw 553 KiB (14 bytes"),
    (f"mlp {NARROW} --early-release", "gradients 16.2 KiB"),  # of two shards, or of all
    (f"mlp {NARROW} --early-release all", "gradients 138.3 KiB"),
    ("mlp --early-release", "\nwith early_release=True a step takes ", " by simulation\n"),
    ("mlp --early-release all", "\nwith early_release='all' a step takes "),
    ("huge --memory 64TiB", "\nDRAM: 64 TiB = weights 16 TiB + "),  # nothing is allocated
    ("mlp --batch 1024 --micro-batches auto --memory 400KiB", "; batch of 1024 samples in ", "!in 1 micro-batch"),
]


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown[0])
def test_what_it_prints(plan, shown):
    line, *parts = shown
    text = "\n".join([*plan(line), ""])
    for part in parts:
        assert (part.lstrip("!") in text) != part.startswith("!"), f"{part!r}:\n{text}"


def line_of(lines, start):
    (line,) = [line for line in lines if line.startswith(start)]
    return line


def rows_of(lines):
    (begin,) = [k for k, line in enumerate(lines) if line.startswith("-----")]
    return lines[begin + 1 : lines.index("", begin)]


def cells(row):
    return [cell.strip() for cell in row.split("  ") if cell]


def test_one_row_per_shard(plan):
    lines = plan("mlp --partitioner balanced:3")
    assert cells(lines[4]) == ["shard", "layers", "slab", "needs", "forward", "backward"]
    rows = [cells(row) for row in rows_of(lines)]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert rows[0][1].startswith("0 (Linear) to ")
    assert rows[2][1].endswith(" to 17 (Linear)")


def test_equal_shards_share_a_row_when_there_are_many(plan):
    lines = plan("mlp --partitioner balanced:18")
    rows = [cells(row) for row in rows_of(lines)]
    assert lines[4].endswith("  equal shards")
    assert 18 > MOST_ROWS > len(rows)
    # The first has no gradient to give back, the last ends in the loss.
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ("0", "0 (Linear)", "16.2 KiB", "1"),
        ("1 ... 16", "1 (Linear) ...", "16.2 KiB", "16"),
        ("17", "17 (Linear)", "320 B", "1"),
    ]


def test_step_line_gives_throughput(plan):
    line = line_of(plan("tokens --batch 4"), "step of one task alone: ")
    samples_per_s, tokens_per_s = (float(part.split()[0]) for part in line.split("; ")[1].split(", "))
    assert tokens_per_s == pytest.approx(32 * samples_per_s, rel=1e-3)


def test_layers_are_made_of_a_forward_of_its_own(plan, monkeypatch):
    for function, shown in OWN_FORWARDS.items():
        monkeypatch.setattr(sys.modules[__name__], "made", function, raising=False)
        lines = plan(f"made --partitioner balanced:{len(shown)}")
        assert "the layers are made of " in lines[3]
        assert [cells(row)[1] for row in rows_of(lines)] == shown


def test_modules_of_the_current_directory_are_found(tmp_path, monkeypatch, said):
    (tmp_path / "of_this_folder.py").write_text(f"from {HERE} import mlp\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    before = list(sys.path)
    code, lines, _ = said(f"plan of_this_folder:mlp {FIXED}")
    assert code == 0
    assert lines[0].endswith("70,785 parameters")
    assert sys.path == before


@pytest.mark.parametrize(
    ("line", "searched"), [(f"plan {HERE}:mlp {FIXED}", True), ("demo", False), ("report a", False)]
)
def test_the_current_directory_is_searched_where_a_function_is_named(monkeypatch, tmp_path, line, searched):
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        command, "import_module", lambda _: SimpleNamespace(run=lambda options: found.append(str(tmp_path) in sys.path))
    )
    assert (main(line.split()), found) == (0, [searched])


# --- refusals ---


FUNCTIONS = {
    "reads_values": "Tensor.item() meta values",
    "prints_values": "(test_main.py: prints_values)",
    "raises": "KeyError: (test_main.py: raises)",
    "takes_arguments": "argument: 'width' without",
    "a_pair": "tuple 2 loss_fn",
    "nothing": "NoneType",
    "no_model": "model int",
    "no_modules": "0 (builtin_function_or_method)",
    "no_layers": "model (list) layers",
    "no_batch": "batch Tensor",
    "no_loss": "loss_fn str",
    "wrong_width": "RuntimeError: 3 (Linear)",
    "failing_layer": "LookupError: (test_main.py: (Fails)",
    "branching_layer": "values 1 (Branch)",
    "missing": f"'missing' '{HERE}' mlp,",
    "NOT_CALLABLE": "'NOT_CALLABLE' int",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_cannot_be_planned(refused, name):
    refused(f"plan {HERE}:{name} {FIXED}", FUNCTIONS[name])


OPTIONS = {
    "--memory 0": "--memory: '0'",
    "--memory 16G": "--memory: '16G' '16GiB'",
    "--memory -1GiB": "--memory",
    "--memory=-1GiB": "--memory: '-1GiB'",
    "--memory 20KiB": "20480 --memory --reserve",
    "--reserve 64MiB": "--reserve: memory, 64",
    "--reserve much": "--reserve: 'much'",
    "--device gpu": "--reserve: 1 64",
    "--device tpu": "'tpu' gpu --help",
    "--precision int8": "'int8' bfloat16",
    "--optimizer lion": "'lion' adamw sgd-momentum",
    "--batch 0": "--batch: '0'",
    "--batch x": "--batch: 'x'",
    "--devices 1.5": "--devices: '1.5'",
    "--micro-batches many": "--micro-batches: 'many'",
    "--micro-batches 9": "micro-batches: 9, 8",
    "--partitioner best": "'best' pilot balanced:N",
    "--partitioner balanced": "partitioner: 'balanced' balanced:N",
    "--partitioner balanced:0": "--partitioner '0'",
    "--partitioner pilot:3": "partitioner: 'pilot' balanced:N",
    "--partitioner balanced:19": "19 18",
    "--flops fast": "--flops: 'fast' 80T",
    "--flops 0": "--flops: '0'",
    "--flops 1e999": "--flops: '1e999'",
    "--link 0": "--link: '0'",
    "--dram-bandwidth 50G": "--dram-bandwidth: '50G'",
    "--memory-bandwidth x/s": "--memory-bandwidth: 'x'",
    "--dram much": "--dram: 'much'",
    "--dram 1MiB": "dram: dram=1 split_weights",
    "--dram 1.1MiB --devices 2": "2 dram=1.1",
    "--dram 1MiB --precision bfloat16 --no-split-weights": "dram=1",
    "--split-weights": "--split-weights: precision='float32'",
    "--early-release late": "'late' all",
    "--early-release --precision float16": "--early-release: precision='float16'",
    "--no-such-option": "--no-such-option",
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_that_cannot_be_meant(refused, options):
    layer = "0 (Linear)" if options == "--memory 20KiB" else None
    refused(f"plan {HERE}:mlp {FIXED} {options}", OPTIONS[options], layer=layer)


def test_names_that_lead_nowhere(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_here.py").write_text("import no_such_package\n")
    (tmp_path / "unreadable_here.py").write_text("def f(:\n")
    for name, says in {
        "mlp": "'mlp' PACKAGE.MODULE:FUNCTION",
        "mlp:": "'mlp:' PACKAGE.MODULE:FUNCTION",
        "nowhere:f": f"module: 'nowhere' {tmp_path}",
        "examples/x.py:f": "module: 'examples/x.py'",
        "broken_here:f": "'broken_here' 'no_such_package' (broken_here.py:1",
        "unreadable_here:f": "'unreadable_here' SyntaxError",
    }.items():
        refused(f"plan {name} --memory 16GiB", says)


@pytest.mark.parametrize("line", ["plan {} --debug", "--debug plan {}", "plan {}"])
def test_bugs_show_their_traceback_where_asked(monkeypatch, said, line):
    monkeypatch.setattr("hydra_engine.planning.ahead.predict_step", None)
    code, lines, errors = said(line.format(f"{HERE}:mlp {FIXED}"))
    assert (code, lines) == (1, [])
    assert (errors[0] == "Traceback (most recent call last):", len(errors) > 1) == ("--debug" in line,) * 2
    assert errors[-1].startswith("hydra-engine plan: ")
    names(errors[-1], says="TypeError: 'NoneType' --debug")


@pytest.mark.parametrize("where", ["import", "run"])
@pytest.mark.parametrize("line", ["plan {}", "--debug plan {}"])
@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (command.Mistake("--memory: 3"), 2, "--memory: 3"),
        (command.Failure("task 'a' failed"), 1, "'a' failed"),
        (ImportError("libcudart.so.12"), 1, "ImportError: libcudart.so.12"),
        (KeyboardInterrupt(), 130, "Ctrl-C"),
        (SystemExit(143), 143, "SIGTERM"),
        (SystemExit(75), 75, None),  # the engine has said why
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_what_ends_a_verb_has_its_code_and_one_line(monkeypatch, capsys, where, line, error, code, says):
    def fails(_):
        raise error

    monkeypatch.setattr(command, "import_module", fails if where == "import" else lambda _: SimpleNamespace(run=fails))
    assert main(line.format(f"{HERE}:mlp {FIXED}").split()) == code
    errors = capsys.readouterr().err.splitlines()
    own = [each for each in errors if each.startswith("hydra-engine plan: ")]
    assert own == (errors[-1:] if says else [])
    assert (errors[:1] == ["Traceback (most recent call last):"]) == ("--debug" in line)
    assert "--debug" in line or errors == own
    names("".join(own), says=says or "")


# --- as a program ---


def test_entry_point_names_a_function():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    name, _, target = settings["options.entry_points"]["console_scripts"].strip().partition(" = ")
    module, _, function = target.partition(":")
    assert (name, getattr(import_module(module), function)) == ("hydra-engine", main)


# VmHWM and not ru_maxrss: that one begins with what the parent had when it forked.
MEASURED = """
import os, resource, sys, time
from pathlib import Path
from hydra_engine.cli import command, main
begin_s = time.perf_counter()
code = main(sys.argv[1:])
wall_s = time.perf_counter() - begin_s
status = Path("/proc/self/status")
if status.exists():
    peak = int(status.read_text().split("VmHWM:")[1].split()[0])
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(f"measured {code} {wall_s} {peak * 1024}")
"""


@pytest.mark.rest
def test_70_billion_parameters_are_planned_for_24_gib_within_a_minute_and_2_gib():
    options = ["--memory", "24GiB", "--precision", "bfloat16", "--devices", "4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURED, "plan", "examples.llama_70b:llama_70b", *options]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = ended.stdout.splitlines()
    _, code, wall_s, peak_bytes = lines[-1].split()
    assert (code, ended.stderr) == ("0", "")
    assert float(wall_s) < 60
    assert int(peak_bytes) < 2 * 2**30
    assert lines[0] == "examples.llama_70b:llama_70b: 82 layers, 70,553,706,496 parameters"
    assert "(16 bytes per parameter)" in line_of(lines, "DRAM: ")
    shown = (ROOT / "docs" / "planning.md").read_text().partition(f"{lines[0]}\n")[2].partition("```")[0].splitlines()
    assert rows_of(shown) == rows_of(lines)


def test_the_parser_offers_what_plans_take():
    assert set(command.DEVICES.values()) == set(RESERVED_BYTES)
    assert set(command.PRECISIONS) == set(DTYPES)
    assert set(command.OPTIMIZERS) == set(OPTIMIZERS)
