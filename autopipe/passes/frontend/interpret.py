"""Translation of the nodes of a parsed file into a graph. One pass over the nodes in topological
order infers the type of each value, evaluates nodes with known operands, and omits nodes that
change nothing.

All input shapes are static, so the shape of a value is known as soon as the shapes of its operands
are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import Attribute, Constant, DType, Graph, Node, Parameter, Value
from autopipe.passes.frontend.cleanup import STOP_GRADIENT
from autopipe.passes.frontend.control_flow import KeptLoop, ReaderAccess, replace_control_flow
from autopipe.passes.frontend.decompositions.registry import (
    Decomposition,
    decompose,
    decomposition_of,
    node_from_proto,
)
from autopipe.passes.frontend.derivations import Step
from autopipe.passes.frontend.detached import (
    DetachedReads,
    find_detached_reads,
    find_straight_through,
)
from autopipe.passes.frontend.dynamic_shapes.interpretation import DynamicShapes
from autopipe.passes.frontend.elements import (
    NUMBERS,
    array_of,
    attributes_of,
    checked_shape,
    copy_with_names,
    dtype_of,
    packed_value,
    replacement_node,
)
from autopipe.passes.frontend.folding import Folded
from autopipe.passes.frontend.inference import RANDOM, Budget, Inference
from autopipe.passes.frontend.known_operands import (
    ASKED,
    deciding_inputs,
    hint_for_control_flow,
    require_known,
)
from autopipe.passes.frontend.load import MOST_NODES, topological_positions
from autopipe.passes.frontend.loops import body_input_types, build_loop
from autopipe.passes.frontend.protobuf_scan import CONTROL_OPERATORS
from autopipe.passes.frontend.rewriter import NEWEST, FileRewriter
from autopipe.passes.frontend.sequences import Sequences
from autopipe.passes.frontend.signature import (
    STATISTIC_SLOTS,
    is_detach,
    is_training_batch_norm,
    padding_row,
    stop_gradient_node,
    uses_unbiased_variance,
)
from autopipe.passes.frontend.size_expressions import size_of
from autopipe.passes.frontend.weights import MissingWeightTypes, Weights

if TYPE_CHECKING:
    import onnx

    from autopipe.passes.frontend.input_shapes import Inputs
    from autopipe.passes.frontend.load import Source

FOLD_LIMIT = 4096
"""Maximum number of elements of a known result that is stored as a constant. Larger results, such
as masks, are computed by nodes of the graph.
"""
STEP_OPERANDS = {
    "Reshape": "shape",
    "Expand": "shape",
    "Gather": "places",
    "Add": "added",
    "Sub": "minuend",
    "Mul": "factor",
    "Pow": "exponent",
}
"""By operator of a derivation step, the suffix of the name of its constant operand. The operand of
the step that writes RESULT is called RESULT/SUFFIX.
"""
_MODE_STATED = 7
"""The first opset in which Dropout drops elements only in training mode. Before, it drops elements
unless its attribute `is_test` is set.
"""


@dataclass(slots=True)
class _ReaderState:
    """The state of the pass over the nodes: types and data of values so far, and the nodes of the
    graph.
    """

    source: Source
    inputs: Inputs
    weights: Weights
    inference: Inference
    sequences: Sequences
    dynamic_shapes: DynamicShapes
    stated: dict[str, list[onnx.ValueInfoProto]]
    """Types that the file declares for each value. The last one with a static shape is used."""
    types: dict[str, Value] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    """Values that depend on no input and no parameter, but whose data are not stored: they are too
    large, or their operators cannot be evaluated.
    """
    parameters: dict[str, Parameter] = field(default_factory=dict)
    packed: dict[str, Value] = field(default_factory=dict)
    """Parameters with elements of less than one byte that no node has read yet. For each name, the
    type of the parameter after unpacking.
    """
    aliases: dict[str, str] = field(default_factory=dict)
    """For each name in the file that only renames a value, the name of that value."""
    nodes: list[Node] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    numbers: Counter[str] = field(default_factory=Counter)
    """By node name, the last number that was appended to it to make a name unique."""
    statistics: dict[str, str] = field(default_factory=dict)
    """For each result of a BatchNormalization that is an updated running statistic, the name of
    that running statistic.
    """
    results: dict[str, None] = field(default_factory=dict)
    repeated: Budget = field(default_factory=lambda: Budget(MOST_NODES))
    """The number of nodes that copies of control-flow bodies may still add."""

    def type_of(self, name: str) -> Value | None:
        """Return the inferred type of a value; the type that the file declares if none is inferred
        yet; None if there is neither.
        """
        return self.types.get(self.aliases.get(name, name)) or self.declared(name)

    def declared(self, name: str) -> Value | None:
        """Return the type that the file declares for a value; None if it declares no static
        shape.
        """
        for info in reversed(self.stated.get(name, [])):
            tensor = info.type.tensor_type
            if info.type.HasField("tensor_type") and tensor.HasField("shape") and tensor.elem_type:
                symbols = self.inputs.symbols
                told = [
                    each.dim_value
                    if each.HasField("dim_value")
                    else size_of(each.dim_param, symbols)
                    for each in tensor.shape.dim
                ]
                shape = checked_shape(
                    tuple(extent for extent in told if extent is not None), repr(name)
                )
                if len(shape) == len(told) and all(extent >= 0 for extent in shape):
                    return Value(name, dtype_of(tensor.elem_type, repr(name)), shape)
        return None

    def reader_access(self) -> ReaderAccess:
        """Return the functions and state that the replacement of control flow uses."""
        return ReaderAccess(
            data=lambda name: self.arrays.get(self.aliases.get(name, name)),
            type_of=lambda name: self.types.get(self.aliases.get(name, name)),
            sequences=self.sequences,
            opset=self.source.opset,
            order=lambda body: [body.node[place] for place in topological_positions(body)],
            count_nodes=self.repeated.spend,
            keep_loop=lambda loop: _keep_loop(self, loop),
            readers=lambda name: (
                [node.op_type for node, _ in self.weights.roles.uses.readers.get(name, ())]
                + ["output"] * (name in self.results)
            ),
        )

    def is_input(self, name: str) -> bool:
        """True if `name` is an input of the graph."""
        return any(value.name == name for value in self.inputs.values)

    def deciding_inputs(self, name: str) -> tuple[str, ...]:
        """Return the inputs of one element from which the value `name` is computed; () if the value
        also depends on other inputs.
        """
        return deciding_inputs(name, self.nodes, self.inputs)

    def copy_tables(self) -> dict[str, Any]:
        """Return copies of the fields that reading a node changes, such as types, data and nodes,
        by field name. They can be restored after a failed attempt.
        """
        tables = (
            "types",
            "arrays",
            "settled",
            "parameters",
            "packed",
            "aliases",
            "nodes",
            "names",
            "numbers",
            "statistics",
        )
        return {name: copy(getattr(self, name)) for name in tables}

    def record_array(self, name: str, array: np.ndarray, dtype: DType) -> None:
        """Record a value whose data are known."""
        self.types[name] = Value(name, dtype, array.shape)
        self.arrays[name] = array

    def record_tensor(self, held: Constant | Parameter) -> None:
        """Record a constant or parameter of the file. A parameter of packed elements is recorded as
        bytes.
        """
        if isinstance(held, Constant):
            self.record_array(held.value.name, held.array, held.value.dtype)
            return
        value = held.value
        if value.dtype.packed_bits:
            self.packed[value.name] = value
            value = packed_value(value)
        self.types[value.name] = value
        self.parameters[value.name] = replace(held, value=value)

    def unpack_parameter(self, name: str) -> None:
        """Add the node that unpacks the packed parameter `name`. Nodes that are read later use its
        result instead of the parameter.
        """
        value = self.packed.pop(name)
        result = f"{name}/unpacked"
        self.types[result] = replace(value, name=result)
        self.aliases[name] = result
        self.names.add(result)
        self.nodes.append(Node(result, "Unpack", (name,), (result,), domain="autopipe"))


def interpret(
    source: Source,
    inputs: Inputs,
    weights: Weights,
    fixed: Mapping[str, np.ndarray],
    bounds: Mapping[str, int],
) -> tuple[Graph, dict[str, str]]:
    """Translate the file `source` and return (graph, aliases). `aliases` maps each name in the file
    that only renames a value to the name of the value in the graph.

    The graph has the inputs `inputs`; `fixed` contains the data of inputs that become constants.
    `bounds` contains the maximum length of Range results whose length depends on data. A value that
    is read but never written becomes a weight without data.

    Raises ModelError, naming the node, if shapes do not fit or depend on data in an unsupported
    way, and for tensors, types and attributes that are not supported. Raises ConfigurationError for
    an entry of `bounds` that is not needed.
    """
    import onnx.helper

    stated: dict[str, list[onnx.ValueInfoProto]] = {}
    for info in (*source.graph.value_info, *source.graph.output):
        stated.setdefault(info.name, []).append(info)
    inference = Inference(source.opsets)
    dynamic_shapes = DynamicShapes(
        source.nodes, inference, source.opset, weights.roles.uses, bounds
    )
    sweep = _ReaderState(
        source, inputs, weights, inference, Sequences(source.opset), dynamic_shapes, stated
    )
    sweep.results = dict.fromkeys(info.name for info in source.graph.output)
    sweep.types.update((value.name, value) for value in inputs.values)
    for name, array in fixed.items():
        sweep.record_array(name, array, DType(array.dtype.name))
    for held in weights.read_initializers().values():
        if isinstance(held, Folded):
            _add_folded_tensor(sweep, held)
        else:
            sweep.record_tensor(held)
    if weights.roles.signature:
        detached = find_detached_reads(source.nodes, weights.roles.signature)
    else:
        detached = find_straight_through(source.nodes, lambda name: sweep.aliases.get(name, name))
    weights.unknown_detached = detached.unknown
    for node in _move_ranges_early(source.nodes, bounds):
        read = _detach_operands(sweep, node, detached)
        row = padding_row(read) if weights.roles.frozen is None else None
        if row is None:
            _visit(sweep, read)
        else:
            _read_padded_lookup(sweep, read, row)
    for name in sweep.results:
        if name in dynamic_shapes:
            identity = onnx.helper.make_node("Identity", [name], [f"{name}/given"], name=name)
            dynamic_shapes.write_output(_file_rewriter(sweep, identity, (name,)))
    for name, most in bounds.items():
        if name in sweep.types:
            raise ConfigurationError(
                f"--dim {name}:0={most} is unnecessary: the size is {sweep.types[name].shape[0]} "
                "and does not depend on data"
            )
    return _build_graph(sweep, inputs), sweep.aliases


def _move_ranges_early(
    nodes: Sequence[onnx.NodeProto], bounds: Mapping[str, int]
) -> list[onnx.NodeProto]:
    """Return the nodes with each Range that writes a value of `bounds` moved right behind the nodes
    that write its operands. It then precedes all nodes that compute shapes from its limit.
    """
    made = {name: place for place, node in enumerate(nodes) for name in node.output}

    def place_of(pair: tuple[int, onnx.NodeProto]) -> tuple[int, bool]:
        """Return the sort key of (position, node): its new position, and whether it is moved
        there.
        """
        place, node = pair
        is_early = node.op_type == "Range" and node.output[0] in bounds
        return max(made.get(name, -1) for name in node.input) if is_early else place, is_early

    return [node for _, node in sorted(enumerate(nodes), key=place_of)]


def _add_folded_tensor(sweep: _ReaderState, folded: Folded) -> None:
    """Add the nodes that compute a folded tensor, which an exporter computed, from its source: a
    parameter, or a tensor that has been read before.
    """
    name = folded.value.name
    dtype = folded.value.dtype
    if isinstance(folded.source, Parameter):
        sweep.record_tensor(folded.source)
        operand = folded.source.value.name
    else:
        operand = sweep.aliases.get(folded.source, folded.source)
    if not folded.steps:
        _add_alias(sweep, name, operand)
    for number, step in enumerate(folded.steps, 1):
        result = name if number == len(folded.steps) else f"{name}/{number}"
        operands: tuple[str, ...] = (operand,)
        if step.other:
            other = sweep.aliases.get(step.other, step.other)
            for place, move in enumerate(step.moves, 1):
                other = _add_step(sweep, move, (other,), f"{result}/other{place}", dtype)
            operands = (other, operand) if step.operator == "Sub" else (operand, other)
        _add_step(sweep, step, operands, result, dtype)
        operand = result


def _add_step(
    sweep: _ReaderState, step: Step, operands: tuple[str, ...], result: str, dtype: DType
) -> str:
    """Add the node of one derivation step, and its constant operand if it has one. Return the name
    of the result.
    """
    if not step.other and step.operator in STEP_OPERANDS:
        held = f"{result}/{STEP_OPERANDS[step.operator]}"
        array = np.asarray(step.shape, np.int64) if step.operand is None else step.operand
        sweep.record_array(held, array, DType.INT64 if array.dtype == np.int64 else dtype)
        operands = (held, *operands) if step.operator == "Sub" else (*operands, held)
    sweep.types[result] = Value(result, dtype, step.shape)
    attributes: tuple[tuple[str, Attribute], ...] = ()
    if step.operator == "Transpose":
        attributes = (("perm", step.perm),)
    elif step.operator == "Concat":
        attributes = (("axis", step.axis),)
    elif step.operator == "ReduceSum":
        attributes = (("keepdims", 0),)
    title = f"{result}/{step.operator.lower()}"
    sweep.names.add(title)
    domain = "autopipe" if step.operator == STOP_GRADIENT else ""
    sweep.nodes.append(Node(title, step.operator, operands, (result,), attributes, domain))
    return result


def _visit(sweep: _ReaderState, node: onnx.NodeProto) -> None:
    """Read one node of the file: record the types and known data of its results, and add the nodes
    that compute them to the graph.
    """
    for name in node.input:
        if name in sweep.packed:
            sweep.unpack_parameter(name)
    operands = tuple(sweep.aliases.get(name, name) for name in node.input)
    for name in operands:
        if name and not any(
            name in each for each in (sweep.types, sweep.sequences, sweep.dynamic_shapes)
        ):
            missing = MissingWeightTypes(
                sweep.weights.roles.uses, sweep.type_of, tuple(sweep.results)
            )
            sweep.record_tensor(
                sweep.weights.make_missing(sweep.declared(name) or missing.infer_type(name))
            )
    others = _find_replacement_nodes(sweep, node, operands)
    if others is not None:
        try:
            for each in others:
                _visit(sweep, each)
        except ModelError as error:
            error.hint = _extend_hint(sweep, node, operands, error.hint)
            raise
        return
    decomposition = decomposition_of(node)
    if decomposition is not None and _read_decomposition(sweep, node, operands, decomposition):
        return
    standard = node.domain in ("", "ai.onnx")
    if standard and node.op_type == "CastLike" and len(operands) == 2:
        node = _convert_cast_like(node, sweep.types[operands[1]].dtype)
        operands = operands[:1]
    if standard and node.op_type == "Constant":
        _read_constant(sweep, node)
    elif (
        standard
        and node.op_type == "ConstantOfShape"
        and operands[0] in sweep.arrays
        and sweep.weights.is_filled(node)
    ):
        _read_filled_constant(sweep, node, sweep.arrays[operands[0]])
    elif standard and node.op_type in ("Shape", "Size"):
        _read_shape_result(sweep, node, sweep.types[operands[0]].shape)
    elif standard and _stops_gradient(sweep, node, operands):
        _add_operator(sweep, stop_gradient_node(node), operands)
    elif standard and _passes_through(sweep, node, operands):
        _add_alias(sweep, node.output[0], operands[0])
    else:
        _add_operator(sweep, node, operands)


def _extend_hint(
    sweep: _ReaderState, node: onnx.NodeProto, operands: tuple[str, ...], hint: str
) -> str:
    """Return the hint of an error inside of a control-flow operator. If inputs decide which nodes
    the operator executes, the hint is extended by the flags that fix these inputs.
    """
    if node.op_type not in ASKED or "model.inputs" in hint:
        return hint
    asked = [
        name for name in operands[: ASKED[node.op_type][0]] if name and name not in sweep.arrays
    ]
    names = dict.fromkeys(each for name in asked for each in sweep.deciding_inputs(name))
    advice = hint_for_control_flow(node, tuple(names))
    return "; or ".join(filter(None, (hint, advice)))


def _replace_chained_statistics(
    sweep: _ReaderState, node: onnx.NodeProto, operands: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the operands of a BatchNormalization in training mode. An operand may be a running
    statistic that an earlier BatchNormalization updated; the statistic before the update replaces
    it.

    If a module calls a BatchNormalization twice, exporters write the updated statistics of the
    first call as operands of the second. In training mode, the normalised result does not depend on
    these operands, and the ranks update a running statistic by all calls in order.
    """
    readers = sweep.weights.roles.uses.readers
    for result in node.output[1:3]:
        is_chained = all(
            is_training_batch_norm(reader) and slot in STATISTIC_SLOTS
            for reader, slot in readers.get(result, ())
        )
        if result in sweep.results or not is_chained:
            return operands
    kept = tuple(
        sweep.statistics.get(name, name) if slot in STATISTIC_SLOTS else name
        for slot, name in enumerate(operands)
    )
    sweep.statistics.update(zip(node.output[1:3], kept[3:5], strict=False))
    return kept


