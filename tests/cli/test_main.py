"""The command line: what `plan` prints, what it takes for the largest model, and every refusal in one line."""

import configparser
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

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


class OwnForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x):
        return self.second(self.first(x))


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


def own_forward():
    return OwnForward(), mlp()[1], F.mse_loss


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


# Short ones, which a test puts into this module by their names.
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


# --- what it prints ---


@pytest.fixture(autouse=True)
def _at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def plan(capsys):
    """Runs `plan` on a function of this file and returns the lines it printed."""

    def plan(name, *options, memory="64MiB", device="cpu"):
        code = main(["plan", f"tests.cli.test_main:{name}", "--memory", memory, "--device", device, *options])
        printed = capsys.readouterr()
        assert (code, printed.err) == (0, "")
        return printed.out.splitlines()

    return plan


def line_of(lines, start):
    (line,) = [line for line in lines if line.startswith(start)]
    return line


def rows_of(lines):
    (begin,) = [k for k, line in enumerate(lines) if line.startswith("-----")]
    return lines[begin + 1 : lines.index("", begin)]


def test_header_says_what_is_planned(plan):
    lines = plan("mlp", "--batch", "16", "--micro-batches", "2")
    assert lines[:3] == [
        "tests.cli.test_main:mlp: 18 layers, 70,785 parameters",
        "cpu of 64 MiB; float32; batch of 16 samples in 2 micro-batches",
        "times are counted, not measured",
    ]


def test_a_gpu_keeps_a_gibibyte_and_says_that_it_estimates(plan):
    lines = plan("mlp", "--precision", "bfloat16", memory="24GiB", device="gpu")
    assert lines[1:3] == [
        "gpu of 24 GiB, 1 GiB of it reserved; bfloat16; batch of 8 samples in 1 micro-batch",
        "estimates: no such device was measured",
    ]
    assert "estimates" not in "".join(plan("mlp"))


def cells(row):
    return [cell.strip() for cell in row.split("  ") if cell]


def test_one_row_per_shard(plan):
    lines = plan("mlp", "--partitioner", "balanced:3")
    assert cells(lines[4]) == ["shard", "layers", "slab", "needs", "forward", "backward"]
    rows = [cells(row) for row in rows_of(lines)]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert rows[0][1].startswith("0 (Linear) to ")
    assert rows[2][1].endswith(" to 17 (Linear)")


def test_equal_shards_share_a_row_when_there_are_many(plan):
    lines = plan("mlp", "--partitioner", "balanced:18")
    rows = [cells(row) for row in rows_of(lines)]
    assert lines[4].endswith("  equal shards")
    assert 18 > MOST_ROWS > len(rows)
    # The first has no gradient to give back, the last ends in the loss.
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ("0", "0 (Linear)", "16.2 KiB", "1"),
        ("1 ... 16", "1 (Linear) ...", "16.2 KiB", "16"),
        ("17", "17 (Linear)", "320 B", "1"),
    ]


def test_dram_line_names_its_parts(plan):
    line = line_of(plan("mlp", "--partitioner", "pilot"), "DRAM:")
    assert "weights 276.5 KiB + gradients 276.5 KiB + adamw 553 KiB (16 bytes per parameter)" in line
    assert line.endswith("+ buffers 0 B + boundaries 2 KiB")
    assert "sgd 0 B (8 bytes per parameter)" in line_of(plan("mlp", "--optimizer", "sgd"), "DRAM:")


@pytest.mark.parametrize(
    ("options", "bound"),
    [(["--flops", "1e6"], "compute"), (["--link", "1MB/s"], "link"), (["--dram-bandwidth", "1MB/s"], "host optimizer")],
)
def test_the_slowest_rate_bounds_the_step(plan, options, bound):
    assert line_of(plan("mlp", *options), "bound by: ").startswith(f"bound by: {bound} (")


def test_step_line_gives_throughput(plan):
    assert line_of(plan("mlp"), "step of one task alone: ").endswith("samples/s")
    line = line_of(plan("tokens", "--batch", "4"), "step of one task alone: ")
    samples_per_s, tokens_per_s = (float(part.split()[0]) for part in line.split("; ")[1].split(", "))
    assert tokens_per_s == pytest.approx(32 * samples_per_s, rel=1e-3)


