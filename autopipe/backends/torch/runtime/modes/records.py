"""Files with gradients, parameters and values of variables in the first steps of a run. `autopipe
verify` compares them with a reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

Results = TypeVar("Results")
RECORDED_STEPS = 2
"""Number of steps, from the first, whose gradients and updated parameters are recorded."""


def record_file(folder: Path, kind: str, step: int, rank: int) -> Path:
    """Return the path of a file of recorded tensors. `kind` is `gradients`, `parameters` or
    `values`; for `values`, `step` is the number of a stage.
    """
    return folder / f"{kind}_{step}_{rank:03d}.npz"


def dump_tensors(
    folder: Path, kind: str, step: int, rank: int, tensors: Mapping[int, torch.Tensor]
) -> None:
    """Write `tensors`, a rank's shards of gradients or parameters by parameter index, to their
    `record_file` as float32 or float64. Tensors that are not floating-point are omitted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        str(index): _as_float32_or_64(each)
        for index, each in tensors.items()
        if each.is_floating_point()
    }
    np.savez(record_file(folder, kind, step, rank), **found)  # type: ignore[arg-type]


def _as_float32_or_64(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as a numpy array; 16-bit and 8-bit floating-point types are converted to
    float32.
    """
    narrow = tensor.is_floating_point() and tensor.element_size() < 4
    found: np.ndarray = (tensor.float() if narrow else tensor).detach().cpu().numpy()
    return found


def run_recorded(
    function: Callable[..., Results], arguments: tuple[Any, ...], file: Path
) -> Results:
    """Return `function(*arguments)`. Write each tensor that is a local variable of a function in
    the same source file to `file`, by the name of the variable. Python's tracing observes the
    variables.
    """
    import torch

    found: dict[str, torch.Tensor] = {}

    def trace_frame(frame: FrameType, event: str, _argument: object) -> Any:
        """Trace function (`sys.settrace`) that stores the tensors among the local variables of a
        frame.
        """
        if frame.f_code.co_filename != function.__code__.co_filename:
            return None
        found.update(
            (name, each) for name, each in frame.f_locals.items() if isinstance(each, torch.Tensor)
        )
        return trace_frame

    before = sys.gettrace()
    sys.settrace(trace_frame)
    try:
        results = function(*arguments)
    finally:
        sys.settrace(before)
    arrays = {name: _as_float32_or_64(each) for name, each in found.items()}
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return results


def load_gradients(folder: Path, step: int, parameters: Mapping[int, torch.Tensor]) -> None:
    """Set the gradients of `parameters`, full parameters by index, to the gradients that rank 0
    recorded in step `step`.
    """
    import torch

    with np.load(record_file(folder, "gradients", step, 0), allow_pickle=False) as stored:
        for index in stored.files:
            parameter = parameters[int(index)]
            parameter.grad = torch.from_numpy(stored[index]).to(parameter.device, parameter.dtype)