def _detach_operands(
    sweep: _ReaderState, node: onnx.NodeProto, detached: DetachedReads
) -> onnx.NodeProto:
    """Return the node with a detached copy in place of each of its operands that `detached` lists.
    Adds the nodes that detach them.
    """
    operands = list(node.input)
    for slot, name in enumerate(node.input):
        if not node.output or (node.output[0], slot) not in detached.operands:
            continue
        source = sweep.aliases.get(name, name)
        operands[slot] = f"{name}/detached"
        if (
            source in sweep.types
            and operands[slot] not in sweep.types
            and sweep.types[source].dtype.is_floating
        ):
            _detach(sweep, source, operands[slot])
        if operands[slot] not in sweep.types:
            operands[slot] = name
    return node if operands == list(node.input) else copy_with_names(node, operands, node.output)


def _detach(sweep: _ReaderState, operand: str, result: str) -> None:
    """Add a StopGradient node, through which `result` equals `operand` but passes no gradient to
    it.
    """
    sweep.types[result] = replace(sweep.types[operand], name=result)
    title = _unique_name(sweep, f"{result}/stop")
    sweep.nodes.append(Node(title, STOP_GRADIENT, (operand,), (result,), domain="autopipe"))


def _read_padded_lookup(sweep: _ReaderState, node: onnx.NodeProto, row: int) -> None:
    """Read an embedding that has a padding row: row `row` of its table receives no gradient. The
    added nodes are equal to the nodes that `autopipe export` writes for such an embedding.
    """
    result = node.output[0]
    rows, stopped, padding, is_padding, per_row, axis = (
        f"{result}/{each}"
        for each in ("rows", "stopped", "padding", "is_padding", "per_row", "axis")
    )
    _visit(sweep, copy_with_names(node, node.input, [rows]))
    source = sweep.aliases.get(rows, rows)
    indices = sweep.types[sweep.aliases.get(node.input[1], node.input[1])]
    _detach(sweep, source, stopped)
    sweep.record_array(padding, np.array(row, indices.dtype.value), indices.dtype)
    sweep.record_array(axis, np.array([-1]), DType.INT64)
    _visit(sweep, replacement_node(node, "Equal", [node.input[1], padding], [is_padding]))
    _visit(sweep, replacement_node(node, "Unsqueeze", [is_padding, axis], [per_row]))
    _visit(sweep, replacement_node(node, "Where", [per_row, stopped, rows], [result]))


