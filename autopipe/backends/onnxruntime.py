"""The ONNX Runtime backend. It runs an ONNX model as the reference for `verify`, and measures
single operators for the profiler.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from autopipe.backends import onnx_float64
from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Value
from autopipe.ir.measured_costs import OperationCost, OperationSample, Timing
from autopipe.ir.ops import OPERATORS
from autopipe.ir.ops.operator import Signature
from autopipe.ir.output_files import scratch_folder

if TYPE_CHECKING:
    import onnx


_MIN_RUNS = 5
_MAX_RUNS = 200
_WARM_UP_RUNS = 2


def measure_operations(
    lap: Sequence[OperationSample], folder: Path, threads: int, seconds: float
) -> tuple[tuple[OperationCost, ...], tuple[str, ...]]:
    """Measure the forward of each distinct operation in `lap`, the list of a model's operations
    with repetitions, for about `seconds` in all. Return (costs, reasons): the costs of the
    operations, and a message for each operation that could not run.

    Each operation runs as an ONNX model with `threads` threads. Its time is the median of its
    kernel time over the runs. ONNX Runtime's profiles are written to `folder`.
    """
    samples = {sample.operation: sample for sample in lap}.values()
    found: list[OperationCost] = []
    refused: list[str] = []
    for number, sample in enumerate(samples):
        try:
            timing = _measure_operation(
                sample, folder / f"operator_{number}", threads, seconds / len(samples)
            )
        # ONNX Runtime raises exceptions of any class for models that it does not support.
        except Exception as error:  # noqa: BLE001
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            refused.append(f"{sample.operation.operator} does not run under ONNX Runtime: {reason}")
        else:
            found.append(sample.cost(timing, None))
    return tuple(found), tuple(refused)


def version() -> str:
    """Return the version of ONNX Runtime."""
    import onnxruntime

    return str(onnxruntime.__version__)


def _measure_operation(
    sample: OperationSample, prefix: Path, threads: int, seconds: float
) -> Timing:
    """Return the kernel time of an operation, measured for about `seconds`. `prefix` is the path
    prefix of ONNX Runtime's profile.
    """
    session = _make_session(
        _serialize_operation(sample), intra_op_num_threads=threads, profile_file_prefix=str(prefix)
    )
    generator = np.random.default_rng(0)
    fed = sample.operands()[1].values()
    feeds = {
        each.name: sample.random_data(each, generator).astype(np.dtype(each.dtype.value))
        for each in fed
    }
    started = time.perf_counter()
    runs = 0
    while runs < _MIN_RUNS + _WARM_UP_RUNS or (
        runs < _MAX_RUNS and time.perf_counter() - started < seconds
    ):
        session.run(None, feeds)
        runs += 1
    return _kernel_times(Path(session.end_profiling()), runs)


def _make_session(
    model: bytes | str, optimized: bool = False, folder: Path | None = None, **settings: object
) -> Any:
    """Return an inference session of a model, which is given as bytes or as a path.

    Graph optimizations, which may change the order of arithmetic, are disabled unless `optimized`
    is set. `folder` contains the external weights of a model that is given as bytes. `settings` are
    further session options; profiling is enabled if there are any.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4 if settings else 3
    options.enable_profiling = bool(settings)
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if folder is not None:
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(folder)
        )
    for name, value in settings.items():
        setattr(options, name, value)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _kernel_times(path: Path, runs: int) -> Timing:
    """Return the kernel time per run, from the profile of `runs` runs in the file `path`, which is
    removed. Warm-up runs are not counted. The times of several kernels of a run are added.
    """
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    kernels = [
        event["dur"] * 1e-6 for event in events if str(event.get("name")).endswith("_kernel_time")
    ]
    if not kernels or len(kernels) % runs:
        raise ValueError(
            f"the profile lists {len(kernels)} kernel runs, expected a multiple of {runs}"
        )
    return Timing.of(np.array(kernels).reshape(runs, -1).sum(axis=1)[_WARM_UP_RUNS:].tolist())


