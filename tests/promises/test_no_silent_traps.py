"""What would end in "finished" and is no success is refused (test_wrong_calls.py), or said in the report."""

import _thread
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import Callback, EmulatedDevice, KeepBest, Model, ModelTask, ShardDoesNotFit, StopTask
from tests import exact
from tests.refused import names, refused

WIDTH = 8


def net(width=WIDTH, **settings):
    return nn.Sequential(*(nn.Linear(width, width, **settings) for _ in range(3)))


def loader(width=WIDTH, num=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(4, width, generator=generator).to(dtype) for _ in "xy") for _ in range(num)]


def orchestra(*tasks, memory="1MiB"):
    return exact.silent(list(tasks), memory)


def report(*tasks):
    return orchestra(*tasks).train_models()


def test_losses_that_become_nan_are_told_with_their_first_step():
    found = report(ModelTask(net(), F.mse_loss, loader(), 1e20, 8, name="a", seed=0))
    assert found.tasks["a"].status == "finished"
    [line] = [line for line in str(found).splitlines() if line.startswith("a: ") and "31 of 32" in line]
    names(line, says="nan 1,")


def test_steps_that_nonfinite_leaves_out_are_counted():
    found = report(ModelTask(net(), F.mse_loss, [*loader(), (torch.full((4, 8), torch.inf),) * 2], nonfinite="skip"))
    assert found.tasks["task-0"].skipped_steps == [4]
    [remark] = found.tasks["task-0"].remarks
    names(remark, says="1 skipped_steps 4")


def test_a_validation_loss_that_is_nan_is_told():
    validation = [(torch.full((4, WIDTH), torch.nan), torch.zeros(4, WIDTH))]
    found = report(ModelTask(net(), F.mse_loss, loader(), epochs=2, validation=validation))
    [remark] = found.tasks["task-0"].remarks
    names(remark, says="validation 2 4")


class Stops(Callback):
    def __init__(self, *reason):
        self.reason = reason

    def on_step(self, report):
        raise StopTask(*self.reason)


def test_the_reason_of_a_stop_is_kept():
    class StopsFromOutside(Callback):
        def on_step(self, report):
            made.stop_task("outside")

    options = {"lr": 1e20, "nonfinite": "stop"}
    made = orchestra(
        ModelTask(net(), F.mse_loss, loader(), name="said", callbacks=[Stops("loss is flat")]),
        ModelTask(net(), F.mse_loss, loader(), name="unsaid", callbacks=[Stops()]),
        ModelTask(net(), F.mse_loss, loader(num=99), name="outside", callbacks=[StopsFromOutside()]),
        ModelTask(net(), F.mse_loss, loader(), name="nan", seed=0, **options),
        ModelTask(net(), F.mse_loss, loader(), 0.0, 9, name="flat", keep_best=KeepBest("loss", patience=1)),
        ModelTask(net(), F.mse_loss, loader(), name="whole"),
    )
    found = made.train_models()
    reasons = {name: task.stop_reason for name, task in found.tasks.items()}
    words = {
        "said": "Stops.on_step StopTask flat",
        "unsaid": "Stops.on_step StopTask",
        "outside": "stop_task()",
        "nan": "step nonfinite='stop'",
        "flat": "loss 1 patience",
    }
    assert reasons.pop("whole") is None
    assert reasons.keys() == words.keys()
    for name, reason in reasons.items():
        names(reason, says=words[name])
    [line] = [line for line in str(found).splitlines() if line.startswith("said: ")]
    assert line.endswith(reasons["said"])


def test_an_interrupt_is_the_reason_of_who_was_stopped_by_it():
    class Interrupts(Callback):
        def on_step(self, report):
            if report.steps == 1:
                _thread.interrupt_main()

    made = orchestra(ModelTask(net(), F.mse_loss, loader(num=9_000), name="a", callbacks=[Interrupts()]))
    with pytest.raises(KeyboardInterrupt):
        made.train_models()
    names(made.report.tasks["a"].stop_reason, says="interrupted")


def test_weights_that_are_trained_in_bfloat16_are_told():
    found = report(ModelTask(net(dtype=torch.bfloat16), F.mse_loss, loader(dtype=torch.bfloat16), name="a"))
    for told in (found.messages[0], found):
        names(told, task="a: 6", says="bfloat16 1/256 model.float()")


