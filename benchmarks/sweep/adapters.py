"""LoRA adapters over one frozen base, larger than the device: what a sweep of four loads of it, and holds."""

import copy
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import optuna
import peft
import space
import torch
import transformers
from torch.nn import functional as F

from hydra_engine import Callback, EmulatedDevice, ModelOrchestrator, ModelTask
from hydra_engine.host import HostPool
from hydra_engine.integrations.huggingface import adapters, sequential
from hydra_engine.sweep import Sweep
from hydra_engine.worker.spiller import Spiller

CONFIG = transformers.LlamaConfig(
    vocab_size=space.BYTES,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=20,
    num_attention_heads=4,
    attention_dropout=0.1,
)
RANKS = (2, 4, 8, 16)
BASE_TO_DEVICE = 3  # bytes
NUM_WINDOWS, EPOCHS, LR = 64, 2, 1e-3


class Kept(Callback):
    """Losses and trained weights of a trial."""

    def __init__(self, model):
        self.model = model

    def on_task_end(self, report):
        self.losses = list(report.losses)
        self.weights = {name: value.clone() for name, value in self.model.named_parameters() if value.requires_grad}


def base_model():
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(CONFIG).train()


def models_over(base, ranks):
    torch.manual_seed(2)
    return adapters(base, [peft.LoraConfig(r=r, target_modules=["q_proj", "v_proj"], lora_dropout=0.1) for r in ranks])


def bytes_of(model):
    return sum(parameter.nbytes for parameter in model.parameters())


@contextmanager
def counted():
    """Bytes of frozen weights that training loads, and that its tasks bring into DRAM, while in here."""
    counts = Counter()
    train, opened, load_slab = ModelOrchestrator.train_models, HostPool.open, Spiller.load_slab

    def train_and_count(orchestra, **options):
        counts.clear()  # of rehearsals
        return train(orchestra, **options)

    def open_and_count(pool, *arguments):
        opened(pool, *arguments)
        counts["brought"] += sum(each.nbytes() for each in pool._brought)

    def load_and_count(spiller, state, shard, region, make_room):
        counts["loaded"] += 0 if region.trainable else region.num_bytes
        return load_slab(spiller, state, shard, region, make_room)

    with (
        mock.patch.object(ModelOrchestrator, "train_models", train_and_count),
        mock.patch.object(HostPool, "open", open_and_count),
        mock.patch.object(Spiller, "load_slab", load_and_count),
    ):
        yield counts


def sweep_over(ranks):
    """A sweep of one trial for each rank: bytes loaded and brought into DRAM, and if all bits are plain PyTorch's."""
    found, base, kept = space.data(NUM_WINDOWS), base_model(), {}
    models = models_over(base, ranks)
    plain = [copy.deepcopy(model) for model in models]

    def build(trial):
        model = models[RANKS.index(trial.suggest_categorical("rank", RANKS[: len(ranks)]))]
        kept[trial.number] = Kept(model)
        return ModelTask(
            sequential(model),
            next_token_loss,
            space.batches_of(found, 8),
            LR,
            EPOCHS,
            optimizer=torch.optim.AdamW,
            validation=found.validation,
            seed=trial.number,
            callbacks=(kept[trial.number],),
        )

    sampler = optuna.samplers.GridSampler({"rank": RANKS[: len(ranks)]}, seed=0)
    study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.NopPruner())
    devices = [EmulatedDevice(bytes_of(base) // BASE_TO_DEVICE)]
    sweep = Sweep(build, study=study, num_trials=len(ranks), parallel=len(ranks), devices=devices)
    sweep.verbose = 0
    with counted() as counts:
        sweep.run()
    is_equal = all(
        is_as_plain(kept[trial.number], plain[RANKS.index(trial.params["rank"])], found, trial.number)
        for trial in study.trials
    )
    return counts, is_equal


def is_as_plain(kept, model, found, seed):
    """Train a copy alone in plain PyTorch, and compare losses and weights bit for bit."""
    loader = space.batches_of(found, 8)
    epochs = space.plain_epochs(sequential(model), loader, found.validation, LR, seed, next_token_loss)
    losses = [loss for _ in range(EPOCHS) for loss in next(epochs)[0]]
    weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return losses == kept.losses and all(torch.equal(value, kept.weights[name]) for name, value in weights.items())


def next_token_loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
