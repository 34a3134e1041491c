"""Short constructors of ONNX files for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import onnx.numpy_helper as onh

Shape = list[int | str | None] | list[int] | list[str]
FLOAT = onnx.TensorProto.FLOAT
INT64 = onnx.TensorProto.INT64
BOOL = onnx.TensorProto.BOOL


def floats(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Return float32 numbers of the standard normal distribution."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def integers(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def node(op: str, inputs: str, outputs: str, **attributes: object) -> onnx.NodeProto:
    """Return a node, such as `node("MatMul", "x w", "y")`. "_" stands for an absent operand."""
    names = ["" if name == "_" else name for name in inputs.split()]
    return oh.make_node(
        op,
        names,
        outputs.split(),
        name=f"{op.lower()}_{outputs.split(maxsplit=1)[0]}",
        **attributes,
    )


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Shape | tuple[int, Shape]],
    outputs: str,
    held: Mapping[str, np.ndarray] | None = None,
    opset: int = 20,
    types: Mapping[str, Shape] | None = None,
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    """Return a model. Inputs are float32 unless given as (type, shape). `types` declares float32
    values.
    """
    infos = []
    for name, shape in inputs.items():
        kind, dims = shape if isinstance(shape, tuple) else (FLOAT, shape)
        infos.append(oh.make_tensor_value_info(name, kind, list(dims)))
    graph = oh.make_graph(
        nodes,
        "test",
        infos,
        [onnx.ValueInfoProto(name=name) for name in outputs.split()],
        [onh.from_array(array, name) for name, array in (held or {}).items()],
        value_info=[
            oh.make_tensor_value_info(name, FLOAT, list(shape))
            for name, shape in (types or {}).items()
        ],
    )
    imports = [oh.make_opsetid("", opset), *(oh.make_opsetid(domain, 1) for domain in domains)]
    return oh.make_model(graph, opset_imports=imports, ir_version=10)


def linear(**changes: object) -> onnx.ModelProto:
    """Return the model y = x w."""
    return model([node("MatMul", "x w", "y")], {"x": [2, 3]}, "y", {"w": floats(3, 4)}, **changes)  # type: ignore[arg-type]


def linear_beside(folder: Path, location: str, offset: int = 0, length: int = 48) -> Path:
    """Return the model of `linear` whose weights are declared to be in another file."""
    proto = linear()
    (tensor,) = proto.graph.initializer
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def saved(proto: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    """Write a model without onnx's checks and return its path. Output types are filled in, as
    onnxruntime requires.
    """
    known = {info.name: info for info in onnx.shape_inference.infer_shapes(proto).graph.output}
    for info in proto.graph.output:
        if info.name in known:
            info.CopyFrom(known[info.name])
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return path
