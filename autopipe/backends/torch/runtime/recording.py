"""What verification compares: each rank's gradients after they are added up, and how much a rounding changes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch


def dump_gradients(folder: Path, rank: int, gradients: dict[int, torch.Tensor]) -> None:
    """Write the gradients of the rank's blocks to `gradients_<rank>.npz` by parameter index, as float32 or float64."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for index, gradient in gradients.items():
        wide = gradient if gradient.dtype is torch.float64 else gradient.float()
        found[str(index)] = wide.cpu().numpy()
    np.savez(folder / f"gradients_{rank:03d}.npz", **found)  # type: ignore[arg-type]


def moved(tensor: torch.Tensor, step: float, key: int) -> torch.Tensor:
    """The tensor with each number a relative `step` larger or smaller, as `key` decides; whole numbers stay."""
    if not tensor.is_floating_point():
        return tensor
    signs = np.random.default_rng(key).integers(0, 2, tensor.shape, np.int8)
    factors = 1 + (torch.from_numpy(2 * signs - 1) * step).to(torch.float64)
    return (tensor.double() * factors.to(tensor.device)).to(tensor.dtype)