def _find_replacement_nodes(
    sweep: _ReaderState, node: onnx.NodeProto, operands: tuple[str, ...]
) -> Iterable[onnx.NodeProto] | None:
    """Return the nodes that replace a node of control flow, sequences or dynamic shapes; None if
    the node is not of this kind. The caller must visit each node before it requests the next one.
    """
    if node.op_type in CONTROL_OPERATORS and node.domain in ("", "ai.onnx"):
        return replace_control_flow(node, operands, sweep.reader_access())
    if sweep.sequences.handles(node):
        return sweep.sequences.replace(node, operands, sweep.types, sweep.arrays)
    if sweep.dynamic_shapes.must_replace(node, operands, sweep.types, sweep.arrays, sweep.declared):
        rewriter = _file_rewriter(sweep, node, operands)
        sweep.dynamic_shapes.replace_node(rewriter, sweep.types, sweep.arrays)
        # The rewriter visited the new nodes itself, so no node remains for the caller to visit.
        return ()
    return None


def _keep_loop(sweep: _ReaderState, loop: KeptLoop) -> str:
    """Add a loop operator and return "". If that is not possible, add nothing and return the
    reason.
    """
    former = sweep.copy_tables()
    outer: list[Node] = former["nodes"]
    sweep.nodes = []
    try:
        sweep.types.update(body_input_types(loop, sweep.types))
        for each in loop.nodes:
            _visit(sweep, each)
        made = build_loop(
            loop, sweep.nodes, sweep.types, sweep.arrays, sweep.aliases, sweep.source.opset
        )
    except ModelError as error:
        for name, table in former.items():
            setattr(sweep, name, table)
        return error.message
    before, node, constants, results = made
    for constant in constants:
        sweep.record_tensor(constant)
    sweep.types.update((value.name, value) for value in results)
    sweep.nodes = [*outer, *before, replace(node, name=_unique_name(sweep, node.name))]
    return ""


