"""The weights of an exported module after some steps, by ranks and by torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
from torch import Tensor, nn

from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.cli.main import main
from tests.distributed.support.pool import Pools

RATE = 0.05


def by_ranks(
    path: Path,
    data: Mapping[str, Tensor],
    steps: int,
    pools: Pools,
    folder: Path,
    *settings: object,
    gpus: int = 1,
) -> dict[str, np.ndarray]:
    """What `checkpoint export` writes as safetensors after `steps` steps of SGD over `data`, a
    micro-batch each.
    """
    size = len(next(iter(data.values()))) // steps
    plan = [
        "plan",
        path,
        "--gpus",
        gpus,
        "--cluster",
        "cpu-local",
        "--strategy",
        "pipedream",
        "-q",
        "--mode",
        "train",
    ]
    plan += [
        "--batch-size",
        size,
        "--micro-batches",
        1,
        "--set",
        f"optimizer={{name: sgd, lr: {RATE}}}",
        *settings,
    ]
    assert main([*map(str, plan), "-o", str(folder / "plan")]) == 0
    assert main(["codegen", str(folder / "plan"), "-q"]) == 0
    np.savez(folder / "data.npz", **{name: tensor.numpy() for name, tensor in data.items()})
    manifest = read_manifest(folder / "plan" / "program")
    flags = [
        "--device",
        "cpu",
        "--steps",
        steps,
        "--data",
        folder / "data.npz",
        "--checkpoint",
        folder / "saved",
    ]
    pools.of(manifest.world_size).run(manifest.folder, *flags)
    target = folder / "trained.safetensors"
    assert main(["checkpoint", "export", str(folder / "saved"), "-o", str(target), "-q"]) == 0
    found: dict[str, np.ndarray] = safetensors.numpy.load_file(target)
    return found


def by_torch(module: nn.Module, data: Mapping[str, Tensor], steps: int) -> dict[str, np.ndarray]:
    """The parameters of a module, which returns its loss, after these steps."""
    size = len(next(iter(data.values()))) // steps
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for step in range(steps):
        optimizer.zero_grad()
        module(*(tensor[step * size : (step + 1) * size] for tensor in data.values())).backward()
        optimizer.step()
    return {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}
