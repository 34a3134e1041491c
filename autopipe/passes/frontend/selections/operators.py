"""Values whose extent depends on data, given static shapes while a file is read.

`NonZero`, `Compress` and `Unique` choose elements; what is computed of each chosen row alone, as
the operators' own rows tell, is computed for every row that could be chosen, and what puts rows
together again leaves out the others: experts that run on their tokens, images placed into a text, a
loss over masked positions, edges joined with loops. Operators along the rows pass over those that
are not chosen; what reads rows by their number among the chosen reads them with the chosen ones in
front. Results and gradients are those of the file. Where rows of two choices meet, or an operator
takes rows together otherwise, the file is refused.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Value
from autopipe.ir.ops.operator import positive
from autopipe.passes.frontend.inference import RANDOM
from autopipe.passes.frontend.selections.along import across, along, largest, settle
from autopipe.passes.frontend.selections.choice import CHOOSING, choose, choose_first
from autopipe.passes.frontend.selections.counts import (
    FEWEST,
    OF_SHAPES,
    at_run_time,
    compute_count,
    cut,
    cuts,
    measure,
    summed_mask,
)
from autopipe.passes.frontend.selections.lookups import cuts_rows, looked_up, splits_rows
from autopipe.passes.frontend.selections.masks import Masks
from autopipe.passes.frontend.selections.neighbours import neighbours
from autopipe.passes.frontend.selections.places import Places, as_rows, taken, taken_of_itself
from autopipe.passes.frontend.selections.puts import PUTS, puts
from autopipe.passes.frontend.selections.reshaped import joined, of_joined, reshaped
from autopipe.passes.frontend.selections.rows import ROWS, Rows, Selection, Writer
from autopipe.passes.frontend.selections.use import SHAPE_OPERANDS, Counted, Followed, Held, Use

if TYPE_CHECKING:
    import onnx

    from autopipe.passes.frontend.inference import Inference
    from autopipe.passes.frontend.uses import Uses

_MOVED = (
    "Add Cast Concat Expand Flatten Gather Identity Mul Reshape Slice Split Squeeze Sub Transpose "
    "Unsqueeze"
)
_MOVES = frozenset(_MOVED.split())
"""Operators that move places, or add them up."""
_SUMS = frozenset({"Add", "Concat", "Sub"})
"""Operators among these that take what is added as an operand."""
_BENIGN = {
    ("Acosh", 0): 2, ("Acos", 0): 0, ("Asin", 0): 0, ("Atanh", 0): 0, ("Cosh", 0): 0, ("Div", 1): 1, ("Exp", 0): 0,
    ("Gather", 1): 0, ("GatherElements", 1): 0, ("GatherND", 1): 0, ("Log", 0): 1, ("LogSoftmax", 0): 0, ("Mod", 1): 1,
    ("NegativeLogLikelihoodLoss", 1): 0, ("Pow", 0): 1, ("Pow", 1): 1, ("Reciprocal", 0): 1, ("ReduceLogSum", 0): 1,
    ("Sinh", 0): 0, ("Softmax", 0): 0, ("SoftmaxCrossEntropyLoss", 1): 0, ("Sqrt", 0): 1, ("Tan", 0): 0,
}  # fmt: skip
"""By operator and operand, a number of which result and gradient are finite: what a row that is not
chosen holds need not be in the function's domain.
"""
_PER_ROW = frozenset({"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that leave rows and their weights apart."""

_CHOSEN_BY = {**dict.fromkeys(CHOOSING, 0), "Compress": 1, "NonMaxSuppression": 1, "Range": 1}
"""By operator the operand whose data choose."""
_FAILURES = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)


