"""Brings a checkpoint in tensor by tensor, so that the weights are never in memory twice."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def load_pretrained(
    path: str | os.PathLike[str],
    model_class: type[PreTrainedModel] | None = None,
    *,
    attn_implementation: str | None = None,
    **config_options: Any,
) -> PreTrainedModel:
    """A model from its files, as `model_class.from_pretrained(path, dtype=torch.float32)` gives it, value for value.

    The model is built without memory and filled one tensor at a time, each copied from its file into memory of its own:
    DRAM holds the model and at most one tensor beside it, or what one is merged from (experts of a mixture). What
    `from_pretrained` gives may be mapped from the file instead, at addresses for which kernels round otherwise, and is
    lost when the file is written over.

    path: a folder with `config.json` and `model.safetensors`, or the files that `model.safetensors.index.json` lists:
        what `save_pretrained` writes and `huggingface_hub.snapshot_download` returns.
    model_class: one of `transformers`, such as BertForSequenceClassification; default: the one named in the config.
        Weights that the files lack, a new head's, are initialised as `from_pretrained` does, from torch's generator.
    config_options: replace entries of the config: `num_labels=3`.

    Returns it in evaluation mode; call `.train()` on it. Raises FileNotFoundError without a config or such files,
    ValueError for a model class that is not in `transformers`, TypeError for quantized weights.

    Sources: https://huggingface.co/docs/transformers/main_classes/model,
    https://huggingface.co/docs/safetensors/index.
    """
    folder = Path(path)
    files = _weight_files(folder)
    config = AutoConfig.from_pretrained(folder, **config_options)
    if getattr(config, "quantization_config", None) is not None:
        raise TypeError(
            f"path: {folder} holds quantized weights, limit: floating point; dequantize them, or take the checkpoint "
            f"they were made from"
        )
    if model_class is None:
        model_class = _class_of(config, folder)
    weights: dict[str, _Weight] = {}
    turn = threading.Lock()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            weights.update({name: _Weight(file, name, turn) for name in tensors.keys()})  # noqa: SIM118
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    # Renames what older checkpoints call otherwise, ties weights, fills in buffers that no file holds.
    model: PreTrainedModel = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32, **options
    )
    model.name_or_path = model.config.name_or_path = str(folder)  # which adapters note as their base
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


class _Weight:
    """A tensor in a file, read when the library slices it: `weight[...]`."""

    def __init__(self, file: Path, name: str, turn: threading.Lock) -> None:
        self._file = file
        self._name = name
        self._turn = turn  # the library reads with several threads; one of them holds a tensor of a file at a time

    def __getitem__(self, index: Any) -> Tensor:
        with self._turn, safe_open(self._file, framework="pt") as tensors:
            found: Tensor = tensors.get_tensor(self._name)
            dtype = torch.float32 if found.is_floating_point() else found.dtype
            own = torch.empty(found.shape, dtype=dtype)
            own.copy_(found)
            return own[index]


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        return [folder / name for name in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))]
    raise FileNotFoundError(
        f"path: {folder} holds neither {WEIGHTS} nor {INDEX}; give the folder that save_pretrained wrote or "
        f"huggingface_hub.snapshot_download returned, and save older formats again with save_pretrained"
    )


def _class_of(config: Any, folder: Path) -> Any:
    names = getattr(config, "architectures", None) or []
    if len(names) != 1 or not hasattr(transformers, names[0]):
        raise ValueError(
            f"path: {folder} names {', '.join(names) or 'no class'} as its architecture, limit: one class of "
            f"transformers; give model_class="
        )
    return getattr(transformers, names[0])