def _serialize_operation(sample: OperationSample) -> bytes:
    """Return an operation as a serialized ONNX model. Operands with known data are initializers,
    and the other operands are inputs.
    """
    from onnx import TensorProto, helper, numpy_helper

    def value_info(value: Value) -> Any:
        name = {DType.FLOAT32: "FLOAT", DType.FLOAT64: "DOUBLE"}.get(value.dtype, value.dtype.name)
        return helper.make_tensor_value_info(
            value.name, TensorProto.DataType.Value(name), value.shape
        )

    known, inputs = sample.operands()
    outputs = [value for value in sample.signatures[-1].results if value is not None]
    protos = []
    for place, node in enumerate(each.node for each in sample.signatures):
        attributes = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in node.attributes
        }
        proto = helper.make_node(
            node.op, node.inputs, node.outputs, name=f"node_{place}", domain=node.domain
        )
        proto.attribute.extend(helper.make_attribute(*each) for each in attributes.items())
        protos.append(proto)
    numbers = [
        numpy_helper.from_array(np.ascontiguousarray(each.array), name)
        for name, each in known.items()
    ]
    graph = helper.make_graph(
        protos,
        "operator",
        [*map(value_info, inputs.values())],
        [*map(value_info, outputs)],
        numbers,
    )
    opsets = {"": max(map(_opset_of_operation, sample.signatures))}
    opsets |= {
        each.node.domain: 1 for each in sample.signatures if each.node.domain not in ("", "ai.onnx")
    }
    imports = [helper.make_opsetid(*each) for each in opsets.items()]
    model: bytes = helper.make_model(
        graph, opset_imports=imports, ir_version=10
    ).SerializeToString()
    return model


def _opset_of_operation(signature: Signature) -> int:
    """Return the opset version for the model of an operator: the version in which the node was
    written or, if that version lacks the operator, the first version that has it.
    """
    from onnx import defs

    node = signature.node
    opset = signature.opset
    if node.domain not in ("", "ai.onnx") or not defs.has(node.op):
        return opset
    schemas = (
        each
        for each in defs.get_all_schemas_with_history()
        if (each.name, each.domain) == (node.op, "")
    )
    return max(opset, min(each.since_version for each in schemas))


_RANDOM_OPERATORS = {name for name, row in OPERATORS.items() if row.random} - {"Dropout"}
_ZERO_PRESERVING_OPERATORS = frozenset(
    {"Cast", "Identity", "Mul", "Reshape", "Slice", "Transpose", "Unsqueeze"}
)
"""Operators whose results are zero if the operand with the data is zero."""
_MAX_SEARCH_DEPTH = 8
"""Maximum length of a chain of operators in which a multiplication by zero is searched."""


def _random_operators_of(proto: onnx.ModelProto) -> Iterator[str]:
    """Return the types of the operators of a model that generate random numbers, once per node. A
    node whose random numbers are all multiplied by zero (noise of scale 0) is not included.
    """
    from onnx import numpy_helper

    tensors = {each.name: each for each in proto.graph.initializer}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in _all_nodes(proto):
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
        for name in node.input:
            readers.setdefault(name, []).append(node)
    outputs = {each.name for each in proto.graph.output}

    def is_zero(name: str) -> bool:
        """Return True if the value is a constant whose elements are all zero."""
        tensor = tensors.get(name)
        return (
            tensor is not None
            and not tensor.external_data
            and not numpy_helper.to_array(tensor).any()
        )

    def is_multiplied_by_zero(name: str, depth: int = _MAX_SEARCH_DEPTH) -> bool:
        """Return True if each path of operators that starts at the value contains a multiplication
        by zero among its first `depth` operators. Up to there, no value of the path may be an
        output of the model, and all operators must be in `_ZERO_PRESERVING_OPERATORS`.
        """
        return (
            bool(depth)
            and name not in outputs
            and all(
                node.op_type in _ZERO_PRESERVING_OPERATORS
                and (
                    (node.op_type == "Mul" and any(map(is_zero, node.input)))
                    or is_multiplied_by_zero(node.output[0], depth - 1)
                )
                for node in readers.get(name, ())
            )
        )

    return (
        node.op_type
        for node in _all_nodes(proto)
        if node.op_type in _RANDOM_OPERATORS and not is_multiplied_by_zero(node.output[0])
    )