class Selections(dict[str, Held]):
    """Facts of each value that has a row for each chosen element, by its name in the file."""

    def __init__(
        self,
        nodes: Iterable[onnx.NodeProto],
        inference: Inference,
        opset: int,
        uses: Uses,
        bounds: Mapping[str, int],
    ) -> None:
        """`bounds` has the most numbers that there may be in results of Range."""
        super().__init__()
        self._inference = inference
        self._opset = opset
        self._uses = uses
        self._bounds = bounds
        self._masks = Masks(nodes)
        self._sums: dict[str, Counted] = {}
        self._joins: dict[object, Selection] = {}
        self._followed: dict[object, Followed] = {}

    def concern(
        self,
        node: onnx.NodeProto,
        operands: tuple[str, ...],
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
        stated: Callable[[str], Value | None],
    ) -> bool:
        """True if a node chooses elements by data, or reads such. `stated` has the file's own types
        of values.
        """
        if node.domain not in ("", "ai.onnx"):
            return any(name in self for name in operands)
        if any(name in self for name in operands):
            return True
        if node.op_type == "ReduceSum" or any(name in self._sums for name in operands):
            return self._counts(node, operands, types, arrays)
        if node.op_type not in _CHOSEN_BY or stated(node.output[0]) is not None:
            return False
        tells = _CHOSEN_BY[node.op_type]
        return len(operands) > tells and operands[tells] not in arrays

    def _counts(
        self,
        node: onnx.NodeProto,
        operands: tuple[str, ...],
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
    ) -> bool:
        """True if a node makes a shape of how many elements of a mask are true; what numbers are
        that is noted.
        """
        if any(
            operands[slot] in self._sums
            for slot in SHAPE_OPERANDS.get(node.op_type, ())
            if slot < len(operands)
        ):
            return node.op_type != "Slice" or operands[0] not in self._sums
        use = self._use(node, operands, types, arrays)
        with contextlib.suppress(ModelError, *_FAILURES):
            if node.op_type == "ReduceSum":
                summed_mask(use, self._masks)
            elif node.op_type in OF_SHAPES and node.op_type not in FEWEST:
                compute_count(use)
            self._sums.update(
                (name, each) for name, each in use.found.items() if isinstance(each, Counted)
            )
        return False

    def made_static(
        self,
        node: onnx.NodeProto,
        operands: tuple[str, ...],
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
    ) -> list[onnx.NodeProto]:
        """The nodes of static shapes that stand for this one. Raises ModelError where there are
        none.
        """
        use = self._use(node, operands, types, arrays)
        try:
            self._treat(use)
        except _FAILURES as error:
            raise use.refused() from error
        self.update(use.found)
        if (
            node.op_type == "Cast"
            and isinstance(use.held[0], Counted)
            and node.output[0] not in use.found
        ):
            first, second = (each.astype(np.float64) for each in use.held[0].numbers)
            self._sums[node.output[0]] = Counted(use.held[0].selection, (first, second))
        return use.write.nodes

    def _use(
        self,
        node: onnx.NodeProto,
        operands: tuple[str, ...],
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
    ) -> Use:
        held = [self.get(name) for name in operands]
        shapes = SHAPE_OPERANDS.get(node.op_type, ())
        if not any(isinstance(each, Rows | Places) for each in held) and node.op_type in OF_SHAPES:
            shapes = (*shapes, *range(len(held)))
        for slot in shapes:
            if slot < len(held) and held[slot] is None:
                held[slot] = self._sums.get(operands[slot])
        write = Writer(node, self._opset)
        use = Use(
            node,
            operands,
            tuple(held),
            types,
            arrays,
            self._inference,
            self._opset,
            write,
            self._followed,
            self._joins,
        )
        told = [
            of_joined(use, each) if slot in shapes and isinstance(each, Counted) else each
            for slot, each in enumerate(held)
        ]
        return replace(use, held=tuple(told))

    def _treat(self, use: Use) -> None:
        operator = use.node.op_type
        if operator in CHOOSING:
            choose(use, self._uses, self._masks)
        elif operator == "Range" and not any(use.held):
            self._sums[use.operands[1]] = choose_first(use, self._masks, self._bounds)
        elif operator == "Identity" or (operator == "Concat" and len(use.operands) == 1):
            use.found.update((use.node.output[0], each) for each in use.held if each is not None)
        elif operator in ("Shape", "Size"):
            measure(use)
        elif any(isinstance(each, Rows) and each.beside is not None for each in use.held):
            _compute(_aligned(use))
        elif cuts(use):
            cut(use)
        elif not any(rule(use) for rule in _RULES):
            _treat_one(_aligned(use))

    def given(self, name: str) -> list[onnx.NodeProto]:
        """The nodes of a result of the model that is held here: its rows in front, zeros in place
        of those that are not there.
        """
        import onnx.helper

        use = self._use(
            onnx.helper.make_node("Identity", [name], [f"{name}/given"], name=name), (name,), {}, {}
        )
        held = self.pop(name)
        write = use.write
        if isinstance(held, Counted):
            write.node("Identity", [at_run_time(use, name, held)], name)
        else:
            rows = as_rows(write, held) if isinstance(held, Places) else held
            rows = write.filled(rows, 0, rows.selection.axes)
            if rows.beside is not None:
                if rows.selection.first is None:
                    raise use.refused()
                rows = write.filled_beside(rows, 0)
            write.node("Identity", [write.packed(rows).name], name)
        return write.nodes


