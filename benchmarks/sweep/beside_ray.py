"""The trials with Ray Tune, each in an actor of its own, two at a time: FOLDER."""

import os
import sys

import ray
import torch
from beside import CONFIGS, EPOCHS, gpt, loaders, tell
from ray import tune
from space import next_byte_loss

from hydra_engine import stream_seed


def train_one(config):
    torch.set_num_threads(1)
    number, (batch_size, lr) = config["number"], CONFIGS[config["number"]].values()
    train, validation = loaders(batch_size)
    torch.manual_seed(stream_seed(0, number, 0))
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    torch.manual_seed(number)
    for _ in range(EPOCHS):
        for inputs, target in train:
            optimizer.zero_grad(set_to_none=True)
            next_byte_loss(model(inputs), target).backward()
            optimizer.step()
        model.eval()
        total = count = 0
        with torch.no_grad():
            for inputs, target in validation:
                total += next_byte_loss(model(inputs), target).item() * len(inputs)
                count += len(inputs)
        model.train()
        tune.report({"validation_loss": total / count})


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
    tuner = tune.Tuner(
        tune.with_resources(train_one, {"cpu": 1}),
        param_space={"number": tune.grid_search(list(range(12)))},
        tune_config=tune.TuneConfig(metric="validation_loss", mode="min", max_concurrent_trials=2),
        run_config=tune.RunConfig(storage_path=sys.argv[1], verbose=0),
    )
    found = {each.config["number"]: each.metrics["validation_loss"] for each in tuner.fit()}
    tell(found[number] for number in range(12))