_INLINE_LIMIT_BYTES = 2**30
"""Maximum size in bytes of weights that are stored in the model file. Larger weights are written to
a second file, because a protobuf message is limited to 2 GiB.
"""


_NO_KERNEL_PREFIX = "NOT_IMPLEMENTED : "


class NoKernelError(ModelError):
    """ONNX Runtime has no CPU kernel of an operator for the types of its operands, for example of
    Erf in float64.
    """


class ReferenceModel:
    """An ONNX model that is loaded into ONNX Runtime. Its Dropout operators are switched off, and
    weights that the file does not store have the given values.
    """

    def __init__(
        self,
        model: Path,
        weights: Mapping[str, np.ndarray],
        train: bool = True,
        fixed: Mapping[str, bool | int | float] = MappingProxyType({}),
    ) -> None:
        """Load the file `model`. `weights` are values of parameters that the file names but does
        not store. `fixed` are values of inputs that have one value in all elements. Unless `train`,
        batch normalization uses running statistics.

        Raise ModelError if the model cannot be loaded. Raise its subclass NoKernelError if the
        model is valid but ONNX Runtime has no kernel for it.
        """
        self._scratch = scratch = ExitStack()
        weakref.finalize(self, scratch.close)
        proto = _load_model(model)
        self._fixed = {
            each.name: _filled_input(each, fixed[each.name])
            for each in proto.graph.input
            if each.name in fixed
        }
        self.random = tuple(sorted(set(_random_operators_of(proto))))
        """Types of the operators that generate random numbers, sorted. Their numbers differ from
        those of autopipe. Operators whose random numbers are multiplied by zero are not included.
        """
        self.dropouts = sum(map(_switch_off_dropout, _all_nodes(proto)))
        """Number of Dropout operators that were switched off."""
        kept = sum(map(_keep_activations_in_float32, _all_nodes(proto)))
        used = {each.name for each in proto.graph.output}.union(
            *(node.input for node in _all_nodes(proto))
        )
        batches = (
            0
            if train
            else sum(_switch_to_running_statistics(node, used) for node in _all_nodes(proto))
        )
        kept += _replace_quantized_lstms(proto)
        kept += _add_expert_tokens_to_outputs(proto)
        changed = (
            bool(weights) or self.dropouts + batches + kept > 0 or _BFLOAT16 in _types_used(proto)
        )
        changed = _cast_to_one_type(proto) or changed
        self._path = (
            _write_completed_model(
                model, proto, weights, scratch.enter_context(scratch_folder("model"))
            )
            if changed
            else model
        )
        self._session = _open_session(self._path)
        self.inputs: dict[str, list[Any]] = {
            each.name: each.shape for each in self._session.get_inputs()
        }
        self._outputs = [each.name for each in self._session.get_outputs()]
        self._is_float64 = False

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the model on the inputs `feeds` and return its outputs by name. The tensors of an
        output that is a sequence are named NAME/0, NAME/1, and so on. Raise ModelError if the model
        rejects the inputs, for example because data-dependent indices contradict its shapes.
        """
        from onnxruntime.capi import onnxruntime_pybind11_state as states

        known = {
            name: array
            for name, array in (self._fixed | dict(feeds)).items()
            if name in self.inputs
        }
        if self._is_float64:
            known = {name: _as_float64(array) for name, array in known.items()}
        try:
            results = self._session.run(None, known)
        except (states.Fail, states.InvalidArgument, states.RuntimeException) as error:
            reason = " ".join(str(error).partition("Status Message:")[2].split()) or str(error)
            raise ModelError(
                f"ONNX Runtime cannot run the model with these inputs: {reason}"
            ) from error
        found: dict[str, np.ndarray] = {}
        for name, result in zip(self._outputs, results, strict=True):
            is_sequence = isinstance(result, list)
            found |= (
                {f"{name}/{place}": each for place, each in enumerate(result)}
                if is_sequence
                else {name: result}
            )
        return found

    def watch(self, names: Collection[str]) -> None:
        """Make `run` return the values called `names`, in the order of the nodes that compute them,
        instead of the outputs. Names that no node computes are ignored.
        """
        import onnx

        proto = _load_model(self._path)
        written = [name for node in proto.graph.node for name in node.output if name in names]
        del proto.graph.output[:]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in written)
        with _convert_session_errors(self._path):
            self._session = _make_session(proto.SerializeToString(), folder=self._path.parent)
        self._outputs = written

    def optimize(self) -> None:
        """Make `run` use ONNX Runtime's default optimizations, which include fusions."""
        self._session = _open_session(self._path, optimized=True)

    def widen(self) -> None:
        """Make `run` compute in float64. Operators without a float64 kernel in ONNX Runtime compute
        in float32.

        Raise ModelError if ONNX Runtime rejects the model even so, or if the model contains
        functions or subgraphs.
        """
        import onnx
        from onnx import external_data_helper

        proto = _load_model(self._path)
        if not onnx_float64.has_only_plain_nodes(proto):
            raise ModelError("a model with functions or branches cannot run in float64")
        floating = self._floating_values(proto)
        external_data_helper.load_external_data_for_model(proto, str(self._path.parent))
        onnx_float64.widen_tensors(proto)
        path = _save_model(proto, self._scratch.enter_context(scratch_folder("float64")))
        proto = _load_model(path)
        nodes = onnx.ModelProto()
        nodes.graph.node.extend(proto.graph.node)
        kept: set[str] = set()
        while True:
            del proto.graph.node[:]
            proto.graph.node.extend(onnx_float64.widen_nodes(nodes, floating, kept))
            try:
                with _convert_session_errors(path):
                    self._session = _make_session(proto.SerializeToString(), folder=path.parent)
            except ModelError as error:
                refused = onnx_float64.operators_to_keep_in_float32(error.message, nodes) - kept
                if not refused:
                    raise
                kept |= refused
            else:
                break
        self._is_float64 = True

    def _floating_values(self, proto: onnx.ModelProto) -> set[str]:
        """Return the names of all floating-point values of `proto`, whose types ONNX Runtime
        infers.
        """
        import onnx

        every = onnx.ModelProto()
        every.CopyFrom(proto)
        names = dict.fromkeys(name for node in proto.graph.node for name in node.output if name)
        del every.graph.output[:]
        every.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        with _convert_session_errors(self._path):
            session = _make_session(every.SerializeToString(), folder=self._path.parent)
        types = {each.name: each.type for each in (*session.get_inputs(), *session.get_outputs())}
        found = {name for name, kind in types.items() if kind in _FLOATING_TYPE_NAMES}
        return found | {
            each.name for each in proto.graph.initializer if each.data_type in _NARROW_TYPES
        }


