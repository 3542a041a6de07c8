"""FSDP2 with CPUOffloadPolicy, in one process of world size 1: torch's own offload."""

from models import ADAMW, LR, NARROW, loss_fn, make_model

from .process_group import open_group
from .trainer import checkpointed, micro_batches

NEEDS = ()


class Sharded:
    """Layers sharded one by one: weights, gradients and optimizer float32 on the CPU; blocks checkpointed.

    The process group is open already. dtype: that the device computes in.
    """

    def __init__(self, model, device, lr=LR, dtype=NARROW):
        self._device = device
        self._model = sharded(model, device, dtype)
        self._optimizer = ADAMW(self._model.parameters(), lr=lr)

    def step_parts(self, parts):
        """Train one step on its micro-batches; return the mean loss."""
        mean = 0.0
        for x, y, share in parts:
            loss = loss_fn(self._model(x.to(self._device)).float(), y.to(self._device)) * share
            loss.backward()
            mean += loss.detach()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return mean


class Trainer(Sharded):
    """A GPT of a scale, sharded over this process alone."""

    def __init__(self, scale, size, *, device, cap_bytes, micro_tokens):
        self._close_group = open_group(device)
        self._micro_tokens = micro_tokens
        super().__init__(make_model(scale, size, "cpu"), device)

    def step(self, inputs, target):
        return self.step_parts(micro_batches(inputs, target, self._micro_tokens))

    def close(self):
        self._close_group()


def sharded(model, device, dtype=NARROW):
    """The model under FSDP2, every layer by itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    model = checkpointed(model)
    for k, layer in enumerate(model):
        fully_shard(layer, reshard_after_forward=k != len(model) - 1, **options)
    return fully_shard(model, **options)
