"""Models of `transformers` as layers: the bits of the models themselves, weights shared, saved and loaded."""

import copy
import functools
import importlib
import json
import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from hydra_engine import Model, ModelTask, split  # noqa: E402
from hydra_engine.integrations import huggingface_loading  # noqa: E402
from hydra_engine.integrations.huggingface import (  # noqa: E402
    MODELS,
    causal_lm_loss,
    inputs_and_labels,
    load_pretrained,
    num_target_tokens,
    sequential,
)
from partitioners import Presharded, profile  # noqa: E402
from tests import exact, reference  # noqa: E402
from tests.any_model import harness  # noqa: E402
from tests.any_model.huggingface import CASES  # noqa: E402
from tests.refused import refused  # noqa: E402

pytestmark = [
    pytest.mark.rest,
    # Of peft's call of a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

SEED, LR, STEPS = 7, 1e-2, 5
VOCABULARY, LENGTH = 64, 9

TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = TOKENS | ENCODER | {"num_key_value_heads": 2, "head_dim": 8}
DECODER |= {"max_position_embeddings": 32, "attention_dropout": 0.1}
WINDOW = {"sliding_window": 5, "query_pre_attn_scalar": 8}
GPT2 = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
OPT = TOKENS | {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
OPT |= {"num_attention_heads": 4, "max_position_embeddings": 32}
QWEN2 = DECODER | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
BERT = ENCODER | {"vocab_size": VOCABULARY, "max_position_embeddings": 32}

CONFIGS = {
    **dict.fromkeys(("GPT2LMHeadModel", "GPT2Model"), GPT2),
    **dict.fromkeys(("LlamaForCausalLM", "LlamaModel", "Qwen3ForCausalLM", "Qwen3Model"), DECODER),
    **dict.fromkeys(("GemmaForCausalLM", "GemmaModel"), DECODER),
    "MistralForCausalLM": DECODER | {"sliding_window": 5},
    "MistralModel": DECODER | {"sliding_window": None},
    "Qwen2ForCausalLM": QWEN2 | {"tie_word_embeddings": True},
    "Qwen2Model": QWEN2,
    **dict.fromkeys(("Gemma2ForCausalLM", "Gemma2Model"), DECODER | WINDOW),
    "Gemma3ForCausalLM": DECODER | WINDOW | {"sliding_window_pattern": 2, "final_logit_softcapping": 3.0},
    "Gemma3TextModel": DECODER | WINDOW | {"sliding_window_pattern": 2},
    **dict.fromkeys(("BertForMaskedLM", "BertModel"), BERT),
    **dict.fromkeys(("BertForSequenceClassification", "BertForTokenClassification"), BERT | {"num_labels": 3}),
}
TIED = ("GPT2LMHeadModel", "Qwen2ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "BertForMaskedLM")
TRAINED = (*TIED, "LlamaForCausalLM", "MistralForCausalLM", "BertForSequenceClassification")


def mostly_rest(cases, in_net):
    """Cases of which `make test` runs those in `in_net`."""
    return [pytest.param(*case, marks=[pytest.mark.net] * (case in in_net), id="-".join(case)) for case in cases]


def only(cases, *in_net):
    return mostly_rest([(case,) for case in cases], [(case,) for case in in_net])


@pytest.fixture(autouse=True)
def _quiet_and_synchronous(monkeypatch):
    """The library's own loader leaves threads to end by themselves, and its progress bars leave one that stays."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    transformers.utils.logging.disable_progress_bar()


def new_model(name, attention=None, **options):
    """A randomly initialised model, the same at every call, in training mode."""
    kind = getattr(transformers, name)
    torch.manual_seed(1)
    kwargs = {} if attention is None else {"attn_implementation": attention}
    model = kind._from_config(kind.config_class(**CONFIGS[name] | options), **kwargs)
    for parameter in model.parameters():  # also where the library starts with zeros or ones
        parameter.data += 0.01 * torch.randn_like(parameter)
    return model.train()


class Plain(nn.Module):
    """The model itself, as a plain loop calls it: on a tensor or a dict, for its logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        if isinstance(inputs, torch.Tensor):
            inputs = {self.model.main_input_name: inputs}
        return output_of(self.model(**inputs, use_cache=False))


def output_of(result):
    return result.logits if "logits" in result else result.last_hidden_state


def ids_and_masks(batch_size=3):
    """Token ids, and masks of all ones, with padding on the right, and on the left."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (batch_size, LENGTH), generator=generator)
    none, right, left = (torch.ones_like(ids) for _ in range(3))
    right[0, 5:] = right[1, 8:] = left[1, :4] = 0
    return ids, none, right, left


def all_inputs(name):
    """The forms of input that the model's layers take."""
    ids, none, right, left = ids_and_masks()
    restart = torch.arange(LENGTH).expand(3, -1) % 5  # two sequences in one row
    found = [
        ids,
        {"input_ids": ids, "attention_mask": none, "position_ids": None},
        {"input_ids": ids, "attention_mask": right},
        {"input_ids": ids, "attention_mask": left, "position_ids": (left.cumsum(-1) - 1).clamp(min=0)},
        {"input_ids": ids, "attention_mask": torch.tril(torch.ones(3, 1, LENGTH, LENGTH)).bool()},
        {"input_ids": ids[:, :4], "attention_mask": none[:, :4]},  # shorter than every window
        {"input_ids": ids[:1, :1], "attention_mask": none[:1, :1]},
        {"input_ids": ids, "position_ids": restart},
        {"input_ids": ids, "position_ids": restart, "attention_mask": none},
    ]
    if name.startswith(("Bert", "GPT2")):
        found.append({"input_ids": ids, "token_type_ids": ids % 2, "attention_mask": right})
    return found


def run(model, layers, inputs):
    """Output and, in training mode, gradients of the model's parameters."""
    model.zero_grad()
    torch.manual_seed(SEED)
    output = layers(inputs)
    if not model.training:
        return [output]
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(3)))
    return [output, *(parameter.grad for parameter in model.parameters())]


def same(a, b):
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.net
def test_every_model_of_the_table_is_tested():
    assert CONFIGS.keys() == MODELS.keys()


def attentions(name):
    """Gemma 2 itself refuses sdpa, which caps no scores; models without a head have the blocks of one that has."""
    return ["eager"] if name.startswith("Gemma2") else ["sdpa", "eager"] if MODELS[name].head else ["sdpa"]


@pytest.mark.parametrize(
    ("name", "attention"),
    mostly_rest(
        [(name, each) for name in CONFIGS for each in attentions(name)],
        [
            ("GPT2LMHeadModel", "eager"),
            ("LlamaForCausalLM", "sdpa"),
            ("Gemma3ForCausalLM", "sdpa"),
            ("BertForMaskedLM", "sdpa"),
        ],
    ),
)
def test_layers_give_the_bits_of_the_model_and_its_gradients(name, attention):
    model = new_model(name, attention)
    layers = sequential(model)
    forms = all_inputs(name)
    if attention == "eager":  # it adds a mask of two dimensions more
        mask = forms[4]["attention_mask"]
        forms[4] = forms[4] | {"attention_mask": torch.zeros(mask.shape).masked_fill(~mask, -1e9)}
    for inputs in forms:
        model.eval()
        assert same(run(model, layers, inputs), run(model, Plain(model), inputs)), inputs
    for inputs in forms[:5]:
        model.train()
        assert same(run(model, layers, inputs), run(model, Plain(model), inputs)), inputs


@pytest.mark.parametrize("name", only(CONFIGS, "GPT2LMHeadModel", "BertModel"))
def test_layers_share_every_parameter_but_an_unused_pooler(name):
    model = new_model(name)
    layers = sequential(model)
    base = getattr(model, MODELS[name].base) if MODELS[name].base else model
    blocks = model.config.num_hidden_layers
    assert len(layers) == 1 + blocks + (MODELS[name].family.norm is not None) + (MODELS[name].head is not None)
    shared = {id(parameter) for parameter in layers.parameters()}
    left_out = {id(p) for p in base.pooler.parameters()} if name == "BertModel" else set()
    assert shared == {id(parameter) for parameter in model.parameters()} - left_out
    assert not list(layers.parameters()) or shared.isdisjoint(left_out)


# --- training ---


def batches(name):
    """Five batches as a collator makes them, with padding; for one of the models only every other one."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for step in range(STEPS):
        ids = torch.randint(3, VOCABULARY, (3, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        if step % 2 or name != "MistralForCausalLM":
            mask[0, 4:] = mask[1, 7:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        if name.endswith("Classification"):
            labels = torch.tensor([0, 1, 2])
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def loss_of(name):
    if name.endswith("CausalLM") or name == "GPT2LMHeadModel":
        return causal_lm_loss
    return F.cross_entropy if name.endswith("Classification") else masked_lm_loss


def masked_lm_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


SETTINGS = {"optimizer": torch.optim.AdamW, "max_grad_norm": 1.0, "seed": SEED, "unpack": inputs_and_labels}


def train_both(model, name, plain=None, **options):
    """Train the layers of `model` in one-layer shards, and `plain`, a copy of it, in the plain loop: the same bits."""
    plain = copy.deepcopy(model) if plain is None else plain
    layers = sequential(model, example=inputs_and_labels(batches(name)[0])[0])
    shards = Presharded(list(range(1, len(layers) + 1)))
    settings = SETTINGS | options
    task = ModelTask(layers, loss_of(name), batches(name), LR, name="a", partitioner=shards, **settings)
    report = exact.run([task]).tasks["a"]
    assert report.status == "finished", report.error
    result = reference.train(Plain(plain), loss_of(name), batches(name), lr=LR, **settings)
    assert report.losses == result.losses
    assert len(report.losses) == STEPS
    assert report.losses[0] != report.losses[-1]
    assert_same_weights(model, plain)
    return plain


def assert_same_weights(model, other):
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(model, kind)()), dict(getattr(other, kind)())
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@functools.cache
def trained(name):
    """A model that the engine trained, and one that the plain loop did."""
    model = new_model(name)
    return model, train_both(model, name)


@pytest.mark.parametrize("name", only(TRAINED, "GPT2LMHeadModel"))
def test_five_steps_give_the_bits_of_the_plain_loop_over_the_model_itself(name):
    model, plain = trained(name)
    assert_same_weights(model, plain)
    start = dict(new_model(name).named_parameters())
    moved = [key for key, parameter in model.named_parameters() if not torch.equal(parameter, start[key])]
    assert len(moved) >= len(start) - 2  # a pooler or a bias may get no gradient


@pytest.mark.parametrize("name", only(TRAINED, "GPT2LMHeadModel"))
def test_a_trained_model_is_saved_and_loaded_with_the_same_bits(name, tmp_path):
    model, _ = trained(name)
    model.save_pretrained(tmp_path)
    assert_same_weights(type(model).from_pretrained(tmp_path, dtype=torch.float32), model)


@pytest.mark.parametrize("name", only(TIED, "GPT2LMHeadModel"))
def test_tied_weights_stay_tied(name):
    model, _ = trained(name)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    layers = sequential(model)
    tied = model.get_input_embeddings().weight
    assert sum(any(each is tied for each in layer.parameters()) for layer in layers) == 2


def test_two_models_together_on_two_devices_in_one_shard_each():
    names = ("GPT2LMHeadModel", "BertForMaskedLM")
    models = {name: new_model(name) for name in names}
    tasks = [
        ModelTask(sequential(model), loss_of(name), batches(name), LR, name=name, **SETTINGS)
        for name, model in models.items()
    ]
    exact.run(tasks, num_devices=2).raise_failures()
    for name, model in models.items():
        assert_same_weights(model, trained(name)[1])


def test_micro_batches_weighed_by_tokens_give_the_bits_of_the_plain_loop():
    name = "Qwen2ForCausalLM"
    train_both(new_model(name), name, accumulation_steps=2, loss_reduction=num_target_tokens)


def test_lora_adapters_are_trained_and_saved(tmp_path):
    peft = pytest.importorskip("peft")
    name = "LlamaForCausalLM"
    config = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "init_lora_weights": False, "use_dora": True}
    config["target_modules"] = ["q_proj", "v_proj", "down_proj"]
    model = peft.get_peft_model(new_model(name), peft.LoraConfig(**config))
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    train_both(model, name)
    for key, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in key)
        assert torch.equal(parameter, before[key]) != parameter.requires_grad, key
    model.save_pretrained(tmp_path)
    assert_same_weights(peft.PeftModel.from_pretrained(new_model(name), tmp_path, is_trainable=True), model)


def test_lora_on_tied_embeddings_with_a_trained_copy_of_the_head():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["wte", "c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True)
    train_both(peft.get_peft_model(new_model("GPT2LMHeadModel"), config), "GPT2LMHeadModel")


def opt():
    """A model that has no layers by hand."""
    torch.manual_seed(1)
    return transformers.OPTForCausalLM(transformers.OPTConfig(**OPT)).train()


INSIDE = {"target_modules": ["q_proj", "v_proj"]}
OTHER_ADAPTERS = {
    "IA3": ("IA3Config", INSIDE | {"feedforward_modules": []}, lambda: new_model("LlamaForCausalLM")),
    "DoRA": ("LoraConfig", INSIDE | {"r": 4, "lora_dropout": 0.1, "init_lora_weights": False, "use_dora": True}, opt),
}


@pytest.mark.parametrize("case", OTHER_ADAPTERS)
def test_adapters_are_trained_by_the_models_own_forward(case):
    peft = pytest.importorskip("peft")
    config, options, build = OTHER_ADAPTERS[case]
    model = peft.get_peft_model(build(), getattr(peft, config)(**options))
    before = copy.deepcopy(model)
    train_both(model, "LlamaForCausalLM")
    moved = {key for key, each in before.named_parameters() if not torch.equal(each, model.get_parameter(key))}
    assert moved == {key for key, each in model.named_parameters() if each.requires_grad}


# --- losses and batches ---


def own_loss(output, labels):
    return output.loss


def test_prompts_are_trained_by_the_models_own_loss_with_labels_in_the_batch():
    """Inputs and labels grow by tokens that are trained."""
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model, data = peft.get_peft_model(new_model("LlamaForCausalLM"), config), batches("LlamaForCausalLM")
    plain = copy.deepcopy(model)
    layers = Model(model, example=data[0])
    settings = {"optimizer": torch.optim.AdamW, "seed": SEED, "unpack": lambda batch: (batch, batch["labels"])}
    shards = Presharded([2, len(layers)])
    task = ModelTask(layers, own_loss, data, LR, name="a", partitioner=shards, **settings)
    report = exact.run([task]).tasks["a"]
    assert report.status == "finished", report.error
    result = reference.train(harness.Called(plain), own_loss, data, lr=LR, **settings)
    assert report.losses == result.losses
    assert_same_weights(model, plain)


@pytest.mark.net
def test_the_loss_is_the_models_own():
    ids, _, mask, _ = ids_and_masks()
    labels = ids.masked_fill(mask == 0, -100)
    model = new_model("LlamaForCausalLM").eval()
    expected = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(causal_lm_loss(sequential(model)(inputs), labels), expected)
    assert torch.equal(causal_lm_loss(model(**inputs), labels), expected)  # what converted layers return
    logits = torch.randn(2, 4, 5)
    assert causal_lm_loss(logits.bfloat16(), torch.tensor([[1, 2, 3, 4]] * 2)).dtype == torch.float32


@pytest.mark.net
def test_micro_batches_weighed_by_their_tokens_have_the_loss_of_the_batch():
    ids, _, mask, _ = ids_and_masks()
    labels = ids.masked_fill(mask == 0, -100)
    logits = torch.randn(3, LENGTH, VOCABULARY)
    whole = causal_lm_loss(logits, labels)
    parts = [causal_lm_loss(x, y) * weight for x, y, weight in split(logits, labels, 3, num_target_tokens)]
    torch.testing.assert_close(sum(parts), whole)
    by_samples = [causal_lm_loss(x, y) * weight for x, y, weight in split(logits, labels, 3)]
    assert abs(sum(by_samples) - whole) > 1e-3


@pytest.mark.net
def test_target_tokens_are_those_that_the_loss_is_the_mean_of():
    assert num_target_tokens(torch.tensor([[1, 2, -100, 3], [-100, -100, -100, -100]])) == 2
    assert num_target_tokens(torch.tensor([[5]])) == 0


@pytest.mark.net
def test_a_batch_is_taken_apart_and_a_mask_that_hides_nothing_left_out():
    ids, none, right, _ = ids_and_masks()
    inputs, labels = inputs_and_labels({"input_ids": ids, "attention_mask": none, "labels": right})
    assert labels is right
    assert inputs.keys() == {"input_ids"}
    encoding = transformers.BatchEncoding({"input_ids": ids, "attention_mask": right, "labels": ids})
    inputs, labels = inputs_and_labels(encoding)
    assert type(inputs) is dict
    assert inputs.keys() == {"input_ids", "attention_mask"}
    inputs, _ = inputs_and_labels({"input_ids": ids, "attention_mask": none, "position_ids": ids, "labels": ids})
    assert "attention_mask" in inputs
    for batch, says in (({"input_ids": ids}, "batch dict input_ids"), ((ids, ids), "batch tuple")):
        with refused(ValueError, says=says):
            inputs_and_labels(batch)


@pytest.mark.net
def test_inputs_that_no_layer_knows_are_refused():
    ids, none, _, _ = ids_and_masks()
    layers = sequential(new_model("LlamaForCausalLM"))
    for inputs, error, says in (
        ({"input_ids": ids, "labels": ids}, ValueError, "inputs labels position_ids"),
        ({"attention_mask": none}, ValueError, "inputs attention_mask input_ids"),
        (transformers.BatchEncoding({"input_ids": ids}), TypeError, "inputs BatchEncoding dict(batch)"),
        ([ids], TypeError, "inputs list {'input_ids'"),
    ):
        with refused(error, says=says):
            layers(inputs)


# --- refusals ---


class LlamaForCausalLM(nn.Module):
    """A class of the user's own, by a known name."""


def quantized():
    model = new_model("LlamaForCausalLM")
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    return model


def elsewhere():
    model = new_model("LlamaForCausalLM")
    model.model.norm._buffers["odd"] = FakeGpuTensor(torch.zeros(1))
    return model


class FakeGpuTensor(torch.Tensor):
    """Says that it lies on another device."""

    @property
    def device(self):
        return torch.device("cuda:1")


def dispatched():
    model = new_model("LlamaForCausalLM")
    model._hf_hook = object()
    return model


def hooked():
    model = new_model("LlamaForCausalLM")
    model.register_forward_hook(lambda module, args, output: None)
    return model


def other_direction():
    model = new_model("LlamaForCausalLM")
    model.config.is_causal = False
    return model


def pruned():
    model = new_model("GPT2LMHeadModel")
    del model.transformer.h[1]
    return model


REFUSED = {
    "own class": (LlamaForCausalLM, ValueError, "(LlamaForCausalLM) layers"),
    "quantized": (quantized, TypeError, "quantized float32"),
    "another device": (elsewhere, TypeError, "cuda:1 CPU model.cpu()"),
    "dispatched": (dispatched, TypeError, "accelerate CPU"),
    "hooks": (hooked, ValueError, "hooks"),
}


@pytest.mark.net
@pytest.mark.parametrize("case", REFUSED)
def test_what_layers_would_not_run_as_the_model_does_is_refused(case):
    build, error, says = REFUSED[case]
    model = build()
    with refused(error, says=says):
        sequential(model)


def around_blocks(name):
    """Modules of a model that layers made by hand do not call, by what they are called."""
    model = new_model(name)
    found = {"the model itself": model}
    if name.startswith("Bert"):
        return model, {**found, "base": model.bert, "encoder": model.bert.encoder}
    return model, {**found, "base": model.model}


@pytest.mark.parametrize(
    ("name", "place", "register"),
    [
        ("BertForMaskedLM", "encoder", "register_forward_hook"),
        ("BertForMaskedLM", "base", "register_forward_pre_hook"),
        ("LlamaForCausalLM", "base", "register_forward_hook"),
    ],
)
def test_hooks_around_the_blocks_are_called(name, place, register):
    model, places = around_blocks(name)
    getattr(places[place], register)(lambda *_: None)
    layers = sequential(model, example=ids_and_masks()[0])
    assert isinstance(layers, Model)


@pytest.mark.parametrize("name", only(["BertForMaskedLM", "LlamaForCausalLM"], "LlamaForCausalLM"))
def test_a_backward_pre_hook_on_the_model_is_refused(name):
    model, places = around_blocks(name)
    places["the model itself"].register_full_backward_pre_hook(lambda *_: None)
    with refused(ValueError, says="hooks"):
        sequential(model)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
OTHERWISE = {
    "decoder of BERT": functools.partial(new_model, "BertForMaskedLM", is_decoder=True),
    "cross attention": functools.partial(new_model, "GPT2LMHeadModel", add_cross_attention=True),
    "direction": other_direction,
    "dynamic positions": functools.partial(new_model, "LlamaForCausalLM", rope_parameters=DYNAMIC),
    "blocks": pruned,
    "a class without layers by hand": opt,
}


@pytest.mark.parametrize("case", only(OTHERWISE, "direction"))
def test_models_that_run_otherwise_than_layers_by_hand_become_layers_by_their_own_forward(case):
    model = OTHERWISE[case]().eval()
    ids, _, right, _ = ids_and_masks()
    inputs = {"input_ids": ids, "attention_mask": right}
    layers = sequential(model, example=inputs)
    assert isinstance(layers, Model)
    assert torch.equal(layers(inputs).logits, model(**inputs).logits)
    assert [*layers.state_dict()] == [*model.state_dict()]


def test_gradient_checkpointing_of_a_model_with_layers_by_hand_is_switched_off_with_a_word():
    model = new_model("LlamaForCausalLM")
    model.activation_checkpointing_enable()
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="LlamaForCausalLM"):
        layers = sequential(model)
    assert layers.is_by_hand
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    train_both(model, "LlamaForCausalLM", plain)  # without a second word