def _as_float64(array: np.ndarray) -> np.ndarray:
    """Return a floating-point array in float64, and any other unchanged."""
    return array.astype(np.float64) if np.issubdtype(array.dtype, np.floating) else array


def _filled_input(info: onnx.ValueInfoProto, number: float) -> np.ndarray:
    """Return an array for a model input with `number` in each element. Symbolic dimensions have
    size 1.
    """
    from onnx import helper

    kind = info.type.tensor_type
    shape = [each.dim_value or 1 for each in kind.shape.dim]
    return np.full(shape, number, helper.tensor_dtype_to_np_dtype(kind.elem_type))


def find_node_of_tensors(
    model: Path, tensors: Collection[str], last: bool = False
) -> tuple[str, str]:
    """Return (node, tensor): the name of the first node of a model that reads or writes one of
    `tensors`, and this tensor. With `last`, return the last such node. Return ("", "") if there is
    none, for example because the tensors are inside a function of the model.
    """
    nodes = _load_model(model).graph.node
    for node in reversed(nodes) if last else nodes:
        for name in (*node.input, *node.output):
            if name in tensors:
                return node.name or f"{node.op_type} of {node.output[0]}", name
    return "", ""


def _load_model(model: Path) -> onnx.ModelProto:
    """Return the model in a file. The data of tensors in other files are not loaded."""
    import onnx

    with _convert_session_errors(model):
        return onnx.load(str(model), load_external_data=False)


