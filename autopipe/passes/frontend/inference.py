"""Inference of the result types of a node, and evaluation of nodes with constant operands. Both use
the onnx package: its shape inference and its reference evaluator.

`RULES` contains the types of operators that ONNX does not infer. `FORMULAS` computes masks,
positions and angles with numpy, because loading ONNX's evaluator is slower than reading a typical
model. A node is not evaluated if that would require too many operations.
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
    checked_shape,
    dtype_of,
    tensor_proto,
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
"""Operators that numpy evaluates if the node has no attributes. By operator: the function; for each
operand, the permitted numpy type kinds; the index of the first operand from which on all operands
must have the same type.
"""


def evaluate_by_formula(
    node: onnx.NodeProto, operands: Sequence[np.ndarray | None]
) -> tuple[np.ndarray, ...] | None:
    """Return the results of a node that `FORMULAS` can compute from the data `operands`. Returns
    None if the node or the types of its operands have no formula, or if the formula fails.
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
"""Maximum number of operations for evaluating all constants of a graph. It suffices for about ten
masks of 8,192 by 8,192, and takes a few seconds.
"""
LOOP = 256
"""Number of operations that one iteration of a Python loop counts for."""
_WHOLE_ARRAYS = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot
    BitwiseOr BitwiseXor Cast CastLike Ceil Clip Compress Concat ConstantOfShape Cos Cosh CumSum
    DepthToSpace DequantizeLinear Div Equal Exp Expand EyeLike Flatten Floor Gather Greater
    GreaterOrEqual Identity IsInf IsNaN Less LessOrEqual Log LogSoftmax Max Mean Min Mod Mul Neg
    NonZero Not OneHot Or Pow QuantizeLinear Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape
    Round Shape Sigmoid Sign Sin Sinh Size Slice Softmax SpaceToDepth Split Sqrt Squeeze Sub Sum Tan
    Tanh Tile TopK Transpose Trilu Unique Unsqueeze Where Xor
"""
_LINEAR = frozenset(_WHOLE_ARRAYS.split())
"""Operators for which numpy needs a few operations per element that they read or write."""
_LOOPED = frozenset(
    {"Erf", "GatherElements", "GatherND", "Gelu", "ReverseSequence", "ScatterElements", "ScatterND"}
)
"""Operators for which ONNX's evaluator runs a Python loop over elements."""
_GROWING = frozenset({"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Range", "Tile"})
"""Operators whose number of result elements depends on the data of an operand."""


@dataclass(slots=True)
class Budget:
    """The number of operations, bytes or nodes that may still be used while a graph is read."""

    left: int

    def spend(self, amount: int) -> bool:
        """Subtract `amount` from the budget and return True. If less is left, return False and
        subtract nothing.
        """
        if amount > self.left:
            return False
        self.left -= amount
        return True


def bound_operations(
    node: onnx.NodeProto, operands: Sequence[np.ndarray | None], results: Sequence[Value | None]
) -> int:
    """Return an upper bound of the number of operations that evaluating a node takes. The bound is
    tight for operators that compute shapes and masks, and loose for others. `results` contains the
    types of the results, None if unknown.
    """
    read = sum(array.size for array in operands if array is not None)
    written = 0
    for name, value in zip(node.output, results, strict=False):
        if value is not None:
            written += value.elements
        elif name:
            written += (
                read if node.op_type not in _GROWING else _bound_elements(node.op_type, operands)
            )
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
    # For other operators the bound is the product of all integer attributes (for example windows
    # and paddings) and of the numbers of elements that are read and written.
    sizes: list[int] = [abs(number) for each in node.attribute for number in (*each.ints, each.i)]
    return (1 + read) * (1 + written) * math.prod(1 + size for size in sizes) * LOOP


def _bound_elements(operator: str, operands: Sequence[np.ndarray | None]) -> int:
    """Return an upper bound of the number of elements that an operator of `_GROWING` writes."""
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
"""The integer attributes of a node that are not zero, by name."""
Rule = Callable[[Operands, Flags], Results]
"""A function that returns the types of a node's results from the types of its operands and its
integer attributes.

It raises ValueError or IndexError if shapes do not fit or operands are missing.
"""


