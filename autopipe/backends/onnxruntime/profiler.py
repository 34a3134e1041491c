"""Operator costs measured by ONNX Runtime's own profiler: a second source of measured costs, for inference."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopipe.ir.graph import Attribute, DType, Value
from autopipe.ir.measured_costs import OperationCost, Sample, Timing
from autopipe.ir.ops.operator import Signature

_LEAST, _MOST = 5, 200
_WARM_UP = 2
_ONNX_NAMES = {DType.FLOAT32: "FLOAT", DType.FLOAT64: "DOUBLE"}


def measure_operations(
    lap: Sequence[Sample], folder: Path, threads: int, seconds: float
) -> tuple[tuple[OperationCost, ...], tuple[str, ...]]:
    """Measure the forward of each distinct sample of `lap` for at most about `seconds`, and say why some could not run.

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
    """The operation as an ONNX model, its known numbers stored in it."""
    from onnx import helper, numpy_helper

    known, inputs = _operands(sample)
    outputs = [value for value in sample.signatures[-1].results if value is not None]
    protos = []
    for place, each in enumerate(sample.signatures):
        node = each.node
        proto = helper.make_node(node.op, node.inputs, node.outputs, name=f"node_{place}", domain=node.domain)
        proto.attribute.extend(helper.make_attribute(name, _plain(value)) for name, value in node.attributes)
        protos.append(proto)
    graph = helper.make_graph(protos, "operator", list(map(_info, inputs.values())), list(map(_info, outputs)))
    graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in known.items()
    )
    opsets = {"": max(map(_opset, sample.signatures))} | {
        each.node.domain: 1 for each in sample.signatures if each.node.domain not in ("", "ai.onnx")
    }
    model: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid(*each) for each in opsets.items()], ir_version=10
    ).SerializeToString()
    return model


def _operands(sample: Sample) -> tuple[dict[str, np.ndarray], dict[str, Value]]:
    """Operands whose numbers are known, and those that are fed."""
    known: dict[str, np.ndarray] = {}
    fed: dict[str, Value] = {}
    written = {value.name for each in sample.signatures for value in each.results if value is not None}
    for signature in sample.signatures:
        for value, array in zip(signature.operands, signature.constants, strict=True):
            if value is not None and array is not None:
                known[value.name] = array
            elif value is not None and value.name not in written:
                fed[value.name] = value
    return known, fed


def _opset(signature: Signature) -> int:
    """The model's version of ONNX; for an operator that came later, the one that it came with."""
    from onnx import defs

    node, opset = signature.node, signature.opset
    if node.domain not in ("", "ai.onnx") or not defs.has(node.op):
        return opset
    versions = [each.since_version for each in defs.get_all_schemas_with_history() if _is_of(each, node.op)]
    return max(opset, min(versions))


def _is_of(schema: Any, op: str) -> bool:
    return bool(schema.name == op and schema.domain == "")


def _plain(value: Attribute) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _info(value: Value) -> Any:
    from onnx import TensorProto, helper

    name = _ONNX_NAMES.get(value.dtype, value.dtype.name)
    return helper.make_tensor_value_info(value.name, TensorProto.DataType.Value(name), value.shape)


def _feeds(sample: Sample) -> dict[str, np.ndarray]:
    """Numbers for the operands that the model does not hold: indices below their limit, else ones for whole numbers."""
    generator = np.random.default_rng(0)
    below = dict(sample.below)
    found = {}
    for name, value in _operands(sample)[1].items():
        dtype = np.dtype(value.dtype.value)
        if name in below:
            found[name] = generator.integers(below[name], size=value.shape).astype(dtype)
        elif value.dtype.is_floating:
            found[name] = (generator.random(value.shape) + 0.5).astype(dtype)
        else:
            found[name] = np.ones(value.shape, dtype)
    return found
