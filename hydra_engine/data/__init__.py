"""Batches and random streams: the loader's reader, positions in the data, memory of tensors."""

from hydra_engine.data.batch import Batch
from hydra_engine.data.draws import Redirected, UserDraws, drawing_apart, drawing_as_usual, register_draws
from hydra_engine.data.indices import (
    Classes,
    ClassLimits,
    IndexLimit,
    TargetPlace,
    check_classes,
    check_indices,
    direct_limit,
)
from hydra_engine.data.memory import (
    ALIGNMENT_BYTES,
    copy_in_dram,
    copy_of,
    flat,
    identical,
    kept_by,
    place_for,
    place_in_dram,
    residue,
    same_bits,
    with_bits_of,
)
from hydra_engine.data.position import Beginning, TaskPosition
from hydra_engine.data.reader import Reader
from hydra_engine.data.signature import NO_BATCH, Signature
from hydra_engine.data.streams import (
    GLOBAL_GENERATORS,
    RandomState,
    Stream,
    TaskGenerator,
    capture,
    copied,
    installed,
    seeded,
    stream_seed,
)
