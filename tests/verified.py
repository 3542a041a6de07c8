"""`python -m tests.verified [NAME ...]`: what `hydra_engine.verify` says of the recipes, a row for each."""

import sys
import time
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from hydra_engine import ModelTask
from hydra_engine.verify import verify
from tests.recipes import RECIPES, batches

SEED, LR = 5, 1e-2
OWN = ("layers", "model", "loss_fn", "loader", "expect", "spread")


def task_of(name):
    """The task of a recipe, made anew."""
    built = RECIPES[name]()
    options = {key: value for key, value in built.items() if key not in OWN}
    model = built.get("model") or nn.Sequential(*built["layers"])
    loader = built.get("loader") or batches()
    return ModelTask(model, built.get("loss_fn") or F.cross_entropy, loader, LR, seed=SEED, name=name, **options)


def verified(name, **options):
    """The verification of a recipe's task, and what its own tests expect: "exact", "refused" or "doubted"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return verify(lambda: task_of(name), **options).tasks[name], RECIPES[name]().get("expect")


def main(names):
    torch.set_num_threads(1)
    for name in names or RECIPES:
        began_s = time.perf_counter()
        try:
            found, expected = verified(name)
            places = [each.place if each else "same" for each in found.differences.values()]
            said = found.error or "; ".join(dict.fromkeys(each.text for each in found.differences.values() if each))
        except Exception as error:  # of making it
            places, said, expected = ["not made"], f"{type(error).__name__}: {error}", "?"
        seconds = time.perf_counter() - began_s
        print(
            f"{name} | {expected} | {' | '.join(places)} | {' '.join(said.split())[:160]} | {seconds:.1f} s", flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
