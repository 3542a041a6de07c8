"""The stages of a session, each a list of groups of rows, the most important first."""

from dataclasses import dataclass
from functools import partial

from peers import PEERS
from scales import Group

RESIDENT = "resident"  # the peer that has no cap
FACTS = ("environment", "ceilings", "stream", "beside traffic", "page-locking", "wake-up")
CHECKS = ("gpu tests", "gpu tests, timed", "races, kept graphs", "races, no room for boundaries", "sticky error")
VARIANTS = ("engine, balanced", "engine, compiled", "engine, balanced, compiled")
LONG_RUNS = ("long run, engine", "long run, resident")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a stage measures, and how many seconds one row may take: a row that hangs must not take them all."""

    groups: list[Group]
    row_s: float

    def rows(self):
        """Return the key of each row."""
        return [key for group in self.groups for key in group.rows()]


def stages(scale):
    """All stages by name, in the order of a session."""
    own = partial(Group, module="engine")
    capped = {"size": scale.size, "memory": scale.memory}
    larger = {"size": scale.larger_size, "memory": scale.memory}
    peers = [
        Group(method=name, size=scale.size, memory="" if name == RESIDENT else scale.memory, tokens=scale.tokens)
        for name in PEERS
    ]
    homed = [Group(method="tests of homes", module="right")]
    for memory in ("", scale.memory):  # no cap first
        options = {"size": scale.size, "memory": memory, "tokens": scale.tokens[1::-1]}
        homed += [own(method=name, **options) for name in ("homes", "engine")]
        homed += [Group(method=name, **options) for name in (RESIDENT, "fsdp2") if name != RESIDENT or not memory]
    num = 1 if scale.is_emulated else len(scale.tokens)  # compiling for the CPU takes a minute
    variants = [own(method=name, **capped, tokens=scale.tokens[:num]) for name in VARIANTS]
    return {
        "facts": Stage(groups=[Group(method="facts", module="facts", parts=FACTS)], row_s=100),
        "right": Stage(groups=[Group(method=name, module="right") for name in CHECKS], row_s=240),
        "one": Stage(
            groups=[
                own(method="kernels", size=scale.size),
                own(method="engine", **capped, tokens=scale.tokens),
                *peers,
                own(method="trace", **capped, tokens=scale.tokens[:1]),
                *variants,
            ],
            row_s=150,
        ),
        "homes": Stage(groups=homed, row_s=240),
        # Eight thousand tokens first: the goals are there.
        "four": Stage(groups=[own(method="interleaved", **capped, tokens=scale.tokens[1::-1])], row_s=300),
        "three": Stage(
            groups=[
                own(method="kernels", size=scale.larger_size),
                own(method="engine", **larger, tokens=scale.tokens[:2]),
            ],
            row_s=200,
        ),
        "loss": Stage(groups=[own(method=name, **capped, tokens=scale.tokens[-1:]) for name in LONG_RUNS], row_s=240),
    }
