"""Indices and classes that a loader gives, checked in DRAM: on a device, one out of range would end the process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from partitioners.boundary import Boundary


def direct_limit(layer: nn.Module) -> int | None:
    """Return the number that indices into a layer must stay below, where its class tells it."""
    return layer.num_embeddings if isinstance(layer, nn.Embedding) else None


class IndexLimit(TorchFunctionMode):
    """Notes the number that indices into a layer must stay below, as its runs show: embeddings get them unchanged."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.found = direct_limit(layer)
        self._entered: set[int] = set()  # storages of integers

    def enters(self, value: Any) -> None:
        """Note what the layer gets next; None: it is through."""
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        self._entered = {each.untyped_storage().data_ptr() for each in tensors if not each.is_floating_point()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.embedding and self._entered and args[0].untyped_storage().data_ptr() in self._entered:
            self.found = min(args[1].shape[0], self.found or args[1].shape[0])
        return func(*args, **(kwargs or {}))


def check_indices(value: Boundary, limit: int, layer: str) -> None:
    """Raise IndexError where a batch gives a layer indices that it cannot look up."""
    tensors = [tensor for tensor in value.tensors if not tensor.is_floating_point() and tensor.numel()]
    if len(tensors) != 1 or tensors[0].is_complex() or not tensors[0].dtype.is_signed:
        return  # which of them is looked up, it cannot tell
    least, most = (int(each) for each in tensors[0].aminmax())
    if least < 0 or most >= limit:
        wrong = least if least < 0 else most
        raise IndexError(
            f"{layer} is to look up index {wrong}, limit: 0 to {limit - 1}; give the embedding more rows, or "
            f"mend the loader"
        )


class Classes(NamedTuple):
    """Values that a target may have: 0 to `number` - 1, and one that is left out of the loss."""

    number: int
    ignored: int


class TargetPlace(NamedTuple):
    """A tensor of a target: of training or of evaluation, in a target of so many tensors, its number there."""

    training: bool
    num_tensors: int
    number: int


class ClassLimits(TorchFunctionMode):
    """Notes which tensors of a target a loss compares with classes: those that it gets unchanged, and as a whole.

    sizes: of the model's parameters, of which the number of classes has to be one. Where it is a size of the batch as
    well (candidates within the batch, places in a sequence), or another number each time, nothing is noted.
    """

    def __init__(self, sizes: Collection[int]) -> None:
        super().__init__()
        self._sizes = set(sizes)
        self.found: dict[TargetPlace, Classes] = {}
        self.training = True  # the batch that runs
        self.batch_sizes: set[int] = set()  # of its tensors
        self._refused: set[TargetPlace] = set()
        self._num_tensors = 0
        self._target: dict[int, tuple[int, Tensor, int]] = {}  # by address: number, tensor, version

    def enters(self, target: Any) -> None:
        """Note the target that the loss gets next."""
        tensors = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor)]
        self._num_tensors = len(tensors)
        numbered = ((k, each) for k, each in enumerate(tensors) if _is_of_indices(each))
        self._target = {each.data_ptr(): (k, each, each._version) for k, each in numbered}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss) and len(args) > 1 and isinstance(args[1], Tensor):
            self._note(args[0], args[1], int(kwargs.get("ignore_index", -100)))
        return func(*args, **kwargs)

    def _note(self, output: Tensor, target: Tensor, ignored: int) -> None:
        k, whole, version = self._target.get(target.data_ptr(), (0, None, 0))
        if whole is None or whole.numel() != target.numel() or whole._version != version:
            return
        place = TargetPlace(self.training, self._num_tensors, k)
        classes = Classes(int(output.shape[0] if output.dim() == 1 else output.shape[1]), ignored)
        is_known = self.found.get(place, classes) == classes
        if not is_known or classes.number not in self._sizes or classes.number in self.batch_sizes:
            self._refused.add(place)
        if place in self._refused:
            self.found.pop(place, None)
            return
        self.found[place] = classes
        check_classes(target.cpu(), classes)


def _is_of_indices(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and not tensor.is_floating_point() and not tensor.is_complex()


def check_classes(target: Tensor, classes: Classes) -> None:
    """Raise IndexError for a class that is out of range for the model's output."""
    if not _is_of_indices(target) or not target.dtype.is_signed:
        return
    least, most = (int(each) for each in target.aminmax())
    if least >= 0 and most < classes.number:
        return
    wrong = target[((target < 0) | (target >= classes.number)) & (target != classes.ignored)]
    if wrong.numel():
        raise IndexError(
            f"loss_fn: the target has class {int(wrong[0])}, expected 0 to {classes.number - 1}, or "
            f"ignore_index={classes.ignored}; correct the data, give the model's last layer more outputs, or set the "
            f"loss's ignore_index"
        )
