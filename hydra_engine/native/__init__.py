"""Code for this processor, compiled at first use into the user's cache: the host update as one pass over DRAM."""

from hydra_engine.native.update import NarrowUpdate, is_dense, lies_as, native
