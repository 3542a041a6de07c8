"""`verify`: tasks within the contract are the same in every run, and what is not is named with its place."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import Callback, ModelTask, StopTask
from hydra_engine.verify import verify
from hydra_engine.verify.compare import CUT, RESUMED, WHOLE, Difference, TaskVerification, difference
from hydra_engine.verify.record import FirstBatches, Record, Step, digest
from tests.guard_cases import CASES, PROGRAMS
from tests.promises.test_exact_or_refused import UNSEEN
from tests.verified import CLASSES, LIKELY, Row, Trained, kind_of, table, verified

PAIR = (torch.ones(4, 6), torch.arange(4) % 3)


def layers():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))


def loader(**options):
    return DataLoader(TensorDataset(torch.randn(32, 6), torch.arange(32) % 3), 4, shuffle=True, **options)


def task(**options):
    model, data = options.pop("model", None) or layers(), options.pop("loader", None) or loader()
    loss_fn = options.pop("loss_fn", F.cross_entropy)
    return ModelTask(model, loss_fn, data, 0.05, **{"optimizer": torch.optim.AdamW} | options)


def first_difference(found, run):
    return next(iter(found.tasks.values())).differences[run]


# -- the same


def test_a_task_of_many_options_is_the_same_in_every_run():
    def make():
        schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # noqa: E731
        options = {"max_grad_norm": 0.5, "ema_decay": 0.9, "lr_scheduler": schedule, "name": "busy"}
        groups = lambda name: {"weight_decay": 0.0} if name.endswith("bias") else {}  # noqa: E731
        return task(**options, param_groups=groups, validation=[PAIR, PAIR], nonfinite="stop")

    found = verify(make, steps=5)
    assert found.is_same, str(found)
    busy = found.tasks["busy"]
    assert (busy.num_steps, busy.num_layers, busy.likely) == (6, 5, None)
    assert list(busy.differences) == [WHOLE, CUT, RESUMED]
    lines = str(found).splitlines()
    assert lines[0] == "busy: compared with nonfinite=None, which a few steps do not show"
    assert lines[-1] == "same, bit for bit"


def test_micro_batches_and_two_tasks_with_a_frozen_part_in_common_are_the_same():
    def make():
        shared = nn.Linear(6, 6).requires_grad_(False)
        models = [nn.Sequential(shared, nn.Dropout(0.1), nn.Linear(6, 3)) for _ in range(2)]
        return [task(model=model, loss_reduction=how) for model, how in zip(models, ("mean", "sum"), strict=True)]

    found = verify(make, steps=4, micro_batches=2, memory="1MiB", devices=2)
    assert list(found.tasks) == ["task-0", "task-1"]
    assert found.is_same, str(found)


def test_a_narrow_task_is_compared_in_float32_and_a_scheduler_of_epochs_moves_with_each_pass():
    def make():
        schedule = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
        return task(precision="bfloat16", early_release=True, lr_scheduler=schedule, lr_scheduler_interval="epoch")

    found = verify(make, steps=4)
    assert found.is_same, str(found)
    assert found.notes == ["task-0: compared with precision='float32', since plain PyTorch makes no such casts"]


class Net(nn.Module):
    """A forward of its own, by the names of its arguments."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x, mask=None):
        states, _ = self.rnn(self.embed(x))
        return self.head((states if mask is None else states * mask.unsqueeze(-1)).mean(1))


@pytest.mark.parametrize("kind", ["by name", "in order"])
def test_a_forward_of_the_modules_own_gets_its_arguments_on_both_sides(kind):
    def make():
        x, mask, y = torch.randint(0, 20, (4, 5)), torch.ones(4, 5), torch.arange(4) % 3
        batch = ({"x": x, "mask": mask} if kind == "by name" else (x, mask)), y
        return task(model=Net(), loader=[batch] * 2)

    found = verify(make, steps=2)
    assert found.is_same, str(found)


@pytest.mark.parametrize(
    "name", ["old_weight_norm", "checkpoint_inside", "loss_that_draws", "module_dict_with_forward"]
)
def test_recipes_within_the_contract_are_the_same(name):
    found, expected = verified(name, steps=4)
    assert expected in ("exact", None)
    assert found.is_same, found.differences


def test_callbacks_of_each_training_get_reports_of_their_own_and_may_stop_it():
    trainings = []

    class Stops(Callback):
        def __init__(self):
            self.seen = []
            trainings.append(self.seen)

        def on_epoch_begin(self, report, epoch):
            self.seen.append(("begin", epoch))

        def on_step(self, report):
            self.seen.append((report.last_step.step, report.last_step.epoch, report.losses[-1]))
            if report.steps == 3:
                raise StopTask("enough")

        def on_validation(self, report):
            self.seen.append(report.last_validation.loss)

        def on_task_end(self, report):
            self.seen.append((report.status, report.stop_reason))

    found = verify(lambda: task(callbacks=[Stops()], validation=[PAIR]), steps=4)
    assert found.is_same, str(found)
    plain, whole, cut, *_ = trainings
    assert plain[:-1] == whole[:-1] == cut[:-1]
    kinds = ["validation" if type(each) is float else each[0] for each in plain]
    assert kinds == ["begin", 1, 2, "validation", "begin", 3, "stopped"]
    assert (plain[-1], whole[-1]) == (("stopped", "enough"), ("stopped", "Stops.on_step raised StopTask: enough"))


