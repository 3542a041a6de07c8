"""Code for this machine, compiled at first use: the host update as one pass over DRAM, and the same on a GPU."""

from hydra_engine.native import kernel
from hydra_engine.native.kernel import Kernel
from hydra_engine.native.update import TORCHS, NarrowUpdate, Rule, Work, is_dense, native
