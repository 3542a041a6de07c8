"""The trials with Optuna alone, each in a process of its own, two at a time: FOLDER fork|spawn."""

import multiprocessing
import sys

import optuna
import torch
from beside import EPOCHS, ask, gpt, loaders, new_study, tell
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from space import next_byte_loss

from hydra_engine import stream_seed


def objective(trial):
    batch_size, lr = ask(trial)
    train, validation = loaders(batch_size)
    torch.manual_seed(stream_seed(0, trial.number, 0))
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    torch.manual_seed(trial.number)
    for epoch in range(EPOCHS):
        for inputs, target in train:
            optimizer.zero_grad(set_to_none=True)
            next_byte_loss(model(inputs), target).backward()
            optimizer.step()
        model.eval()
        total = number = 0
        with torch.no_grad():
            for inputs, target in validation:
                total += next_byte_loss(model(inputs), target).item() * len(inputs)
                number += len(inputs)
        model.train()
        trial.report(total / number, epoch)
    return total / number


def storage_in(folder):
    # Not SQLite, where two processes may get one trial.
    return JournalStorage(JournalFileBackend(f"{folder}/study.log"))


def train_one(folder):
    torch.set_num_threads(1)
    optuna.load_study(study_name="beside", storage=storage_in(folder)).optimize(objective, n_trials=1)


if __name__ == "__main__":
    study = new_study(storage_in(sys.argv[1]))
    with multiprocessing.get_context(sys.argv[2]).Pool(2, maxtasksperchild=1) as pool:
        pool.map(train_one, [sys.argv[1]] * 12, chunksize=1)
    tell(trial.value for trial in study.trials)
