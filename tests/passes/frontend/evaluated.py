"""Files of one node, computed by onnxruntime and by the emitted program on one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.helper as oh
import onnx.numpy_helper as onh
import torch

from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import Model, read_model
from tests.conformance.adapter import forward_of, stage_of, to_array, to_tensor
from tests.passes.frontend.reference import parameter_array, run

Arrays = Sequence[np.ndarray | None]


def node_file(
    folder: Path,
    op: str,
    arrays: Arrays,
    results: str = "y",
    *,
    known: Sequence[int] = (),
    domain: str = "com.microsoft",
    opset: int = 21,
    **attributes: object,
) -> tuple[Path, dict[str, np.ndarray]]:
    """Return (the path of a model of one node, the arrays of its inputs). Operands are called i0,
    i1, …; those in `known` are initializers. `results` has the names of results, separated by
    blanks; "_" stands for one that is not written.
    """
    names = ["" if array is None else f"i{place}" for place, array in enumerate(arrays)]
    outputs = ["" if name == "_" else name for name in results.split()]
    given = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    held = {f"i{place}": given.pop(f"i{place}") for place in known if f"i{place}" in given}
    infos = [
        oh.make_tensor_value_info(name, oh.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in given.items()
    ]
    graph = oh.make_graph(
        [oh.make_node(op, names, outputs, name="node", domain=domain, **attributes)],
        "node",
        infos,
        [oh.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs if name],
        [onh.from_array(array, name) for name, array in held.items()],
    )
    opsets = [oh.make_opsetid("", opset), *([oh.make_opsetid(domain, 1)] if domain else [])]
    path = folder / "node.onnx"
    onnx.save(oh.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path, given


def emitted(model: Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the outputs of a model on one device, by name."""
    graph = model.graph
    held = SimpleNamespace(
        device=torch.device("cpu"),
        **{f"c{index}": to_tensor(each.array) for index, each in enumerate(graph.constants)},
        **{
            f"w{index}": to_tensor(parameter_array(each, model.path))
            for index, each in enumerate(graph.parameters)
        },
    )
    forward = forward_of(emit_forward(stage_of(graph)).text)
    results = forward(held, *(to_tensor(feeds[value.name]) for value in graph.inputs))
    results = results if isinstance(results, tuple) else (results,)
    pairs = zip(graph.outputs, results, strict=True)
    return {name: to_array(result, graph.type_of(name).dtype) for name, result in pairs}


def both(
    folder: Path, op: str, arrays: Arrays, results: str = "y", **settings: object
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return our results and those of onnxruntime."""
    path, feeds = node_file(folder, op, arrays, results, **settings)  # type: ignore[arg-type]
    return emitted(read_model(path, mode=Mode.INFER), feeds), run(path, feeds)