# -- what differs


def test_a_loader_that_counts_its_batches_gives_others_after_a_resume():
    class Augmented(list):
        calls = 0

        def __iter__(self):
            for x, y in super().__iter__():
                self.calls += 1
                yield x + self.calls, y

    found = verify(lambda: task(loader=Augmented([PAIR] * 4)), steps=4)
    assert first_difference(found, WHOLE) is None
    assert first_difference(found, CUT) is None
    assert first_difference(found, RESUMED)[:2] == (4, "loss")
    assert "no checkpoint holds" in found.tasks["task-0"].likely
    assert str(found).splitlines()[-1] == "not the same"


@pytest.mark.parametrize("has_state", [False, True])
def test_what_a_callback_keeps_is_there_after_a_resume_if_it_has_a_state_dict(has_state):
    class Anneals(Callback):
        def __init__(self):
            self.scale = 1.0

        def on_step(self, report):
            self.scale *= 0.5

        def state_dict(self):
            return {"scale": self.scale} if has_state else {}

        def load_state_dict(self, state):
            self.scale = state.get("scale", 1.0)

    def make():
        anneals = Anneals()
        return task(loss_fn=lambda output, target: F.cross_entropy(output, target) * anneals.scale, callbacks=[anneals])

    found = verify(make, steps=4)
    assert [first_difference(found, run) for run in (WHOLE, CUT)] == [None, None]
    resumed = first_difference(found, RESUMED)
    assert resumed is None if has_state else resumed[:2] == (4, "loss")


@pytest.mark.parametrize("number", [float, np.float32])
def test_a_number_that_a_callback_changes_in_a_layer_is_there_after_a_resume(number):
    class Scales(nn.Linear):
        scale = number(1)

        def forward(self, x):
            return super().forward(x) * self.scale

    class Anneals(Callback):
        def __init__(self, layer):
            self.layer = layer

        def on_step(self, report):
            self.layer.scale = number(self.layer.scale * 0.9)

    def make():
        model = nn.Sequential(nn.Linear(6, 6), Scales(6, 3))
        return task(model=model, callbacks=[Anneals(model[1])])

    found = verify(make, steps=4)
    assert found.is_same, str(found)


def test_what_the_engine_refuses_is_told_with_its_message():
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    found = verify(lambda: task(model=nn.Sequential(nn.Linear(6, 6), Counts(6, 3))), steps=2)
    refused = first_difference(found, WHOLE)
    assert (refused.step, refused.what, refused.place) == (0, "refused", "refused, step 0")
    assert "1 (Counts): forward changes its attribute 'calls'" in refused.text
    assert refused.text in str(found)


def test_what_plain_pytorch_does_not_train_is_not_compared():
    def fails(output, target):
        raise ArithmeticError("no loss today")

    found = verify(lambda: task(loss_fn=fails, name="bad"))
    assert found.tasks["bad"].error == "ArithmeticError: no loss today"
    assert not found.is_same
    assert "  plain PyTorch fails: ArithmeticError: no loss today" in str(found).splitlines()
    assert found.tasks["bad"].differences == {}


def step(loss=1.0, weight=b"w", buffer=b"b", training=True, random=b"r"):
    flags = {"0.training": training}
    return Step(loss=loss, weights={"0.weight": weight}, buffers={"0.mean": buffer}, flags=flags, random=random)


PLAIN = Record(batches=[b"1", b"2", b"3"], steps=[step(), step(2.0), step(math.nan)], validation_losses=[0.5])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"steps": [step(), step(2.5)]}, (2, "loss", "the loss of step 2 is 2.5, plain PyTorch's 2.0")),
        ({"steps": [step(weight=b"x")]}, (1, "weights", "after step 1: 0.weight")),
        ({"steps": [step(buffer=b"x", training=False)]}, (1, "buffers", "after step 1: 0.mean")),
        ({"steps": [step(training=False)]}, (1, "flags", "after step 1: 0.training")),
        ({"steps": [step(random=b"x")]}, (1, "random", "after step 1: torch's random stream stands elsewhere")),
        ({"batches": [b"1", b"x", b"3"]}, (2, "batch", "the loader gave another batch for step 2")),
        (
            {"validation_losses": [0.25]},
            (2, "validation", "validation 1, after step 2: 0.25, plain PyTorch's 0.5"),
        ),
        ({"averages": {"0.weight": b"a"}}, (3, "averages", "ema_decay: 0.weight")),
        ({"steps": PLAIN.steps[:1], "error": "ValueError: no"}, (1, "refused", "ValueError: no")),
        ({"error": "RuntimeError: at its end"}, (3, "refused", "RuntimeError: at its end")),
        ({"steps": [*PLAIN.steps, step()]}, (4, "loss", "step 4 is made, which plain PyTorch does not make")),
    ],
)
def test_the_first_difference_is_named(changes, expected):
    assert difference(PLAIN, Record(**vars(PLAIN) | changes)) == expected


