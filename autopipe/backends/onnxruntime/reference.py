"""Reference execution: the model as ONNX Runtime runs it on the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.ops import OPERATORS

if TYPE_CHECKING:
    import onnx

_RANDOM = {name for name, row in OPERATORS.items() if row.random} - {"Dropout"}
_INLINE_LIMIT = 2**30
"""Bytes of weights above which they go to a file beside the model: protobuf ends at 2 GiB."""


class ReferenceModel:
    """An ONNX file opened for execution, with numbers for the weights it lacks, and without Dropout."""

    def __init__(self, model: Path, weights: Mapping[str, np.ndarray], train: bool = True) -> None:
        """`weights` are parameters that the file names without storing. Unless `train`, batches are normalised by
        running statistics. Raises ModelError where it cannot be opened."""
        import onnx

        self._scratch = tempfile.TemporaryDirectory()
        try:
            proto = onnx.load(str(model), load_external_data=False)
        except Exception as error:
            raise _unreadable(model, error) from error
        self.random = tuple(sorted({node.op_type for node in _nodes(proto)} & _RANDOM))
        """Operators of it that draw numbers, which are none of ours."""
        self.dropouts = sum(map(_switch_off_dropout, _nodes(proto)))
        """Of its Dropouts those that were switched off."""
        used = {each.name for each in proto.graph.output}.union(*(node.input for node in _nodes(proto)))
        batches = 0 if train else sum(_switch_to_running_statistics(node, used) for node in _nodes(proto))
        self.dtype, self.depth = _coarsest_type(proto), _depth(proto)
        """Its coarsest floating type, and how many of its nodes follow one another."""
        changed = bool(weights) or self.dropouts + batches > 0 or self.dtype == "bfloat16"
        self._path = _completed(model, proto, weights, Path(self._scratch.name)) if changed else model
        self._session = _open(self._path)
        self.inputs: dict[str, list[Any]] = {each.name: each.shape for each in self._session.get_inputs()}
        self.outputs: list[str] = [each.name for each in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All outputs by name for one evaluation."""
        known = {name: array for name, array in feeds.items() if name in self.inputs}
        return dict(zip(self.outputs, self._session.run(None, known), strict=True))

    def optimize(self) -> None:
        """From now on, run as ONNX Runtime does by itself, with its fusions."""
        self._session = _open(self._path, optimized=True)


def precision_of(model: Path) -> tuple[str, int]:
    """A file's coarsest floating type, and how many of its nodes follow one another."""
    import onnx

    try:
        proto = onnx.load(str(model), load_external_data=False)
    except Exception as error:
        raise _unreadable(model, error) from error
    return _coarsest_type(proto), _depth(proto)


_FLOATS = {11: "float64", 1: "float32", 10: "float16", 16: "bfloat16"}
"""By TensorProto's numbers, coarsest last."""
_TYPES = ("to", "dtype", "output_dtype")
"""Attributes that are the type of a result."""


def _coarsest_type(proto: onnx.ModelProto) -> str:
    values = (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)
    used = {tensor.data_type for tensor in proto.graph.initializer}
    used |= {value.type.tensor_type.elem_type for value in values}
    for node in _nodes(proto):
        used |= {each.i for each in node.attribute if each.name in _TYPES}
        used |= {each.t.data_type for each in node.attribute if each.HasField("t")}
    return next((name for number, name in reversed(_FLOATS.items()) if number in used), "float32")


def _depth(proto: onnx.ModelProto) -> int:
    """Nodes on the longest way through the graph; one that calls a function counts as all of the function's."""
    sizes = {(function.domain, function.name): len(function.node) for function in proto.functions}
    depths: dict[str, int] = {}
    for node in proto.graph.node:
        before = max((depths.get(name, 0) for name in node.input), default=0)
        depths |= dict.fromkeys(node.output, before + sizes.get((node.domain, node.op_type), 1))
    return max(depths.values(), default=1)


def _widen(proto: onnx.ModelProto) -> None:
    """Have bfloat16 be float32, since ONNX Runtime has hardly an operator for the former on CPUs. Numbers stay."""
    import onnx
    from onnx import numpy_helper

    def widened(tensor: onnx.TensorProto) -> onnx.TensorProto:
        return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)

    narrow, wide = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    for tensor in proto.graph.initializer:
        if tensor.data_type == narrow:
            tensor.CopyFrom(widened(tensor))
    for value in (*proto.graph.input, *proto.graph.output):
        if value.type.tensor_type.elem_type == narrow:
            value.type.tensor_type.elem_type = wide
    del proto.graph.value_info[:]
    for function in proto.functions:
        del function.value_info[:]
    for node in _nodes(proto):
        for attribute in node.attribute:
            if attribute.name in _TYPES and attribute.i == narrow:
                attribute.i = wide
            if attribute.HasField("t") and attribute.t.data_type == narrow:
                attribute.t.CopyFrom(widened(attribute.t))


def _open(path: Path, optimized: bool = False) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not optimized:
        # The reference is the model as written: no fusion that reorders arithmetic.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ModelError:
    reason = str(error).splitlines()[0]
    return ModelError(f"ONNX Runtime cannot open the model: {reason}", where=str(path))


def _nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those of functions and branches too."""
    waiting = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    while waiting:
        node = waiting.pop()
        yield node
        for attribute in node.attribute:
            graphs = (attribute.g, *attribute.graphs) if attribute.HasField("g") else tuple(attribute.graphs)
            waiting.extend(inner for graph in graphs for inner in graph.node)


def _switch_off_dropout(node: onnx.NodeProto) -> bool:
    """Have a Dropout drop nothing; whether that was to be said."""
    if node.op_type != "Dropout" or node.domain not in ("", "ai.onnx") or len(node.input) < 3:
        return False
    del node.input[2:]
    return True


def _switch_to_running_statistics(node: onnx.NodeProto, used: set[str]) -> bool:
    """Have a BatchNormalization do as at inference; whether that was to be said."""
    if node.op_type != "BatchNormalization" or not used.isdisjoint(node.output[1:]):
        return False
    if len(node.output) == 1 and not any(each.name == "training_mode" and each.i for each in node.attribute):
        return False
    del node.output[1:]
    kept = [each for each in node.attribute if each.name != "training_mode"]
    del node.attribute[:]
    node.attribute.extend(kept)
    return True


def _completed(model: Path, proto: onnx.ModelProto, weights: Mapping[str, np.ndarray], scratch: Path) -> Path:
    """A file of `proto`, read from `model`, in which the missing weights are initializers."""
    import onnx
    from onnx import external_data_helper, numpy_helper

    external_data_helper.load_external_data_for_model(proto, str(model.parent))
    _widen(proto)
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
    large = sum(len(tensor.raw_data) for tensor in proto.graph.initializer) > _INLINE_LIMIT
    onnx.save(proto, str(path), save_as_external_data=large)
    return path