_FLOAT = 1
_FLOAT16 = 10
_DOUBLE = 11
_BFLOAT16 = 16
"""bfloat16 in ONNX's numbering of element types (`TensorProto.DataType`)."""
_NARROW_TYPES = {_FLOAT, _FLOAT16, _BFLOAT16}
_FLOATING_TYPE_NAMES = {"tensor(float)", "tensor(float16)", "tensor(bfloat16)"}
"""Types that `ReferenceModel.widen` converts to float64, as ONNX Runtime names them."""
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")
"""Attributes of nodes whose value is the element type of a result."""


def _types_used(proto: onnx.ModelProto) -> set[int]:
    """Return the element types that a model uses, as ONNX's numbers: types of values, of stored
    tensors, and of results whose type is an attribute of the node.
    """
    values = (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)
    attributes = [each for node in _all_nodes(proto) for each in node.attribute]
    tensors = (*proto.graph.initializer, *(each.t for each in attributes if each.HasField("t")))
    used = {tensor.data_type for tensor in tensors} | {
        value.type.tensor_type.elem_type for value in values
    }
    return used | {each.i for each in attributes if each.name in _TYPE_ATTRIBUTES}


_MIXED_TYPE_OPERATORS = {
    "BatchNormalization": _FLOAT16,
    "GridSample": _DOUBLE,
    "GroupNormalization": _FLOAT16,
    "InstanceNormalization": _FLOAT16,
    "LayerNormalization": _FLOAT16,
    "RMSNormalization": _FLOAT16,
}
"""Operators for which exporters write operands of two element types, which ONNX Runtime rejects,
and the second of these types.
"""


_CAST_LIKE_OPSET = 15
"""First opset version that has the operator CastLike."""
_MIXED_BATCH_NORM_OPSET = 14
"""First opset version in which the operands of BatchNormalization may have several types."""


def _cast_to_one_type(proto: onnx.ModelProto) -> bool:
    """Cast the operands of each operator in `_MIXED_TYPE_OPERATORS` to the type of its first
    operand, in place. Return True if an operator was changed.
    """
    used = _types_used(proto)
    found = False
    opset = max(
        (each.version for each in proto.opset_import if each.domain in ("", "ai.onnx")), default=1
    )
    told = (
        _types_of_values(proto)
        if opset < _CAST_LIKE_OPSET and not used.isdisjoint(_MIXED_TYPE_OPERATORS.values())
        else {}
    )
    for graph in (proto.graph, *proto.functions):
        nodes = list(graph.node)
        del graph.node[:]
        for node in nodes:
            is_several = node.op_type == "BatchNormalization" and opset >= _MIXED_BATCH_NORM_OPSET
            if (
                _MIXED_TYPE_OPERATORS.get(node.op_type) in used
                and node.domain in ("", "ai.onnx")
                and not is_several
            ):
                graph.node.extend(_cast_operands(node, told.get(node.input[0])))
                found = True
            graph.node.append(node)
    return found


def _cast_operands(node: onnx.NodeProto, kind: int | None) -> Iterator[onnx.NodeProto]:
    """Yield nodes that cast the operands of `node` to the type of its first operand, and make
    `node` read their results. `kind` is this type, or None if it is not known; in that case the
    nodes are CastLike.
    """
    from onnx.helper import make_node

    for place, name in [*enumerate(node.input)][1:]:
        cast = node.input[place] = f"{node.output[0]}/operand {place}"
        if kind:
            yield make_node("Cast", [name], [cast], to=kind)
        else:
            yield make_node("CastLike", [name, node.input[0]], [cast])


