"""Types of what a node writes, and its numbers where all it reads is known: ONNX's own inference
and evaluator.

Rules here add the types that ONNX does not tell; formulas compute masks, positions and angles,
since loading ONNX's evaluator takes longer than reading most models. What would take too much
computing stays a node.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Graph, Node, Value
from autopipe.ir.ops import OPERATORS
from autopipe.passes.frontend.elements import (
    MOST_DIMENSIONS,
    NUMBERS,
    dtype_of,
    shape_of,
    tensor_of,
    type_proto,
)

if TYPE_CHECKING:
    import onnx

FORMULAS: dict[str, tuple[Callable[..., Any], tuple[str, ...], int]] = {
    "Add": (np.add, ("iuf", "iuf"), 0),
    "Less": (np.less, ("iuf", "iuf"), 0),
    "Mul": (np.multiply, ("iuf", "iuf"), 0),
    "Range": (
        lambda start, end, step: np.arange(start.item(), end.item(), step.item()).astype(
            start.dtype
        ),
        ("iuf", "iuf", "iuf"),
        0,
    ),
    "Sub": (np.subtract, ("iuf", "iuf"), 0),
    "Unsqueeze": (lambda data, axes: np.expand_dims(data, tuple(axes.tolist())), ("biuf", "i"), 1),
    "Where": (
        lambda chosen, shown, hidden: np.asarray(np.where(chosen, shown, hidden)).astype(
            shown.dtype, copy=False
        ),
        ("b", "biuf", "biuf"),
        1,
    ),
}
"""By operator without attributes: what computes it, the kinds of its operands' types (numpy's own),
and from which operand on types are one.
"""


def told_by_formula(
    node: onnx.NodeProto, operands: Sequence[np.ndarray | None]
) -> tuple[np.ndarray, ...] | None:
    """The numbers of the result; None where there is no formula for such a node, or none for such
    numbers.
    """
    if node.op_type not in FORMULAS or node.domain not in ("", "ai.onnx") or node.attribute:
        return None
    formula, kinds, alike = FORMULAS[node.op_type]
    types = [each.dtype for each in operands if each is not None]
    if len(operands) != len(kinds) or len(types) != len(kinds) or len(set(types[alike:])) > 1:
        return None
    if not all(each.kind in kind for each, kind in zip(types, kinds, strict=True)):
        return None
    try:
        return (np.asarray(formula(*operands)),)
    except (ArithmeticError, ValueError, TypeError, MemoryError):
        return None


MOST_OPERATIONS = 1 << 31
"""Operations for all constants of a graph together: ten masks of 8,192 by 8,192, or a few seconds.
"""
LOOP = 256
"""Operations that one round of a loop in Python counts as."""
_WHOLE_ARRAYS = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor
    Cast CastLike Ceil Clip Compress Concat ConstantOfShape Cos Cosh CumSum DepthToSpace DequantizeLinear Div Equal Exp
    Expand EyeLike Flatten Floor Gather Greater GreaterOrEqual Identity IsInf IsNaN Less LessOrEqual Log LogSoftmax Max
    Mean Min Mod Mul Neg NonZero Not OneHot Or Pow QuantizeLinear Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Round Shape Sigmoid
    Sign Sin Sinh Size Slice Softmax SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh Tile TopK Transpose Trilu Unique
    Unsqueeze Where Xor
"""
_LINEAR = frozenset(_WHOLE_ARRAYS.split())
"""Operators that numpy computes with a few operations for each element that they read or write."""
_LOOPED = frozenset(
    {"Erf", "GatherElements", "GatherND", "Gelu", "ReverseSequence", "ScatterElements", "ScatterND"}
)
"""Operators that ONNX's evaluator computes in a loop over elements."""
_GROWING = frozenset({"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Range", "Tile"})
"""Operators of which a few numbers tell how much they write."""


@dataclass(slots=True)
class Budget:
    """Rest of the operations or bytes that computing the constants of a graph may take."""

    left: int

    def takes(self, amount: int) -> bool:
        """Take `amount` from what is left, if there is as much."""
        if amount > self.left:
            return False
        self.left -= amount
        return True


