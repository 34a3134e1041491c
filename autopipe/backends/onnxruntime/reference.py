"""Reference execution: the model as ONNX Runtime runs it on the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from autopipe.ir.errors import ModelError

_INLINE_LIMIT = 2**30
"""Bytes of added weights above which they go to a file beside the model: protobuf ends at 2 GiB."""


class ReferenceModel:
    """An ONNX file opened for execution, with numbers for the weights it lacks."""

    def __init__(self, model: Path, weights: Mapping[str, np.ndarray]) -> None:
        """`weights` are parameters that the file names without storing. Raises ModelError where it cannot be opened."""
        self._scratch = tempfile.TemporaryDirectory()
        path = model if not weights else _completed(model, weights, Path(self._scratch.name))
        self._session = _open(path)
        self.inputs: dict[str, list[Any]] = {each.name: each.shape for each in self._session.get_inputs()}
        self.outputs: list[str] = [each.name for each in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs by name for one evaluation."""
        known = {name: array for name, array in feeds.items() if name in self.inputs}
        return dict(zip(self.outputs, self._session.run(None, known), strict=True))


def _open(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # The reference is the model as written: no fusion that reorders arithmetic.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"ONNX Runtime cannot open the model: {reason}", where=str(path)) from error


def _completed(model: Path, weights: Mapping[str, np.ndarray], scratch: Path) -> Path:
    """A copy of the model in which the missing weights are initializers."""
    import onnx
    from onnx import numpy_helper

    proto = onnx.load(str(model), load_external_data=True)
    have = {each.name for each in proto.graph.initializer}
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(array), name)
        for name, array in weights.items()
        if name not in have
    )
    inputs = [each for each in proto.graph.input if each.name not in weights]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    path = scratch / "model.onnx"
    large = sum(array.nbytes for array in weights.values()) > _INLINE_LIMIT
    onnx.save(proto, str(path), save_as_external_data=large)
    return path
