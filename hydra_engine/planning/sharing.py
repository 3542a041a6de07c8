"""What tasks must not share: then none would change what another one does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hydra_engine.planning.planner import PlannedTask
from hydra_engine.tasks import GuidedLoader


def check_sharing(planned: Sequence[PlannedTask]) -> None:
    """Refuse tasks that train one parameter, or read through one random generator.

    The model of a task that is over is free. So is its loader, if it was read to its end: else a read may be under way.
    """
    trained: dict[int, str] = {}
    read: dict[int, str] = {}
    for each in planned:
        for slot in () if each.has_left else each.layout.trainable_slots():
            other = trained.setdefault(slot.parameter.data_ptr() or id(slot.parameter), each.name)
            if other != each.name:
                raise ValueError(
                    f"tasks {other} and {each.name} share the trainable parameter {slot.name}; freeze it in both, or "
                    f"give each task its own copy (of adapters: by hydra_engine.integrations.huggingface.adapters)"
                )
        loaders = () if each.has_read_all else (each.task.dataloader, each.task.validation)
        moved = [held for loader in loaders for held in _moved_by_reading(loader)]
        for owner in [read.setdefault(id(held), each.name) for held in moved]:
            if owner != each.name:
                raise ValueError(
                    f"tasks {owner} and {each.name} read through one generator, or one loader that keeps its place or "
                    f"its workers, so each would change what the other reads; give each task a loader of its own"
                )


def check_nothing_shared(planned: PlannedTask, others: Sequence[PlannedTask]) -> None:
    """Refuse a task that would join others which train weights that it has, or read frozen those that it trains."""
    holders = {id(slot.parameter): (other, slot) for other in others for slot in other.layout.slots}
    for slot in planned.layout.slots:
        other, theirs = holders.get(id(slot.parameter), (planned, slot))
        if other is not planned and (slot.trainable or theirs.trainable):
            mover = other.name if theirs.trainable else planned.name
            raise ValueError(
                f"tasks {other.name} and {planned.name} share the parameter {theirs.name}, which moves while {mover} "
                f"trains; add the task from the other's on_task_end or later, or give it a copy of its own"
            )


def check_shared_buffers(planned: Sequence[PlannedTask]) -> None:
    """Refuse tasks that share a buffer which one of them changes in training."""
    holders: dict[int, list[PlannedTask]] = {}
    for each in planned:
        for buffer in each.layout.buffers:
            holders.setdefault(id(buffer), []).append(each)
    for each in planned:
        for index in each.state.observed.changed_buffers:
            other = next((o for o in holders[id(each.layout.buffers[index])] if o is not each), None)
            if other is not None:
                raise ValueError(
                    f"tasks {each.name} and {other.name} share a module whose buffers change in training (BatchNorm, "
                    f"say), so their results would depend on one another; give each task its own, or put it in eval()"
                )


def check_apart(what: str, loader: object, planned: Sequence[PlannedTask]) -> None:
    """Refuse a loader whose reading would change what tasks read that have yet to train; `what` would read it."""
    moved = {id(held) for held in _moved_by_reading(loader)}
    for each in planned:
        for own in (each.task.dataloader, each.task.validation):
            if any(id(held) in moved for held in _moved_by_reading(own)):
                raise ValueError(
                    f"{what}: the loader shares its place, its generator or its persistent workers with a loader of "
                    f"task {each.name}, which has yet to train and would then read other batches; give {what} a loader "
                    f"of its own"
                )


def _moved_by_reading(loader: object) -> Iterator[object]:
    """What a reading of a loader leaves otherwise than it found it, as far as one can see from outside."""
    for holder in (loader, getattr(loader, "sampler", None)):
        if (generator := getattr(holder, "generator", None)) is not None:
            yield generator
    if getattr(loader, "persistent_workers", False) or isinstance(loader, (GuidedLoader, Iterator)):
        yield loader
