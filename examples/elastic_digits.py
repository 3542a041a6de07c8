"""A CNN learns scikit-learn's digits on one, two and four devices: one global batch, and the same bits.

    python examples/elastic_digits.py

Each batch of the loader is a global batch of 256 images. No device computes more than 64 at a time.
"""

import argparse
import hashlib
import sys

import torch
from single_task_vision import accuracy, digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask

GLOBAL_BATCH = 256
MAX_DEVICE_BATCH = 64


def cnn():
    """The untrained model. It has no BatchNorm, whose statistics would be those of micro-batches."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64 * 4 * 4, 10),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)  # one compute thread per device

    train, validation = digits()
    hashes = []
    for num_devices in (1, 2, 4):
        model = cnn()
        task = ModelTask(
            model,
            F.cross_entropy,
            DataLoader(train, batch_size=GLOBAL_BATCH, shuffle=True, drop_last=True),
            lr=3e-3,
            epochs=args.epochs,
            name="digits",
            optimizer=torch.optim.AdamW,
            seed=0,
            max_device_batch=MAX_DEVICE_BATCH,
        )
        orchestra = ModelOrchestrator([task], devices=[EmulatedDevice("8MiB") for _ in range(num_devices)])
        orchestra.verbose = 0
        losses = orchestra.train_models().tasks["digits"].losses
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        hashes.append(hashlib.sha256(weights).hexdigest()[:16])
        print(f"devices: {num_devices}, loss {losses[0]:.3f} -> {losses[-1]!r}, weights {hashes[-1]}")
    print(f"validation accuracy {accuracy(model, validation):.1%}")
    equal = len(set(hashes)) == 1
    print(f"bit-equal: {'yes' if equal else 'NO'}")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