def test_frozen_weights_may_be_as_narrow_as_they_are():
    class Casts(nn.Linear):
        def forward(self, x):
            return super().forward(x.half()).float()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Casts(WIDTH, WIDTH).half().requires_grad_(False))
    assert report(ModelTask(model, F.mse_loss, loader(), name="a")).tasks["a"].status == "finished"


@pytest.mark.rest
def test_the_least_memory_that_is_told_works_for_all_tasks_and_less_does_not():
    def trained(memory):
        small, large = (ModelTask(net(n), F.mse_loss, loader(n), name=f"n{n}", seed=0) for n in (64, 256))
        return orchestra(small, large, memory=memory).train_models()

    with refused(ShardDoesNotFit, task="n64", layer="2 (Linear)", says="n256") as caught:
        trained("1KiB")
    least = int(re.search(r"least memory .* \((\d+) bytes\)", str(caught.value))[1])
    assert {task.status for task in trained(least).tasks.values()} == {"finished"}
    with refused(ShardDoesNotFit, task="n256", says=least):
        trained(least - 1)


def test_auto_memory_is_half_of_the_free_dram(monkeypatch):
    monkeypatch.setattr("hydra_engine.system.dram.available_dram_bytes", lambda: 2**30)
    assert EmulatedDevice("auto").memory_bytes == EmulatedDevice(memory="auto").memory_bytes == 2**29


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("rmsprop", torch.optim.RMSprop)])
def test_an_optimizer_by_name_is_that_class(name, kind):
    def losses(optimizer):
        torch.manual_seed(0)
        task = ModelTask(net(), F.mse_loss, loader(), 0.01, optimizer=optimizer, name="a", seed=0)
        return report(task).tasks["a"].losses

    assert losses(name) == losses(kind)


class Scores(nn.Module):
    """Takes labels, as models of `transformers` do, and gives its loss with its outputs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3)
        self.outer = nn.Linear(3, 3)

    def forward(self, x, scale=None, labels=None):
        logits = self.outer(self.inner(x if scale is None else x * scale))
        return {"logits": logits, "loss": None if labels is None else F.cross_entropy(logits, labels)}


def collated():
    return [{"x": x, "labels": torch.arange(4) % 3, "scale": y} for x, y in loader()]


def test_batches_of_a_data_collator_unpack_by_themselves():
    def losses(model, loss_fn, **options):
        return report(ModelTask(model, loss_fn, collated(), 0.1, 2, name="a", seed=0, **options)).tasks["a"].losses

    torch.manual_seed(0)
    state = Scores().state_dict()

    def model():
        made = Scores()
        made.load_state_dict(state)
        return made

    own = losses(model(), lambda output, labels: output["loss"])
    assert own == losses(model(), lambda output, labels: F.cross_entropy(output["logits"], labels))
    assert own == losses(
        Model(model()), lambda output, labels: output["loss"], unpack=lambda batch: (batch, batch["labels"])
    )
    assert own[-1] < own[0]


def test_labels_are_the_target_alone_where_no_forward_takes_them():
    class Picks(nn.Module):
        def forward(self, inputs):
            assert list(inputs) == ["x", "scale"]
            return inputs["x"] * inputs["scale"]

    task = ModelTask([Picks(), nn.Linear(WIDTH, 3)], F.cross_entropy, collated(), name="a")
    assert report(task).tasks["a"].steps == 4


class Gates(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, gate):
        return self.inner(x) * gate


@pytest.mark.parametrize("by_name", [False, True])
def test_a_forward_of_two_arguments_over_one_layer_gets_both(by_name):
    torch.manual_seed(0)
    model, plain = Gates(), Gates()
    plain.load_state_dict(model.state_dict())
    batches = [({"x": x, "gate": y} if by_name else (x, y), y) for x, y in loader()]
    found = report(ModelTask(model, F.mse_loss, batches, 0.1, name="a", seed=0)).tasks["a"].losses
    optimizer, expected = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for inputs, target in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(plain(**inputs) if by_name else plain(*inputs), target)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found == expected
