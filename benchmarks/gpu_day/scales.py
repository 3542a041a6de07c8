"""The models, caps and batches of a session: on a GPU, and small ones to try every stage without one."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a GPT."""

    width: int
    num_blocks: int
    num_heads: int


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Everything that a session measures has these sizes."""

    sizes: dict[str, Shape]  # of the stages one, four and loss; of the stage three
    memory: str  # cap of the device
    tokens: tuple[int, ...]  # per step, the most important first: all in stage one, the first two in the others
    length: int  # tokens of a sequence
    micro_tokens: int  # of a micro-batch
    vocabulary: int
    num_steps: int  # measured, after the warm ones
    num_loss_steps: int
    num_warm: int = 2
    num_models: int = 4  # interleaved
    num_shards: int = 8  # of the cut that is not the default one
    bandwidth: int | None = None  # of the emulated device's link, bytes per second; None: a GPU
    probe_bytes: int = 2**30  # of each array that the rate of DRAM is measured on
    locked_bytes: int = 2**32  # page-locked at once to time it
    race_width: int = 1024  # of the model that races are hunted on
    race_bytes: int = 2**31  # of the device, where it has room for every graph

    @property
    def is_emulated(self):
        return self.bandwidth is not None

    @property
    def size(self):
        """The model of the stages one, four and loss."""
        return next(iter(self.sizes))

    @property
    def larger_size(self):
        """The model of the stage three."""
        return list(self.sizes)[1]


GPU = Scale(
    sizes={
        "1.5B": Shape(width=2048, num_blocks=27, num_heads=16),  # 1.50e9 parameters
        "3B": Shape(width=2560, num_blocks=36, num_heads=20),  # 3.00e9
    },
    memory="16GiB",
    tokens=(16384, 8192, 4096),
    length=2048,
    micro_tokens=4096,
    vocabulary=32768,
    num_steps=5,
    num_loss_steps=100,
)
EMULATED = Scale(
    sizes={
        "0.3M": Shape(width=64, num_blocks=6, num_heads=4),
        "0.5M": Shape(width=80, num_blocks=6, num_heads=4),
    },
    memory="1MiB",
    tokens=(256, 128, 64),
    length=16,
    micro_tokens=64,
    vocabulary=256,
    num_steps=2,
    num_loss_steps=12,
    bandwidth=500_000_000,
    probe_bytes=2**22,
    locked_bytes=2**22,
    race_width=32,
    race_bytes=2**22,
)
SCALES = {"gpu": GPU, "emulated": EMULATED}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that one process measures, one after the other: a method on a model under a cap, at each length of step."""

    method: str
    size: str = ""
    memory: str = ""
    tokens: tuple[int, ...] = (0,)  # per step; 0: the method has no steps
    module: str = "peers"  # that has the method
    parts: tuple[str, ...] = ()  # of the method, each a row by that name

    def rows(self):
        """Return the key of each row."""
        names = self.parts or (self.method,)
        return [(name, self.size, self.memory, tokens) for name in names for tokens in self.tokens]

    def only(self, keys):
        """Return the group with those of its rows alone."""
        kept = [key for key in self.rows() if key in keys]
        if self.parts:
            return replace(self, parts=tuple(key[0] for key in kept))
        return replace(self, tokens=tuple(key[3] for key in kept))