def operations_of(
    node: onnx.NodeProto, operands: Sequence[np.ndarray | None], results: Sequence[Value | None]
) -> int:
    """At most what it takes to compute a node: near for operators that tell shapes or make masks,
    far for others.
    """
    read = sum(array.size for array in operands if array is not None)
    written = 0
    for name, value in zip(node.output, results, strict=False):
        if value is not None:
            written += value.elements
        elif name:
            written += read if node.op_type not in _GROWING else _grown(node.op_type, operands)
    first, second = (*operands, None, None)[:2]
    if node.op_type in _LINEAR:
        return read + written
    if node.op_type in _LOOPED:
        return (read + written) * LOOP
    if node.op_type in ("MatMul", "Gemm") and first is not None:
        return read + written * max(first.shape, default=1)
    if node.op_type == "Einsum":
        return written + math.prod(array.size for array in operands if array is not None)
    if node.op_type == "Pad" and second is not None and (second >= 0).all():
        return read + written
    # No more than each number of the attributes (windows, paddings) times what is read times what
    # is written.
    sizes: list[int] = [abs(number) for each in node.attribute for number in (*each.ints, each.i)]
    return (1 + read) * (1 + written) * math.prod(1 + size for size in sizes) * LOOP


def _grown(operator: str, operands: Sequence[np.ndarray | None]) -> int:
    """At most the elements of what an operator writes, by the numbers that it reads."""
    arrays = [array for array in operands if array is not None and array.dtype.kind in "iuf"]
    numbers: list[float] = [
        number
        for array in arrays
        if array.size <= MOST_DIMENSIONS
        for number in array.reshape(-1).tolist()
    ]
    if not all(map(math.isfinite, numbers)):
        return MOST_OPERATIONS
    if operator == "Range" and len(numbers) == 3:
        start, end, step = numbers
        return min(math.ceil(abs((end - start) / step)), MOST_OPERATIONS) if step else 0
    return math.prod(array.size for array in arrays) * math.prod(
        1 + math.ceil(abs(number)) for number in numbers
    )


Operands = tuple[Value | None, ...]
Results = tuple[Value, ...]
Flags = Mapping[str, int]
"""The whole-number attributes of a node that are not zero."""
Rule = Callable[[Operands, Flags], Results]
"""From the operands' types and those attributes to the results' types.

Raises ValueError where shapes do not fit or operands are missing.
"""


def _like_first(operands: Operands, flags: Flags) -> Results:
    first = operands[0]
    assert first is not None
    return (first,)


def _like_scale(operands: Operands, flags: Flags) -> Results:
    """The first operand's shape in the type of the second."""
    first, scale = (*operands, None)[:2]
    assert first is not None
    return (first if scale is None else replace(first, dtype=scale.dtype),)


def _skip_normalization(operands: Operands, flags: Flags) -> Results:
    """The result, mean and 1 / deviation, and the sum that was normalised."""
    first = operands[0]
    assert first is not None
    statistics = Value("", DType.FLOAT32, (*first.shape[:-1], 1))
    return first, statistics, statistics, first


def _fused_matmul(operands: Operands, flags: Flags) -> Results:
    left, right = (value for value in operands[:2] if value is not None)
    first = left.shape[-2:]
    second = right.shape[-2:]
    rows, inner = first[::-1] if "transA" in flags else first
    other, columns = second[::-1] if "transB" in flags else second
    if inner != other:
        raise ValueError(f"{inner} and {other}")
    return (
        Value(
            "", left.dtype, (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), rows, columns)
        ),
    )


def _packed_product(operands: Operands, flags: Flags) -> Results:
    x, weight = (value for value in operands[:2] if value is not None)
    return (replace(x, shape=(*x.shape[:-1], weight.shape[0])),)


def _packed_lookup(operands: Operands, flags: Flags) -> Results:
    table, places, scales = (value for value in operands[:3] if value is not None)
    bits = flags.get("bits", 4)
    if bits not in (2, 4, 8):
        raise ValueError(f"{bits} bits")
    width = table.shape[1] * 8 // bits
    return (Value("", scales.dtype, (*places.shape, width)),)