class _FileScope:
    """A scope for a rewriter whose new nodes are read as if the file contained them."""

    def __init__(self, sweep: _ReaderState) -> None:
        self._sweep = sweep

    @property
    def opset(self) -> int:
        return self._sweep.source.opset

    def type_of(self, name: str) -> Value:
        return self._sweep.types[self._sweep.aliases.get(name, name)]

    def array(self, name: str) -> np.ndarray | None:
        return self._sweep.arrays.get(self._sweep.aliases.get(name, name))

    def unique_name(self, name: str) -> str:
        """Return `name` without checking whether it is in use."""
        return name

    def add_constant(self, value: Value, array: np.ndarray) -> None:
        self._sweep.record_array(value.name, array, value.dtype)

    def add(self, node: Node, results: tuple[Value, ...]) -> None:
        """Read the new node as if the file contained it; `results` is ignored."""
        import onnx.helper

        attributes: dict[str, Any] = dict(node.attributes)
        made = onnx.helper.make_node(
            node.op, node.inputs, node.outputs, name=node.name, domain=node.domain, **attributes
        )
        _visit(self._sweep, made)


class _TypedScope(_FileScope):
    """A scope for a rewriter whose new nodes are of opset `NEWEST` and become nodes of the graph
    without being read.
    """

    @property
    def opset(self) -> int:
        return NEWEST

    def add(self, node: Node, results: tuple[Value, ...]) -> None:
        """Add the new node to the graph, with the types `results` of its results."""
        self._sweep.types.update((value.name, value) for value in results)
        self._sweep.nodes.append(replace(node, name=_unique_name(self._sweep, node.name)))


