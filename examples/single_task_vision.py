"""A small CNN with BatchNorm learns scikit-learn's digits on a device smaller than its training state.

    python examples/single_task_vision.py

It trains again in plain PyTorch, and says whether weights, BatchNorm's statistics and losses are the same bits.
"""

import argparse
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("this example needs scikit-learn for its data: pip install 'hydra_engine[examples]'")

LR = 0.01
SEED = 0


def cnn():
    """The untrained model, the same at every call."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        *conv(1, 32),
        *conv(32, 32),
        nn.MaxPool2d(2),
        *conv(32, 128),
        *conv(128, 128),
        nn.MaxPool2d(2),
        *conv(128, 256),
        nn.Flatten(),
        nn.Linear(256 * 2 * 2, 256),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(256, 10),
    )


def conv(num_inputs, num_outputs):
    return [
        nn.Conv2d(num_inputs, num_outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(num_outputs),
        nn.ReLU(inplace=True),
    ]


def optimizer(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def digits():
    """Training and validation set: 1437 and 360 images of 8 x 8 pixels."""
    images, classes = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    classes = torch.tensor(classes)
    cut = len(images) * 4 // 5
    return TensorDataset(images[:cut], classes[:cut]), TensorDataset(images[cut:], classes[cut:])


def train_plain(model, loader, epochs):
    """What the engine's results must be; returns the loss of every step."""
    sgd = optimizer(model.parameters(), lr=LR)
    losses = []
    torch.manual_seed(SEED)
    for _ in range(epochs):
        for images, classes in loader:
            sgd.zero_grad()
            loss = F.cross_entropy(model(images), classes)
            loss.backward()
            sgd.step()
            losses.append(loss.item())
    return losses


def accuracy(model, dataset):
    """Share of the images that the model names rightly."""
    images, classes = dataset.tensors
    model.eval()
    with torch.no_grad():
        return (model(images).argmax(dim=1) == classes).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--memory", default="4MiB", help="of the device")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one compute thread for the one device, and the same for the plain run

    train, validation = digits()
    loader = DataLoader(train, batch_size=32, shuffle=True)
    device = EmulatedDevice(memory=args.memory)

    model = cnn()
    state_bytes = 12 * sum(parameter.numel() for parameter in model.parameters())  # weight, gradient, momentum
    print(f"training state {state_bytes / 2**20:.1f} MiB, {state_bytes / device.memory_bytes:.1f} times the device\n")
    task = ModelTask(
        model,
        F.cross_entropy,
        loader,
        LR,
        args.epochs,
        name="digits",
        optimizer=optimizer,
        seed=SEED,
        validation=DataLoader(validation, batch_size=60),
    )
    report = ModelOrchestrator([task], devices=[device]).train_models()
    print(f"\n{report}\n")

    plain = cnn()
    losses = train_plain(plain, loader, args.epochs)
    pairs = zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    equal = report.tasks["digits"].losses == losses and all(torch.equal(ours, theirs) for ours, theirs in pairs)
    print(f"hydra_engine:  validation accuracy {accuracy(model, validation):.1%}")
    print(f"plain PyTorch: validation accuracy {accuracy(plain, validation):.1%}")
    print(f"bit-equal: {'yes' if equal else 'NO'}")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