@pytest.mark.net
def test_without_the_library_the_error_names_the_extra(monkeypatch):
    name = "hydra_engine.integrations.huggingface"
    for module in (name, f"{name}_layers", f"{name}_loading"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused(ImportError, says="transformers hydra_engine[huggingface]"):
        importlib.import_module(name)


# --- loading ---


@pytest.mark.parametrize(
    ("name", "shard_size"),
    mostly_rest(
        [
            ("GPT2LMHeadModel", "50GB"),
            ("GPT2LMHeadModel", "20KB"),
            ("Gemma3ForCausalLM", "20KB"),
            ("BertForMaskedLM", "50GB"),
        ],
        [("GPT2LMHeadModel", "20KB"), ("BertForMaskedLM", "50GB")],
    ),
)
def test_loaded_values_are_those_of_from_pretrained(name, shard_size, tmp_path):
    new_model(name).save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "50GB")
    model = load_pretrained(tmp_path)
    expected = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert type(model).__name__ == name
    assert_same_weights(model, expected)
    assert model.training is expected.training is False
    assert model.config.to_dict() == expected.config.to_dict()
    for tensor in (*expected.parameters(), *expected.buffers()):  # from the mapped file: kernels choose by addresses
        tensor.data = tensor.data.clone()
    for inputs in all_inputs(name):
        assert torch.equal(sequential(model)(inputs), Plain(expected)(inputs))
    if name in TIED:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_weights_in_a_mapped_file_are_trained_as_aligned_ones_in_plain_pytorch(name, tmp_path):
    new_model(name).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "written")
    tensors = safetensors.load_file(tmp_path / "written")
    seen = set()
    for length in (4, 36):  # of a text before the weights, which moves them: once at least beside multiples of 64
        safetensors.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt", "note": "x" * length})
        load = functools.partial(getattr(transformers, name).from_pretrained, tmp_path, dtype=torch.float32)
        model, plain = load().train(), load().train()
        seen.update(parameter.data_ptr() % 64 for parameter in model.parameters())
        for parameter in plain.parameters():  # the engine's begin at multiples of 64
            parameter.data = parameter.data.clone()
        train_both(model, name, plain)
    assert seen - {0}


