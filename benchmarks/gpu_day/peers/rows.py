"""Rows of a peer: its steps timed as the engine's are, its losses kept, so that one sees that it trained the same."""

import gc
from contextlib import suppress

import torch
from kernels import synchronize
from models import batches
from row import filled, in_short, measured, timed_steps

from partitioners import parse_bytes

from . import PEERS

LARGE = 4  # times the scale's micro-batch: no larger one is tried, since each that does not fit takes long to tell


def run_peer(scale, group, device, emit, peers=PEERS):
    """Time a peer on the rows of a group in this process; `emit` takes each row as a dict."""
    peer = peers[group.method]
    cap_bytes = parse_bytes(group.memory, "memory") if group.memory else None
    if device.type == "cuda" and cap_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_bytes / total, device)
    contestant = Contestant(peer, scale, group.size, device, cap_bytes)
    try:
        for tokens in group.tokens:
            with measured(emit, device, (group.method, group.size, group.memory, tokens)) as row:
                row.update(is_exact=peer.is_exact, is_capped=device.type == "cuda" and cap_bytes is not None)
                contestant.train(tokens, row)
    finally:
        contestant.close()


class Contestant:
    """A peer's trainer, which goes on from row to row; built anew after an error, since nobody knows its state then."""

    def __init__(self, peer, scale, size, device, cap_bytes):
        self._peer, self._scale, self._size = peer, scale, size
        self._device, self._cap_bytes = device, cap_bytes
        times = LARGE if peer.has_large_micro_batches else 1
        self._micro_tokens = times * scale.micro_tokens
        self._trainer = None

    def train(self, tokens, row):
        """One row, with micro-batches that halve until they fit."""
        scale = self._scale
        while True:
            try:
                return self._train(tokens, row)
            except torch.OutOfMemoryError as error:
                refusal = in_short(error)
            except BaseException:
                self._abandon()
                raise
            # Behind the handler, whose traceback holds the device's tensors.
            self._abandon()
            if self._micro_tokens // 2 < scale.length:
                raise MemoryError(f"not one sequence of {scale.length} tokens fits: {refusal}")
            self._micro_tokens = min(self._micro_tokens, tokens) // 2

    def _train(self, tokens, row):
        scale, num_warm = self._scale, max(self._scale.num_warm, self._peer.num_warm)
        if self._trainer is None:
            trainer = self._peer.load()
            self._num_steps = 0
            options = {"device": self._device, "cap_bytes": self._cap_bytes, "micro_tokens": self._micro_tokens}
            self._trainer = trainer(scale, self._size, **options)
            synchronize(self._device)
        losses = []
        data = batches(scale, num_warm + scale.num_steps, tokens)
        seconds = timed_steps(lambda *batch: losses.append(self._trainer.step(*batch)), data, self._device, num_warm)
        filled(row, seconds, tokens)
        row.update(
            losses=[float(loss) for loss in losses],
            steps_before=self._num_steps,  # of rows before this one: losses compare where it is equal
            micro_batches=max(1, tokens // self._micro_tokens),
            version=self._peer.version(),
        )
        self._num_steps += len(data)

    def _abandon(self):
        with suppress(Exception):
            self.close()
        self._trainer = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self):
        """Give back the trainer, if there is one."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()