def _own(use: Use) -> bool:
    """Read of each row what stands at known places; False where the node does not."""
    places = use.held[1] if len(use.held) > 1 else None
    return (
        isinstance(places, Places) and isinstance(use.held[0], Rows) and _reads_itself(use, places)
    )


def _puts_others(use: Use) -> bool:
    """Put rows into rows that are chosen by another mask; False where the node does not."""
    target, *rest = use.held
    if not isinstance(target, Rows | Places) or not any(
        isinstance(each, Rows | Places) for each in rest
    ):
        return False
    if (
        all(each is None or each.selection.key == target.selection.key for each in rest)
        or use.node.op_type not in PUTS
    ):
        return False
    others = _aligned(replace(use, held=(None, *rest)))
    return puts(replace(others, held=(target, *others.held[1:])))


def _aligned(use: Use) -> Use:
    """The same, with all rows held by one mask. Raises ModelError where different elements are
    chosen.
    """
    held = [each for each in use.held if each is not None]
    if len({each.selection.key for each in held}) > 1:
        raise use.refused()
    target = next(
        each for kind in (Places, Rows, Counted) for each in held if isinstance(each, kind)
    ).selection
    told: list[Held | None] = []
    for each in use.held:
        if isinstance(each, Places) and each.selection.shape != target.shape:
            each = as_rows(use.write, each)
        if isinstance(each, Rows):
            each = use.write.expressed(each, target)
        told.append(None if each is None else replace(each, selection=target))
    return replace(use, held=tuple(told))


def _treat_one(use: Use) -> None:
    """A node whose rows are all chosen by one mask."""
    if not any(isinstance(each, Rows | Places) for each in use.held):
        compute_count(use)
    elif not _reads(use) and not puts(use) and not _moves(use):
        _compute(use)


def _reads(use: Use) -> bool:
    """Read a static value at chosen places; False where the node does not, or not where it
    stands.
    """
    operator = use.node.op_type
    places = use.held[1] if len(use.held) > 1 else None
    if operator not in ("Gather", "GatherND") or not isinstance(places, Places):
        return False
    if use.held[0] is not None:
        return False
    data = use.types[use.operands[0]]
    is_nd = operator == "GatherND"
    columns = None if use.attribute("batch_dims") else places.columns(is_nd)
    first = 0 if is_nd else positive(use.attribute("axis"), len(data.shape))
    outer = places.type.shape[:-1] if is_nd else places.type.shape
    if columns is None or math.prod(outer) != ROWS:
        return False
    found = taken(use.write, places.selection, columns, data, first)
    if found is None:
        return False
    name, over = found
    type_ = Value(
        "", data.dtype, (*data.shape[:first], *outer, *data.shape[first + len(columns) :])
    )
    rows = Rows(places.selection, type_, first + places.axis, over, name)
    if outer != (ROWS,):
        rows = replace(rows, value=use.write.reshape(name, rows.shape))
    use.found[use.node.output[0]] = rows
    return True


def _reads_itself(use: Use, places: Places) -> bool:
    """Read of each row what stands at known places; False where the node does not."""
    data = use.held[0]
    name = ""
    if (
        isinstance(data, Rows)
        and use.node.op_type == "GatherND"
        and not use.attribute("batch_dims")
    ):
        data = use.write.whole(data)
        name = taken_of_itself(use.write, data, places)
    if not isinstance(data, Rows) or not name:
        return False
    type_ = Value(
        "", data.type.dtype, (*places.type.shape[:-1], *data.type.shape[places.type.shape[-1] :])
    )
    use.found[use.node.output[0]] = replace(data, type=type_, value=name)
    return True