@pytest.mark.net
def test_one_tensor_of_the_files_is_held_at_a_time(tmp_path, monkeypatch):
    new_model("LlamaForCausalLM").save_pretrained(tmp_path, max_shard_size="20KB")
    monkeypatch.delenv("HF_DEACTIVATE_ASYNC_LOAD")
    held, peaks, names = weakref.WeakSet(), [], []

    class Watched:
        """A file whose tensors are counted for as long as they live."""

        def __init__(self, *args, **kwargs):
            self.file = safetensors.safe_open(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *exc):
            self.file.__exit__(*exc)

        def keys(self):
            return self.file.keys()

        def get_tensor(self, name):
            tensor = self.file.get_tensor(name)
            held.add(tensor)
            peaks.append(len(held))
            names.append(name)
            return tensor

    monkeypatch.setattr(huggingface_loading, "safe_open", Watched)
    model = load_pretrained(tmp_path)
    for thread in threading.enumerate():  # of the library's own pool
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join()
    assert max(peaks) == 1
    assert len(held) == 0
    assert sorted(names) == sorted(model.state_dict())
    for parameter in model.parameters():  # in memory of its own, where torch would have put it
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter.data_ptr() % 64 == 0


@pytest.mark.net
def test_a_head_that_the_files_lack_is_made_as_from_pretrained_makes_it(tmp_path):
    new_model("BertModel").save_pretrained(tmp_path)
    wanted = transformers.BertForSequenceClassification
    torch.manual_seed(5)
    model = load_pretrained(tmp_path, wanted, num_labels=4, attn_implementation="eager")
    torch.manual_seed(5)
    assert_same_weights(model, wanted.from_pretrained(tmp_path, num_labels=4, dtype=torch.float32))
    assert model.classifier.out_features == 4
    assert model.config._attn_implementation == "eager"
    assert sequential(model)(ids_and_masks()[0]).shape == (3, 4)


