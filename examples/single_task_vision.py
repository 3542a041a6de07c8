"""A small CNN with BatchNorm learns scikit-learn's digits on a device smaller than its training state.

    python examples/single_task_vision.py
    python examples/single_task_vision.py --scale paper --memory 8GiB     # ViT-H/14 on a GPU, the digits enlarged

It trains again in plain PyTorch, and says whether weights, BatchNorm's statistics and losses are the same bits. The
large scale does not, and needs `transformers`; it was not measured on a GPU.
"""

import argparse
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import CudaDevice, EmulatedDevice, ModelOrchestrator, ModelTask

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("this example needs scikit-learn for its data: pip install 'hydra_engine[examples]'")

LR = 0.01
SEED = 0
VIT = {
    "image_size": 224,
    "patch_size": 14,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
}


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


class Enlarged(nn.Module):
    """A classifier of `transformers` for images of another size; its forward becomes layers by itself."""

    def __init__(self, model, size):
        super().__init__()
        self.model = model
        self.size = size

    def forward(self, images):
        return self.model(F.interpolate(images, self.size)).logits


def vit():
    """ViT-H/14 with random weights, behind a layer that enlarges the digits."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(SEED)
    model = ViTForImageClassification(ViTConfig(**VIT, num_channels=1, num_labels=10))
    return Enlarged(model, VIT["image_size"]).train()


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
        return share_right(model(images), classes).item()


def share_right(logits, classes):
    return (logits.argmax(dim=1) == classes).float().mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--memory", help="of the device (default: 4MiB of an emulated one, all that a GPU has free)")
    parser.add_argument("--scale", choices=("tiny", "paper"), default="tiny", help="paper: ViT-H/14 on a GPU")
    args = parser.parse_args()
    is_large = args.scale == "paper"
    torch.set_num_threads(1)  # one compute thread for the one device, and the same for the plain run

    train, validation = digits()
    loader = DataLoader(train, batch_size=32, shuffle=True)
    device = CudaDevice(0, args.memory) if is_large else EmulatedDevice(memory=args.memory or "4MiB")

    model = vit() if is_large else cnn()
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
    orchestra = ModelOrchestrator([task], devices=[device])
    report = orchestra.train_models()
    print(f"\n{report}\n")
    if is_large:
        found = orchestra.evaluate(task, task.validation, metrics={"accuracy": share_right})
        print(f"validation accuracy {found.metrics['accuracy']:.1%}")
        return

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
