"""Models over one frozen base, each with adapters or heads of its own; the base's weights exist once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from torch import nn

if TYPE_CHECKING:
    from peft import LoraConfig

Base = TypeVar("Base", bound=nn.Module)
Trained: TypeAlias = "LoraConfig | Iterable[str]"  # adapters, or names of modules

# Ways to begin an adapter that leave the weights below it as they are; the others subtract from them.
KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva", "mica")


def adapters(base: nn.Module, trained: Sequence[Trained]) -> list[nn.Module]:
    """Make models that train adapters or heads of their own over the weights of one base.

    The models hold the base's own Parameter objects, so its weights are in DRAM once, whether tasks over some of the
    models train together or one after the other, and while they train, too. Modules, buffers and configs are copies.
    Of the base itself, one thing changes: its parameters no longer require gradients.

    base: a model of `transformers`, without adapters in it. It may be given again, for more models, also while others
        over it train.
    trained: what each model trains. A `peft.LoraConfig` makes it the `PeftModel` that `get_peft_model` would make of a
        copy of the base, from the same draws of torch's generator. Names of modules, `["classifier"]`, make it a model
        of the base's class that trains copies of these alone, under every name that their weights have.

    Returns the models, in order; pass each to `sequential`.

    Raises TypeError for a base with adapters in it and for other kinds of adapters, ValueError for names that the base
    does not have and for adapters that begin by changing the base's weights (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA).

    Sources: https://huggingface.co/docs/peft/package_reference/lora,
    https://huggingface.co/docs/peft/developer_guides/lora#initialization.
    """
    if any(hasattr(module, "peft_config") or hasattr(module, "adapter_layer_names") for module in base.modules()):
        raise TypeError(
            f"base: a {type(base).__name__} with adapters in it, limit: none; give the model as it was before "
            f"get_peft_model, or what peft_model.unload() returns"
        )
    makers = [_names(base, each) if _are_names(each) else _checked(each, k) for k, each in enumerate(trained)]
    trained_before = [each for each in base.parameters() if each.requires_grad]
    base.requires_grad_(False)
    try:
        return [_with_heads(base, each) if isinstance(each, list) else _with_lora(base, each) for each in makers]
    except BaseException:
        for parameter in trained_before:
            parameter.requires_grad_(True)
        raise


def _with_lora(base: nn.Module, config: LoraConfig) -> nn.Module:
    from peft import get_peft_model

    # Biases that an adapter trains are its model's own; those that it turns out not to train are the base's again.
    biases = {id(each) for name, each in base.named_parameters() if name.rpartition(".")[2] == "bias"}
    model, own = _copy_but(base, set() if config.bias == "none" else biases)
    adapted = get_peft_model(model, copy.deepcopy(config))
    for module in adapted.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in own and not parameter.requires_grad:
                module._parameters[name] = own[id(parameter)]
    return adapted


def _with_heads(base: nn.Module, names: list[str]) -> nn.Module:
    trained = {id(parameter) for name in names for parameter in base.get_submodule(name).parameters()}
    model, _ = _copy_but(base, trained)
    for name in names:
        model.get_submodule(name).requires_grad_(True)
    return model


def _copy_but(base: nn.Module, own: set[int]) -> tuple[nn.Module, dict[int, nn.Parameter]]:
    """Copy a model around its parameters, but for those with these ids; with the latter by the ids of their copies."""
    memo: dict[int, object] = {id(each): each for each in base.parameters() if id(each) not in own}
    model = copy.deepcopy(base, memo)
    return model, {id(memo[id(each)]): each for each in base.parameters() if id(each) in own}


def _are_names(trained: Trained) -> bool:
    return isinstance(trained, Iterable) and not hasattr(trained, "peft_type")


def _names(base: nn.Module, names: Iterable[str]) -> list[str]:
    found = [names] if isinstance(names, str) else list(names)
    known = dict(base.named_modules())
    for name in found:
        if not name or name not in known or not list(known[name].parameters()):
            raise ValueError(
                f"trained: {name!r} is no module of the base with parameters, known: "
                f"{', '.join(name for name, _ in base.named_children())} and their modules, by their full names"
            )
    if not found:
        raise ValueError("trained: no names, limit: at least one module; name the head, ['lm_head']")
    return found


def _checked(config: Trained, index: int) -> LoraConfig:
    try:
        from peft import LoraConfig, PeftType
    except ImportError as error:
        raise ImportError(
            f"adapters need peft ({error}); pip install 'hydra_engine[huggingface]'", name="peft"
        ) from error
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:  # AdaLoRA's derives from it
        raise TypeError(f"trained[{index}]: a {type(config).__name__}, known: LoraConfig, names of modules")
    if config.init_lora_weights not in KEEPS_BASE:
        raise ValueError(
            f"trained[{index}]: init_lora_weights={config.init_lora_weights!r} takes from the base's weights what the "
            f"adapters begin with, limit: {', '.join(map(repr, KEEPS_BASE))}, since all share these; or give that "
            f"model a copy of the base"
        )
    return config