def _suppression(operands: Operands, flags: Flags) -> Results:
    boxes, scores = (value for value in operands[:2] if value is not None)
    if len(scores.shape) != 3 or boxes.shape != (scores.shape[0], scores.shape[2], 4):
        raise ValueError("boxes are [images, boxes, 4], scores [images, classes, boxes]")
    return (Value("", DType.INT64, (*scores.shape[:2], flags["most"])),)


RULES: dict[tuple[str, str], Rule] = {
    ("autopipe", "NonMaxSuppression"): _suppression,
    **dict.fromkeys(
        (("", name) for name in ("GroupNormalization", "MeanVarianceNormalization")), _like_first
    ),
    ("", "SimplifiedLayerNormalization"): _like_scale,
    **dict.fromkeys(
        (
            ("com.microsoft", name)
            for name in (
                "Gelu",
                "QuickGelu",
                "FastGelu",
                "BiasGelu",
                "RotaryEmbedding",
                "MoE",
                "QMoE",
            )
        ),
        _like_first,
    ),
    ("autopipe", "Bounded"): _like_first,
    ("autopipe", "StopGradient"): _like_first,
    ("com.microsoft", "SkipLayerNormalization"): _skip_normalization,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_normalization,
    ("com.microsoft", "FusedMatMul"): _fused_matmul,
    ("com.microsoft", "MatMulNBits"): _packed_product,
    ("com.microsoft", "GatherBlockQuantized"): _packed_lookup,
}
"""By domain and operator."""


class MisfitError(ModelError):
    """Operands of a node whose shapes do not fit one another, or the node's attributes."""


def told_by_rule(
    node: onnx.NodeProto, operands: Operands, where: str
) -> tuple[Value | None, ...] | None:
    """Types of what a node writes, nameless, None where a result is absent; None where there is no
    rule for it.

    Raises ModelError where the operands' shapes do not fit.
    """
    rule = RULES.get((node.domain, node.op_type))
    if rule is None or not operands or operands[0] is None:
        return None
    try:
        told = rule(operands, {each.name: each.i for each in node.attribute if each.i})
    except (ValueError, IndexError) as error:
        shapes = ", ".join(str(value.shape) for value in operands if value is not None)
        raise MisfitError(f"the shapes {shapes} do not fit: {error}", where=where) from error
    results = itertools.zip_longest(node.output, told[: len(node.output)])
    return tuple(replace(value, name="") if name and value else None for name, value in results)


TYPED_BY = {
    "BatchNormalization": (0, 1),
    "InstanceNormalization": (0, 1),
    "LayerNormalization": (0, 17),
    "RMSNormalization": (1, 23),
}
"""The operand that tells the type of a normalisation's result, where exporters write a scale of
another type than the operand's, and the opset of its schema: ONNX Runtime writes it in models of
older ones.
"""
_CEILING_SINCE = 22
"""The opset since which a pooling with `ceil_mode` has no window that begins in the pads at the
end, by its schema. ONNX Runtime and torch leave this window out in models of older ones, too.
"""
_SEVERAL_TYPES = {"BatchNormalization": 14}
"""The opset since which ONNX itself lets such an operand be of another type."""
Operand = tuple[Value | None, np.ndarray | None]
"""Type and numbers of an operand; (None, None) where it is absent, no numbers where they are not
known.
"""
KNOWN_LIMIT = 4096
"""Elements up to which an operand's numbers are shown to shape inference: those that tell shapes
are few.
"""
_OVER_ROWS = frozenset({"Hardmax", "LogSoftmax", "Softmax"})
_ONE_AXIS = 13
"""Operators that take all axes from `axis` on together below this opset, and one axis since."""
_HASHED = 4
"""Elements that are looked up in the time of one operation."""
RANDOM = frozenset(row.name for row in OPERATORS.values() if row.random)
"""Operators whose result is drawn anew each time: nothing is known of it, and two equal nodes give
different ones.
"""