def _infer_like_first(operands: Operands, flags: Flags) -> Results:
    """Return the type of the first operand as that of the only result."""
    first = operands[0]
    assert first is not None
    return (first,)


def _infer_like_scale(operands: Operands, flags: Flags) -> Results:
    """Return the type of the first operand, with the element type of the second operand (the scale)
    if there is one.
    """
    first, scale = (*operands, None)[:2]
    assert first is not None
    return (first if scale is None else replace(first, dtype=scale.dtype),)


def _infer_skip_normalization(operands: Operands, flags: Flags) -> Results:
    """Return the types of the four results: the normalised tensor, the mean, 1 / standard
    deviation, and the sum that is normalised.
    """
    first = operands[0]
    assert first is not None
    statistics = Value("", DType.FLOAT32, (*first.shape[:-1], 1))
    return first, statistics, statistics, first


def _infer_fused_matmul(operands: Operands, flags: Flags) -> Results:
    """Return the type of the product of two tensors, either of which may be transposed."""
    left, right = (value for value in operands[:2] if value is not None)
    first = left.shape[-2:]
    second = right.shape[-2:]
    rows, inner = first[::-1] if "transA" in flags else first
    other, columns = second[::-1] if "transB" in flags else second
    if inner != other:
        raise ValueError(f"the inner dimensions {inner} and {other} differ")
    return (
        Value(
            "", left.dtype, (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), rows, columns)
        ),
    )


def _infer_packed_matmul(operands: Operands, flags: Flags) -> Results:
    """Return the type of a matmul with a quantised weight of shape [columns of the result, …]."""
    x, weight = (value for value in operands[:2] if value is not None)
    return (replace(x, shape=(*x.shape[:-1], weight.shape[0])),)


def _infer_packed_embedding(operands: Operands, flags: Flags) -> Results:
    """Return the type of an embedding from a quantised table, whose bytes hold several elements
    each.
    """
    table, places, scales = (value for value in operands[:3] if value is not None)
    bits = flags.get("bits", 4)
    if bits not in (2, 4, 8):
        raise ValueError(f"elements have {bits} bits, expected 2, 4 or 8")
    width = table.shape[1] * 8 // bits
    return (Value("", scales.dtype, (*places.shape, width)),)


def _infer_non_max_suppression(operands: Operands, flags: Flags) -> Results:
    """Return the type of the indices that a non-maximum suppression selects."""
    boxes, scores = (value for value in operands[:2] if value is not None)
    if len(scores.shape) != 3 or boxes.shape != (scores.shape[0], scores.shape[2], 4):
        raise ValueError(
            "expected boxes of shape [images, boxes, 4] and scores of shape [images, classes, "
            "boxes]"
        )
    return (Value("", DType.INT64, (*scores.shape[:2], flags["most"])),)


RULES: dict[tuple[str, str], Rule] = {
    ("autopipe", "NonMaxSuppression"): _infer_non_max_suppression,
    **dict.fromkeys(
        (("", name) for name in ("GroupNormalization", "MeanVarianceNormalization")),
        _infer_like_first,
    ),
    ("", "SimplifiedLayerNormalization"): _infer_like_scale,
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
        _infer_like_first,
    ),
    ("autopipe", "Bounded"): _infer_like_first,
    ("autopipe", "StopGradient"): _infer_like_first,
    ("com.microsoft", "SkipLayerNormalization"): _infer_skip_normalization,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _infer_skip_normalization,
    ("com.microsoft", "FusedMatMul"): _infer_fused_matmul,
    ("com.microsoft", "MatMulNBits"): _infer_packed_matmul,
    ("com.microsoft", "GatherBlockQuantized"): _infer_packed_embedding,
}
"""Rule for each operator, by (domain, operator)."""


class MisfitError(ModelError):
    """The shapes of a node's operands do not fit each other or the node's attributes."""


