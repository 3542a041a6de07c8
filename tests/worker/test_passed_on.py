"""What passes through several layers unchanged crosses the link once, and every bit is that of plain PyTorch."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hydra_engine import ModelTask
from hydra_engine.host.staging import StepStaging
from partitioners import Presharded
from partitioners.boundary import Boundary
from tests import exact, reference, zoo
from tests.covering import covering

SEED, LR = 3, 0.05
SAMPLES, WIDTH, NUM_STEPS = 8, 32, 3
HIDDEN_BYTES = SAMPLES * WIDTH * 4


class Begin(nn.Module):
    """Makes a mask from the input, which the layers above pass on."""

    def __init__(self):
        super().__init__()
        self.linear, self.to_mask = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1024)
        self.to_mask.requires_grad_(False)

    def forward(self, x):
        return self.linear(x), self.to_mask(x)


class Block(nn.Module):
    """Uses the mask, and passes on what `passed` makes of it."""

    def __init__(self, passed=lambda h, mask: [mask]):
        super().__init__()
        self.linear, self.passed = nn.Linear(WIDTH, WIDTH), passed

    def use(self, h, mask):
        return torch.tanh(self.linear(h)) * mask.mean()

    def forward(self, x):
        h, mask = x[0], x[1]
        return self.use(h, mask), *self.passed(h, mask)


InPlace = partial(Block, lambda h, mask: [mask.mul_(1.25)])
Sometimes = partial(Block, lambda h, mask: [mask if h.detach().sum() > 0 else mask * 1.25])
Views = partial(Block, lambda h, mask: [mask, mask[2:]])


class Swaps(Block):
    """Gives the tensors in another order."""

    def forward(self, x):
        a, b = x
        return (b, self.use(a, b)) if a.shape[1] == WIDTH else (self.use(b, a), a)


class Differentiable(Begin):
    """The passed value needs gradients from all the layers."""

    def __init__(self):
        super().__init__()
        self.to_mask.requires_grad_(True)


class End(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, x):
        h = next(each for each in x if each.shape[1] == WIDTH)
        return self.linear(h)


def chain(*blocks, begin=Begin):
    torch.manual_seed(SEED)
    return nn.Sequential(begin(), *(block() for block in blocks), End())


def batches():
    generator = torch.Generator().manual_seed(SEED)
    return [
        (torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, 4, generator=generator))
        for _ in range(NUM_STEPS)
    ]


CHAINS = {
    "blocks": lambda: chain(*[Block] * 4),
    "differentiable": lambda: chain(*[Block] * 4, begin=Differentiable),
    "in place": lambda: chain(Block, InPlace, Block, InPlace),
    "sometimes": lambda: chain(Block, Sometimes, Block, Sometimes, Block),
    "views": lambda: chain(Block, Views, Block, Views),
    "swaps": lambda: chain(*[Swaps] * 4),
}


def train(model, *, memory="4MiB", num_devices=1, partition=None, **options):
    task = ModelTask(
        model, nn.functional.mse_loss, batches(), LR, name="chain", seed=SEED, partitioner=partition, **options
    )
    return exact.run([task], memory=memory, num_devices=num_devices)


@covering(strength=1, name=list(CHAINS), num_devices=[1, 2], accumulation_steps=[1, 4])
def test_bits_are_those_of_plain_pytorch(name, num_devices, accumulation_steps):
    memory = "460KiB" if num_devices == 1 else "4MiB"
    plain, model = CHAINS[name](), CHAINS[name]()
    expected = reference.train(
        plain, nn.functional.mse_loss, batches(), seed=SEED, lr=LR, accumulation_steps=accumulation_steps
    )
    each = Presharded(list(range(1, len(model) + 1)))
    report = train(model, memory=memory, num_devices=num_devices, partition=each, accumulation_steps=accumulation_steps)
    ours = report.tasks["chain"]
    assert ours.status == "finished", ours.error
    assert ours.losses == expected.losses
    exact.assert_same_state(zoo.state(model), zoo.state(plain))


@pytest.mark.rest
def test_a_value_that_passes_crosses_the_link_once_in_a_step():
    """With three blocks more, only these blocks' own bytes cross it more often."""
    loaded, stored = {}, {}
    for num_blocks in (2, 5):
        model = chain(*[Block] * num_blocks)
        device = train(model, partition=Presharded(list(range(1, len(model) + 1)))).devices[0]
        loaded[num_blocks], stored[num_blocks] = device.loaded_bytes, device.stored_bytes
    parameter_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    # What enters a block and the gradient of that are too small to be kept on the device.
    own_bytes = 3 * NUM_STEPS * (parameter_bytes + 2 * HIDDEN_BYTES)
    assert stored[5] - stored[2] == own_bytes
    assert loaded[5] - loaded[2] == own_bytes


def copy_into(place, tensor):
    place.copy_(tensor)


def entering(staging, shard):
    return [tensor.tolist() for tensor in staging.entering(shard, 0).tensors]


def put(staging, shard, values, passed=None):
    staging.put_boundary(shard, 0, Boundary.of(values, "an output"), copy_into, passed=passed or {})


def test_places_of_what_passed_are_never_written_to_from_above():
    def number(value) -> Tensor:
        return torch.tensor([float(value)])

    staging = StepStaging()
    staging.begin([(Boundary.of(number(0), ""), Boundary.of(number(0), ""))], [1.0], [None], None)
    put(staging, 1, (number(1), number(2)))
    put(staging, 2, (number(3), number(2)), {1: 1})
    put(staging, 3, (number(2), number(3)), {0: 1, 1: 0})
    assert staging.entering(3, 0).tensors[0] is staging.entering(1, 0).tensors[1]
    # The next step passes less on.
    put(staging, 1, (number(11), number(12)))
    put(staging, 2, (number(13), number(14)))
    put(staging, 3, (number(15), number(14)), {1: 1})
    put(staging, 3, (number(16), number(17)))
    assert entering(staging, 1) == [[11.0], [12.0]]
    assert entering(staging, 2) == [[13.0], [14.0]]
    assert entering(staging, 3) == [[16.0], [17.0]]
