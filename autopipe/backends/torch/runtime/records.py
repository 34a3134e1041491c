"""Gradients and parameters of a run's first steps, in files for verification."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

RECORDED_STEPS = 2
"""Steps of which verification sees gradients, and the parameters that they lead to."""


def record_file(folder: Path, kind: str, step: int, rank: int) -> Path:
    """Where a rank leaves its blocks."""
    return folder / f"{kind}_{step}_{rank:03d}.npz"


def dump_tensors(folder: Path, kind: str, step: int, rank: int, tensors: Mapping[int, torch.Tensor]) -> None:
    """Write gradients or parameters of the rank's blocks by the parameter's index, as float32 or float64."""
    folder.mkdir(parents=True, exist_ok=True)
    floating = {index: each.detach() for index, each in tensors.items() if each.is_floating_point()}
    wide = {str(i): each if each.element_size() == 8 else each.float() for i, each in floating.items()}
    found = {index: each.cpu().numpy() for index, each in wide.items()}
    np.savez(record_file(folder, kind, step, rank), **found)  # type: ignore[arg-type]


def load_gradients(folder: Path, step: int, parameters: Mapping[int, torch.Tensor]) -> None:
    """Give parameters the gradients of a step that `dump_tensors` wrote of whole parameters."""
    import torch

    with np.load(record_file(folder, "gradients", step, 0), allow_pickle=False) as stored:
        for index in stored.files:
            parameter = parameters[int(index)]
            parameter.grad = torch.from_numpy(stored[index]).to(parameter.device, parameter.dtype)
