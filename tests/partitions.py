"""Random layers and devices for the partitioners' tests, and every partition of a model: what they are held to."""

import itertools
import math
from dataclasses import replace

import pytest

from partitioners import Budget, LayerCost, forward_unit_bytes, shard_bytes, slab_bytes

ZERO = LayerCost(
    index=0,
    name="layer-0",
    param_bytes=0,
    grad_bytes=0,
    buffer_bytes=0,
    input_bytes=0,
    output_bytes=0,
    saved_bytes=0,
    peak_bytes=0,
    forward_s=0.0,
    backward_s=0.0,
    draws_random=False,
    draws_globally=False,
    changes_input=False,
    changes_buffers=False,
    shares_with=(),
)

PLENTY_BYTES = 2**40


def seeds(number, *, net=3):
    """Parametrize a test over seeds, the first few of which `make test` runs, and `make test-all` the others."""
    rest = [pytest.param(seed, marks=pytest.mark.rest) for seed in range(net, number)]
    return pytest.mark.parametrize("seed", [*range(net), *rest])


def layers(*settings):
    """Layers that cost nothing but what is said of each."""
    return [replace(ZERO, index=index, name=f"layer-{index}", **each) for index, each in enumerate(settings)]


def random_layers(rng, most=8):
    """1 to `most` layers. Some cost nothing of a kind; some models are frozen up to a layer, or tie parameters."""
    num = rng.randint(1, most)
    frozen = rng.choice([0, 0, rng.randrange(num)])
    chained = rng.random() < 0.5  # what leaves a layer enters the next; else anything does
    measured = rng.random() < 0.7  # the forward alone
    costs = []
    for index in range(num):
        input_bytes = costs[-1]["output_bytes"] if chained and costs else _some(rng, 3_000)
        grad_bytes = 0 if index < frozen else _some(rng, 5_000)
        costs.append(
            {
                "param_bytes": _some(rng, 5_000),
                "grad_bytes": grad_bytes,
                "accumulated_bytes": rng.choice([None, _some(rng, 5_000) if grad_bytes else 0]),
                "buffer_bytes": _some(rng, 500),
                "padding_bytes": _some(rng, 100),
                "input_bytes": input_bytes,
                "output_bytes": _some(rng, 3_000),
                "saved_bytes": _some(rng, 5_000),
                "peak_bytes": _some(rng, 8_000),
                "forward_peak_bytes": _some(rng, 4_000) if measured else None,
                "forward_s": rng.choice([0.0, rng.random()]),
                "backward_s": rng.choice([0.0, rng.random(), 2 * rng.random()]),
                "changes_input": rng.random() < 0.2,
            }
        )
    costs[-1]["target_bytes"] = _some(rng, 500)
    tied = rng.sample(range(num), rng.randint(2, num)) if num > 1 and rng.random() < 0.3 else ()
    for index in tied:
        others = tuple(sorted(set(tied) - {index}))
        costs[index] |= {"shares_with": others, "shared_bytes": _some(rng, 2_000)}
    return layers(*costs)


def random_device(rng, costs):
    """From too little memory to plenty; often just what some shard needs, alone or beside another's slab."""
    num_micro_batches = rng.choice([1, 2, 5])
    alone_bytes = max(shard_bytes(costs, k, k + 1, num_micro_batches) for k in range(len(costs)))
    shards = [sorted(rng.sample(range(len(costs) + 1), 2)) for _ in range(2)]
    needed_bytes = max(shard_bytes(costs, *shards[0], num_micro_batches), rng.choice([0, alone_bytes, alone_bytes]))
    exact_bytes = needed_bytes + rng.choice([0, slab_bytes(costs, *shards[1])]) + rng.choice([-1, 0, 0, 1])
    scaled_bytes = round(needed_bytes * rng.uniform(0.5, 1.5))
    return Budget(
        memory_bytes=max(1, rng.choice([exact_bytes, exact_bytes, scaled_bytes, alone_bytes - 1, PLENTY_BYTES])),
        double_buffer=rng.random() < 0.7,
        num_micro_batches=num_micro_batches,
        link_bytes_per_s=rng.choice([math.inf, 10 ** rng.uniform(2, 6)]),
        update_bytes_per_s=rng.choice([math.inf, 10 ** rng.uniform(2, 6)]),
        unit_s=rng.choice([0.0, rng.random() / 5]),
    )


