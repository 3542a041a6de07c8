"""Models of Hugging Face `transformers` as layers for the engine, and back without a copy.

    from hydra_engine.integrations.huggingface import causal_lm_loss, inputs_and_labels, load_pretrained, sequential

    model = load_pretrained("path/to/llama").train()             # tensor by tensor: no second copy of the weights
    task = ModelTask(sequential(model), causal_lm_loss, loader, lr=1e-5, unpack=inputs_and_labels)
    ModelOrchestrator([task], devices=[...]).train_models()
    model.save_pretrained("path/to/tuned")                       # the layers hold the model's own parameters

The layers compute what the model does, bit for bit, with its own modules. Needs the extra `huggingface`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from hydra_engine import Model

try:
    from transformers.loss.loss_utils import ForCausalLMLoss

    from hydra_engine.integrations.huggingface_adapters import adapters
    from hydra_engine.integrations.huggingface_layers import (
        BIDIRECTIONAL,
        FULL,
        SLIDING,
        BertEmbedding,
        Block,
        CappedHead,
        ClassifierHead,
        GPT2Embedding,
        TokenEmbedding,
        hides_nothing,
    )
    from hydra_engine.integrations.huggingface_loading import load_pretrained
except ImportError as error:
    raise ImportError(
        f"hydra_engine.integrations.huggingface needs transformers 5.23 or later ({error}); "
        f"pip install 'hydra_engine[huggingface]'",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["adapters", "causal_lm_loss", "inputs_and_labels", "load_pretrained", "num_target_tokens", "sequential"]

IGNORED = -100  # the label that `transformers` leaves out of a loss
ATTENTION = ("eager", "sdpa")
# Frequencies of these change with the longest sequence seen so far, or with the length of the present one.
CHANGING_ROPE = ("dynamic", "longrope")
# Entries of a config with which a model runs otherwise than its layers made by hand.
OTHERWISE = ("is_encoder_decoder", "is_decoder", "add_cross_attention", "use_bidirectional_attention")


class Family(NamedTuple):
    """The layers of one architecture's models, and where to find them."""

    embedding: Callable[[Any], nn.Module]  # base model -> the first layer
    blocks: str  # where in the base model
    attention: Callable[[Any], str | list[str]]  # config -> kind of attention: of all blocks, or of each
    norm: str | None  # after the last block


class Entry(NamedTuple):
    """One class of `transformers`."""

    family: Family
    base: str = ""  # attribute that holds the base model; "" where it is the model itself
    head: Callable[[Any], nn.Module] | None = None  # model -> the last layer


def _capped_lm_head(model: Any) -> Any:
    cap = model.config.final_logit_softcapping
    return model.lm_head if cap is None else CappedHead(model.lm_head, cap)


_lm_head = attrgetter("lm_head")

GPT2 = Family(GPT2Embedding, "h", lambda config: FULL, "ln_f")
LLAMA = Family(TokenEmbedding, "layers", lambda config: FULL, "norm")
MISTRAL = LLAMA._replace(attention=lambda config: FULL if config.sliding_window is None else SLIDING)
QWEN = LLAMA._replace(attention=lambda config: config.layer_types)
GEMMA3 = QWEN._replace(embedding=lambda base: TokenEmbedding(base, sorted(set(base.config.layer_types))))
BERT = Family(BertEmbedding, "encoder.layer", lambda config: BIDIRECTIONAL, None)

MODELS = {
    "GPT2Model": Entry(GPT2),
    "GPT2LMHeadModel": Entry(GPT2, "transformer", _lm_head),
    "LlamaModel": Entry(LLAMA),
    "LlamaForCausalLM": Entry(LLAMA, "model", _lm_head),
    "MistralModel": Entry(MISTRAL),
    "MistralForCausalLM": Entry(MISTRAL, "model", _lm_head),
    "Qwen2Model": Entry(QWEN),
    "Qwen2ForCausalLM": Entry(QWEN, "model", _lm_head),
    "Qwen3Model": Entry(QWEN),
    "Qwen3ForCausalLM": Entry(QWEN, "model", _lm_head),
    "GemmaModel": Entry(LLAMA),
    "GemmaForCausalLM": Entry(LLAMA, "model", _lm_head),
    "Gemma2Model": Entry(QWEN),
    "Gemma2ForCausalLM": Entry(QWEN, "model", _capped_lm_head),
    "Gemma3TextModel": Entry(GEMMA3),
    "Gemma3ForCausalLM": Entry(GEMMA3, "model", _capped_lm_head),
    "BertModel": Entry(BERT),
    "BertForMaskedLM": Entry(BERT, "bert", attrgetter("cls")),
    "BertForSequenceClassification": Entry(BERT, "bert", lambda model: ClassifierHead(model, model.bert.pooler)),
    "BertForTokenClassification": Entry(BERT, "bert", ClassifierHead),
}