@pytest.mark.parametrize(
    ("run", "what", "begins"),
    [
        (WHOLE, "loss", "rule 1, 2 or 6"),
        (CUT, "loss", "rule 2 or 4"),
        (CUT, "weights", "rule 3, 7 or 12"),
        (RESUMED, "loss", "a callback, loader or other object"),
        (RESUMED, "refused", "the engine does not take"),
        (WHOLE, "batch", "rule 9"),
    ],
)
def test_the_likely_rule_follows_from_the_first_run_that_differs(run, what, begins):
    runs = [WHOLE, CUT, RESUMED]
    differences = {each: Difference(1, what, "") if runs.index(each) >= runs.index(run) else None for each in runs}
    assert TaskVerification(name="a", differences=differences).likely.startswith(begins)


# Of what no check sees, those that change no result within a few steps.
LATE = ("forward_that_sets_a_gradient", "attribute_of_Numbering", "late_")


@pytest.mark.rest
@pytest.mark.parametrize("name", [name for name in UNSEEN.split() if not name.startswith(LATE)])
def test_what_no_check_sees_is_named(name):
    found, _ = verified(name)
    assert not found.is_same


# -- the table of programs


def test_every_program_has_its_row():
    assert CASES.keys() == PROGRAMS.keys()
    counts = Counter((case.was, name[0]) for name, case in CASES.items() if case.was != "since")
    refused, exact = (
        {name: num for (was, name), num in counts.items() if was == each} for each in ("refused", "exact")
    )
    assert refused == {"R": 168, "H": 101, "T": 46, "B": 18, "O": 6, "F": 3}
    assert exact == {"R": 65, "T": 26, "H": 18, "B": 4}
    assert (sum(refused.values()), sum(exact.values())) == (342, 113)
    assert Counter(case.likely for case in CASES.values() if case.was == "refused") == {
        "common": 119,
        "rare": 198,
        "nobody": 25,
    }


@pytest.mark.parametrize(
    ("ways", "said", "kind"),
    [
        (["=", "="], "", "exact"),
        (["=", "refused"], "the loss of step 2", "refused"),
        (["=", "error"], "", "error"),
        (["=", "="], "the loss of step 2", "named"),
        (["refused", "differs at 2"], "ValueError: no", "named"),
        (["=", "differs at 2"], "", "unseen"),
        (["differs at 2", "hung"], "", "hung"),
        (["=", "="], Trained("crashed"), "crashed"),
    ],
)
def test_a_program_is_told_by_what_became_of_each_way(ways, said, kind):
    assert kind_of(ways, said) == kind


def test_totals_are_by_class_and_likelihood():
    rows = [
        Row("R:counter", "refused", {}, ""),
        Row("R:late_scales", "unseen", {}, ""),
        Row("T:lbfgs", "refused", {}, ""),
    ]
    found = {line.split()[0]: [*map(int, line.split()[1:])] for line in table(rows).splitlines()[1:]}
    assert list(found) == [*CLASSES, "all"]
    assert (found["refused"], found["unseen"], found["all"]) == ([2, 0, 0, 2], [0, 1, 0, 1], [2, 1, 0, 3])
    assert table(rows).split()[:4] == [*LIKELY, "all"]


# -- parts


def test_a_loader_is_read_anew_after_its_first_batches_and_opened_when_it_is_asked_for():
    opened = []

    class Loader:
        def __iter__(self):
            opened.append(True)
            return iter(range(5))

    seen = []
    first = FirstBatches(Loader(), 2, seen)
    iterator = iter(first)
    assert opened == [True]
    assert [*iterator, *first] == [0, 1, 0, 1]
    assert seen == [digest(0), digest(1)] * 2


def test_digests_tell_bits_dtypes_shapes_and_containers_apart():
    zero = torch.zeros(4)
    values = [
        zero,
        -zero,
        zero.view(2, 2),
        zero.long(),
        [zero],
        (zero, zero),
        {"a": zero},
        {"b": zero},
        None,
        0,
        0.0,
        "0",
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(torch.arange(6).view(2, 3).t()) == digest(torch.arange(6).view(2, 3).t().contiguous())


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"steps": 0}, ValueError, "steps: 0, limit: at least 1"),
        ({"devices": 1.5}, TypeError, "devices: 1.5 is not an int; give a whole number"),
        ({"micro_batches": True}, TypeError, "micro_batches: True is not an int; give a whole number"),
    ],
)
def test_wrong_arguments_are_refused(options, kind, words):
    with pytest.raises(kind, match=words):
        verify(task, **options)


def test_two_tasks_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"make_tasks: two of \['a', 'a'\] have one name"):
        verify(lambda: [task(name="a"), task(name="a")])


def test_what_is_no_task_is_refused():
    with pytest.raises(TypeError, match="make_tasks: returned a Linear, limit: a ModelTask or a list of them"):
        verify(lambda: [nn.Linear(1, 1)])