def test_layers_at_home_are_told_where_they_make_steps_shorter(plan):
    line = line_of(plan("mlp", "--link", "1MB/s", "--dram-bandwidth", "100MB/s"), "with ")
    assert line.startswith("with 18 of 18 layers at home on the device, cut into 1 shard, a step takes ")
    assert not [line for line in plan("mlp", "--link", "1PB/s", "--dram-bandwidth", "1PB/s") if "at home" in line]


def test_several_devices_help_several_tasks(plan):
    assert not [line for line in plan("mlp") if "devices" in line]
    line = line_of(plan("mlp", "--devices", "4"), "4 devices with 4 such tasks or more ")
    assert "a task's step uses one device at a time" in line
    assert line.endswith("of DRAM")


def test_rates_are_stated(plan):
    told = "{} TFLOP/s, device memory {} GB/s, link {} GB/s each way, DRAM {} GB/s for 28 bytes per parameter"
    assert line_of(plan("mlp"), "stated rates: ") == f"stated rates: {told.format(0.05, 10, 25, 50)}"
    own = ("--flops", "2T", "--memory-bandwidth", "1.5TB/s", "--link", "12GB", "--dram-bandwidth", "1GiB/s")
    assert line_of(plan("mlp", *own), "stated rates: ") == f"stated rates: {told.format(2, 1500, 12, 1.074)}"


def test_flops_are_read(plan):
    for flops in ("80e12", "80T", "80 TFLOP/s", "80tflops", "80000000000000"):
        assert "stated rates: 80 TFLOP/s" in line_of(plan("mlp", "--flops", flops), "stated rates: ")


def test_layers_are_made_of_a_forward_of_its_own(plan, monkeypatch):
    for function, shown in OWN_FORWARDS.items():
        monkeypatch.setattr(sys.modules[__name__], "made", function, raising=False)
        lines = plan("made", "--partitioner", f"balanced:{len(shown)}")
        assert "the layers are made of " in lines[3]
        assert [cells(row)[1] for row in rows_of(lines)] == shown
    assert not [line for name in ("mlp", "tokens") for line in plan(name) if "own forward" in line]


def test_dram_is_a_limit_for_as_many_tasks_as_devices(plan, refused):
    base = ("plan", "tests.cli.test_main:mlp", "--memory", "64MiB", "--device", "cpu")
    assert plan("mlp", "--dram", "1.1MiB")
    names(refused(*base, "--dram", "1MiB"), says="dram: dram=1 split_weights")
    names(refused(*base, "--dram", "1.1MiB", "--devices", "2"), says="2 dram=1.1")
    narrow = ("--precision", "bfloat16")
    assert line_of(plan("mlp", *narrow, "--dram", "1MiB"), "DRAM: ").startswith(
        "DRAM: 970."
    )  # split, or it does not fit
    names(refused(*base, *narrow, "--dram", "1MiB", "--no-split-weights"), says="dram=1")


def test_split_weights_and_early_release_save_bytes(plan):
    narrow = ("--precision", "bfloat16", "--partitioner", "balanced:18")

    def dram(*options):
        return line_of(plan("mlp", *narrow, *options), "DRAM: ")

    assert "= weights 414.8 KiB + gradients 138.3 KiB + adamw 553 KiB (16 bytes" in dram()
    assert "= split weights 276.5 KiB + gradients 138.3 KiB + adamw 553 KiB (14 bytes" in dram("--split-weights")
    # Of two shards, or of all.
    assert "gradients 16.2 KiB" in dram("--early-release")
    assert "gradients 138.3 KiB" in dram("--early-release", "all")
    assert line_of(plan("mlp", "--early-release"), "with early_release=True a step takes ").endswith(" by simulation")
    assert line_of(plan("mlp", "--early-release", "all"), "with early_release='all' a step takes ")


def test_nothing_is_allocated(plan):
    assert line_of(plan("huge", memory="64TiB"), "DRAM: ").startswith("DRAM: 64 TiB = weights 16 TiB + ")