def _types_of_values(proto: onnx.ModelProto) -> dict[str, int]:
    """Return the element types of a model's values by name, as ONNX's numbers. Values without a
    known type are missing.
    """
    from onnx import shape_inference

    graph = shape_inference.infer_shapes(proto).graph
    return {
        each.name: each.type.tensor_type.elem_type for each in (*graph.value_info, *graph.input)
    }


def _replace_bfloat16(proto: onnx.ModelProto) -> None:
    """Replace the type bfloat16 with float32 in a model, in place, because ONNX Runtime has few CPU
    kernels for bfloat16. The values of stored tensors remain equal.
    """
    import onnx
    from onnx import numpy_helper

    narrow = onnx.TensorProto.BFLOAT16
    wide = onnx.TensorProto.FLOAT
    attributes = [each for node in _all_nodes(proto) for each in node.attribute]
    for tensor in (
        *proto.graph.initializer,
        *(each.t for each in attributes if each.HasField("t")),
    ):
        if tensor.data_type == narrow:
            numbers = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(numbers, tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        if value.type.tensor_type.elem_type == narrow:
            value.type.tensor_type.elem_type = wide
    for described in (proto.graph, *proto.functions):
        del described.value_info[:]
    for attribute in attributes:
        if attribute.name in _TYPE_ATTRIBUTES and attribute.i == narrow:
            attribute.i = wide


def _open_session(path: Path, optimized: bool = False) -> Any:
    """Return an inference session of the model in a file. Raise ModelError if ONNX Runtime rejects
    the model.
    """
    with _convert_session_errors(path):
        return _make_session(str(path), optimized)


@contextmanager
def _convert_session_errors(path: Path) -> Iterator[None]:
    """Context manager that converts ONNX Runtime's errors for the model at `path` to ModelError or
    NoKernelError.
    """
    try:
        yield
    except Exception as error:
        reason = str(error).splitlines()[0]
        if _NO_KERNEL_PREFIX in reason:
            operator = reason.partition(_NO_KERNEL_PREFIX)[2]
            raise NoKernelError(
                f"ONNX Runtime lacks a kernel for an operator: {operator}"
            ) from error
        raise ModelError(
            f"ONNX Runtime cannot open the model: {reason}", where=str(path)
        ) from error


def _all_nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes of a model, including those in functions and in subgraphs of nodes."""
    waiting = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    while waiting:
        node = waiting.pop()
        yield node
        graphs = (graph for each in node.attribute for graph in (each.g, *each.graphs))
        waiting.extend(inner for graph in graphs for inner in graph.node)


def _switch_off_dropout(node: onnx.NodeProto) -> bool:
    """Remove the operand `training_mode` of a Dropout node, in place, so that the node is the
    identity. Return True if the node was changed.
    """
    if node.op_type != "Dropout" or node.domain not in ("", "ai.onnx") or len(node.input) < 3:
        return False
    del node.input[2:]
    return True


def _keep_activations_in_float32(node: onnx.NodeProto) -> bool:
    """Make a matmul with packed weights keep its activations in float32 (attribute `accuracy_level`
    1), in place, if the file allows kernels to round them. Return True if the node was changed.
    """
    levels = [each for each in node.attribute if each.name == "accuracy_level" and each.i > 1]
    for level in levels:
        level.i = 1
    return bool(levels)


_QUANTIZED_LSTM_OPERANDS = 12
"""Number of operands of DynamicQuantizeLSTM: the 8 operands of LSTM, then the scale and zero point
of the weight and of the recurrence weight.
"""


def _replace_quantized_lstms(proto: onnx.ModelProto) -> int:
    """Replace 8-bit LSTMs in a model with float32 LSTMs, in place. Return their number.

    ONNX Runtime quantizes the state of a step by the range of the values in one thread, so the
    results of its 8-bit LSTM depend on the number of threads.
    """
    found = 0
    for graph in (proto.graph, *proto.functions):
        nodes = list(graph.node)
        del graph.node[:]
        for node in nodes:
            if (
                node.op_type == "DynamicQuantizeLSTM"
                and len(node.input) == _QUANTIZED_LSTM_OPERANDS
            ):
                graph.node.extend(_float32_lstm_nodes(node))
                found += 1
            else:
                graph.node.append(node)
    return found


def _float32_lstm_nodes(lstm: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a float32 LSTM that replaces the 8-bit LSTM `lstm`. The weights of `lstm`
    have shape [directions, width, 4 * hidden] and must be transposed for the LSTM operator.
    """
    from onnx.helper import make_node

    operands = [*lstm.input]
    prefix = lstm.output[0] or lstm.output[1] or lstm.output[2]
    yield make_node("Constant", [], [f"{prefix}/shape"], value_ints=[0, 1, -1])
    for place, scale in ((1, 8), (2, 10)):
        whole = operands[place]
        point = operands[scale + 1]
        factor = operands[scale]
        names = f"{prefix}/{place}"
        for part, name in (("number", whole), ("point", point)):
            yield make_node("Cast", [name], [f"{names}/{part}"], to=_FLOAT)
        for part, name in (("points", f"{names}/point"), ("factors", factor)):
            yield make_node("Reshape", [name, f"{prefix}/shape"], [f"{names}/{part}"])
        yield make_node("Sub", [f"{names}/number", f"{names}/points"], [f"{names}/difference"])
        yield make_node("Mul", [f"{names}/difference", f"{names}/factors"], [f"{names}/weight"])
        operands[place] = f"{names}/turned"
        yield make_node("Transpose", [f"{names}/weight"], [operands[place]], perm=[0, 2, 1])
    node = make_node("LSTM", operands[:8], [*lstm.output], name=lstm.name)
    node.attribute.extend(lstm.attribute)
    yield node


def _add_expert_tokens_to_outputs(proto: onnx.ModelProto) -> int:
    """Make the token operands of MoE operators outputs of the model, in place, and return their
    number.

    ONNX Runtime then does not reuse their memory. Otherwise it may store the result of the MoE
    kernel in the memory of the tokens, although the kernel writes results before it has read all
    tokens.
    """
    import onnx

    have = {each.name for each in (*proto.graph.input, *proto.graph.output)}
    names = {node.input[0] for node in proto.graph.node if node.op_type == "MoE"} - have
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(names))
    return len(names)


