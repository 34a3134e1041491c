"""Runs the emitted forward of each node case that ships with ONNX, and its backward, on fake CUDA
tensors, and writes a JSON line for each. A share of the cases is run, in float32 and under CUDA's
autocast in bfloat16:

    python -m autopipe.backends.torch.fake_cuda LIBRARY tests/fake_cuda/cases.py FOUND SHARE SHARES
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.backends.torch.codegen.stage import emit_forward
from tests.conformance.adapter import fed_names, forward_of, stage_of, to_tensor
from tests.conformance.cases import all_cases, data_of, model_of, skips
from tests.conformance.importer import Imported, import_model
from tests.fake_cuda.watching import Watcher, line

DEVICE = torch.device("cuda", 0)


class _Mode(TorchDispatchMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.watcher.see(function, args, kwargs, result)
        return result


def _held(tensors: list[torch.Tensor], trained: bool) -> list[torch.Tensor]:
    return [
        each.requires_grad_(trained and each.dtype in (torch.float32, torch.float64))
        for each in tensors
    ]


class Case(NamedTuple):
    """A node case, read and emitted."""

    imported: Imported
    given: dict[str, np.ndarray]
    forward: Callable[..., Any]

    @staticmethod
    def of(name: str) -> Case:
        case = all_cases()["node", name]
        model = model_of(case)
        arrays = [np.asarray(each) for each in next(iter(data_of(case)))[0]]
        imported = import_model(model, arrays)
        forward = forward_of(emit_forward(stage_of(imported.graph)).text)
        return Case(imported, dict(zip(fed_names(model, arrays), arrays, strict=True)), forward)


def run(case: Case, precision: str, watcher: Watcher, trained: bool = True) -> None:
    """Forward and backward of a case. Raises AssertionError for a result that is elsewhere or has
    no gradient.
    """
    imported, given, forward = case
    graph = imported.graph
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = _held([to_tensor(array, DEVICE) for array in imported.weights], trained)
        constants = {
            f"c{index}": to_tensor(each.array, DEVICE) for index, each in enumerate(graph.constants)
        }
        held = SimpleNamespace(
            device=DEVICE, **{f"w{index}": each for index, each in enumerate(weights)}, **constants
        )
        operands = _held([to_tensor(given[each.name], DEVICE) for each in graph.inputs], trained)
        watcher.watching = True
        with _Mode(watcher):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
                results = forward(held, *operands)
            for result in results:
                assert result.device == DEVICE, f"a result is on {result.device}"
            ends = [each for each in results if each.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])
        watcher.watching = False
        for leaf in (*weights, *operands):
            assert leaf.grad is None or leaf.grad.device == DEVICE


NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


def main() -> None:
    warnings.simplefilter("ignore")
    _, path, share, shares = sys.argv
    names = [name for kind, name in all_cases() if kind == "node" and name not in skips()]
    with Path(path).open("w", encoding="utf-8") as out:
        for name in names[int(share) :: int(shares)]:
            case = Case.of(name)
            for precision in ("fp32", "bf16"):
                watcher = Watcher()
                error = ""
                needs_values = False
                try:
                    try:
                        run(case, precision, watcher)
                    except RuntimeError as caught:
                        if "is not differentiable" not in str(caught):
                            raise
                        # The weights of a loss are no parameters.
                        run(case, precision, watcher, trained=False)
                except NEEDS_VALUES:
                    needs_values = True
                except Exception as caught:  # noqa: BLE001
                    error = f"{caught}\n{''.join(traceback.format_tb(caught.__traceback__)[-3:])}"
                found = [
                    (kind, place, count) for (kind, place), count in sorted(watcher.found.items())
                ]
                out.write(
                    line(
                        case=name,
                        precision=precision,
                        error=error,
                        needs_values=needs_values,
                        found=found,
                    )
                )


main()