def test_micro_batches_are_chosen(plan):
    line = plan("mlp", "--batch", "1024", "--micro-batches", "auto", memory="400KiB")[1]
    assert "batch of 1024 samples in " in line
    assert "in 1 micro-batch" not in line


def test_modules_of_the_current_directory_are_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "of_this_folder.py").write_text("from tests.cli.test_main import mlp\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    before = list(sys.path)
    assert main(["plan", "of_this_folder:mlp", "--memory", "1MiB", "--device", "cpu"]) == 0
    assert "70,785 parameters" in capsys.readouterr().out
    assert sys.path == before


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
    "missing": "'missing' 'tests.cli.test_main' mlp,",
    "NOT_CALLABLE": "'NOT_CALLABLE' int",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_cannot_be_planned(refused, monkeypatch, name):
    if name in SHORT:
        monkeypatch.setattr(sys.modules[__name__], name, SHORT[name], raising=False)
    line = refused("plan", f"tests.cli.test_main:{name}", "--memory", "64MiB", "--device", "cpu")
    names(line, says=FUNCTIONS[name])


OPTIONS = {
    ("--memory", "0"): "--memory: '0'",
    ("--memory", "16G"): "--memory: '16G' '16GiB'",
    ("--memory", "-1GiB"): "--memory",
    ("--memory=-1GiB",): "--memory: '-1GiB'",
    ("--reserve", "64MiB"): "--reserve: memory, 64",
    ("--reserve", "much"): "--reserve: 'much'",
    ("--device", "gpu"): "--reserve: 1 64",
    ("--device", "tpu"): "'tpu' gpu --help",
    ("--precision", "int8"): "'int8' bfloat16",
    ("--optimizer", "lion"): "'lion' adamw sgd-momentum",
    ("--batch", "0"): "--batch: '0'",
    ("--batch", "x"): "--batch: 'x'",
    ("--devices", "1.5"): "--devices: '1.5'",
    ("--micro-batches", "many"): "--micro-batches: 'many'",
    ("--micro-batches", "9"): "micro-batches: 9, 8",
    ("--partitioner", "best"): "'best' pilot balanced:N",
    ("--partitioner", "balanced"): "partitioner: 'balanced' balanced:N",
    ("--partitioner", "balanced:0"): "--partitioner '0'",
    ("--partitioner", "pilot:3"): "partitioner: 'pilot' balanced:N",
    ("--partitioner", "balanced:19"): "19 18",
    ("--flops", "fast"): "--flops: 'fast' 80T",
    ("--flops", "0"): "--flops: '0'",
    ("--flops", "1e999"): "--flops: '1e999'",
    ("--link", "0"): "--link: '0'",
    ("--dram-bandwidth", "50G"): "--dram-bandwidth: '50G'",
    ("--memory-bandwidth", "x/s"): "--memory-bandwidth: 'x'",
    ("--dram", "much"): "--dram: 'much'",
    ("--split-weights",): "--split-weights: precision='float32'",
    ("--early-release", "late"): "'late' all",
    ("--early-release", "--precision", "float16"): "--early-release: precision='float16'",
    ("--no-such-option",): "--no-such-option",
}


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_options_that_cannot_be_meant(refused, options):
    line = refused("plan", "tests.cli.test_main:mlp", "--memory", "64MiB", "--device", "cpu", *options)
    names(line, says=OPTIONS[options])


def test_a_layer_too_large_names_what_to_change(refused):
    line = refused("plan", "tests.cli.test_main:mlp", "--memory", "20KiB", "--device", "cpu")
    names(line, layer="0 (Linear)", says="20480 --memory --reserve")


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
        names(refused("plan", name, "--memory", "16GiB"), says=says)


def test_bugs_show_their_traceback_where_asked(monkeypatch, capsys):
    arguments = ["plan", "tests.cli.test_main:mlp", "--memory", "64MiB", "--device", "cpu"]
    monkeypatch.setattr("hydra_engine.planning.ahead.predict_step", None)
    for words in ([*arguments, "--debug"], ["--debug", *arguments]):
        with pytest.raises(TypeError):
            main(words)
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    names(err, says="TypeError: 'NoneType' --debug")
    assert err.startswith("hydra-engine plan: ")
    assert err.count("\n") == 1


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