class Inference:
    """Shape inference and evaluation under the operator sets of one file."""

    def __init__(self, opsets: tuple[tuple[str, int], ...]) -> None:
        self.opsets = opsets
        self.operations = Budget(MOST_OPERATIONS)
        self._types: dict[object, tuple[Value | None, ...]] = {}
        self._results: dict[object, tuple[np.ndarray, ...] | None] = {}

    def types(
        self, node: onnx.NodeProto, operands: tuple[Operand, ...]
    ) -> tuple[Value | None, ...]:
        """Types of the results, None for those that are absent or cannot be told.

        The node's operands are named by position in what is inferred, so names in `operands` do not
        matter. Raises ModelError where the operands' shapes do not fit the operator.
        """
        parts = []
        for value, array in operands:
            content = array.tobytes() if array is not None and array.size <= KNOWN_LIMIT else None
            parts.append(None if value is None else (value.dtype, value.shape, content))
        key = (*form_of(node), *parts)
        if key not in self._types:
            self._types[key] = self._infer(
                _anonymous(node), operands, f"{node.op_type} {node.name!r}"
            )
        return self._types[key]

    def evaluate(
        self,
        node: onnx.NodeProto,
        operands: tuple[np.ndarray | None, ...],
        types: Sequence[Value | None],
    ) -> tuple[np.ndarray, ...] | None:
        """The numbers of results of these `types`; None where the evaluator cannot tell them, or
        takes too long.
        """
        if not self.operations.takes(
            sum(each.size for each in operands if each is not None) // _HASHED
        ):
            return None
        parts = tuple(
            None if each is None else (each.dtype.str, each.shape, content_of(each))
            for each in operands
        )
        key = (*form_of(node), parts)
        if key not in self._results:
            affordable = self.operations.takes(operations_of(node, operands, types))
            self._results[key] = self._run(_anonymous(node), operands) if affordable else None
        return self._results[key]

    def _infer(
        self, node: onnx.NodeProto, operands: tuple[Operand, ...], where: str
    ) -> tuple[Value | None, ...]:
        import onnx
        import onnx.checker
        import onnx.defs
        import onnx.shape_inference

        opsets = dict(self.opsets)
        nothing: tuple[Value | None, ...] = (None,) * len(node.output)
        told = told_by_rule(node, tuple(value for value, _ in operands), where)
        if told is not None:
            for value in filter(None, told):
                shape_of(value.shape, where)
            return told
        if (
            node.op_type == "MaxUnpool"
            and len(operands) > 2
            and operands[0][0]
            and operands[2][1] is not None
        ):
            return (
                replace(operands[0][0], name="", shape=shape_of(operands[2][1].tolist(), where)),
            )
        opset = opsets.get(node.domain, 1)
        typed = (
            TYPED_BY.get(node.op_type)
            if opset < _SEVERAL_TYPES.get(node.op_type, math.inf)
            else None
        )
        try:
            least = typed[1] if typed else _CEILING_SINCE if _rounds_up(node) else opset
            schema = onnx.defs.get_schema(node.op_type, max(opset, least), node.domain)
        except onnx.defs.SchemaError:
            return nothing
        named = zip(node.input, _as_defined(node, operands, typed), strict=True)
        known = [
            (name, value, array) for name, (value, array) in named if name and value is not None
        ]
        try:
            found = onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                {name: type_proto(value) for name, value, _ in known},
                {
                    name: tensor_of(array, value.dtype)
                    for name, value, array in known
                    if array is not None and array.size <= KNOWN_LIMIT
                },
                opset_imports=[
                    onnx.OperatorSetIdProto(domain=name, version=version)
                    for name, version in self.opsets
                ],
            )
        except onnx.shape_inference.InferenceError as error:
            shapes = ", ".join(str(value.shape) for _, value, _ in known)
            reason = str(error).strip().splitlines()[-1].strip()
            raise MisfitError(f"the shapes {shapes} do not fit: {reason}", where=where) from error
        except onnx.checker.ValidationError as error:
            if any(value.dtype is DType.BFLOAT16 for _, value, _ in known):
                return self._in_single(node, operands, where)
            raise ModelError(
                f"not a valid use: {str(error).splitlines()[0]}", where=where
            ) from error
        except (RuntimeError, ValueError, KeyError):
            return nothing
        return tuple(_static(found[name], where) if name in found else None for name in node.output)

    def _in_single(
        self, node: onnx.NodeProto, operands: tuple[Operand, ...], where: str
    ) -> tuple[Value | None, ...]:
        """Types of what a node of bfloat16 writes, as if it had single precision: exporters write
        it below the opset that allows it.
        """
        wide = (
            (replace(value, dtype=DType.FLOAT32), None)
            if value and value.dtype is DType.BFLOAT16
            else (value, array)
            for value, array in operands
        )
        found = self._infer(node, tuple(wide), where)
        return tuple(
            replace(value, dtype=DType.BFLOAT16)
            if value and value.dtype is DType.FLOAT32
            else value
            for value in found
        )

    def _run(
        self, node: onnx.NodeProto, operands: tuple[np.ndarray | None, ...]
    ) -> tuple[np.ndarray, ...] | None:
        first = operands[0] if operands else None
        if (
            node.op_type in _OVER_ROWS
            and dict(self.opsets).get("", 1) < _ONE_AXIS
            and first is not None
            and first.ndim
        ):
            return self._run_over_rows(node, first)
        return self._run_as_is(node, operands)

    def _run_over_rows(self, node: onnx.NodeProto, x: np.ndarray) -> tuple[np.ndarray, ...] | None:
        """Of all axes from `axis` on together, which the evaluator does not do."""
        axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
        row = type(node)(op_type=node.op_type, input=node.input, output=node.output)
        row.attribute.add(name="axis", i=1, type=2)
        found = self._run_as_is(
            row, (x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])),)
        )
        return found and (found[0].reshape(x.shape),)

    def _run_as_is(
        self, node: onnx.NodeProto, operands: tuple[np.ndarray | None, ...]
    ) -> tuple[np.ndarray, ...] | None:
        with np.errstate(all="ignore"):
            results = told_by_formula(node, operands)
            if results is None:
                # ONNX's own evaluator loads every operator there is. Of a node alone it ignores the
                # opset.
                import onnx
                from onnx.reference import ReferenceEvaluator

                named = zip(node.input, operands, strict=True)
                feeds = {name: array for name, array in named if name and array is not None}
                infos = [
                    [onnx.ValueInfoProto(name=name) for name in names]
                    for names in (feeds, node.output)
                ]
                graph = onnx.GraphProto(node=[node], input=infos[0], output=infos[1])
                try:
                    results = (
                        *ReferenceEvaluator(graph, opsets=dict(self.opsets)).run(None, feeds),
                    )
                except Exception:  # noqa: BLE001 - it raises anything; a node it cannot take is simply not folded
                    return None
        arrays = tuple(np.ascontiguousarray(result).reshape(np.shape(result)) for result in results)
        return arrays if all(array.dtype.kind in "biufcV" for array in arrays) else None


