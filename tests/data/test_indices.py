"""Indices out of range are found before a device sees them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import ModelTask
from hydra_engine.data.indices import IndexLimit, check_indices, direct_limit
from partitioners import Presharded
from partitioners.boundary import Boundary
from tests import exact
from tests.refused import names, refused

VOCABULARY, LENGTH = 11, 4


class Embed(nn.Module):
    """Tokens and positions, as in a GPT: the positions do not come from the loader."""

    def __init__(self, max_length=LENGTH):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 6), nn.Embedding(max_length, 6)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


def limit_of(layer, value):
    limit = IndexLimit(layer)
    limit.enters(value)
    with limit:
        layer(value)
    return limit.found


def test_an_embedding_is_its_own_limit():
    assert direct_limit(nn.Embedding(7, 2)) == 7
    assert direct_limit(nn.Linear(7, 2)) is None


def test_only_what_came_in_counts():
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    assert limit_of(Embed(), tokens) == VOCABULARY
    assert limit_of(nn.Linear(3, 2), torch.zeros(1, 3)) is None


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, VOCABULARY + 5])
def test_value_limit_and_remedy_are_named(wrong):
    value = Boundary.of(torch.tensor([[0, wrong, 3]]), "the batch")
    with refused(IndexError, layer="embed", says=f"{wrong} {VOCABULARY - 1}"):
        check_indices(value, VOCABULARY, "embed")


@pytest.mark.parametrize("tensor", [torch.tensor([0, VOCABULARY - 1]), torch.zeros(0, dtype=torch.long), torch.ones(2)])
def test_what_is_in_range_passes(tensor):
    check_indices(Boundary.of(tensor, "the batch"), VOCABULARY, "embed")


def cross_entropy(out, target):
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("first", [Embed, lambda: nn.Embedding(VOCABULARY, 6)])
def test_a_task_with_a_wrong_token_fails_at_its_last_commit_and_others_finish(first):
    def task_of(name, wrong_step=None):
        torch.manual_seed(0)
        batches = [torch.randint(VOCABULARY, (3, LENGTH)) for _ in range(4)]
        if wrong_step is not None:
            batches[wrong_step][1, 2] = VOCABULARY
        model = nn.Sequential(first(), nn.Linear(6, 6), nn.Linear(6, VOCABULARY))
        loader = [(batch, batch.clamp(max=VOCABULARY - 1)) for batch in batches]
        return ModelTask(model, cross_entropy, loader, 0.1, name=name, seed=1)

    report = exact.silent([task_of("wrong", 2), task_of("right")]).train_models()
    assert report.tasks["right"].status == "finished"
    failed = report.tasks["wrong"]
    assert (failed.status, failed.steps) == ("failed", 2)
    assert isinstance(failed.exception, IndexError)
    names(failed.error, says=f"{VOCABULARY} {VOCABULARY - 1}")


# Classes of a target


NUM_CLASSES = 5
LOSSES = {
    "cross entropy": nn.CrossEntropyLoss(),
    "a function": F.cross_entropy,
    "its own logarithms": lambda out, target: F.nll_loss(F.log_softmax(out, 1), target),
    "one of several": lambda out, target: F.cross_entropy(out, target["labels"]),
}


def classified(loss, *, classes, batch_with=None, **options):
    """A task of ten batches, of which the last has `batch_with` among its classes."""
    torch.manual_seed(0)
    batches = [(torch.randn(4, 6), torch.tensor([0, 1, *classes])) for _ in range(10)]
    if batch_with is not None:
        batches[-1][1][2] = batch_with
    if loss == "one of several":
        batches = [(x, {"weights": torch.ones(4, dtype=torch.long), "labels": y}) for x, y in batches]
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, NUM_CLASSES))
    return ModelTask(model, LOSSES.get(loss, loss), batches, 0.1, name="a", partitioner=Presharded([1, 2]), **options)


@pytest.mark.parametrize("wrong", [NUM_CLASSES, -1])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_class_that_the_output_has_not_fails_its_task_before_the_loss_sees_it(loss, wrong):
    task = classified(loss, classes=(2, 4), batch_with=wrong, accumulation_steps=2)
    with refused(IndexError, task="a", says=f"class {wrong} ignore_index=-100"):
        exact.run([task]).raise_failures()


def test_a_class_that_is_out_of_range_from_the_beginning_is_refused_in_the_plan():
    with refused(IndexError, says="9"):
        exact.silent([classified("cross entropy", classes=(2, 9))]).generate()


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(ignore_index=9),
        lambda out, target: F.cross_entropy(out, target.clamp(max=NUM_CLASSES - 1)),
        lambda out, target: F.cross_entropy(out[:2], target[:2]),
    ],
    ids=["left out", "changed before", "a part"],
)
def test_what_the_loss_leaves_out_or_changes_trains(loss):
    exact.run([classified(loss, classes=(2, 4), batch_with=9)]).raise_failures()


class SelfSimilar(nn.Module):
    """Has as many outputs as the batch has samples: candidates within the batch."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 12)

    def forward(self, x):
        out = self.embed(x)
        return out @ out.T


def shifted(out, target):
    target -= 1  # the data counts from 1
    return F.cross_entropy(out, target)


@pytest.mark.parametrize(
    ("model", "loss", "sizes", "first"),
    [
        (nn.Sequential(SelfSimilar()), F.cross_entropy, (4, 8, 12), 0),
        (nn.Sequential(nn.Linear(6, NUM_CLASSES)), lambda out, y: shifted(out, y.clone()), (4, 4), 1),
    ],
    ids=["candidates", "counts from 1"],
)
def test_classes_that_are_no_output_of_the_model_are_not_compared(model, loss, sizes, first):
    batches = [(torch.randn(size, 6), torch.arange(first, first + size)) for size in sizes]
    task = ModelTask(model, loss, batches, 0.1, name="a", partitioner=Presharded([1]))
    exact.run([task]).raise_failures()


def test_a_validation_may_have_another_target():
    def loss(out, target):
        return F.cross_entropy(out, target[1] if isinstance(target, tuple) else target)

    batches = [(torch.randn(4, 6), torch.tensor([0, 1, 2, 4])) for _ in range(2)]
    validation = [(x, (torch.full((4,), 100), y)) for x, y in batches]
    model = nn.Sequential(nn.Linear(6, NUM_CLASSES))
    task = ModelTask(model, loss, batches, 0.1, name="a", validation=validation, partitioner=Presharded([1]))
    exact.run([task]).raise_failures()