def infer_by_rule(
    node: onnx.NodeProto, operands: Operands, where: str
) -> tuple[Value | None, ...] | None:
    """Return the types of a node's results by `RULES`, with empty names; None for each absent
    result. Returns None if there is no rule for the node.

    Raises MisfitError, naming the node by `where`, if the shapes of the operands do not fit.
    """
    rule = RULES.get((node.domain, node.op_type))
    if rule is None or not operands or operands[0] is None:
        return None
    try:
        told = rule(operands, {each.name: each.i for each in node.attribute if each.i})
    except (ValueError, IndexError) as error:
        shapes = ", ".join(str(value.shape) for value in operands if value is not None)
        raise MisfitError(
            f"the operand shapes {shapes} do not fit the operator: {error}", where=where
        ) from error
    results = itertools.zip_longest(node.output, told[: len(node.output)])
    return tuple(replace(value, name="") if name and value else None for name, value in results)


TYPED_BY = {
    "BatchNormalization": (0, 1),
    "InstanceNormalization": (0, 1),
    "LayerNormalization": (0, 17),
    "RMSNormalization": (1, 23),
}
"""For each normalization whose operands may have several element types: the index of the operand
whose element type the result receives, and the minimum opset of the schema to use. Exporters write
scales of another type than the input, and ONNX Runtime writes these operators in models of older
opsets, too.
"""
_CEILING_SINCE = 22
"""The first opset in which the schema of a pooling with `ceil_mode` omits a window that begins in
the padding at the end. ONNX Runtime and torch omit this window in models of older opsets, too.
"""
_SEVERAL_TYPES = {"BatchNormalization": 14}
"""By operator, the first opset in which ONNX allows the scale to have another type than the
input.
"""
Operand = tuple[Value | None, np.ndarray | None]
"""Type and data of an operand. Both are None if the operand is absent. The data are None if they
are unknown.
"""
KNOWN_LIMIT = 4096
"""Maximum number of elements of an operand whose data are passed to shape inference, since operands
that determine shapes are small. Also the maximum number of bytes that `cached_content` returns.
"""
_OVER_ROWS = frozenset({"Hardmax", "LogSoftmax", "Softmax"})
"""Operators that work over several axes before opset `_ONE_AXIS`."""
_ONE_AXIS = 13
"""The first opset in which the operators of `_OVER_ROWS` work over one axis. Before, they work over
all axes from `axis` on.
"""
_HASHED = 4
"""Number of elements that can be hashed in the time of one operation."""
RANDOM = frozenset(row.name for row in OPERATORS.values() if row.random)
"""Operators that draw random numbers. They are not evaluated, and equal nodes have different
results.
"""


