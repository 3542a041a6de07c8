"""Adapters and heads over one base: it lies in DRAM once, is loaded once for all, and each has the bits of it alone."""

import copy
from collections import Counter
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from hydra_engine import Callback, ModelTask  # noqa: E402
from hydra_engine.host import HostPool  # noqa: E402
from hydra_engine.integrations.huggingface import adapters, causal_lm_loss, sequential  # noqa: E402
from hydra_engine.worker.spiller import Spiller  # noqa: E402
from tests import exact, reference, zoo  # noqa: E402
from tests.refused import names, refused  # noqa: E402

# Of peft's call of a property that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TOKENS = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
LLAMA = TOKENS | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "attention_dropout": 0.1}
GPT2 = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
LR, STEPS = 0.1, 3
BLOCKS = 8  # of a base that is streamed


def llama(num_blocks=1):
    """The same base at every call, with dropout."""
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, num_hidden_layers=num_blocks)).train()


def gpt2():
    """One whose head is tied to its embeddings, and whose layers have biases."""
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).train()


def lora(**options):
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1} | options)


def bytes_of(model):
    return sum(parameter.nbytes for parameter in model.parameters())


def batches():
    generator = torch.Generator().manual_seed(2)
    return [(ids, ids) for ids in torch.randint(3, 64, (STEPS, 2, 9), generator=generator)]


def task_of(model, k, **options):
    options |= {"name": f"t{k}", "seed": k, "optimizer": torch.optim.AdamW}
    return ModelTask(sequential(model), causal_lm_loss, batches(), LR, **options)


def trained(models, memory, policy="in-step"):
    """The models trained together: the report, bytes of frozen weights loaded, and of those that came into the pool."""
    tasks = [task_of(model, k) for k, model in enumerate(models)]
    orchestra = exact.silent(tasks, memory, policy=policy)
    orchestra.generate()  # which opens pools, too
    loaded, brought = Counter(), []
    opened, load_slab = HostPool.open, Spiller.load_slab

    def open_and_count(pool, *arguments):
        opened(pool, *arguments)
        brought.append(sum(each.nbytes() for each in pool._brought))

    def load_and_count(spiller, state, shard, region, make_room):
        loaded[region.trainable] += region.num_bytes
        return load_slab(spiller, state, shard, region, make_room)

    with mock.patch.object(HostPool, "open", open_and_count), mock.patch.object(Spiller, "load_slab", load_and_count):
        report = orchestra.train_models()
    exact.assert_within_budget(report)
    return report, loaded[False], brought


def assert_trained_as_alone(report, models, plain):
    """Plain PyTorch trains each of the others to the same bits."""
    for k, (model, other) in enumerate(zip(models, plain, strict=True)):
        layers = sequential(other)
        losses = reference.train(layers, causal_lm_loss, batches(), seed=k, lr=LR, optimizer=torch.optim.AdamW).losses
        exact.assert_as_expected(report, f"t{k}", sequential(model), exact.Expected(losses, [], zoo.state(layers)))


# --- a sweep ---


@pytest.mark.rest
def test_a_sweep_over_a_base_of_three_times_the_device_holds_it_once_and_shares_its_loads():
    memory = bytes_of(llama(BLOCKS)) // 3
    configs = [lora(r=4), lora(r=8, use_rslora=True), lora(r=4, use_dora=True)]
    alone = adapters(llama(BLOCKS), configs[:1])
    _, loads_of_one, _ = trained(alone, memory)

    base = llama(BLOCKS)
    values = {name: parameter.clone() for name, parameter in base.named_parameters()}
    models = adapters(base, configs)
    plain = copy.deepcopy(models)
    report, loads, brought = trained(models, memory)
    assert bytes_of(base) <= brought[0] < bytes_of(base) + 64 * len(values)  # each at a multiple of 64 bytes
    assert brought[1:] == [0, 0]
    assert loads_of_one > 3 * bytes_of(base)  # it is streamed
    # How seldom it is loaded then depends on who is held up, so TestInStep of tests/schedule counts that, by no clock.
    assert loads < 3 * loads_of_one
    assert_trained_as_alone(report, models, plain)
    # The base's own parameters, in one place, as they were.
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter, values[name])
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert base(batches()[0][0]).logits.isfinite().all()


def test_heads_adapters_and_biases_are_trained_side_by_side():
    base = gpt2()
    targets = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    configs = [lora(**targets, bias="all"), lora(**targets, bias="lora_only"), ["transformer.ln_f", "lm_head"]]
    models = adapters(base, configs)
    plain = copy.deepcopy(models)
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    report, _, _ = trained(models, "512KiB")
    assert_trained_as_alone(report, models, plain)
    assert all(torch.equal(parameter, before[name]) for name, parameter in base.named_parameters())


def test_a_trained_adapter_is_saved_alone(tmp_path):
    base = llama()
    models = adapters(base, [lora(), lora()])
    trained(models, "16MiB")
    models[1].save_pretrained(tmp_path)
    found = peft.PeftModel.from_pretrained(llama(), tmp_path)
    expected = models[1].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())


