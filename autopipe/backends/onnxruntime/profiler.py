"""What operations take under ONNX Runtime, by its own profiler: a second source of measured costs, for inference."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopipe.ir.costs import OperationCost, Sample, Timing
from autopipe.ir.dtype import DType
from autopipe.ir.graph import Attribute, Value

_LEAST, _MOST = 5, 200
_WARM_UP = 2
_ONNX_NAMES = {DType.FLOAT32: "FLOAT", DType.FLOAT64: "DOUBLE"}


def measure_operations(
    lap: Sequence[Sample], folder: Path, threads: int, seconds: float
) -> tuple[tuple[OperationCost, ...], tuple[str, ...]]:
    """What each distinct sample of `lap` takes forward, for at most about `seconds`, and why some could not be run.

    Each is a model of one node; the figure is the median of its kernel's times. Files go to `folder`.
    """
    samples = {sample.operation: sample for sample in lap}.values()
    found: list[OperationCost] = []
    refused: list[str] = []
    for number, sample in enumerate(samples):
        try:
            timing = _measured(sample, folder / f"operator_{number}", threads, seconds / len(samples))
        except Exception as error:  # noqa: BLE001 - ONNX Runtime raises whatever it likes for what it cannot run
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            refused.append(f"{sample.operation.operator} does not run under ONNX Runtime: {reason}")
        else:
            found.append(sample.cost(timing, None))
    return tuple(found), tuple(refused)


def version() -> str:
    """Of ONNX Runtime."""
    import onnxruntime

    return str(onnxruntime.__version__)


def _measured(sample: Sample, prefix: Path, threads: int, seconds: float) -> Timing:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling = True
    options.profile_file_prefix = str(prefix)
    session = onnxruntime.InferenceSession(_model(sample), options, providers=["CPUExecutionProvider"])
    feeds = _feeds(sample)
    started, runs = time.perf_counter(), 0
    while runs < _LEAST + _WARM_UP or (runs < _MOST and time.perf_counter() - started < seconds):
        session.run(None, feeds)
        runs += 1
    return _kernel_times(Path(session.end_profiling()), runs)


def _kernel_times(path: Path, runs: int) -> Timing:
    """The median of the runs, but for the first ones; an operator may be several kernels."""
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    kernels = [event["dur"] * 1e-6 for event in events if str(event.get("name")).endswith("_kernel_time")]
    if not kernels or len(kernels) % runs:
        raise ValueError("its profiler tells of no kernel")
    times = np.array(kernels).reshape(runs, -1).sum(axis=1)[_WARM_UP:]
    low, median, high = (float(each) for each in np.percentile(times, (25, 50, 75)))
    return Timing(median, (high - low) / median if median else 0.0, len(times))


def _model(sample: Sample) -> bytes:
    """The operation as an ONNX model of one node, its known numbers stored in it."""
    from onnx import helper, numpy_helper

    signature = sample.signature
    node = signature.node
    known = {
        value.name: numpy_helper.from_array(np.ascontiguousarray(array), value.name)
        for value, array in zip(signature.operands, signature.constants, strict=True)
        if value is not None and array is not None
    }
    inputs = {value.name: value for value in signature.operands if value is not None and value.name not in known}
    outputs = [value for value in signature.results if value is not None]
    proto = helper.make_node(node.op, node.inputs, node.outputs, name="node", domain=node.domain)
    proto.attribute.extend(helper.make_attribute(name, _plain(value)) for name, value in node.attributes)
    graph = helper.make_graph([proto], "operator", list(map(_info, inputs.values())), list(map(_info, outputs)))
    graph.initializer.extend(known.values())
    domains = [helper.make_opsetid("", _opset(sample))]
    domains += [helper.make_opsetid(node.domain, 1)] if node.domain not in ("", "ai.onnx") else []
    model: bytes = helper.make_model(graph, opset_imports=domains, ir_version=10).SerializeToString()
    return model


def _opset(sample: Sample) -> int:
    """The model's version of ONNX; for an operator that came later, the one that it came with."""
    from onnx import defs

    node, opset = sample.signature.node, sample.signature.opset
    if node.domain not in ("", "ai.onnx") or not defs.has(node.op):
        return opset
    versions = [
        each.since_version for each in defs.get_all_schemas_with_history() if (each.name, each.domain) == (node.op, "")
    ]
    return max(opset, min(versions))


def _plain(value: Attribute) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _info(value: Value) -> Any:
    from onnx import TensorProto, helper

    name = _ONNX_NAMES.get(value.dtype, value.dtype.name)
    return helper.make_tensor_value_info(value.name, TensorProto.DataType.Value(name), value.shape)


def _feeds(sample: Sample) -> dict[str, np.ndarray]:
    """Numbers for the operands that the model does not hold: indices below their limit, else ones for whole numbers."""
    generator = np.random.default_rng(0)
    signature = sample.signature
    found = {}
    for value, array, below in zip(signature.operands, signature.constants, sample.below, strict=True):
        if value is None or array is not None:
            continue
        dtype = np.dtype(value.dtype.value)
        if below is not None:
            found[value.name] = generator.integers(below, size=value.shape).astype(dtype)
        elif value.dtype.is_floating:
            found[value.name] = (generator.random(value.shape) + 0.5).astype(dtype)
        else:
            found[value.name] = np.ones(value.shape, dtype)
    return found