class Inference:
    """Type inference and evaluation of nodes under the opsets of one file. Results are cached, so
    that equal nodes are processed once.
    """

    def __init__(self, opsets: tuple[tuple[str, int], ...]) -> None:
        self.opsets = opsets
        self.operations = Budget(MOST_OPERATIONS)
        self._types: dict[object, tuple[Value | None, ...]] = {}
        self._results: dict[object, tuple[np.ndarray, ...] | None] = {}

    def types(
        self, node: onnx.NodeProto, operands: tuple[Operand, ...]
    ) -> tuple[Value | None, ...]:
        """Return the types of a node's results, from the types and known data of its operands. A
        type is None for a result that is absent or whose type cannot be inferred.

        Nodes that differ only in the names of values share a cache entry. Raises ModelError if the
        shapes of the operands do not fit the operator, or if the node violates the ONNX
        specification.
        """
        parts = []
        for value, array in operands:
            content = array.tobytes() if array is not None and array.size <= KNOWN_LIMIT else None
            parts.append(None if value is None else (value.dtype, value.shape, content))
        key = (*node_key(node), *parts)
        if key not in self._types:
            self._types[key] = self._infer(
                _anonymous_copy(node), operands, f"{node.op_type} {node.name!r}"
            )
        return self._types[key]

    def evaluate(
        self,
        node: onnx.NodeProto,
        operands: tuple[np.ndarray | None, ...],
        types: Sequence[Value | None],
    ) -> tuple[np.ndarray, ...] | None:
        """Return the data of a node's results, whose types are `types`. Returns None if the
        evaluator fails or if the remaining budget of operations does not suffice.
        """
        if not self.operations.spend(
            sum(each.size for each in operands if each is not None) // _HASHED
        ):
            return None
        parts = tuple(
            None if each is None else (each.dtype.str, each.shape, cached_content(each))
            for each in operands
        )
        key = (*node_key(node), parts)
        if key not in self._results:
            affordable = self.operations.spend(bound_operations(node, operands, types))
            self._results[key] = (
                self._evaluate_node(_anonymous_copy(node), operands) if affordable else None
            )
        return self._results[key]

    def _infer(
        self, node: onnx.NodeProto, operands: tuple[Operand, ...], where: str
    ) -> tuple[Value | None, ...]:
        """Return the types of the results, without the cache."""
        import onnx
        import onnx.checker
        import onnx.defs
        import onnx.shape_inference

        opsets = dict(self.opsets)
        nothing: tuple[Value | None, ...] = (None,) * len(node.output)
        told = infer_by_rule(node, tuple(value for value, _ in operands), where)
        if told is not None:
            for value in filter(None, told):
                checked_shape(value.shape, where)
            return told
        if (
            node.op_type == "MaxUnpool"
            and len(operands) > 2
            and operands[0][0]
            and operands[2][1] is not None
        ):
            return (
                replace(
                    operands[0][0], name="", shape=checked_shape(operands[2][1].tolist(), where)
                ),
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
        named = zip(node.input, _operands_for_schema(node, operands, typed), strict=True)
        known = [
            (name, value, array) for name, (value, array) in named if name and value is not None
        ]
        try:
            found = onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                {name: type_proto(value) for name, value, _ in known},
                {
                    name: tensor_proto(array, value.dtype)
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
            raise MisfitError(
                f"the operand shapes {shapes} do not fit the operator: {reason}", where=where
            ) from error
        except onnx.checker.ValidationError as error:
            if any(value.dtype is DType.BFLOAT16 for _, value, _ in known):
                return self._infer_as_float32(node, operands, where)
            raise ModelError(
                f"the node violates the ONNX specification: {str(error).splitlines()[0]}",
                where=where,
            ) from error
        except (RuntimeError, ValueError, KeyError):
            return nothing
        return tuple(
            _static_type(found[name], where) if name in found else None for name in node.output
        )

    def _infer_as_float32(
        self, node: onnx.NodeProto, operands: tuple[Operand, ...], where: str
    ) -> tuple[Value | None, ...]:
        """Return the result types of a node on bfloat16, inferred as if it were float32. Exporters
        write bfloat16 in opsets that do not allow the type for the operator.
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

    def _evaluate_node(
        self, node: onnx.NodeProto, operands: tuple[np.ndarray | None, ...]
    ) -> tuple[np.ndarray, ...] | None:
        """Return the data of the results; None if the node cannot be evaluated."""
        first = operands[0] if operands else None
        if (
            node.op_type in _OVER_ROWS
            and dict(self.opsets).get("", 1) < _ONE_AXIS
            and first is not None
            and first.ndim
        ):
            return self._evaluate_over_axes(node, first)
        return self._evaluate_as_is(node, operands)

    def _evaluate_over_axes(
        self, node: onnx.NodeProto, x: np.ndarray
    ) -> tuple[np.ndarray, ...] | None:
        """Return the result of an operator of `_OVER_ROWS` on `x`, over all axes from attribute
        `axis` on, which ONNX's evaluator does not support.
        """
        axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
        row = type(node)(op_type=node.op_type, input=node.input, output=node.output)
        row.attribute.add(name="axis", i=1, type=2)
        found = self._evaluate_as_is(
            row, (x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])),)
        )
        return found and (found[0].reshape(x.shape),)

    def _evaluate_as_is(
        self, node: onnx.NodeProto, operands: tuple[np.ndarray | None, ...]
    ) -> tuple[np.ndarray, ...] | None:
        """Return the data of the results by `FORMULAS` or by ONNX's evaluator; None if the
        evaluation fails or yields strings or objects.
        """
        with np.errstate(all="ignore"):
            results = evaluate_by_formula(node, operands)
            if results is None:
                # The import is here because it is slow: ONNX's evaluator imports all operators. The
                # node is wrapped in a graph because the evaluator ignores the opset of a single
                # node.
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
                # The evaluator raises exceptions of any class, so all of them are caught. The node
                # then stays in the graph, and the program computes its result.
                except Exception:  # noqa: BLE001
                    return None
        arrays = tuple(np.ascontiguousarray(result).reshape(np.shape(result)) for result in results)
        return arrays if all(array.dtype.kind in "biufcV" for array in arrays) else None


def _rounds_up(node: onnx.NodeProto) -> bool:
    """True if a node is a pooling that rounds the number of windows up (ceil_mode = 1)."""
    is_pool = node.op_type in ("AveragePool", "LpPool", "MaxPool") and not node.domain
    return is_pool and any(each.name == "ceil_mode" and each.i for each in node.attribute)


def cached_content(array: np.ndarray) -> bytes:
    """Return the bytes of an array as part of a cache key; if they are more than `KNOWN_LIMIT`,
    their SHA-256.
    """
    content = array.tobytes()
    return content if len(content) <= KNOWN_LIMIT else hashlib.sha256(content).digest()


def node_key(node: onnx.NodeProto) -> tuple[object, ...]:
    """Return a key of a node that does not depend on the names of its values. The key has the
    operator, the attributes, which operands are equal, and which operands and results are absent.
    """
    places: dict[str, int] = {}
    operands = tuple(places.setdefault(name, len(places)) if name else None for name in node.input)
    attributes = tuple(
        sorted(each.SerializeToString(deterministic=True) for each in node.attribute)
    )
    return node.domain, node.op_type, operands, tuple(map(bool, node.output)), attributes


def _operands_for_schema(
    node: onnx.NodeProto, operands: tuple[Operand, ...], typed: tuple[int, int] | None
) -> tuple[Operand, ...]:
    """Return the operands in the form that ONNX's schema requires, because exporters also write
    other forms. All operands of a normalization get the element type of one of them, whose index is
    `typed[0]`; `typed` is None for other operators. Operands of Range with one element become
    scalars.
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


def _anonymous_copy(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a copy of the node without its name and metadata. Its values are named by position;
    equal operands have equal names.
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
        # The default of attribute `onesided` is 1 in the operator's definition, but 0 in ONNX's
        # shape inference. The attribute is therefore written explicitly, so that the inferred shape
        # is correct.
        stated.append(onnx.helper.make_attribute("onesided", 1))
    found.attribute.extend(sorted(stated, key=lambda each: each.name))
    return found


def _static_type(found: onnx.TypeProto, where: str) -> Value | None:
    """Return the inferred type as a Value without a name; None if its shape is not static. Raises
    ModelError for a type other than a tensor.
    """
    if not found.HasField("tensor_type"):
        raise ModelError(
            "the result is a sequence, an Optional or a map, which is not supported here",
            where=where,
        )
    tensor = found.tensor_type
    if not tensor.HasField("shape") or any(
        not dimension.HasField("dim_value") for dimension in tensor.shape.dim
    ):
        return None
    shape = checked_shape([dimension.dim_value for dimension in tensor.shape.dim], where)
    if any(extent < 0 for extent in shape):
        return None
    return Value("", dtype_of(tensor.elem_type, where), shape)


LARGEST = 1 << 26
"""Maximum number of elements of a value that a `ConstantFolder` computes."""
MOST_BYTES = 1 << 30
"""Maximum number of bytes of all values that one `ConstantFolder` computes."""


class ConstantFolder:
    """Computes data of values of a graph that depend on no input and no parameter.

    The graph does not store large values of this kind, for example a causal mask. Passes use this
    class to recognise them. Data are computed at the first request and kept.
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
        """Return the data of the value `name`. Returns None if the data depend on inputs or
        parameters, are too large, or cannot be evaluated.
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
        """Store the data of the node's results, whose operands have been computed; None if they are
        not computable.
        """
        operands = tuple(self._arrays[name] if name else None for name in node.inputs)
        complete = all(
            array is not None for name, array in zip(node.inputs, operands, strict=True) if name
        )
        types = tuple(self.graph.type_of(name) if name else None for name in node.outputs)
        written = [value for value in types if value is not None]
        small = all(value.elements <= LARGEST for value in written)
        computed = complete and small and self._room.spend(sum(value.bytes for value in written))
        results = (
            self.inference.evaluate(node_proto(self.graph, node), operands, types)
            if computed
            else None
        )
        for position, name in enumerate(node.outputs):
            if name:
                self._arrays[name] = None if results is None else results[position]


def node_proto(graph: Graph, node: Node) -> onnx.NodeProto:
    """Return a node of a graph as ONNX's NodeProto."""
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
