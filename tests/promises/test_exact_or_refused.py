"""The recipes of tests/recipes.py: the bits of the plain loop, or refused by name.

Each recipe is trained by the plain loop and by the engine, whole and cut, on one device and on two. Either the engine
refuses it before any work, with an error that names the task, and leaves the user's model and all generators as they
were; or it ends with the plain loop's losses, weights and buffers.
"""

import random
import re
import signal
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask
from partitioners import Presharded
from tests import exact, reference, zoo
from tests.promises.test_spread import spread
from tests.recipes import RECIPES, Doubles, batches

pytestmark = [
    pytest.mark.rest,
    # torch's own, of what people still have: torch.jit, the old weight_norm.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
]

SEED, LR, EPOCHS = 5, 1e-2, 2
NAME = "odd-one"

DEVICES = {
    "whole": (None, 1),
    "cut, two devices": (1, 2),
}

# Of each kind of recipe one that takes little time, and together nearly every line of the engine's checks.
IN_THE_NET = {
    "whole": """
        late_binds_its_weight_to_other_memory merges_on_eval late_write_in_a_retry late_scale_of_the_longest_so_far
        loss_with_numpy_generator optimizer_GlobalCounter_task counter_in_a_closure
        memory_bank sparse_boundary
        optimizer_NormScaled_shard object_that_moves_its_tensor
        dataset_draws_from_numpy_after_10 loss_masks_the_target_in_place
        masks_a_target_that_every_micro_batch_has first_layer_works_in_place_on_an_array backward_of_a_shared_buffer
        loss_pops_from_a_target_that_the_loader_keeps attribute_of_LazyTable
        counter_of_a_module loss_with_a_counter_of_a_class table_by_weak_module
        loss_of_a_spread_step_runs_a_backward_itself loader_goes_on_from_gradients_of_its_batches
    """,
    "cut, two devices": """
        layer_above_works_on_a_batch_by_its_data
        shifts_indices_in_place_in_2_micro_batches
        clamps_in_a_hook own_generator sparse_embedding optimizer_GroupCounter_shard
        merges_on_eval_without_validation optimizer_SGLD_task loss_module_holds_a_layer
        tensor_lr mixed_dtypes_clipped mixup_in_unpack dataset_seeds_torch
        input_is_the_target buffer_of_other_strides empty_tensors_share_no_memory
        backward_hook_gather_beside_autograd function_changes_a_buffer_in_its_backward
        batch_norm_in_a_checkpoint directional_derivative layer_changes_a_dict_that_the_loader_keeps
        array_that_the_loader_fills_again
        counter_of_a_function_of_another_package counter_of_an_autograd_function counter_in_an_attribute_of_range
        globals_that_stay shared_buffer_that_is_replaced layer_puts_gradients_back
        clipped_with_parameters_that_are_left_out batch_that_requires_gradients
    """,
}
# What a rule of the contract forbids, and no check sees: a comparison with the plain loop does.
UNSEEN = """
    cache_of_the_last_batch counter_in_a_closure draws_in_a_backward draws_in_a_backward_hook draws_in_a_tensor_hook
    numpy_draws_in_a_backward loss_reads_an_attribute loss_reads_through_the_model loss_reads_a_buffer
    layer_takes_the_norm_of_another_ones_weight
    layer_reads_what_another_left forward_that_sets_a_gradient attribute_of_RunningMaximum
    attribute_of_RunningMaximumInSlots attribute_of_Numbering loss_reads_the_mode_of_a_layer
    loss_object_with_a_running_maximum optimizer_that_couples_later draws_in_a_parameter_hook
    parameter_hook_writes_a_buffer parameter_hook_reads_a_buffer_that_changes parameter_hook_reads_another_gradient
    gradient_noise_by_hook optimizer_NoiseLater_shard optimizer_NoiseLater_task
    parameter_hook_reads_another_weight_early layer_leaves_gradients_changed layer_leaves_autocast_changed
    late_registers_a_hook_on_its_weight
    late_works_in_place_on_the_batch late_work_in_place_on_what_is_also_the_target
    late_work_in_place_on_validation_after_copies_in_training
    late_layer_above_works_in_place_on_whole_part_of_list_batches
    late_layer_above_works_in_place_on_view_part_of_list_batches
"""
CASES = [
    pytest.param(name, where, marks=[pytest.mark.net] * (name in IN_THE_NET[where].split()))
    for name in RECIPES
    if name not in UNSEEN.split()
    for where in DEVICES
]


