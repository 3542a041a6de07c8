"""The training of plain.py on a device of 1 MiB, a quarter of its training state. It prints the same last line."""

import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hydra_engine import EmulatedDevice, ModelOrchestrator, ModelTask

torch.manual_seed(0)
inputs = torch.randn(2000, 64)
targets = inputs[:, :10].argmax(dim=1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=50, shuffle=True)
blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.1)) for _ in range(4)]
model = nn.Sequential(nn.Linear(64, 256), *blocks, nn.Linear(256, 10))

task = ModelTask(model, F.cross_entropy, loader, lr=1e-3, epochs=3, optimizer=torch.optim.AdamW, seed=1)
report = ModelOrchestrator([task], devices=[EmulatedDevice("1MiB")]).train_models()
losses = report.tasks["task-0"].losses

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"loss {losses[0]:.3f} -> {losses[-1]!r}, weights {hashlib.sha256(weights).hexdigest()[:16]}")
