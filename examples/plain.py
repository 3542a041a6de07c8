"""A small training in plain PyTorch. See with_hydra.py beside it: `diff plain.py with_hydra.py`."""

import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(2000, 64)
targets = inputs[:, :10].argmax(dim=1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=50, shuffle=True)
blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.1)) for _ in range(4)]
model = nn.Sequential(nn.Linear(64, 256), *blocks, nn.Linear(256, 10))

torch.manual_seed(1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(f"loss {losses[0]:.3f} -> {losses[-1]!r}, weights {hashlib.sha256(weights).hexdigest()[:16]}")
