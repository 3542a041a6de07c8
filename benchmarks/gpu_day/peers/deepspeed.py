"""DeepSpeed's ZeRO-3 with weights and optimizer offloaded to DRAM, in one process of world size 1."""

import torch
from models import loss_fn, make_model

from .process_group import keep_group
from .trainer import adamw_settings, checkpointed, micro_batches

NEEDS = (
    "deepspeed==0.19.8",
    "einops==0.8.2",
    "hjson==3.1.0",
    "msgpack==1.2.4",
    "ninja==1.13.2",
    "numpy",
    "packaging",
    "psutil",
    "py-cpuinfo==9.0.0",
    "pydantic",
    "tqdm",
)


def build():
    """Compile the CPU Adam, a minute's work, or load what was compiled."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load()


class Trainer:
    """ZeRO-3: a layer's weights come up when it runs, gradients go down, Adam runs on the CPU at the end of a step.

    Norms are bfloat16 as well: its bfloat16 knows no exceptions that hold for this model.
    """

    def __init__(self, scale, size, *, device, cap_bytes, micro_tokens):
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.utils import safe_set_full_fp32_param

        self._device, self._micro_tokens = device, micro_tokens
        keep_group(device)
        model = make_model(scale, size, "cpu")
        masters = [parameter.detach().clone() for parameter in model.parameters()]
        # With the other kind of checkpoint, a recompute sees weights whose shapes ZeRO-3 has already taken away.
        model = checkpointed(model, use_reentrant=True)
        optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **adamw_settings())
        settings = config(max(1, micro_tokens // scale.length))
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        for parameter, master in zip(self._engine.module.parameters(), masters, strict=True):
            safe_set_full_fp32_param(parameter, master)

    def step(self, inputs, target):
        parts = micro_batches(inputs, target, self._micro_tokens)
        self._engine.set_train_micro_batch_size(len(parts[0][0]))
        self._engine.set_train_batch_size(len(inputs))
        mean = 0.0
        for x, y, share in parts:
            loss = loss_fn(self._engine(x.to(self._device)).float(), y.to(self._device))
            self._engine.backward(loss)  # which divides by the number of micro-batches
            self._engine.step()  # which does nothing but after the last
            mean += loss.detach() * share
        return mean

    def close(self):
        self._engine.destroy()
        self._engine = None


def config(num_sequences):
    """Everything offloaded, and otherwise as it comes."""
    offload = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": num_sequences,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
    }