def _file_rewriter(
    sweep: _ReaderState, node: onnx.NodeProto, operands: tuple[str, ...]
) -> FileRewriter:
    """Return a rewriter for the node whose new nodes are read as if the file contained them."""
    scope = _FileScope(sweep)
    return FileRewriter(
        scope, node_from_proto(node, operands), node, lambda each: _visit(sweep, each)
    )


def _read_decomposition(
    sweep: _ReaderState,
    node: onnx.NodeProto,
    operands: tuple[str, ...],
    decomposition: Decomposition,
) -> bool:
    """Read the nodes that `decomposition` writes for a node. Return False if it writes none, so
    that the node is kept.
    """
    scope = _TypedScope(sweep) if decomposition.is_typed else _FileScope(sweep)
    rewriter = FileRewriter(
        scope, node_from_proto(node, operands), node, lambda each: _visit(sweep, each)
    )
    is_replaced = decompose(decomposition, rewriter)
    for name, value in rewriter.aliases.items():
        _add_alias(sweep, name, value)
    return is_replaced


def _add_alias(sweep: _ReaderState, name: str, operand: str) -> None:
    """Record that `name` is another name of the value `operand`."""
    sweep.aliases[name] = operand
    sweep.types[name] = sweep.types[operand]


def _add_operator(sweep: _ReaderState, node: onnx.NodeProto, operands: tuple[str, ...]) -> None:
    """Add a node to the graph. If its operands are known, its results are evaluated and recorded
    instead; if it changes nothing, its result becomes an alias.
    """
    attributes = attributes_of(node)
    if is_training_batch_norm(node):
        operands = _replace_chained_statistics(sweep, node, operands)
    if uses_unbiased_variance(node):
        attributes = (*attributes, ("unbiased", 1))
    known = tuple(sweep.arrays.get(name) if name else None for name in operands)
    require_known(
        node,
        operands,
        sweep.arrays,
        sweep.settled,
        sweep.is_input,
        sweep.deciding_inputs,
        sweep.source.opset,
    )
    pairs = tuple(
        (sweep.types[name] if name else None, array)
        for name, array in zip(operands, known, strict=True)
    )
    types = _apply_declared_types(
        sweep, node, pairs[0][0] if pairs else None, sweep.inference.types(node, pairs)
    )
    is_small = all(value is None or value.elements <= FOLD_LIMIT for value in types)
    is_known = all(array is not None for name, array in zip(operands, known, strict=True) if name)
    domain = "" if node.domain == "ai.onnx" else node.domain
    if is_known and is_small and node.op_type not in RANDOM and not domain:
        results = sweep.inference.evaluate(node, known, types)
        if results is not None and all(result.size <= FOLD_LIMIT for result in results):
            for name, array, inferred in zip(node.output, results, types, strict=False):
                if name:
                    sweep.record_array(
                        name, array, inferred.dtype if inferred else DType(array.dtype.name)
                    )
            return
    if (
        not domain
        and is_small
        and (decided := _known_logical_result(node.op_type, known)) is not None
        and types[0] is not None
    ):
        sweep.record_array(node.output[0], np.full(types[0].shape, decided), DType.BOOL)
        return
    operands = _drop_empty_operands(sweep, node, operands)
    if _leaves_operand_unchanged(sweep, node, operands, types):
        _add_alias(sweep, node.output[0], operands[0])
        return
    if node.op_type not in RANDOM and all(
        not name or name in sweep.arrays or name in sweep.settled for name in operands
    ):
        sweep.settled.update(filter(None, node.output))
    for name, inferred in zip(node.output, types, strict=True):
        if name:
            sweep.types[name] = _merge_types(sweep, name, inferred, f"{node.op_type} {node.name!r}")
    sweep.nodes.append(
        Node(
            _unique_name(sweep, node.name or node.op_type),
            node.op_type,
            _trim_empty_names(operands),
            _trim_empty_names(node.output),
            attributes,
            domain,
        )
    )