def partitions(num):
    """All 2^(num-1) partitions of so many layers, as cumulative end indices."""
    for cuts in itertools.product([False, True], repeat=num - 1):
        yield [*(end for end, cut in enumerate(cuts, start=1) if cut), num]


def shards_of(boundaries):
    return list(itertools.pairwise([0, *boundaries]))


def shard_fits(costs, first, last, budget):
    return shard_bytes(costs, first, last, budget.num_micro_batches) <= budget.memory_bytes


def fitting_partitions(costs, budget):
    """Those of which every shard fits the device."""
    shards = itertools.combinations(range(len(costs) + 1), 2)
    fits = {shard: shard_fits(costs, *shard, budget) for shard in shards}
    return [ends for ends in partitions(len(costs)) if all(fits[shard] for shard in shards_of(ends))]


def slow_parts(costs, boundaries, budget):
    """Compute, exposed loads, exposed boundaries and chain of `predict_step`: its unit after unit, each copy alone."""
    n, link = budget.num_micro_batches, budget.link_bytes_per_s
    shards = shards_of(boundaries)
    trainable = [cost.index for cost in costs if cost.grad_bytes]
    units = [("forward", shard) for shard in shards[:-1]] + [("backward", shards[-1])]
    units += [("backward", shard) for shard in shards[-2::-1] if trainable and trainable[0] < shard[1]]
    first_bytes = sum(_master_bytes(cost) for cost in costs[: shards[0][1]])
    compute_s, boundary_s, load_s = 0.0, 0.0, slab_bytes(costs, *shards[0]) / link
    for at, (kind, (first, last)) in enumerate(units):
        inside, input_bytes, output_bytes = costs[first:last], costs[first].input_bytes, costs[last - 1].output_bytes
        alone_s = sum(cost.forward_s for cost in inside)
        unit_bytes = forward_unit_bytes(costs, first, last, n)
        enters, leaves, gradients = input_bytes, output_bytes, 0
        if kind == "backward":
            alone_s += sum(cost.backward_s for cost in inside)
            unit_bytes = shard_bytes(costs, first, last, n) - slab_bytes(costs, first, last)
            enters = input_bytes + (costs[-1].target_bytes if last == len(costs) else output_bytes)
            leaves = input_bytes if trainable and trainable[0] < first else 0
            gradients = sum(cost.grad_bytes for cost in inside)
        span_s = _flow_s(n, [enters / link, alone_s, leaves / link]) + gradients / link
        compute_s += n * alone_s + budget.unit_s
        boundary_s += span_s - n * alone_s
        if at + 1 < len(units):
            next_bytes = slab_bytes(costs, *units[at + 1][1])
            room = slab_bytes(costs, first, last) + unit_bytes + next_bytes <= budget.memory_bytes
            load_s += max(0.0, next_bytes / link - (span_s if room and budget.double_buffer else 0.0))
    chain_s = first_bytes / budget.update_bytes_per_s + load_s + compute_s + boundary_s
    return compute_s, load_s, boundary_s, chain_s


def slow_step_s(costs, boundaries, budget):
    """Seconds of a step as `predict_step` documents them."""
    whole_s = sum(_master_bytes(cost) for cost in costs) / budget.update_bytes_per_s
    return max(slow_parts(costs, boundaries, budget)[-1], whole_s)


def _flow_s(num, stages_s):
    """So many equal jobs pass through stages, each of which works on one at a time."""
    free_s = [0.0] * len(stages_s)
    for _ in range(num):
        done_s = 0.0
        for stage, seconds in enumerate(stages_s):
            done_s = free_s[stage] = max(done_s, free_s[stage]) + seconds
    return done_s


def _master_bytes(cost):
    return cost.grad_bytes if cost.accumulated_bytes is None else cost.accumulated_bytes


def _some(rng, most):
    return rng.choice([0, rng.randrange(most), rng.randrange(most)])
