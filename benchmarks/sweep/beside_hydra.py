"""The trials in one process, on two emulated devices."""

import torch
from beside import EPOCHS, ask, gpt, loaders, new_study, tell
from space import next_byte_loss

from hydra_engine import EmulatedDevice, ModelTask
from hydra_engine.sweep import Sweep


def build_task(trial):
    batch_size, lr = ask(trial)
    train, validation = loaders(batch_size)
    options = {"optimizer": torch.optim.AdamW, "validation": validation, "seed": trial.number}
    return ModelTask(gpt(), next_byte_loss, train, lr, EPOCHS, **options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    devices = [EmulatedDevice("64MiB"), EmulatedDevice("64MiB")]
    study = Sweep(build_task, study=new_study(), num_trials=12, devices=devices).run()
    tell(trial.value for trial in study.trials)