def parts(built):
    own = ("layers", "model", "loss_fn", "loader", "expect", "spread")
    options = {key: value for key, value in built.items() if key not in own}
    model = built.get("model") or nn.Sequential(*built["layers"])
    return model, built.get("loss_fn") or F.cross_entropy, built.get("loader") or batches(), options


def build(name):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    return RECIPES[name]()


def generators():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.fixture(autouse=True)
def _no_hang():
    def late(*_):
        raise TimeoutError("hung")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)


def seed():
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def plain(name):
    """Losses and state of the plain loop; None where it raises, so that refusing is right."""
    model, loss_fn, loader, options = parts(build(name))
    options.pop("optimizer_scope", None)
    options.pop("early_release", None)
    seed()
    try:
        losses = reference.train(model, loss_fn, loader, seed=SEED, lr=LR, epochs=EPOCHS, **options).losses
    except Exception:
        return None
    return losses, zoo.state(model)


def run(built, ends, num_devices):
    """The model, what it raised by when ("made", "planned", "trained"), and the report."""
    model, loss_fn, loader, options = parts(built)
    stage, orchestra = "made", None
    seed()
    try:
        partitioner = Presharded(ends or [len(list(model.children()))])
        task = ModelTask(model, loss_fn, loader, LR, EPOCHS, seed=SEED, partitioner=partitioner, name=NAME, **options)
        stage = "planned"
        orchestra = ModelOrchestrator([task], devices=[EmulatedDevice("4MiB", chaos=k) for k in range(num_devices)])
        orchestra.verbose = 0
        orchestra.generate()
        stage = "trained"
        report = orchestra.train_models()
        report.raise_failures()
    except Exception as error:
        return model, stage, error, None
    return model, "", None, report


@pytest.mark.parametrize(("name", "where"), CASES)
def test_exact_or_refused(name, where):
    size, num_devices = DEVICES[where]
    wanted, built = plain(name), build(name)
    model = parts(built)[0]
    before = {key: tensor.clone() for key, tensor in zoo.state(model).items()}
    seed()
    state, num_layers = generators(), len(list(model.children()))
    ends = None if size is None else [*range(size, num_layers, size), num_layers]
    with spread(built["spread"], in_sums=False) if "spread" in built else nullcontext():
        model, stage, error, report = run(built | {"model": model}, ends, built.get("spread", num_devices))
    told = "" if error else str(report.messages)
    found = "refused" if error else "doubted" if "changed in a forward" in told else "exact"
    if built.get("expect") == "differs":
        assert found == "exact", error or told
        assert report.tasks[NAME].losses != wanted[0]
        return
    assert built.get("expect") == found or (built.get("expect") is None and found != "doubted"), error or told
    if found == "doubted":
        return
    if error is None:
        assert wanted is not None, "trained what plain PyTorch does not"
        assert report.tasks[NAME].losses == wanted[0]
        exact.assert_same_state(zoo.state(model), wanted[1])
        return
    if stage == "trained":  # what only a step shows: by name, all the same
        assert re.search("limit|draw|;", str(error)), repr(error)
        return
    assert stage == "made" or NAME in "".join([str(error), *getattr(error, "__notes__", ())]), repr(error)
    exact.assert_same_state(zoo.state(model), before)
    now = generators()
    assert torch.equal(now[0], state[0])
    assert now[1:] == state[1:]


def test_generator_that_keeps_a_batch_which_a_layer_changes_is_refused():
    def loader():
        x = torch.randn(6, 8)
        for _ in range(3):
            yield x, torch.arange(6) % 3

    model = nn.Sequential(Doubles(), nn.Linear(8, 3))
    orchestra = ModelOrchestrator(
        [ModelTask(model, F.cross_entropy, loader(), name=NAME)], devices=[EmulatedDevice("4MiB")]
    )
    with pytest.raises(
        ValueError, match=r"^odd-one: 0 \(\w+\) to 1 .*: work in place on the inputs .* that loader\[\d+\] keeps"
    ):
        orchestra.generate()
