"""Train a small model with this package and, on the same gradients, with its float64 reference."""

import torch

from deepspeed_muon import Muon
from deepspeed_muon.reference import ReferenceMuon

torch.manual_seed(0)
layers = (
    torch.nn.Linear(32, 64),
    torch.nn.Tanh(),
    torch.nn.Linear(64, 64),
    torch.nn.Tanh(),
    torch.nn.Linear(64, 16),
)
model = torch.nn.Sequential(*layers)
optimizer = Muon(model, variant="normuon", weight_decay=0.1, ns_dtype="fp32")
matrices = {route.name: lambda weight: [weight] for route in optimizer.routes if route.algorithm == "muon"}
reference = ReferenceMuon(matrices, variant="normuon", weight_decay=0.1)
weights = {name: param.detach().double() for name, param in model.named_parameters()}
for _ in range(10):
    model.zero_grad()
    model(torch.randn(8, 32)).square().mean().backward()
    reference.step(weights, {name: param.grad for name, param in model.named_parameters()})
    optimizer.step()
differences = [(param.detach() - weights[name]).abs().max() for name, param in model.named_parameters()]
print(f"Muon for {', '.join(matrices)}: largest difference {max(differences):.1e}")