def _apply_declared_types(
    sweep: _ReaderState, node: onnx.NodeProto, first: Value | None, types: tuple[Value | None, ...]
) -> tuple[Value | None, ...]:
    """Return the inferred result types `types`, with one exception: the result of an
    RMSNormalization receives the element type of its first operand `first`, as in torch, if the
    file declares that type. ONNX infers the type of the scale.
    """
    if node.op_type != "RMSNormalization" or node.domain or first is None or types[0] is None:
        return types
    stated = {each.type.tensor_type.elem_type for each in sweep.stated.get(node.output[0], ())}
    return (replace(types[0], dtype=first.dtype),) if NUMBERS[first.dtype] in stated else types


def _convert_cast_like(node: onnx.NodeProto, dtype: DType) -> onnx.NodeProto:
    """Return the Cast to `dtype` that replaces a CastLike."""
    import onnx.helper

    cast = onnx.helper.make_node(
        "Cast", node.input[:1], node.output, name=node.name, to=NUMBERS[dtype]
    )
    cast.attribute.extend(
        each for each in node.attribute if each.name in ("saturate", "round_mode")
    )
    return cast


def _known_logical_result(operator: str, known: Sequence[np.ndarray | None]) -> bool | None:
    """Return the value of all elements of an And or Or, if one known operand determines it: False
    for an And with a false operand, True for an Or with a true operand. Returns None if none does.
    """
    deciding = {"And": False, "Or": True}.get(operator)
    told = deciding is not None and any(
        array is not None and (array == deciding).all() for array in known
    )
    return deciding if told else None