def sequential(model: PreTrainedModel | nn.Module, example: Any = None) -> Model:
    """The model as an `nn.Sequential` that shares its modules and Parameter objects, tied ones included.

    So what the engine trains is in the model, which may then be saved. Dropout follows the model's mode: after
    `from_pretrained`, call `model.train()`. Gradient checkpointing is switched off with a warning: the engine
    recomputes by itself.

    model: a model of `transformers`, or a `PeftModel` around one; on the CPU, or on meta to plan with.
    example: a batch as the model takes it, a dict, say, for a model that becomes layers by its own forward. Without it
        the first batch of the task serves; see `hydra_engine.Model`.

    Models of the classes in `MODELS`, also with LoRA adapters, become embeddings, each block, the final norm and the
    head, for batches of any shape at once. These layers take a tensor of token ids (B, S) or a dict as tokenizers make
    it: `input_ids`, and where the model knows them `attention_mask`, `position_ids`, `token_type_ids`. They compute
    `model(**inputs, use_cache=False).logits`; for a model without a head the last hidden states (B, S, H), and a pooler
    is left out. Parameters keep the names that they have in the model.

    All other models, and other adapters and settings of these, become layers by their own forward. They take what the
    model takes, and return what it does.

    Raises TypeError for models that are quantized or on another device, and as `hydra_engine.Model` does.

    Sources: https://huggingface.co/docs/transformers/main_classes/model,
    https://huggingface.co/docs/transformers/attention_interface, https://huggingface.co/docs/peft/package_reference/lora.
    """
    _check(model)
    whole = Model(model)
    model = whole.source
    inner: Any = _without_lora(model)
    entry = MODELS.get(type(inner).__name__)
    if entry is None or not type(inner).__module__.startswith("transformers.models."):
        return Model(model, example=example)
    base = getattr(inner, entry.base) if entry.base else inner
    blocks = list(attrgetter(entry.family.blocks)(base))
    if not _is_usual(inner, base, len(blocks)):
        return Model(model, example=example)
    layers = [entry.family.embedding(base)]
    kinds = entry.family.attention(base.config)
    each = [kinds] * len(blocks) if isinstance(kinds, str) else kinds
    for k, (block, kind) in enumerate(zip(blocks, each, strict=True), start=1):
        layers.append(Block(block, base.config, kind, is_last=k == len(blocks)))
    if entry.family.norm is not None:
        layers.append(getattr(base, entry.family.norm))
    if entry.head is not None:
        layers.append(entry.head(inner))
    made = Model.by_hand(model, layers)
    # Of modules around the blocks (an encoder, an adapter's wrapper, the model) it calls none, and none of their hooks.
    around = set(model.modules()) - set(made.modules())
    return Model(model, example=example) if any(map(_has_hooks, around)) else made


def causal_lm_loss(output: Any, labels: Tensor) -> Tensor:
    """The mean cross-entropy of each next token, as a causal language model computes it from `labels=`.

    output: logits (B, S, vocabulary), which are cast to float32, or what a model returns, with `logits` in it.
    labels: (B, S), as the input ids: they are shifted here; where -100, left out. Without any label left the loss is
    NaN, as the model's is: leave such samples out of the data.

    With micro-batches, `ModelTask(loss_reduction=num_target_tokens)` weighs each by the tokens its loss is the mean of,
    so that a step is that of the whole batch.

    Source: `ForCausalLMLoss` of https://github.com/huggingface/transformers/blob/main/src/transformers/loss/loss_utils.py.
    """
    logits: Tensor = getattr(output, "logits", output)
    loss: Tensor = ForCausalLMLoss(logits, labels, vocab_size=logits.shape[-1])
    return loss


def num_target_tokens(labels: Tensor) -> int:
    """Tokens that `causal_lm_loss` of these labels (B, S) is the mean of; for `ModelTask(loss_reduction=)`."""
    return int((labels[..., 1:] != IGNORED).sum())


def inputs_and_labels(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Take a batch as the library's data collators make it apart; for `ModelTask(unpack=)`.

    batch: a mapping with `labels` and the model's inputs. A mask that hides nothing is left out, so that the engine,
    which knows how much memory a step takes by the names and shapes in its batch, meters those with padding apart.

    Source: https://huggingface.co/docs/transformers/main_classes/data_collator.
    """
    if not isinstance(batch, Mapping) or "labels" not in batch:
        found = f"with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else "without names"
        raise ValueError(
            f"a batch of the loader is a {type(batch).__name__} {found}, limit: a mapping with 'labels'; add them to "
            f"the data set or the collator, or give ModelTask an unpack= function of your own"
        )
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    mask = inputs.get("attention_mask")
    # Beside position ids a mask also says that these show no packed sequences.
    if isinstance(mask, Tensor) and "position_ids" not in inputs and mask.dim() == 2 and hides_nothing(mask):
        del inputs["attention_mask"]
    return inputs, batch["labels"]


def _without_lora(model: Any) -> Any:
    """The model inside a PEFT model, which runs by itself where LoRA adapters are all that was added."""
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    for config in model.peft_config.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind != "LORA" or getattr(config, "alora_invocation_tokens", None) is not None:
            return model
    return model.get_base_model()


def _check(model: Any) -> None:
    """Raise TypeError for a model that the engine cannot hold."""
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    if getattr(model, "is_quantized", False) or settings is not None:
        raise _refusal(model, "its weights are quantized, limit: float32", "load it without a quantization_config")
    places = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())} - {"cpu", "meta"}
    if places or hasattr(model, "_hf_hook"):
        where = f"on {', '.join(sorted(places))}" if places else "dispatched by accelerate"
        raise _refusal(
            model,
            f"it is {where}, limit: the CPU",
            "load it without device_map=, or call model.cpu(); the engine streams it",
        )


def _is_usual(model: Any, base: Any, num_blocks: int) -> bool:
    """Return True if the layers made by hand do all that the model does."""
    config = base.config
    kinds = getattr(getattr(base, "rotary_emb", None), "rope_type", None)
    return (
        config.num_hidden_layers == num_blocks
        and config._attn_implementation in ATTENTION
        and not any(getattr(config, name, False) for name in OTHERWISE)
        # Set to the other direction, attention is another one in every block.
        and getattr(config, "is_causal", None) is None
        and not any(kind in CHANGING_ROPE for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))
    )


def _has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _refusal(model: Any, why: str, remedy: str) -> TypeError:
    return TypeError(f"model: a {type(model).__name__}; {why}; {remedy}")
