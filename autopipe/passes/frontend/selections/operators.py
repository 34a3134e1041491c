"""Values whose extent depends on data, given static shapes while a file is read.

`NonZero`, `Compress` and `Unique` choose elements; what is computed of each chosen row alone, as the operators' own
rows tell, is computed for every row that could be chosen, and what puts rows together again leaves out the others:
experts that run on their tokens, images placed into a text, a loss over masked positions. Results and gradients are
those of the file. Where rows are met by an operator that does more than one at a time, the file is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Value
from autopipe.ir.ops.operator import positive
from autopipe.passes.frontend.selections.choice import CHOOSING, choose
from autopipe.passes.frontend.selections.counts import compute_count, cut, cuts, measure
from autopipe.passes.frontend.selections.places import Places, as_rows, put, scattered, taken, taken_of_itself
from autopipe.passes.frontend.selections.rows import ROWS, Rows, Writer
from autopipe.passes.frontend.selections.use import Counted, Held, Packed, Use, is_static

if TYPE_CHECKING:
    import onnx

    from autopipe.passes.frontend.inference import Inference
    from autopipe.passes.frontend.uses import Uses

_MOVED = "Add Cast Concat Expand Flatten Gather Identity Mul Reshape Slice Split Squeeze Sub Transpose Unsqueeze"
_MOVES = frozenset(_MOVED.split())
"""Operators that move places, or add them up."""
_SUMS = frozenset({"Add", "Concat", "Sub"})
"""Operators among these that take what is added as an operand."""
_FILLS = {
    "CumSum": 0.0, "Einsum": 0.0, "Gemm": 0.0, "MatMul": 0.0, "ReduceL1": 0.0, "ReduceL2": 0.0, "ReduceLogSum": 0.0,
    "ReduceLogSumExp": -math.inf, "ReduceMax": -math.inf, "ReduceMean": 0.0, "ReduceMin": math.inf, "ReduceProd": 1.0,
    "ReduceSum": 0.0, "ReduceSumSquare": 0.0,
}  # fmt: skip
"""Numbers in rows that are not chosen, so that operators along the rows pass over them."""
_LOSSES = frozenset({"NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"})
_LEFT_OUT = -100
"""The label that losses leave out, where the node states none."""
_BENIGN = {
    ("Acosh", 0): 2, ("Acos", 0): 0, ("Asin", 0): 0, ("Atanh", 0): 0, ("Cosh", 0): 0, ("Div", 1): 1, ("Exp", 0): 0,
    ("Gather", 1): 0, ("GatherElements", 1): 0, ("GatherND", 1): 0, ("Log", 0): 1, ("LogSoftmax", 0): 0, ("Mod", 1): 1,
    ("NegativeLogLikelihoodLoss", 1): 0, ("Pow", 0): 1, ("Pow", 1): 1, ("Reciprocal", 0): 1, ("ReduceLogSum", 0): 1,
    ("Sinh", 0): 0, ("Softmax", 0): 0, ("SoftmaxCrossEntropyLoss", 1): 0, ("Sqrt", 0): 1, ("Tan", 0): 0,
}  # fmt: skip
"""By operator and operand, a number of which result and gradient are finite: what a row that is not chosen holds need
not be in the function's domain."""
_PER_ROW = frozenset({"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that leave rows and their weights apart."""


class Selections(dict[str, Held]):
    """Facts of each value that has a row for each chosen element, by its name in the file."""

    def __init__(self, nodes: Iterable[onnx.NodeProto], inference: Inference, opset: int, uses: Uses) -> None:
        super().__init__()
        self._inference, self._opset, self._uses = inference, opset, uses
        self._expanded = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Expand" and node.output}
        self._masks: dict[str, str] = {}
        self._followed: dict[object, tuple[list[Value], list[int] | None]] = {}

    def concern(
        self,
        node: onnx.NodeProto,
        operands: tuple[str, ...],
        arrays: Mapping[str, np.ndarray],
        stated: Callable[[str], Value | None],
    ) -> bool:
        """True if a node chooses elements by data, or reads such. `stated` has the file's own types of values."""
        if any(name in self for name in operands):
            return True
        if node.op_type not in CHOOSING or node.domain not in ("", "ai.onnx") or stated(node.output[0]) is not None:
            return False
        return operands[1 if node.op_type == "Compress" else 0] not in arrays

    def made_static(
        self,
        node: onnx.NodeProto,
        operands: tuple[str, ...],
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
    ) -> list[onnx.NodeProto]:
        """The nodes of static shapes that stand for this one. Raises ModelError where there are none."""
        held = tuple(self.get(name) for name in operands)
        write = Writer(node, self._opset)
        use = Use(node, operands, held, types, arrays, self._inference, self._opset, write, self._followed)
        try:
            self._treat(use)
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            raise use.refused() from error
        self.update(use.found)
        return use.write.nodes

    def _treat(self, use: Use) -> None:
        choices = {each.selection for each in use.held if each is not None}
        if use.node.op_type in CHOOSING and not choices:
            choose(use, self._uses, self._expanded, self._masks)
        elif use.node.op_type == "Identity":
            use.found.update((use.node.output[0], each) for each in use.held if each is not None)
        elif use.node.op_type in ("Shape", "Size"):
            measure(use)
        elif any(isinstance(each, Packed) for each in use.held) or cuts(use):
            cut(use)
        elif len(choices) > 1:
            raise use.refused()
        elif not any(isinstance(each, Rows | Places) for each in use.held):
            compute_count(use)
        elif not _reads(use) and not _puts(use) and not _moves(use):
            _compute(use)

    def refused_output(self, name: str) -> ModelError:
        """For a result of the model that is held here."""
        return ModelError(
            f"the shape of output {name!r} cannot be told before running: {self[name].selection.node} chooses its rows "
            "by data",
            hint="let the model give what is computed of them: a sum, or the tensor that they are put into",
        )


def _reads(use: Use) -> bool:
    """Read a static value at chosen places; False where the node does not, or not where it stands."""
    operator, places = use.node.op_type, use.held[1] if len(use.held) > 1 else None
    if operator not in ("Gather", "GatherND") or not isinstance(places, Places):
        return False
    if use.held[0] is not None:
        return _reads_itself(use, places)
    data, is_nd = use.types[use.operands[0]], operator == "GatherND"
    columns = None if use.attribute("batch_dims") else places.columns(is_nd)
    first = 0 if is_nd else positive(use.attribute("axis"), len(data.shape))
    outer = places.type.shape[:-1] if is_nd else places.type.shape
    if columns is None or math.prod(outer) != ROWS:
        return False
    found = taken(use.write, places.selection, columns, data, first)
    if found is None:
        return False
    name, over = found
    type_ = Value("", data.dtype, (*data.shape[:first], *outer, *data.shape[first + len(columns) :]))
    rows = Rows(places.selection, type_, first + places.axis, over, name)
    if outer != (ROWS,):
        rows = replace(rows, value=use.write.reshape(name, rows.shape))
    use.found[use.node.output[0]] = rows
    return True


def _reads_itself(use: Use, places: Places) -> bool:
    """Read of each row what stands at known places; False where the node does not."""
    data, name = use.held[0], ""
    if isinstance(data, Rows) and use.node.op_type == "GatherND" and not use.attribute("batch_dims"):
        data = use.write.whole(data)
        name = taken_of_itself(use.write, data, places)
    if not isinstance(data, Rows) or not name:
        return False
    type_ = Value("", data.type.dtype, (*places.type.shape[:-1], *data.type.shape[places.type.shape[-1] :]))
    use.found[use.node.output[0]] = replace(data, type=type_, value=name)
    return True


def _puts(use: Use) -> bool:
    """Put rows into a static value at chosen places; False where the node does not."""
    operator, write, result = use.node.op_type, use.write, use.node.output[0]
    if operator not in ("ScatterND", "ScatterElements", "Scatter") or use.held[0] is not None:
        return False
    data, places = use.types[use.operands[0]], use.held[1]
    mode = next((each.s.decode(errors="replace") for each in use.node.attribute if each.name == "reduction"), "none")
    if not isinstance(places, Rows | Places) or mode not in ("none", "add"):
        raise use.refused()
    rows, adds = _updates(use, places), mode == "add"
    is_nd = operator == "ScatterND"
    axis = 0 if is_nd else positive(use.attribute("axis"), len(data.shape))
    columns = _columns(places, is_nd, data, axis)
    if columns is not None:
        around = (*data.shape[:axis], *data.shape[axis + len(columns) :])
        fits = math.prod(rows.type.shape) == ROWS * math.prod(around)
        if fits and put(write, rows, columns, data, axis, adds, result):
            return True
    found = as_rows(write, places) if isinstance(places, Places) else places
    scattered(write, "ScatterND" if is_nd else "ScatterElements", data, found, rows, axis, adds, result)
    return True


def _columns(places: Rows | Places, is_nd: bool, data: Value, axis: int) -> tuple[tuple[int, ...], ...] | None:
    """The places of whole rows of the data; None where those are not told by the mask's coordinates alone."""
    if not isinstance(places, Places) or is_nd:
        return places.columns(last=True) if isinstance(places, Places) else None
    rest = [extent for place, extent in enumerate(places.type.shape) if place != places.axis]
    others = [extent for place, extent in enumerate(data.shape) if place != axis]
    return places.columns(last=False) if places.axis == axis and rest == others else None


def _updates(use: Use, places: Rows | Places) -> Rows:
    """The rows that are put there, or a static value with as many."""
    rows = use.held[2]
    if isinstance(rows, Places):
        return as_rows(use.write, rows)
    if isinstance(rows, Rows):
        return rows
    if rows is not None:
        raise use.refused()
    given, axis = use.types[use.operands[2]], places.axis
    name = use.write.ranked(places.selection, use.operands[2], given.shape, axis)
    type_ = Value("", given.dtype, (*given.shape[:axis], ROWS, *given.shape[axis + 1 :]))
    return Rows(places.selection, type_, axis, places.selection.axes, name)


def _moves(use: Use) -> bool:
    """Move or add up places; False where the result is not of that kind."""
    operator, known = use.node.op_type, use.numbers()
    places = [each for each in use.held if isinstance(each, Places)]
    unknown = [name for name, array in zip(use.operands, known, strict=True) if name and array is None]
    if operator not in _MOVES or len(unknown) > len(places) or (operator == "Mul" and len(places) > 1):
        return False
    if operator == "Cast" and use.attribute("to") not in (6, 7):
        return False
    types, axes = use.followed()
    if axes is None:
        return False
    found = []  # Of each term alone, as all these operators are linear.
    for term in range(len(places[0].terms)):
        arrays: list[np.ndarray | None] = []
        for array, each in zip(known, use.held, strict=True):
            if isinstance(each, Places):
                arrays.append(each.terms[term])
            elif array is None or (operator in _SUMS and term > 0):
                arrays.append(None if array is None else np.zeros_like(array))
            else:
                arrays.append(np.where(array == ROWS, 1, array) if isinstance(each, Counted) else array)
        results = use.evaluated(arrays, types)
        if results is None:
            return False
        found.append(results)
    for name, type_, axis, *terms in zip(use.node.output, types, axes, *found, strict=True):
        use.found[name] = Places(places[0].selection, type_, axis, tuple(terms))
    return True


def _compute(use: Use) -> None:
    """Compute each row alone, for all that could be chosen; or along the rows, passing over those that are not."""
    write, operator = use.write, use.node.op_type
    types, axes = use.followed()
    rows = {
        slot: as_rows(write, each) if isinstance(each, Places) else each
        for slot, each in enumerate(use.held)
        if isinstance(each, Rows | Places)
    }
    if axes is None:
        _along(use, rows, types)
        return
    if operator == "Mul" and _weighed(use, types[0], axes[0], rows):
        return
    apart = operator in _PER_ROW and len(rows) == 1
    over = tuple(sorted({axis for each in rows.values() for axis in (*each.over, *(() if apart else each.weighed))}))
    names = list(use.operands)
    for slot, each in rows.items():
        rows[slot] = each if apart else write.placed(write.whole(each), over)
        if (operator, slot) in _BENIGN and not isinstance(use.held[slot], Places) and not _is_power(use):
            rows[slot] = write.filled(rows[slot], _BENIGN[operator, slot])
        names[slot] = rows[slot].value
    first = next(iter(rows.values()))
    _settle(use, names, first.selection.extent(first.over))
    results = [f"{name}/rows" if name else "" for name in use.node.output]
    write.again(names, results)
    weight = first.weight if apart else ""
    if weight and operator == "Cast":
        weight = write.cast(weight, types[0].dtype)
    for name, type_, axis in zip(filter(None, use.node.output), types, axes, strict=True):
        weighed = first.weighed if weight else ()
        use.found[name] = Rows(first.selection, type_, axis, first.over, f"{name}/rows", weight, weighed)


def _is_power(use: Use) -> bool:
    """True for a square or another whole power, which is finite for all numbers."""
    exponent = use.numbers()[1] if use.node.op_type == "Pow" else None
    return exponent is not None and bool(((exponent >= 1) & (exponent == np.floor(exponent))).all())


def _settle(use: Use, names: list[str], count: int) -> None:
    """Replace numbers of rows among the operands by `count`."""
    for slot, (each, array) in enumerate(zip(use.held, use.numbers(), strict=True)):
        if isinstance(each, Counted) and array is not None:
            numbers = np.where(array == ROWS, count, array).reshape(-1).tolist()
            names[slot] = use.write.reshape(use.write.numbers(numbers), array.shape)


def _weighed(use: Use, type_: Value, axis: int, rows: Mapping[int, Rows]) -> bool:
    """Note a product of rows and one number for each that differs along more of the mask's axes: it is multiplied in
    where rows are put together, which leaves fewer. False for another product."""
    if len(rows) < 2:
        return False
    for data, factor in ((rows[0], rows[1]), (rows[1], rows[0])):
        single = math.prod(factor.type.shape) == ROWS and not factor.weight and not data.weight
        if single and data.type.shape == type_.shape and not set(factor.over) <= set(data.over):
            line = use.write.reshape(factor.value, (factor.selection.extent(factor.over),))
            weighed = replace(data, type=type_, axis=axis, weight=line, weighed=factor.over)
            use.found[use.node.output[0]] = weighed
            return True
    return False


def _along(use: Use, rows: Mapping[int, Rows], types: list[Value]) -> None:
    """A node along the rows, to which those that are not chosen are nothing: a sum, a product, a loss."""
    operator, write, names = use.node.op_type, use.write, list(use.operands)
    first, result = next(iter(rows.values())), use.node.output[0]
    if operator == "Reshape" and len(rows) == 1 and first.axis == 0 and len(types[0].shape) == 1:
        _pack(use, first)
        return
    if operator not in {*_FILLS, *_LOSSES} or (operator != "CumSum" and not is_static(types)):
        raise use.refused()
    every = first.selection.axes
    for slot, each in rows.items():
        whole = write.placed(write.whole(each), every)
        if operator in _FILLS:
            whole = write.filled(whole, _nothing(operator, each.type.dtype))
        elif slot == 1:
            whole = write.filled(whole, use.attribute("ignore_index", _LEFT_OUT))
        names[slot] = whole.value
    _settle(use, names, math.prod(first.selection.shape))
    if operator == "CumSum":
        use.found[result] = Rows(first.selection, first.type, first.axis, every, f"{result}/rows")
    write.again(names, [f"{result}/rows"] if operator in ("CumSum", "ReduceMean") else use.node.output)
    if operator in _LOSSES and not use.has("ignore_index"):
        write.state("ignore_index", _LEFT_OUT)
    if operator == "ReduceMean":  # Over all rows so far.
        dtype, count = first.type.dtype, math.prod(first.selection.shape)
        some = write.node(
            "Max", [write.counted(first.selection), write.number(1, DType.INT64)]
        )  # ORT's mean of none: 0
        chosen = write.cast(some, dtype)
        write.node("Mul", [f"{result}/rows", write.node("Div", [write.number(count, dtype), chosen])], result)


def _nothing(operator: str, dtype: DType) -> float:
    number = _FILLS[operator]
    if math.isinf(number) and dtype.is_integer:
        bounds = np.iinfo(dtype.value)
        return float(bounds.max if number > 0 else bounds.min)
    return number


def _pack(use: Use, rows: Rows) -> None:
    """Rows flattened: the chosen ones first, since others are read by their number only."""
    write, selection = use.write, rows.selection
    rows = write.placed(write.whole(rows), selection.axes)
    count = rows.shape[0]
    mask = write.reshape(write.expand(selection.mask, selection.held, selection.shape), (count,))
    packed = write.node("Gather", [rows.value, write.in_order(mask, count)], axis=0)
    flat = (math.prod(rows.shape),)
    type_ = Value("", rows.type.dtype, (math.prod(rows.type.shape),))
    use.found[use.node.output[0]] = Packed(selection, type_, write.reshape(packed, flat), flat)
