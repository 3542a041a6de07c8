"""The best makespan there is for a few units with swap costs, by exhaustive search.

What a schedule may do is what a device can do, whoever decides:

- a unit's shard is loaded once the unit before it on the device has been begun: two slabs; one load at a time;
- a unit is begun once the device is free, and its input is in DRAM or was made there; what it starts from is then
  brought up, once it is in DRAM;
- it computes once both are there; what it leaves to the next unit goes down the link, and then its gradients, one
  unit's after the other's.

Loads and inputs do not wait for each other here, which on a real link they do: what is found is no more than the best.
"""

from hydra_engine import DeviceCost, TaskCost, simulate
from hydra_engine.schedule.policies import POLICIES
from hydra_engine.schedule.units import FORWARD


def in_proportion(rng):
    """At most three tasks of three shards, one step each, on at most two devices, with costs as those of models.

    What takes long to compute has many weights: a shard's load takes a share of its forward's time, up to all of it and
    the same for an instance but for a factor of 2. A backward with its recomputed forward, and the fused unit, take
    three times a forward. Gradients are as large as weights, boundaries small.
    """
    device = DeviceCost(load_bytes_per_s=1.0, store_bytes_per_s=1.0)
    tasks, share = [], rng.uniform(0.1, 0.8)
    for k in range(rng.randint(2, 3)):
        num_shards = rng.randint(1, 3)
        forward_s = [rng.uniform(0.3, 1.2) for _ in range(num_shards)]
        weights = [seconds * share * rng.uniform(0.7, 1.3) for seconds in forward_s]
        tasks.append(
            TaskCost(
                name=str(k),
                unit_s=[*forward_s[:-1], *(3 * seconds for seconds in reversed(forward_s))],
                load_bytes=weights,
                boundary_bytes=[rng.uniform(0.0, 0.1) for _ in range(num_shards)],
                gradient_bytes=weights,
            )
        )
    return tasks, [device] * rng.randint(1, 2)


def at_random(rng):
    """The same with all costs apart from each other: loads up to twice as long as the unit they are for."""
    device = DeviceCost(load_bytes_per_s=1.0, store_bytes_per_s=1.0)
    tasks = []
    for k in range(rng.randint(2, 3)):
        num_shards = rng.randint(1, 3)
        tasks.append(
            TaskCost(
                name=str(k),
                unit_s=[rng.uniform(0.5, 2.0) for _ in range(2 * num_shards - 1)],
                load_bytes=[rng.uniform(0.0, 1.0) for _ in range(num_shards)],
                boundary_bytes=[rng.uniform(0.0, 0.2) for _ in range(num_shards)],
                gradient_bytes=[rng.uniform(0.0, 0.5) for _ in range(num_shards)],
            )
        )
    return tasks, [device] * rng.randint(1, 2)


def best_s(tasks, devices):
    """Seconds of the best schedule: Pareto sets of states, by what is done and where, level by level."""
    jobs = [_jobs(task) for task in tasks]
    speed = devices[0]  # all are equal
    assert all(device == speed for device in devices)
    best = min(simulate(tasks, devices, policy).makespan_s for policy in sorted(POLICIES))
    left = [[sum(job[1] for job in chain[k:]) for k in range(len(chain) + 1)] for chain in jobs]
    # (computed, passed, stored) of each task's last unit and where; (begun, computed, loaded, stored) of each device's.
    idle = tuple((0.0, 0.0, 0.0, 0.0) for _ in devices)
    level = {(tuple(0 for _ in jobs), tuple(-1 for _ in jobs)): [((), (tuple((0.0, 0.0, 0.0) for _ in jobs), idle))]}
    for _ in range(sum(map(len, jobs))):
        following = {}
        for (done, where), states in level.items():
            for _, state in states:
                for k, chain in enumerate(jobs):
                    if done[k] == len(chain):
                        continue
                    seen = set()
                    for d in range(len(devices)):
                        # Of two devices with nothing done yet, one will do.
                        if state[1][d] in seen and state[1][d] == idle[0]:
                            continue
                        seen.add(state[1][d])
                        new = _after(state, chain[done[k]], k, d, where[k], speed)
                        position = (_replaced(done, k, done[k] + 1), _replaced(where, k, d))
                        if _bound(new, position[0], left, len(devices)) < best - 1e-12:
                            _add(following.setdefault(position, []), new)
                            if all(n == len(c) for n, c in zip(position[0], jobs, strict=True)):
                                best = min(best, max(stored for *_, stored in new[0]))
        level = following
    return best


def _jobs(task):
    """(load, compute, input, output, gradients) of each unit, in bytes and seconds."""
    jobs = []
    for (kind, shard), seconds in zip(task.chain, task.unit_s, strict=True):
        gradients = 0.0 if kind == FORWARD else task.of_shard("gradient_bytes", shard)
        brings, leaves = task.input_bytes(kind, shard), task.output_bytes(kind, shard)
        jobs.append((task.of_shard("load_bytes", shard), seconds, brings, leaves, gradients))
    return jobs


def _after(state, job, k, d, where, speed):
    """The state with one more unit, of task k on device d."""
    tasks, devices = state
    load, seconds, brings, leaves, gradients = job
    computed, passed, stored_before = tasks[k]
    begun, free, loaded, store_free = devices[d]
    load_end = max(begun, loaded) + load / speed.load_bytes_per_s
    begin = max(free, computed if where == d else passed)
    brought = max(begin, passed) + brings / speed.load_bytes_per_s
    end = max(load_end, brought) + seconds
    down = max(end, store_free) + leaves / speed.store_bytes_per_s
    stored = down + gradients / speed.store_bytes_per_s
    task = (end, down, max(stored, stored_before))
    return _replaced(tasks, k, task), _replaced(devices, d, (begin, end, load_end, stored))


def _replaced(values, k, value):
    return (*values[:k], value, *values[k + 1 :])


def _bound(state, done, left, num_devices):
    """No schedule that goes on from here is faster: each task's units follow one another, and devices share all."""
    tasks, devices = state
    to_come = [each[n] for each, n in zip(left, done, strict=True)]
    chains = max(max(computed + rest, stored) for (computed, _, stored), rest in zip(tasks, to_come, strict=True))
    return max(chains, (sum(free for _, free, _, _ in devices) + sum(to_come)) / num_devices)


def _add(front, state):
    """Keep what no other state is at least as good as in everything."""
    flat = [value for group in state for values in group for value in values]
    for k in range(len(front) - 1, -1, -1):
        other = front[k][0]
        if all(a <= b for a, b in zip(other, flat, strict=True)):
            return
        if all(a <= b for a, b in zip(flat, other, strict=True)):
            del front[k]
    front.append((flat, state))
