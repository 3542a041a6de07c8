"""The examples, with the smallest settings, in this process: it has torch loaded."""

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

from tests.fake_cuda import FakeCuda
from tests.refused import names

pytestmark = pytest.mark.rest
ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example and returns what it printed."""

    monkeypatch.syspath_prepend(ROOT / "examples")

    def run(name, *options):
        monkeypatch.setattr(sys, "argv", [name, *options])
        try:
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        else:
            code = 0
        printed = capsys.readouterr().out
        assert code == 0, printed
        return printed

    return run


def module_of(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_single_task_vision_trains_as_plain_pytorch_does(run):
    pytest.importorskip("sklearn")
    printed = run("single_task_vision.py", "--epochs", "1")
    assert "training state 8.6 MiB, 2.2 times the device" in printed
    assert "bit-equal: yes" in printed
    ours, theirs = (line.split()[-1] for line in printed.splitlines() if "validation accuracy" in line)
    assert ours == theirs
    assert float(ours.removesuffix("%")) > 50


def test_single_task_vision_trains_a_vit_on_a_gpu(capsys, monkeypatch):
    pytest.importorskip("sklearn")
    pytest.importorskip("transformers")
    module = module_of("single_task_vision")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    monkeypatch.setattr(module, "VIT", {"image_size": 16, "patch_size": 8, **sizes})
    monkeypatch.setattr(sys, "argv", ["single_task_vision.py", "--scale", "paper", "--epochs", "1", "--memory", "8MiB"])
    cuda = FakeCuda(num_devices=1)
    with cuda.installed():
        module.main()
    printed = capsys.readouterr().out
    assert "plan for CudaDevice(0, 3.8 MiB)" in printed
    assert printed.splitlines()[-1].startswith("validation accuracy ")
    cuda.check_all_left_as_found()


@pytest.mark.parametrize(("half", "lrs"), [("a", ["0.0003", "0.0001", "5e-05"]), ("b", ["6e-05", "1e-05", "2e-05"])])
def test_hydra_12_models_ranks_what_it_trained(run, half, lrs):
    pytest.importorskip("transformers")
    lines = run("hydra_12_models.py", "--steps", "1", "--half", half).splitlines()
    rows = [line.split() for line in lines if " validation loss " in line]
    assert sorted(row[0] for row in rows) == sorted(f"lr={lr}" for lr in [*lrs, *lrs])
    assert {(row[1], row[2]) for row in rows} == {("batch=16", "1"), ("batch=8", "2")}
    losses = [float(row[-1]) for row in rows]
    assert losses == sorted(losses)


def test_scaling_hydra_trains_as_many_models_as_devices(run):
    pytest.importorskip("transformers")
    rows = [line.split() for line in run("scaling_hydra.py", "--steps", "1", "--most", "2").splitlines()]
    assert [row[:2] for row in rows[2:]] == [["1", "1"], ["2", "2"]]


@pytest.mark.parametrize("name", ["hydra_12_models.py", "scaling_hydra.py"])
def test_gpt2_xl_needs_a_gpu(name, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", [name, "--scale", "paper"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    names(ended.value, says="--scale paper: 0")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft calls it
def test_finetune_huggingface_trains_saves_and_loads_as_plain_pytorch_does(run, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    transformers.utils.logging.disable_progress_bar()  # which leaves a thread
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    printed = run("finetune_huggingface.py", "--steps", "2", "--verify", "--save", str(tmp_path))
    assert "LlamaForCausalLM: 2,755,008 parameters, 2,755,008 of them trained" in printed
    assert "training state 42.0 MiB, 4.2 times the device" in printed
    assert "yes: 57 of 57 weight tensors are bit-equal" in printed
    assert "yes: losses of 2 steps are identical" in printed
    printed = run("finetune_huggingface.py", str(tmp_path), "--lora", "--steps", "1", "--verify")
    assert "PeftModel: 2,930,112 parameters, 175,104 of them trained" in printed
    assert "yes: 141 of 141 weight tensors are bit-equal" in printed


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft calls it
def test_lora_sweep_trains_trials_over_one_base_as_plain_pytorch_does(run, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    printed = run("lora_sweep.py", "--steps", "1", "--verify", "--save", str(tmp_path))
    assert "base 4.4 MiB, 3.0 times the device" in printed
    assert "weights of all 4 trials, the base with them: 4.7 MiB of DRAM" in printed
    assert "verify: 4 of 4 trials have the bits of plain PyTorch" in printed
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_plain_and_with_hydra_print_the_same_result(run):
    plain, with_hydra = run("plain.py"), run("with_hydra.py")
    assert plain.startswith("loss ")
    assert plain.splitlines()[-1] == with_hydra.splitlines()[-1]


@pytest.mark.net
def test_plain_and_with_hydra_differ_in_few_lines():
    plain, with_hydra = ((ROOT / "examples" / name).read_text().splitlines() for name in ("plain.py", "with_hydra.py"))
    assert len(set(with_hydra) - set(plain)) <= 6


def test_elastic_digits_have_the_same_bits_on_more_devices(run):
    pytest.importorskip("sklearn")
    printed = run("elastic_digits.py", "--epochs", "1")
    lines = [line for line in printed.splitlines() if line.startswith("devices: ")]
    assert [line.partition(",")[0] for line in lines] == ["devices: 1", "devices: 2", "devices: 4"]
    assert len({line.partition(",")[2] for line in lines}) == 1
    assert "bit-equal: yes" in printed


@pytest.mark.parametrize(("gpus", "most", "steps"), [pytest.param("1", "12", 3, marks=pytest.mark.net), ("2", "1", 16)])
def test_elastic_text_trains_as_with_whole_batches(run, gpus, most, steps):
    printed = run("elastic_text.py", "--steps", "3", "--gpus", gpus, "--max-gpu-batch-size", most)
    assert f"BatchSplit(steps={steps}, " in printed
    assert printed.rstrip().endswith("within 0.001: True")


def test_adaptdl_port_goes_on_from_its_checkpoint(run, tmp_path):
    pytest.importorskip("sklearn")
    path = str(tmp_path / "port.pt")
    first, second = (run("adaptdl_port.py", "--epochs", epochs, "--checkpoint", path) for epochs in ("1", "2"))
    assert [line.split(":")[0] for line in first.splitlines()] == ["epoch 0", "the last step"]
    steps = int(first.split()[2])
    lines = second.splitlines()
    assert lines[0] == f"goes on with epoch 1, step {steps}"
    assert [line.split(":")[0] for line in lines[1:]] == ["epoch 1", "the last step"]
    assert float(lines[1].split()[-1].removesuffix("%")) > 30
    assert "batches of " in lines[1]


@pytest.mark.parametrize(
    ("name", "options", "batch"),
    [("adaptive_digits.py", ["--epochs", "1"], 32), ("adaptive_text.py", ["--epochs", "1", "--windows", "160"], 4)],
)
def test_batches_that_adapt_are_compared_with_fixed_ones(run, name, options, batch):
    pytest.importorskip("sklearn")
    fixed, adaptive, sizes = run(name, *options, "--target", "0").splitlines()
    assert fixed.startswith(f"batches of {batch}: validation loss ")
    assert adaptive.startswith("batches that adapt: validation loss ")
    assert sizes.startswith("batches from ")
