"""Models of `transformers` train as layers to the bits of their own forward, whatever that forward is."""

import inspect

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from hydra_engine import Model
from tests.any_model import harness, huggingface
from tests.refused import refused

BY_NAME = {case.name: case for case in (*huggingface.CASES, *huggingface.SMALLEST)}
CUTS = [harness.one_shard, harness.each_layer]
SEVERAL = [
    "decoder",
    *(pytest.param(name, marks=pytest.mark.rest) for name in ("T5", "Mixtral", "CLIP", "BERT, sequences", "Mamba")),
]


def test_names_of_the_table_are_unique():
    assert len(BY_NAME) == len(huggingface.CASES) + len(huggingface.SMALLEST)


@pytest.mark.parametrize("case", huggingface.SMALLEST, ids=lambda case: case.name)
def test_layers_of_each_kind_train_to_the_bits_of_the_module(case):
    harness.check(case, harness.each_layer)


@pytest.mark.rest
@pytest.mark.parametrize("cut", CUTS, ids=["one shard", "each layer"])
@pytest.mark.parametrize("case", huggingface.LISTED, ids=lambda case: case.name)
def test_layers_train_to_the_bits_of_the_module(case, cut):
    harness.check(case, cut)


@pytest.mark.rest
@pytest.mark.parametrize("name", SEVERAL)
def test_parameters_and_names_are_those_of_the_module(name):
    module = harness.new_module(BY_NAME[name])
    addresses = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    model = Model(module, example=BY_NAME[name].batches()[0][0])
    ours = dict(model.named_parameters())
    for key, parameter in module.named_parameters():
        assert ours[key] is parameter
        assert parameter.data_ptr() == addresses[key]
    assert ours.keys() == addresses.keys()
    assert list(model.state_dict()) == list(module.state_dict())


@pytest.mark.parametrize("name", SEVERAL)
def test_conversion_changes_neither_the_module_nor_the_random_stream(name):
    module = harness.new_module(BY_NAME[name])
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    modes = [each.training for each in module.modules()]
    stream = torch.get_rng_state()
    Model(module, example=BY_NAME[name].batches()[0][0])
    assert torch.equal(torch.get_rng_state(), stream)
    assert [each.training for each in module.modules()] == modes
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())


@pytest.mark.rest
def test_a_block_of_attention_and_mlp_is_at_least_two_layers():
    case = BY_NAME["Llama"]
    _, model = harness.converted(case)
    assert len(model) >= 2 + 2 * 2  # an embedding, a head, and two blocks


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_gradient_checkpointing_is_switched_off_with_a_word():
    case = BY_NAME["tied weights"]
    module = harness.new_module(case)
    module.activation_checkpointing_enable()
    with pytest.warns(UserWarning, match=type(module).__name__):
        Model(module, example=case.batches()[0][0])
    assert not any(getattr(each, "gradient_checkpointing", False) for each in module.modules())


class Branching(nn.Module):
    """Decides by what its first layer computed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 0:
            x = self.second(x)
        return x


def test_a_branch_on_a_computed_value_is_refused_with_its_line():
    lines, first = inspect.getsourcelines(Branching.forward)
    number = first + next(k for k, line in enumerate(lines) if "x.sum() > 0" in line)
    with refused(ValueError, says=f"test_huggingface.py {number}"):
        Model(Branching(), example=torch.randn(3, 8))