def _rounds_up(node: onnx.NodeProto) -> bool:
    """True if a pooling has a last window for the elements that are left."""
    is_pool = node.op_type in ("AveragePool", "LpPool", "MaxPool") and not node.domain
    return is_pool and any(each.name == "ceil_mode" and each.i for each in node.attribute)


def content_of(array: np.ndarray) -> bytes:
    """The bytes of an array, or what tells them from others."""
    content = array.tobytes()
    return content if len(content) <= KNOWN_LIMIT else hashlib.sha256(content).digest()


def form_of(node: onnx.NodeProto) -> tuple[object, ...]:
    """Signature of a node, but for the names of its values: which of them are equal, and which are
    absent.
    """
    places: dict[str, int] = {}
    operands = tuple(places.setdefault(name, len(places)) if name else None for name in node.input)
    attributes = tuple(
        sorted(each.SerializeToString(deterministic=True) for each in node.attribute)
    )
    return node.domain, node.op_type, operands, tuple(map(bool, node.output)), attributes


def _as_defined(
    node: onnx.NodeProto, operands: tuple[Operand, ...], typed: tuple[int, int] | None
) -> tuple[Operand, ...]:
    """Operands as a schema has them, where exporters write others: types of scales (`typed` by an
    operand), scalars with an axis.
    """
    if typed and len(operands) > typed[0] and (like := operands[typed[0]][0]) is not None:
        return tuple(
            (value and replace(value, dtype=like.dtype), array) for value, array in operands
        )
    if node.op_type == "Range" and all(
        array is not None and array.size == 1 for _, array in operands
    ):
        return tuple(
            (value and replace(value, shape=()), array if array is None else array.reshape(()))
            for value, array in operands
        )
    return operands