@pytest.mark.net
def test_narrow_weights_are_loaded_as_float32(tmp_path):
    new_model("LlamaForCausalLM").bfloat16().save_pretrained(tmp_path)
    model = load_pretrained(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_same_weights(model, type(model).from_pretrained(tmp_path, dtype=torch.float32))


@pytest.mark.net
def test_a_loaded_model_outlives_its_files_and_keeps_its_generation_settings(tmp_path):
    model = new_model("LlamaForCausalLM")
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    assert loaded.generation_config.max_new_tokens == 17
    assert loaded.name_or_path == str(tmp_path)
    loaded.save_pretrained(tmp_path)  # over the files it came from
    assert_same_weights(load_pretrained(tmp_path), model)


@pytest.mark.net
def test_folders_without_weights_that_can_be_loaded_are_refused(tmp_path):
    model = new_model("LlamaForCausalLM")
    model.config.save_pretrained(tmp_path)
    with refused(FileNotFoundError, says="model.safetensors model.safetensors.index.json"):
        load_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changed, error, says in (
        ({"architectures": ["OwnModel"]}, ValueError, "OwnModel architecture"),
        ({"architectures": None}, ValueError, "architecture model_class="),
        ({"quantization_config": {"quant_method": "awq"}}, TypeError, "quantized"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        with refused(error, says=says):
            load_pretrained(tmp_path)


@pytest.mark.rest
@pytest.mark.parametrize("name", only(["LlamaForCausalLM", "BertForMaskedLM"], "LlamaForCausalLM"))
def test_a_model_on_meta_is_profiled_with_a_mask_that_has_no_values(name):
    ids, _, mask, _ = ids_and_masks()
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.device("meta"):
        model = new_model(name)
        placeholders = {key: torch.empty_like(value) for key, value in inputs.items()}
        labels = torch.empty_like(ids)
    counted = profile(sequential(model), placeholders, labels, loss_of(name))
    run = profile(sequential(new_model(name)), inputs, ids, loss_of(name), time_layers=False)
    for field in ("param_bytes", "peak_bytes", "output_bytes"):
        assert [getattr(cost, field) for cost in counted] == [getattr(cost, field) for cost in run], field


@pytest.mark.parametrize(
    ("name", "shard_size", "dtype"),
    [
        pytest.param("OPT", "20KB", torch.bfloat16, marks=pytest.mark.net),
        ("T5", "50GB", torch.float32),
        ("BERT, sequences", "20KB", torch.bfloat16),
        ("ViT", "50GB", torch.float32),
        ("Mixtral", "20KB", torch.bfloat16),
        ("Whisper", "50GB", torch.float32),
        ("Falcon", "20KB", torch.bfloat16),
    ],
)
def test_any_model_is_loaded_value_for_value_and_becomes_layers(name, shard_size, dtype, tmp_path):
    case = next(case for case in CASES if case.name == name)
    harness.new_module(case).to(dtype).save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "50GB")
    model = load_pretrained(tmp_path)
    expected = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_weights(model, expected)
    assert names_of_tensors(model) == names_of_tensors(expected)  # tied where they are
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    for tensor in (*model.parameters(), *model.buffers()):  # in memory of its own: no file, no second copy
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.data_ptr() % 64 == 0
    inputs = case.batches()[0][0]
    layers = Model(model, example=inputs)
    assert [parameter.data_ptr() for parameter in layers.parameters()] == addresses
    for tensor in (*expected.parameters(), *expected.buffers()):  # from the mapped file: kernels choose by addresses
        tensor.data = tensor.data.clone()
    ours, theirs = layers(inputs), harness.Called(expected)(inputs)
    assert torch.equal(ours[0], theirs[0])


def names_of_tensors(model):
    """The names that each parameter and buffer has, those that no file holds included."""
    found = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        found.setdefault(id(tensor), []).append(name)
    return sorted(found.values())


# Names


@pytest.mark.net
def test_parameters_keep_the_names_that_they_have_in_the_model(tmp_path):
    torch.manual_seed(0)
    model = new_model("BertForSequenceClassification")
    seen = []

    def groups(name):
        seen.append(name)
        return {"lr": 0.5 if name.startswith("classifier") else LR}

    layers = sequential(model)
    assert layers.state_dict().keys() == model.state_dict().keys()
    assert [name for name, _ in layers.named_parameters()] == [name for name, _ in model.named_parameters()]
    inputs = torch.randint(3, VOCABULARY, (4, LENGTH))
    options = {"seed": SEED, "param_groups": groups, "ema_decay": 0.5, "name": "bert"}
    task = ModelTask(layers, F.cross_entropy, [(inputs, torch.tensor([0, 1, 2, 0]))], LR, **options)
    report = exact.silent([task], "1MiB", checkpoint_dir=tmp_path).train_models()
    report.raise_failures()
    names_here = [name for name, _ in model.named_parameters()]
    assert seen[: len(names_here)] == names_here
    assert report.tasks["bert"].last_step.learning_rates == (LR, 0.5)
    assert report.tasks["bert"].ema_state.keys() == model.state_dict().keys()
    [weights] = tmp_path.glob("files/*-weights.safetensors")
    assert safetensors.load_file(weights).keys() == set(names_here)


@pytest.mark.net
def test_layers_that_are_added_are_named_with_the_others_and_saved():
    layers = sequential(new_model("BertModel"))
    layers.append(nn.Linear(32, 3))
    last = f"{len(layers) - 1}.weight"
    assert last in dict(layers.named_parameters())
    assert last in layers.state_dict()
