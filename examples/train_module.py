"""Train a PyTorch module on four ranks and print the losses."""

import numpy as np
import torch
from torch import nn

import autopipe

if __name__ == "__main__":
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    labels = torch.randint(10, (512,))
    images = torch.randn(10, 64)[labels] + 0.5 * torch.randn(512, 64)
    np.savez("data.npz", input=images.numpy(), labels=labels.numpy())

    path = autopipe.export(
        model, images[:2], "classifier.onnx", loss=nn.functional.cross_entropy, labels=labels[:2]
    )
    plan = autopipe.plan(
        path, "cpu-local", gpus=4, batch_size=32, optimizer={"name": "adamw", "lr": 3e-3}
    )
    plan.verify()
    for step in plan.launch(steps=16, data="data.npz"):
        print(step["step"], step["loss"])
