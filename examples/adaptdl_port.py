"""AdaptDL's MNIST tutorial on this package: a training loop of one's own, whose batches and learning rates adapt.

    python examples/adaptdl_port.py

Each line that differs from AdaptDL's has AdaptDL's behind it. No process group is started, the data are scikit-learn's
digits, and a checkpoint is saved after every epoch where --checkpoint says to: run it again, and it goes on.
"""

import argparse
from pathlib import Path

import torch
from single_task_vision import digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

from hydra_engine import adaptive  # import adaptdl.torch


class Net(nn.Module):
    """Two convolutions and two linear layers, for images of 8 x 8."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, 1), nn.Conv2d(16, 32, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(128, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def train(model, train_loader, optimizer):
    """One epoch; not a line differs."""
    model.train()
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, test_loader):
    """Return the mean loss and the share of digits that are read right."""
    model.eval()
    stats = adaptive.Accumulator()  # stats = adaptdl.torch.Accumulator()
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            stats["loss"] += F.nll_loss(output, target, reduction="sum").item()
            stats["correct"] += output.argmax(dim=1).eq(target).sum().item()
            stats["samples"] += len(data)
    with stats.synchronized():
        return stats["loss"] / stats["samples"], stats["correct"] / stats["samples"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="go on from this file, and save to it")
    args = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)

    dataset1, dataset2 = digits()
    # train_loader = adaptdl.torch.AdaptiveDataLoader(dataset1, drop_last=True, batch_size=64, shuffle=True)
    train_loader = adaptive.AdaptiveDataLoader(dataset1, drop_last=True, batch_size=32, shuffle=True)
    # test_loader = adaptdl.torch.AdaptiveDataLoader(dataset2, batch_size=64)
    test_loader = adaptive.AdaptiveDataLoader(dataset2, batch_size=64)
    # train_loader.autoscale_batch_size(1028, local_bsz_bounds=(32, 128))
    train_loader.autoscale_batch_size(256, local_bsz_bounds=(8, 64))

    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
    # adaptdl.torch.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    # model = adaptdl.torch.AdaptiveDataParallel(model, optimizer, scheduler)
    model = adaptive.AdaptiveDataParallel(model, optimizer, scheduler, loader=train_loader)
    if args.checkpoint and args.checkpoint.exists():  # AdaptDL loads where its environment says to
        model.restore(torch.load(args.checkpoint))
        print(f"goes on with epoch {train_loader.epoch}, step {len(model.steps)}")

    # for epoch in adaptdl.torch.remaining_epochs_until(args.epochs):
    for epoch in adaptive.remaining_epochs_until(args.epochs, train_loader):
        first = len(model.steps)
        train(model, train_loader, optimizer)
        loss, accuracy = test(model, test_loader)
        scheduler.step()
        sizes = [step.batch_size for step in model.steps[first:]]
        print(
            f"epoch {epoch}: {len(sizes)} steps, batches of {min(sizes)} to {max(sizes)}, gain {model.gain:.2f}, "
            f"noise scale {model.noise_scale:.0f}, loss {loss:.3f}, accuracy {accuracy:.1%}"
        )
        if args.checkpoint:  # AdaptDL saves when its process is told to end
            torch.save(model.checkpoint(), args.checkpoint)
    print(f"the last step: {model.steps[-1]}")


if __name__ == "__main__":
    main()
