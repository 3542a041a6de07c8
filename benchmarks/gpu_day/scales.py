"""What is measured: models, budgets and batches, on a GPU and, to try the script, without one; and in which order."""

from dataclasses import dataclass

METHODS = ("engine", "resident", "fsdp2", "interleaved")
# When the engine updates: as gradients arrive, or after the step's commit; "auto": early alone, since a model's updates
# then hide under its own backward, and at the commit where another model computes meanwhile.
RELEASES = ("auto", "early", "commit")
PARTITIONERS = ("pilot", "optimal")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT's."""

    width: int
    num_blocks: int
    num_heads: int


@dataclass(frozen=True, kw_only=True)
class Scale:
    """All that one call may measure; the first of each are the most important."""

    sizes: dict[str, Shape]
    memories: tuple[str, ...]  # caps of the device
    tokens: tuple[int, ...]  # per step
    length: int  # tokens of a sequence
    micro_tokens: int  # of a micro-batch
    vocabulary: int
    num_steps: int  # measured, after the warm ones
    num_warm: int = 2
    bandwidth: int | None = None  # of the emulated device's link, bytes per second; None: a GPU
    probe_bytes: int = 2**30  # of the arrays that DRAM's rate is measured on
    probe_width: int = 8192  # of the matrices that the matmul peak is measured on

    @property
    def is_emulated(self):
        return self.bandwidth is not None


GPU = Scale(
    sizes={
        "1.5B": Shape(width=2048, num_blocks=27, num_heads=16),  # 1.50e9 parameters
        "3B": Shape(width=2560, num_blocks=36, num_heads=20),  # 3.00e9
    },
    memories=("16GiB", "24GiB"),
    tokens=(16384, 4096, 65536, 8192, 32768),
    length=2048,
    micro_tokens=4096,
    vocabulary=32768,
    num_steps=5,
)
QUICK_GPU = Scale(
    sizes={"0.2B": Shape(width=1024, num_blocks=12, num_heads=8)},
    memories=("4GiB",),  # context and libraries take the better part of one
    tokens=(4096,),
    length=1024,
    micro_tokens=2048,
    vocabulary=8192,
    num_steps=3,
)
EMULATED = Scale(
    sizes={
        "1M": Shape(width=128, num_blocks=5, num_heads=4),
        "3M": Shape(width=192, num_blocks=6, num_heads=6),
    },
    memories=("16MiB", "24MiB"),
    tokens=(1024, 256),
    length=64,
    micro_tokens=256,
    vocabulary=512,
    num_steps=3,
    bandwidth=500_000_000,
    probe_bytes=2**26,
    probe_width=512,
)
QUICK_EMULATED = Scale(
    sizes={"0.3M": Shape(width=64, num_blocks=4, num_heads=4)},
    memories=("4MiB",),
    tokens=(256,),
    length=32,
    micro_tokens=128,
    vocabulary=256,
    num_steps=2,
    bandwidth=500_000_000,
    probe_bytes=2**22,
    probe_width=128,
)
SCALES = {"gpu": GPU, "gpu-quick": QUICK_GPU, "emulated": EMULATED, "emulated-quick": QUICK_EMULATED}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that one process measures, one after the other: a method on a model under a cap, at so many tokens."""

    method: str  # one of METHODS, or "machine"
    size: str = ""
    memory: str = ""
    tokens: tuple[int, ...] = ()
    kernels: bool = False  # measure the kernels alone as well, first
    release: str = "auto"
    partitioner: str = "pilot"

    def rows(self):
        """Each row's key."""
        kinds = [("machine", "", "", 0)] if self.method == "machine" else []
        kinds += [("kernels", self.size, "", 0)] if self.kernels else []
        return kinds + [(self.method, self.size, self.memory, tokens) for tokens in self.tokens]


def groups(scale, *, sizes=(), memories=(), tokens=(), methods=(), **options):
    """All groups, the most important first; empty filters take all. `options`: each group's release and partitioner.

    First every model under the smallest cap at three lengths of step, beside its competitors; then the larger cap; then
    the lengths between. What bounds are made of is measured before it is needed, whatever the filters leave.
    """
    taken_sizes = [each for each in scale.sizes if not sizes or each in sizes]
    taken_memories = [each for each in scale.memories if not memories or each in memories]
    taken_tokens = [each for each in scale.tokens if not tokens or each in tokens]
    taken_methods = methods or METHODS
    found = [Group(method="machine")]

    def add(method, size, memory, tokens, *, kernels=False):
        tokens = tuple(tokens) if method in taken_methods else ()
        if tokens or kernels:
            found.append(Group(method=method, size=size, memory=memory, tokens=tokens, kernels=kernels, **options))

    first, rest = taken_tokens[:3], taken_tokens[3:]
    for size in taken_sizes:
        add("resident", size, "", first, kernels=True)
        for memory in taken_memories[:1]:
            add("engine", size, memory, first)
            add("fsdp2", size, memory, first)
            if size == next(iter(scale.sizes)):  # two of a larger one need too much DRAM
                add("interleaved", size, memory, first[:1])
    for memory in taken_memories[1:]:
        for size in reversed(taken_sizes):
            add("engine", size, memory, first)
            add("fsdp2", size, memory, first)
    for size in taken_sizes:
        add("resident", size, "", rest)
        for memory in taken_memories:
            add("engine", size, memory, rest)
            add("fsdp2", size, memory, rest)
            if size == next(iter(scale.sizes)):
                done = first[:1] if memory in taken_memories[:1] else []
                add("interleaved", size, memory, [each for each in taken_tokens if each not in done])
    return found