def test_a_model_over_the_base_may_be_made_and_join_while_others_train():
    base = llama()
    [first] = adapters(base, [lora()])
    plain = [copy.deepcopy(first)]
    late = []

    class AddOne(Callback):
        def on_step(self, report):
            if not late:
                with torch.random.fork_rng():  # else the task would go on with other draws
                    late.extend(adapters(base, [lora(r=2)]))
                plain.extend(copy.deepcopy(late))
                orchestra.add_task(task_of(late[0], 1))

    orchestra = exact.silent([task_of(first, 0, callbacks=[AddOne()])], "16MiB")
    report = orchestra.train_models()
    assert_trained_as_alone(report, [first, *late], plain)
    assert {p.data_ptr() for p in base.parameters()} < {p.data_ptr() for p in late[0].parameters()}


# --- the models ---


def test_models_are_those_that_get_peft_model_makes_of_copies():
    configs = [lora(), lora(r=2, init_lora_weights="gaussian", modules_to_save=["lm_head"])]
    base, ids = llama().eval(), batches()[0][0]
    expected_logits, names = base(ids).logits, list(base.state_dict())
    copies = [copy.deepcopy(base) for _ in configs]
    torch.manual_seed(5)
    models = adapters(base, configs)
    torch.manual_seed(5)
    for model, each, config in zip(models, copies, configs, strict=True):
        expected = peft.get_peft_model(each, copy.deepcopy(config))
        assert type(model) is type(expected)
        assert {name: p.requires_grad for name, p in model.named_parameters()} == {
            name: p.requires_grad for name, p in expected.named_parameters()
        }
        theirs = expected.state_dict()
        assert list(model.state_dict()) == list(theirs)
        assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())
    # The base runs as before, has no adapters in it, and is in each of them.
    assert list(base.state_dict()) == names
    assert torch.equal(base(ids).logits, expected_logits)
    for model in models:
        frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
        assert frozen == {id(parameter) for parameter in base.parameters()}
    assert not configs[0].inference_mode
    assert configs[0].base_model_name_or_path is None


def test_a_head_is_trained_under_all_names_of_its_weights():
    base = gpt2()
    [model] = adapters(base, [["lm_head"]])
    assert model.lm_head.weight is model.transformer.wte.weight
    assert [name for name, each in model.named_parameters() if each.requires_grad] == ["transformer.wte.weight"]
    assert model.lm_head.weight is not base.lm_head.weight
    assert torch.equal(model.lm_head.weight, base.lm_head.weight)


def test_only_biases_that_are_trained_are_copies():
    base = gpt2()
    config = lora(target_modules=["c_attn"], fan_in_fan_out=True, bias="lora_only")
    [model] = adapters(base, [config])
    own = {name for name, parameter in model.named_parameters() if id(parameter) not in set(map(id, base.parameters()))}
    biases = {f"base_model.model.transformer.h.{k}.attn.c_attn.base_layer.bias" for k in range(2)}
    assert {name for name in own if "lora_" not in name} == biases
    assert not any(parameter.requires_grad for parameter in base.parameters())


# --- refusals ---


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_adapters_that_change_the_base_to_begin_with_are_refused(init):
    base = llama()
    with refused(ValueError, says=f"trained[1] init_lora_weights='{init}' False"):
        adapters(base, [lora(), lora(init_lora_weights=init)])
    assert all(parameter.requires_grad for parameter in base.parameters())


@pytest.mark.parametrize(
    ("trained", "error", "says"),
    [
        (peft.IA3Config(), TypeError, "trained[0] IA3Config LoraConfig"),
        (3, TypeError, "trained[0] int LoraConfig"),
        (["head"], ValueError, "'head' model lm_head"),
        (["model.rotary_emb"], ValueError, "'model.rotary_emb'"),
        ([], ValueError, "names one"),
    ],
)
def test_what_cannot_be_trained_over_a_base_is_refused(trained, error, says):
    with refused(error, says=says):
        adapters(llama(), [trained])


def test_a_base_with_adapters_in_it_is_refused():
    base = llama()
    model = peft.get_peft_model(base, lora())
    for each in (base, model):
        with refused(TypeError, says="adapters peft_model.unload()"):
            adapters(each, [lora()])
    assert len(adapters(model.unload(), [lora()])) == 1


# --- other ways ---


def plan_of(*models):
    tasks = [ModelTask(sequential(model), causal_lm_loss, batches(), LR, seed=0) for model in models]
    return exact.silent(tasks, "16MiB").generate()


def test_a_plan_says_when_equal_bases_are_in_dram_more_than_once():
    base = llama()
    copies = [peft.get_peft_model(copy.deepcopy(base), lora()) for _ in range(2)]
    plan = plan_of(*copies)
    assert [task.doubled_bytes for task in plan.tasks.values()] == [0, bytes_of(base)]
    [told] = [line for line in str(plan).splitlines() if "adapters" in line]
    names(told, task="task-1", says="frozen DRAM")
    assert "adapters" not in str(plan_of(*adapters(base, [lora(), lora()])))


def test_frozen_weights_of_other_models_are_not_equal():
    base, other = llama(), llama()
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dim() > 1:  # its norms are ones, as all are
                parameter.add_(1e-3)
    assert not plan_of(*adapters(base, [lora()]), *adapters(other, [lora()])).tasks["task-1"].doubled_bytes


@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft, about the second
def test_two_models_made_of_one_base_by_get_peft_model_are_refused():
    base = llama()
    first, second = peft.get_peft_model(base, lora()), peft.get_peft_model(base, lora())
    with refused(ValueError, says="lora_A huggingface.adapters"):
        plan_of(first, second)