def _moves(use: Use) -> bool:
    """Move or add up places; False where the result is not of that kind."""
    operator = use.node.op_type
    known = use.numbers()
    places = [each for each in use.held if isinstance(each, Places)]
    unknown = [
        name for name, array in zip(use.operands, known, strict=True) if name and array is None
    ]
    if (
        operator not in _MOVES
        or len(unknown) > len(places)
        or (operator == "Mul" and len(places) > 1)
    ):
        return False
    if operator == "Cast" and use.attribute("to") not in (6, 7):
        return False
    types, axes, beside, _ = use.followed()
    if axes is None or beside:
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
                arrays.append(
                    np.where(array == ROWS, 1, array) if isinstance(each, Counted) else array
                )
        results = use.evaluated(arrays, types)
        if results is None:
            return False
        found.append(results)
    for name, type_, axis, *terms in zip(use.node.output, types, axes, *found, strict=True):
        use.found[name] = Places(places[0].selection, type_, axis, tuple(terms))
    return True


def _compute(use: Use) -> None:
    """Compute each row alone, for all that could be chosen; or along the rows, passing over those
    that are not.
    """
    write = use.write
    operator = use.node.op_type
    types, axes, beside, together = use.followed()
    rows = {
        slot: as_rows(write, each) if isinstance(each, Places) else each
        for slot, each in enumerate(use.held)
        if isinstance(each, Rows | Places)
    }
    if axes is None and any(each.beside is not None for each in rows.values()):
        raise use.refused()
    if axes is None:
        if 0 not in rows or not neighbours(use, rows[0], types[0]):
            along(use, rows, types)
        return
    if operator == "Mul" and not beside and _weighed(use, types[0], axes[0], rows):
        return
    apart = operator in _PER_ROW and len(rows) == 1
    over = tuple(
        sorted(
            {
                axis
                for each in rows.values()
                for axis in (*each.over, *(() if apart else each.weighed))
            }
        )
    )
    if operator in RANDOM or beside:
        over = next(iter(rows.values())).selection.axes
    for slot, each in rows.items():
        rows[slot] = each if apart else write.placed(write.whole(each), over)
        if (
            (operator, slot) in _BENIGN
            and not isinstance(use.held[slot], Places)
            and not _is_power(use)
        ):
            rows[slot] = _benign(write, rows[slot], _BENIGN[operator, slot])
    if together:
        rows.update(across(use, rows, together))
    names = [rows[slot].value if slot in rows else name for slot, name in enumerate(use.operands)]
    first = next(iter(rows.values()))
    settle(use, names, first.selection.extent(first.over))
    results = [f"{name}/rows" if name else "" for name in use.node.output]
    write.again(names, results)
    weight = first.weight if apart else ""
    if weight and operator == "Cast":
        weight = write.cast(weight, types[0].dtype)
    count = math.prod(first.selection.shape)
    weighed = first.weighed if weight else ()
    others = beside or (None,) * len(types)
    for name, type_, axis, other in zip(
        filter(None, use.node.output), types, axes, others, strict=True
    ):
        shape = tuple(
            count if place == other else extent for place, extent in enumerate(type_.shape)
        )
        held = replace(type_, shape=shape)
        use.found[name] = Rows(
            first.selection, held, axis, first.over, f"{name}/rows", weight, weighed, other
        )


def _benign(write: Writer, rows: Rows, number: float) -> Rows:
    """The same rows, with a number in place of what is not chosen."""
    filled = write.filled(rows, number)
    return filled if rows.beside is None else write.filled_beside(filled, number)


def _is_power(use: Use) -> bool:
    """True for a square or another whole power, which is finite for all numbers."""
    exponent = use.numbers()[1] if use.node.op_type == "Pow" else None
    return exponent is not None and bool(((exponent >= 1) & (exponent == np.floor(exponent))).all())


def _weighed(use: Use, type_: Value, axis: int, rows: Mapping[int, Rows]) -> bool:
    """Note a product of rows and one number for each that differs along more of the mask's axes: it
    is multiplied in where rows are put together, which leaves fewer. False for another product.
    """
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


_RULES = (reshaped, joined, largest, cuts_rows, splits_rows, _own, looked_up, _puts_others)
"""Rules for rows beside which there may be others, chosen by another mask, tried in turn."""
