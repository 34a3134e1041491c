"""Files with gradients, parameters and values of variables in the first steps of a run. `autopipe
verify` compares them with a reference.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from autopipe.ir.program import assignment_name

if TYPE_CHECKING:
    import torch

Results = TypeVar("Results", bound=Sequence[Any])
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
    """Return `function(*arguments)`, a tuple of tensors, and write tensors to `file`: result i as
    `result i`, and each tensor that a function in the same source file assigns to a variable. A
    variable `x3` of the flat form has its name. Another assignment has the name of
    `assignment_name`. Python's tracing observes the assignments.
    """
    source = function.__code__.co_filename
    recorder = _Recorder(source)
    before = sys.gettrace()
    sys.settrace(recorder.trace_call)
    try:
        results = function(*arguments)
    finally:
        sys.settrace(before)
    for index, each in enumerate(results):
        recorder.found[f"result {index}"] = each
    arrays = {name: _as_float32_or_64(each) for name, each in recorder.found.items()}
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return results


class _Recorder:
    """Records the assignments of tensors in the functions of one source file."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: dict[str, torch.Tensor] = {}
        """Tensors by the names under which they are recorded."""
        self._calls: Counter[str] = Counter()
        """Number of calls of each function so far."""
        self._targets = _assigned_names(Path(source).read_text(encoding="utf-8"))

    def trace_call(self, frame: FrameType, _event: str, _argument: object) -> Any:
        """Trace function (`sys.settrace`) for a new frame. Return the trace function of the frame,
        or None if the frame belongs to another file.
        """
        if frame.f_code.co_filename != self.source:
            return None
        function = frame.f_code.co_name
        self._calls[function] += 1
        call = self._calls[function]
        counts: Counter[str] = Counter()
        running: tuple[str, ...] = ()
        line = 0

        def trace_line(frame: FrameType, event: str, _argument: object) -> Any:
            """Trace function for the lines of the frame: when a line ends, record the variables
            that its statement assigned.
            """
            nonlocal running, line
            if event in ("line", "return"):
                targets = self._targets.get(frame.f_lineno, (0, ()))
                # Python reports each line of a statement that has several lines.
                if event == "return" or targets[0] != line or line == 0:
                    for name in running:
                        value = frame.f_locals.get(name)
                        if value is not None and hasattr(value, "is_floating_point"):
                            counts[name] += 1
                            self.found[assignment_name(function, call, name, counts[name])] = value
                    line, running = targets
            return trace_line

        return trace_line


def _assigned_names(source: str) -> dict[int, tuple[int, tuple[str, ...]]]:
    """Return (first line, names) by line number, for each line of a statement in functions of a
    source text. `names` are the variables that the statement assigns.
    """
    found: dict[int, tuple[int, tuple[str, ...]]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.For):
            names: list[str] = []
            if isinstance(node, ast.Assign):
                targets = ast.walk(node.targets[0])
                names = [each.id for each in targets if isinstance(each, ast.Name)]
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                first, known = found.get(number, (node.lineno, ()))
                # Several statements of the flat form can be in one line.
                found[number] = (first, (*known, *names))
    return found


def load_gradients(folder: Path, step: int, parameters: Mapping[int, torch.Tensor]) -> None:
    """Set the gradients of `parameters`, full parameters by index, to the gradients that rank 0
    recorded in step `step`.
    """
    import torch

    with np.load(record_file(folder, "gradients", step, 0), allow_pickle=False) as stored:
        for index in stored.files:
            parameter = parameters[int(index)]
            parameter.grad = torch.from_numpy(stored[index]).to(parameter.device, parameter.dtype)
