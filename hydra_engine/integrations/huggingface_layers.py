"""The layers that `transformers` models run as: one argument each, and nothing of a batch kept in them.

They hold the model's own modules and call its library's own functions, so that bits are those of the model. What blocks
need beside hidden states travels with these, in a dict:

    hidden_states        (B, S, H)
    attention_mask       (B, S) of booleans where some token is padding, or (B, 1, S, S) as the user gave it
    position_ids         (B, S) where they show that one row holds several sequences
    position_embeddings  cosines and sines, each (1 or B, S, D), or a dict of such pairs by kind of attention

Each block makes its mask from these: a mask of S times S for every sample would cost more to carry than to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
    find_packed_sequence_indices,
)

State: TypeAlias = "dict[str, Any]"

# Kinds of attention, as `config.layer_types` names them, and that of encoders.
FULL, SLIDING, BIDIRECTIONAL = "full_attention", "sliding_attention", "bidirectional_attention"


class TokenEmbedding(nn.Module):
    """Token embeddings of a model with rotary positions. `rotary_kinds`: it rotates otherwise by kind of attention."""

    def __init__(self, base: Any, rotary_kinds: list[str] | None = None) -> None:
        super().__init__()
        self.embed_tokens = base.embed_tokens
        self.rotary_emb = base.rotary_emb
        self.rotary_kinds = rotary_kinds

    def forward(self, inputs: Any) -> State:
        given = _named(inputs, "attention_mask", "position_ids")
        hidden = self.embed_tokens(given["input_ids"])
        positions = _positions(given, hidden)
        if self.rotary_kinds is None:
            rotary: Any = self.rotary_emb(hidden, positions)
        else:
            rotary = {kind: self.rotary_emb(hidden, positions, kind) for kind in self.rotary_kinds}
        return {"hidden_states": hidden, "position_embeddings": rotary, **_what_masks_need(given, causal=True)}


class GPT2Embedding(nn.Module):
    """Token, position and token type embeddings of GPT-2; types are embedded as tokens are."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = base.wte, base.wpe, base.drop

    def forward(self, inputs: Any) -> State:
        given = _named(inputs, "attention_mask", "position_ids", "token_type_ids")
        hidden = self.wte(given["input_ids"])
        hidden = hidden + self.wpe(_positions(given, hidden))
        if "token_type_ids" in given:
            hidden = hidden + self.wte(given["token_type_ids"])
        return {"hidden_states": self.drop(hidden), **_what_masks_need(given, causal=True)}


class BertEmbedding(nn.Module):
    """Word, position and token type embeddings of BERT."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.embeddings = base.embeddings

    def forward(self, inputs: Any) -> State:
        given = _named(inputs, "attention_mask", "position_ids", "token_type_ids")
        hidden = self.embeddings(**{name: each for name, each in given.items() if name != "attention_mask"})
        return {"hidden_states": hidden, **_what_masks_need(given, causal=False)}


class Block(nn.Module):
    """One transformer block with attention of one kind; the last returns its hidden states alone."""

    def __init__(self, block: nn.Module, config: Any, attention: str, *, is_last: bool) -> None:
        super().__init__()
        self.block = block
        self.config = config
        self.attention = attention
        self.is_last = is_last

    def forward(self, state: State) -> State | Tensor:
        hidden = state["hidden_states"]
        options: dict[str, Any] = {"attention_mask": self._mask(state)}
        rotary = state.get("position_embeddings")
        if rotary is not None:
            options["position_embeddings"] = rotary[self.attention] if isinstance(rotary, dict) else rotary
        hidden = self.block(hidden, **options)
        return hidden if self.is_last else {**state, "hidden_states": hidden}

    def _mask(self, state: State) -> Tensor | None:
        mask, hidden = state.get("attention_mask"), state["hidden_states"]
        # A mask that came this far hides something. Said so, the functions do not look into it again, which would make
        # the host wait for the device in every block.
        may_skip = mask is None
        made: Tensor | None
        if self.attention == BIDIRECTIONAL:
            made = create_bidirectional_mask(self.config, hidden, mask, allow_is_bidirectional_skip=may_skip)
        else:
            create = create_sliding_window_causal_mask if self.attention == SLIDING else create_causal_mask
            made = create(self.config, hidden, mask, None, state.get("position_ids"), allow_is_causal_skip=may_skip)
        return made


class CappedHead(nn.Module):
    """A language model's head whose logits are softly kept within `cap` (Gemma 2 and 3)."""

    def __init__(self, lm_head: nn.Module, cap: float) -> None:
        super().__init__()
        self.lm_head = lm_head
        self.cap = cap

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return torch.tanh(logits / self.cap) * self.cap


class ClassifierHead(nn.Module):
    """A model's classes of a whole input, by what `pooler` makes of it, or else of every token."""

    def __init__(self, model: Any, pooler: nn.Module | None = None) -> None:
        super().__init__()
        self.pooler, self.dropout, self.classifier = pooler, model.dropout, model.classifier

    def forward(self, hidden: Tensor) -> Tensor:
        if self.pooler is not None:
            hidden = self.pooler(hidden)
        logits: Tensor = self.classifier(self.dropout(hidden))
        return logits


def _named(inputs: Any, *others: str) -> dict[str, Any]:
    """The inputs by name; a tensor alone is `input_ids`, and None is as good as left out."""
    if isinstance(inputs, Tensor):
        return {"input_ids": inputs}
    if not isinstance(inputs, dict):
        remedy = "pass dict(batch)" if isinstance(inputs, Mapping) else "pass {'input_ids': ...}"
        kind = type(inputs).__name__
        raise TypeError(f"inputs: a {kind}, limit: a tensor (input_ids) or a dict of tensors; {remedy}")
    given = {name: value for name, value in inputs.items() if value is not None}
    known = ("input_ids", *others)
    if "input_ids" not in given or not given.keys() <= set(known):
        raise ValueError(
            f"inputs: {', '.join(given) or 'nothing'}, known: {', '.join(known)}, of which input_ids is needed; take "
            f"the others out, and labels with ModelTask(unpack=inputs_and_labels)"
        )
    return given


def _positions(given: Mapping[str, Any], hidden: Tensor) -> Tensor:
    """The positions that were given, or 0, 1, ... as (1, S)."""
    positions: Tensor | None = given.get("position_ids")
    return torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0) if positions is None else positions


def _what_masks_need(given: Mapping[str, Any], *, causal: bool) -> State:
    """Return what blocks make their masks from: nothing, where no token but those to come is hidden from another.

    The library's functions decide the same way, by values, whether attention gets a mask; the bits depend on it.
    """
    mask: Tensor | None = given.get("attention_mask")
    if mask is not None:
        mask = mask.to(torch.bool) if mask.dim() == 2 else mask
        return {} if mask.dim() == 2 and hides_nothing(mask) else {"attention_mask": mask}
    positions: Tensor | None = given.get("position_ids")
    if causal and positions is not None and find_packed_sequence_indices(positions) is not None:
        return {"position_ids": positions}
    return {}


def hides_nothing(mask: Tensor) -> bool:
    """Return True for a mask of ones; False where it has no values, as where a batch is measured by its shapes."""
    return not isinstance(mask, FakeTensor) and bool(mask.to(torch.bool).all())
