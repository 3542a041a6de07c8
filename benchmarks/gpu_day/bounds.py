"""What a step takes at least, and what a run's spans say of its steps. Pure arithmetic; see README.md."""

from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

LINK_BYTES = 2  # of a parameter, a gradient or a boundary's element on the link
# Of DRAM per parameter in an update: bfloat16 gradient read, float32 master and two moments read and written, bfloat16
# weight written. What the copies themselves read and write there (up to 6 more) is left out, so the bound is a low one.
UPDATE_BYTES = 2 + 3 * 8 + 2


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Seconds of one layer with one micro-batch, everything resident."""

    forward: float  # saving nothing
    recompute: float  # the forward that saves for its backward
    backward: float


def compute_s(layers, boundaries, graph_bytes, num_micro_batches):
    """Seconds of a step's kernels: forwards, recomputes and backwards, as this plan has them.

    The last shard's forward saves for its backward, and so does one whose graph is kept; all others run twice.
    """
    total_s = 0.0
    firsts = [0, *boundaries[:-1]]
    for j, (first, last) in enumerate(zip(firsts, boundaries, strict=True)):
        is_once = j == len(boundaries) - 1 or bool(graph_bytes and graph_bytes[j])
        for layer in layers[first:last]:
            total_s += layer.recompute + layer.backward + (0.0 if is_once else layer.forward)
    return num_micro_batches * total_s


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Seconds that each resource is busy in a step; no step is shorter than the longest."""

    compute: float
    up: float
    down: float
    host: float

    @property
    def seconds(self):
        return max(asdict(self).values())

    @property
    def binding(self):
        return max(asdict(self).items(), key=lambda item: item[1])[0]


def bound(compute, ceilings, *, num_parameters, num_shards, boundary_bytes, moved, num_tasks=1):
    """The least that a step takes; of `num_tasks` equal models, a step of each.

    `compute`: seconds of one model's kernels. `boundary_bytes`: of one boundary of a whole step. `moved`: (up, down)
    bytes that a step of all was seen to move; where that is less than the formulas say, since shards or boundaries
    stayed on the device, the bound takes what was moved.
    """
    weights = LINK_BYTES * num_parameters
    up = min(num_tasks * (2 - 1 / num_shards) * weights, moved[0])
    down = min(num_tasks * (weights + 2 * (num_shards - 1) * boundary_bytes), moved[1])
    return Bound(
        compute=num_tasks * compute,
        up=up / ceilings["up_bytes_per_s"],
        down=down / ceilings["down_bytes_per_s"],
        host=num_tasks * UPDATE_BYTES * num_parameters / ceilings["dram_bytes_per_s"],
    )


def commit_times(spans):
    """When the steps of each task were committed."""
    found = {}
    for span in sorted(spans, key=lambda span: span.end_s):
        if span.lane == "commit":
            found.setdefault(span.label, []).append(span.end_s)
    return found


def measured_window(commits, num_warm):
    """From when every task has its warm steps behind it until the first has made its last: all of them train there.

    Until the last one has, where there is no such time: a task was begun as another was through.
    """
    lasts_s = [times[-1] for times in commits.values()]
    start_s = max(times[num_warm - 1] for times in commits.values())
    return start_s, min(lasts_s) if start_s < min(lasts_s) else max(lasts_s)


def rounds_s(commits, num_warm):
    """Seconds of rounds, a step of every task: of one task each of its steps, of several one mean.

    Tasks commit in bursts, so what lies between a commit and one so many later, as there are tasks, is mostly shorter
    than a round, and what lies in a window depends on where it cuts a burst. So each task is timed from one commit of
    its own to another one, and a round takes as long as they need for so many steps together as there are tasks.
    """
    start_s, end_s = measured_window(commits, num_warm)
    inside = [[at_s for at_s in times if start_s <= at_s <= end_s] for times in commits.values()]
    if len(inside) == 1:
        return [after - before for before, after in pairwise(*inside)]
    rates = [(len(times) - 1) / (times[-1] - times[0]) for times in inside if len(times) > 1]
    return [len(rates) / sum(rates)]


def union(intervals):
    """The same time as disjoint intervals in order."""
    merged = []
    for start_s, end_s in sorted(intervals):
        if merged and start_s <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end_s)
        elif end_s > start_s:
            merged.append([start_s, end_s])
    return [tuple(each) for each in merged]


def length_s(intervals):
    """Seconds that intervals cover together."""
    return sum(end_s - start_s for start_s, end_s in union(intervals))


def within(spans, lanes, start_s, end_s):
    """What spans of some lanes cover of a window."""
    return [
        (max(span.start_s, start_s), min(span.end_s, end_s))
        for span in spans
        if span.lane in lanes and span.end_s > start_s and span.start_s < end_s
    ]


def exposed_share(spans, start_s, end_s):
    """The share of a window in which no device computes while the host commits or updates."""
    host = within(spans, ("commit", "update"), start_s, end_s)
    devices = within(spans, ("compute",), start_s, end_s)
    return (length_s([*host, *devices]) - length_s(devices)) / (end_s - start_s)


def busy_share(spans, start_s, end_s):
    """The share of a window in which a device computes."""
    return length_s(within(spans, ("compute",), start_s, end_s)) / (end_s - start_s)


def spread(seconds):
    """Median and range, as a row holds them."""
    return {"step_s": median(seconds), "step_s_least": min(seconds), "step_s_most": max(seconds)}


def difference(losses, others):
    """The largest difference of two runs' losses, as a share of the other run's fall.

    The fall, not the loss: what does not train at all has losses that hardly differ either.
    """
    pairs = list(zip(losses, others, strict=False))
    fall = abs(pairs[0][1] - pairs[-1][1])
    return max(abs(loss - other) for loss, other in pairs) / fall if fall else float("inf")
