"""`hydra-engine demo`: what it says before and after, that its bits are plain PyTorch's, and what it refuses."""

from importlib import import_module
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader

from tests.fake_cuda import FakeCuda
from tests.refused import names, refused

demo = import_module("hydra_engine.cli.demo")


def shrink(monkeypatch, **changes):
    """Make the four models small."""
    small = {name: config._replace(**changes) for name, config in demo.CONFIGS.items()}
    monkeypatch.setattr(demo, "CONFIGS", small)
    monkeypatch.setattr(demo, "CONTEXT", 16)
    return small


def test_it_trains_four_models_as_plain_pytorch_does(said, monkeypatch):
    small = shrink(monkeypatch, width=96, num_blocks=4)
    threads = torch.get_num_threads()
    code, lines, _ = said("demo --steps 2 --devices 1.75MiB 1.75MiB")
    assert (code, torch.get_num_threads()) == (0, threads)
    assert lines[0].startswith("Four byte-level GPTs train together on 2 devices, each too small for any: about ")
    assert [line.split(",")[0] for line in lines[1:4]] == ["1. plan", "2. train", "3. check"]
    for name in small:
        header, row = (line for line in lines if line.split()[:2] in ([name, "4"], [name, "finished"]))
        assert float(header.split()[-2]) >= 4, header
        assert row.count("->") == 2, row  # training and validation loss
    assert lines.count("plan for EmulatedDevice(1.8 MiB), EmulatedDevice(1.8 MiB)") == 1
    assert {"1. plan", "2. train", "3. check"} <= set(lines)
    assert "  yes: 54 of 54 weight tensors are bit-equal" in lines
    assert "  yes: losses of 2 steps are identical" in lines
    assert "  yes: validation losses of 2 epochs are identical" in lines
    assert lines[-1].startswith("Conclusion: 4 models, each 4.")
    assert lines[-1].endswith("and deep has every bit that plain PyTorch gives it alone.")


def test_it_trains_on_gpus(said, monkeypatch):
    small = shrink(monkeypatch, width=32, num_blocks=1)
    cuda = FakeCuda(num_devices=2)
    with cuda.installed():
        code, lines, _ = said("demo --steps 2 --devices cuda:0 cuda:1 --memory 8MiB")
    assert code == 0
    assert "plan for CudaDevice(0, 3.8 MiB), CudaDevice(1, 3.8 MiB)" in lines
    for name in small:
        assert [line for line in lines if line.split()[:3] == [name, "finished", "2"]]
    assert lines[-1].endswith("Bits are compared on emulated devices alone: leave --devices out.")
    cuda.check_all_left_as_found()


def test_it_fails_when_the_weights_differ(said, monkeypatch):
    shrink(monkeypatch, width=32, num_blocks=2)
    gpt, seeds = demo.gpt, iter(range(99))
    monkeypatch.setattr(demo, "gpt", lambda config, seed: gpt(config, next(seeds)))
    code, lines, errors = said("demo --steps 2 --devices 1.75MiB 1.75MiB")
    assert code == 1
    assert "  NO: losses of 2 steps are identical" in lines
    assert not [line for line in lines if "Conclusion" in line]
    assert "but deep differs from plain PyTorch: not " in errors[0]
    assert len(errors) == 1


def test_what_differs_is_named(capsys):
    config = demo.Config(width=32, num_blocks=1, lr=1e-3)
    loader = DataLoader(demo.windows(bytes(range(256)), 8), batch_size=4)
    untrained = SimpleNamespace(model=demo.gpt(config, seed=0), dataloader=loader, validation=loader)
    report = SimpleNamespace(name="tiny", losses=[0.0] * 4, validation_losses=[0.0] * 2, seed=0)
    assert len(demo.differences(untrained, report, config)) == 3
    printed = capsys.readouterr().out
    assert printed.count("NO: ") == 3
    assert "NO: 0 of " in printed


def test_devices_too_small_are_refused_in_one_line(said, monkeypatch):
    shrink(monkeypatch, width=96, num_blocks=1)
    code, lines, errors = said("demo --devices 1KiB")
    assert (code, len(errors)) == (2, 1)
    assert lines[0].startswith("Four byte-level GPTs train together on 1 device, ")
    names(errors[0], says="available: 1 KiB")
    names(errors[0], says="--devices 12MiB")


def test_it_learns_a_text_of_the_users(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 2)
    windows = demo.windows(demo.read_text(path), 8)
    inputs, target = windows[7]
    assert len(windows) == 8
    assert inputs.tolist() == [each % 256 for each in range(7 * 55, 7 * 55 + 64)]
    assert inputs.tolist()[1:] == target.tolist()[:-1]
    assert len(target) == 64
    with refused(says="text: 512 564"):
        demo.windows(demo.read_text(path), 500)


def test_ctrl_c_names_the_command(said, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_demonstrate", interrupt)
    again = "hydra-engine demo: ended by Ctrl-C; begin again with `hydra-engine demo --steps 2`"
    assert said("demo --steps 2") == (130, [], [again])