def _switch_to_running_statistics(node: onnx.NodeProto, used: set[str]) -> bool:
    """Make a BatchNormalization in training mode use its running statistics, in place, as for
    inference. `used` has the names of all values that nodes read, and of the outputs. The node is
    not changed if a result after its first is in `used`. Return True if the node was changed.
    """
    if node.op_type != "BatchNormalization" or not used.isdisjoint(node.output[1:]):
        return False
    if len(node.output) == 1 and not any(
        each.name == "training_mode" and each.i for each in node.attribute
    ):
        return False
    del node.output[1:]
    for attribute in [each for each in node.attribute if each.name == "training_mode"]:
        node.attribute.remove(attribute)
    return True


def _write_completed_model(
    model: Path, proto: onnx.ModelProto, weights: Mapping[str, np.ndarray], scratch: Path
) -> Path:
    """Write the model `proto`, which was read from the file `model`, to a file in the folder
    `scratch`, with `weights` added as initializers and with float32 instead of bfloat16. Return the
    path of the file.
    """
    from onnx import external_data_helper, numpy_helper

    external_data_helper.load_external_data_for_model(proto, str(model.parent))
    _replace_bfloat16(proto)
    have = {each.name for each in proto.graph.initializer}
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(array), name)
        for name, array in weights.items()
        if name not in have
    )
    for each in [each for each in proto.graph.input if each.name in weights]:
        proto.graph.input.remove(each)
    return _save_model(proto, scratch)


def _save_model(proto: onnx.ModelProto, scratch: Path) -> Path:
    """Write a model to a file in the folder `scratch` and return the path of the file. Large
    weights are written to a second file.
    """
    import onnx

    path = scratch / "model.onnx"
    large = sum(len(tensor.raw_data) for tensor in proto.graph.initializer) > _INLINE_LIMIT_BYTES
    onnx.save(proto, str(path), save_as_external_data=large)
    return path