def _leaves_operand_unchanged(
    sweep: _ReaderState,
    node: onnx.NodeProto,
    operands: tuple[str, ...],
    types: tuple[Value | None, ...],
) -> bool:
    """True if a node that moves or repeats elements returns its first operand unchanged, given the
    inferred shapes.
    """
    if (
        node.domain not in ("", "ai.onnx")
        or len(types) != 1
        or types[0] is None
        or not operands
        or not operands[0]
    ):
        return False
    if types[0].shape != sweep.types[operands[0]].shape:
        return False
    match node.op_type:
        case "Reshape" | "Expand" | "Flatten" | "Squeeze" | "Unsqueeze":
            return True
        case "Concat":
            return len(operands) == 1
        case "Transpose":
            order = next((tuple(each.ints) for each in node.attribute if each.name == "perm"), ())
            return order == tuple(range(len(types[0].shape)))
        case "Slice":
            steps = sweep.arrays.get(operands[4]) if len(operands) > 4 else None
            return len(operands) < 5 or (steps is not None and bool((steps > 0).all()))
    return False


def _drop_empty_operands(
    sweep: _ReaderState, node: onnx.NodeProto, operands: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the operands of a node. Those of a Concat that are empty, as a cache may be, are
    dropped; if all are empty, the first is kept.
    """
    if node.op_type != "Concat" or node.domain not in ("", "ai.onnx"):
        return operands
    axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
    return tuple(name for name in operands if sweep.types[name].shape[axis]) or operands[:1]


def _merge_types(sweep: _ReaderState, name: str, inferred: Value | None, where: str) -> Value:
    """Return the type of a result: the inferred type, otherwise the declared type. Raises
    ModelError if there is neither.
    """
    if inferred is not None:
        return Value(name, inferred.dtype, inferred.shape)
    declared = sweep.declared(name)
    if declared is not None:
        return declared
    raise ModelError(
        f"the shape of the result {name!r} is unknown before execution",
        hint="check that the operator is supported and that the shape does not depend on the "
        "values of inputs",
        where=where,
    )


def _read_constant(sweep: _ReaderState, node: onnx.NodeProto) -> None:
    """Read a Constant node: its tensor becomes a constant or a parameter."""
    where = f"Constant {node.name!r}"
    if len(node.attribute) != 1 or len(node.output) != 1:
        raise ModelError(
            "a Constant must have one attribute and one output, but the numbers are "
            f"{len(node.attribute)} and {len(node.output)}",
            where=where,
        )
    name = node.output[0]
    attribute = node.attribute[0]
    if attribute.name == "value":
        sweep.record_tensor(sweep.weights.read_constant(name, attribute.t))
        return
    kinds = {
        "value_float": np.float32,
        "value_floats": np.float32,
        "value_int": np.int64,
        "value_ints": np.int64,
    }
    if attribute.name not in kinds:
        raise ModelError(
            f"attribute {attribute.name!r} of a Constant is not supported", where=where
        )
    (stated,) = attributes_of(node)
    array = np.asarray(stated[1], dtype=kinds[attribute.name])
    sweep.record_array(name, array, DType(array.dtype.name))


def _read_filled_constant(sweep: _ReaderState, node: onnx.NodeProto, shape: np.ndarray) -> None:
    """Read a ConstantOfShape node that creates a weight: it becomes a parameter whose elements all
    have one value.
    """
    name = node.output[0]
    where = f"ConstantOfShape {node.name!r}"
    number = 0.0
    dtype = DType.FLOAT32
    if node.attribute:
        tensor = node.attribute[0].t
        dtype = dtype_of(tensor.data_type, where)
        number = float(array_of(tensor, where).reshape(-1)[0])
    extents = tuple(int(extent) for extent in shape)
    sweep.record_tensor(sweep.weights.make_filled(Value(name, dtype, extents), number))


def _read_shape_result(sweep: _ReaderState, node: onnx.NodeProto, shape: tuple[int, ...]) -> None:
    """Read a Shape or Size node whose operand has the shape `shape`. The result is known."""
    if node.op_type == "Size":
        sweep.record_array(node.output[0], np.asarray(np.prod(shape, dtype=np.int64)), DType.INT64)
        return
    stated = dict(attributes_of(node))
    start = stated.get("start", 0)
    end = stated.get("end", len(shape))
    assert isinstance(start, int) and isinstance(end, int)
    sweep.record_array(node.output[0], np.asarray(shape[start:end], dtype=np.int64), DType.INT64)


def _stops_gradient(sweep: _ReaderState, node: onnx.NodeProto, operands: tuple[str, ...]) -> bool:
    """True if a node is a `detach` of a floating-point value whose data are unknown."""
    if node.op_type != "Identity" or len(operands) != 1 or operands[0] in sweep.arrays:
        return False
    return (
        operands[0] in sweep.types
        and sweep.types[operands[0]].dtype.is_floating
        and is_detach(node)
    )


def _passes_through(sweep: _ReaderState, node: onnx.NodeProto, operands: tuple[str, ...]) -> bool:
    """True if a node returns its first operand: an Identity, a Dropout that drops no elements, or a
    Cast to the operand's type. False if a further result of the node, for example the mask, is
    read.
    """
    if node.op_type not in ("Identity", "Cast", "Dropout") or not operands or not operands[0]:
        return False
    readers = sweep.weights.roles.uses.readers
    if any(name in readers or name in sweep.results for name in node.output[1:]):
        return False
    if node.op_type == "Identity":
        return True
    if node.op_type == "Cast":
        target = next((each.i for each in node.attribute if each.name == "to"), 0)
        return target == NUMBERS[sweep.types[operands[0]].dtype]
    if sweep.source.opset < _MODE_STATED:
        return any(each.name == "is_test" and each.i for each in node.attribute)
    ratio, training = (*operands[1:3], "", "")[:2]
    drops_none = any(
        each in sweep.arrays and not sweep.arrays[each].any() for each in (ratio, training)
    )
    return not training or drops_none


def _unique_name(sweep: _ReaderState, base: str) -> str:
    """Return `base` as name of a node, with a number appended if the name is in use."""
    name = base
    while name in sweep.names:
        # The counter only increases, because a name in use is never released. Each number is
        # therefore tried at most once.
        sweep.numbers[base] += 1
        name = f"{base}_{sweep.numbers[base]}"
    sweep.names.add(name)
    return name


def _trim_empty_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names without absent operands or results ("") at the end."""
    return tuple(names[: max((place for place, name in enumerate(names, 1) if name), default=0)])


def _build_graph(sweep: _ReaderState, inputs: Inputs) -> Graph:
    """Return the graph of all nodes that have been read. An output that is another name of a value
    receives an Identity.
    """
    nodes = list(sweep.nodes)
    values = [sweep.types[name] for node in nodes for name in node.outputs if name]
    outputs = dict(_find_outputs(sweep))
    for name, source in outputs.items():
        if name != source:
            # The name of an output does not change. `clean_graph` later removes the Identity if
            # possible.
            title = name
            while title in sweep.names:
                title += "_"
            sweep.names.add(title)
            nodes.append(Node(title, "Identity", (source,), (name,)))
            values.append(replace(sweep.types[source], name=name))
    constants = [Constant(sweep.types[name], array) for name, array in sweep.arrays.items()]
    return Graph(
        name=sweep.source.graph.name,
        opset=sweep.source.opset,
        inputs=inputs.values,
        parameters=tuple(sweep.parameters.values()),
        constants=tuple(constants),
        nodes=tuple(nodes),
        outputs=tuple(outputs),
        values=tuple(values),
        batch_axes=inputs.batch_axes,
    )


def _find_outputs(sweep: _ReaderState) -> Iterator[tuple[str, str]]:
    """Yield (name, value in the graph) for each output. For an output that is a sequence, yield one
    pair per tensor, named NAME/0, NAME/1, … Raises ModelError if no node writes an output.
    """
    for info in sweep.source.graph.output:
        held = [(info.name, info.name)]
        if info.name in sweep.sequences:
            held = [
                (f"{info.name}/{number}", name)
                for number, name in enumerate(sweep.sequences[info.name])
            ]
        for name, source in held:
            if source not in sweep.types:
                raise ModelError(f"no node writes the model output {name!r}")
            yield name, sweep.aliases.get(source, source)