def _anonymous(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node with values named by position (one name for one value) and nothing else that tells
    it from its like.
    """
    import onnx.helper

    names: dict[str, str] = {}
    found = onnx.NodeProto(
        op_type=node.op_type, domain="" if node.domain == "ai.onnx" else node.domain
    )
    found.input.extend(
        names.setdefault(name, f"i{len(names)}") if name else "" for name in node.input
    )
    found.output.extend(f"o{index}" if name else "" for index, name in enumerate(node.output))
    stated = list(node.attribute)
    if node.op_type == "STFT" and all(each.name != "onesided" for each in stated):
        # The operator's default is 1, that of ONNX's shape inference 0.
        stated.append(onnx.helper.make_attribute("onesided", 1))
    found.attribute.extend(sorted(stated, key=lambda each: each.name))
    return found


def _static(found: onnx.TypeProto, where: str) -> Value | None:
    if not found.HasField("tensor_type"):
        raise ModelError("sequences, optional values and maps are not supported", where=where)
    tensor = found.tensor_type
    if not tensor.HasField("shape") or any(
        not dimension.HasField("dim_value") for dimension in tensor.shape.dim
    ):
        return None
    shape = shape_of([dimension.dim_value for dimension in tensor.shape.dim], where)
    if any(extent < 0 for extent in shape):
        return None
    return Value("", dtype_of(tensor.elem_type, where), shape)


LARGEST = 1 << 26
"""Elements beyond which nothing is computed here."""
MOST_BYTES = 1 << 30
"""Bytes that are held of one graph; what is asked for after them is not known."""


class ConstantFolder:
    """Numbers of a graph's values that depend on no input and no parameter, computed when asked
    for.

    Large ones, such as a causal mask, are not stored in the graph; whoever wants to recognise one
    asks here.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inference = Inference((("", graph.opset),))
        self._room = Budget(MOST_BYTES)
        self._arrays: dict[str, np.ndarray | None] = {
            each.value.name: each.array for each in graph.constants
        }
        self.known = {*self._arrays, ""}
        for node in graph.nodes:
            if (
                node.op not in RANDOM
                and not node.domain
                and node.inputs
                and self.known.issuperset(node.inputs)
            ):
                self.known.update(node.outputs)
        self.known.discard("")

    def array(self, name: str) -> np.ndarray | None:
        """The numbers of a value; None where they are not known, too many, or beyond the
        evaluator.
        """
        if name not in self.known:
            return None
        waiting = [name] if name not in self._arrays else []
        while waiting:
            index = self.graph.producer(waiting[-1])
            assert index is not None, f"{waiting[-1]} is neither a constant nor computed"
            node = self.graph.nodes[index]
            missing = [each for each in node.inputs if each and each not in self._arrays]
            waiting.extend(missing)
            if not missing:
                self._compute(node)
                waiting.pop()
        return self._arrays[name]

    def _compute(self, node: Node) -> None:
        operands = tuple(self._arrays[name] if name else None for name in node.inputs)
        complete = all(
            array is not None for name, array in zip(node.inputs, operands, strict=True) if name
        )
        types = tuple(self.graph.type_of(name) if name else None for name in node.outputs)
        written = [value for value in types if value is not None]
        small = all(value.elements <= LARGEST for value in written)
        computed = complete and small and self._room.takes(sum(value.bytes for value in written))
        results = (
            self.inference.evaluate(node_proto(self.graph, node), operands, types)
            if computed
            else None
        )
        for position, name in enumerate(node.outputs):
            if name:
                self._arrays[name] = None if results is None else results[position]


def node_proto(graph: Graph, node: Node) -> onnx.NodeProto:
    import onnx.helper

    attributes = dict(node.attributes)
    proto = onnx.helper.make_node(
        node.op, node.inputs, node.outputs, name=node.name, domain=node.domain
    )
    if node.op == "ConstantOfShape" and "value" in attributes:
        number = NUMBERS[graph.type_of(node.outputs[0]).dtype]
        attributes.pop("value")
        tensor = onnx.helper.make_tensor("value", number, [1], [node.number("value")])
        proto.attribute.append(onnx.helper.make_attribute("value", tensor))
    proto.attribute.extend(
        onnx.helper.make_attribute(name, value) for name, value in sorted(attributes.items())
    )
    return proto
