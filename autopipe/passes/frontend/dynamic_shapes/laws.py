"""The laws of dynamic shapes: for each class of operators, a sequence of functions that derive the
facts of a node's results from the facts of its operands. A fact is what is recorded of a value
whose shape or elements depend on data.

A law returns False if it does not apply to the node; then it has recorded no fact. The laws of a
class are tried in order: special cases that keep more precise facts come first. An operator that no
class lists is treated as one that computes rows one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autopipe.passes.frontend.dynamic_shapes.domain import (
    CountedNumbers,
    Fact,
    Indices,
    SelectedRows,
    Selection,
)
from autopipe.passes.frontend.dynamic_shapes.gathers import (
    gather_by_rank,
    gather_from_static,
    gather_own_elements,
    slice_rows,
    split_rows,
)
from autopipe.passes.frontend.dynamic_shapes.indices import write_indices
from autopipe.passes.frontend.dynamic_shapes.masked_reductions import reduce_rows, sort_rows
from autopipe.passes.frontend.dynamic_shapes.node_context import NodeContext
from autopipe.passes.frontend.dynamic_shapes.regrouping import join_rows, regroup_rows
from autopipe.passes.frontend.dynamic_shapes.row_wise import compute_indices, compute_rows
from autopipe.passes.frontend.dynamic_shapes.scatters import scatter
from autopipe.passes.frontend.dynamic_shapes.size_operators import (
    compute_sizes,
    slice_to_count,
)
from autopipe.passes.frontend.dynamic_shapes.windows import compute_windows

Law = Callable[[NodeContext], bool]
"""A function that records the facts of a node's results (what is known of values whose shape
depends on data) and writes nodes that compute them. It returns False if it does not apply to the
node.
"""


@dataclass(frozen=True, slots=True)
class OperatorClass:
    """Operators to which the same laws apply: functions that write a node with static shapes."""

    name: str
    operators: frozenset[str]
    before_alignment: tuple[Law, ...] = ()
    """Laws that also apply if different masks select the rows of the operands. They are tried
    before `laws`. A law is a function that writes a node with static shapes.
    """
    laws: tuple[Law, ...] = ()
    """Laws (functions that write a node with static shapes) that apply if one mask selects the rows
    of all operands. `compute_rows` and `reduce_rows` are tried after them.
    """
    combines_selections: bool = False
    """True for scatters, whose updates may be selected by another selection than their target."""


ROW_WISE = OperatorClass("row-wise", frozenset())


def _operator_class(
    name: str, operators: str, *laws: Law, before: tuple[Law, ...] = ()
) -> OperatorClass:
    """Return the operator class `name` of the space-separated `operators`. `before` are the laws
    (functions that write a node with static shapes) that are tried before the operands are
    expressed in terms of one mask, `laws` those tried after it.
    """
    return OperatorClass(name, frozenset(operators.split()), before, laws)


OPERATOR_CLASSES: tuple[OperatorClass, ...] = (
    _operator_class("reshape", "Flatten Reshape", compute_indices, before=(regroup_rows,)),
    _operator_class("concatenation", "Concat", compute_indices, before=(join_rows,)),
    _operator_class("sort", "TopK", before=(sort_rows,)),
    _operator_class("slice", "Slice", compute_indices, before=(slice_to_count, slice_rows)),
    _operator_class("split", "Split", compute_indices, before=(split_rows,)),
    _operator_class(
        "gather", "Gather", gather_from_static, compute_indices, before=(gather_by_rank,)
    ),
    _operator_class(
        "gather by position",
        "GatherND",
        gather_from_static,
        before=(gather_own_elements, gather_by_rank),
    ),
    OperatorClass(
        "scatter",
        frozenset({"Scatter", "ScatterElements", "ScatterND"}),
        laws=(scatter,),
        combines_selections=True,
    ),
    _operator_class(
        "affine", "Add Cast Expand Mul Squeeze Sub Transpose Unsqueeze", compute_indices
    ),
    _operator_class("window", "Conv ConvTranspose MaxPool Pad", compute_rows, compute_windows),
)
"""The operator classes that have laws (functions that write a node with static shapes) of their
own.
"""
CLASS_OF = {operator: each for each in OPERATOR_CLASSES for operator in each.operators}
"""The operator class of each operator that has one, by operator."""


def apply_laws(context: NodeContext) -> None:
    """Write a node that reads selected rows (rows whose mask element is true) with static shapes,
    and record the facts of its results: what is known of their rows. The first law (rule) of the
    node's operator that applies is used. Raises ModelError if none does.
    """
    operator_class = CLASS_OF.get(context.node.op_type, ROW_WISE)
    has_pairs = any(
        isinstance(each, SelectedRows) and each.pair_axis is not None for each in context.facts
    )
    if has_pairs:
        _apply_first((compute_rows, reduce_rows), align_selections(context))
        return
    if any(law(context) for law in operator_class.before_alignment):
        return
    if operator_class.combines_selections and _apply_across_selections(context, operator_class):
        return
    context = align_selections(context)
    if not any(isinstance(each, Indices | SelectedRows) for each in context.facts):
        compute_sizes(context)
        return
    _apply_first((*operator_class.laws, compute_rows, reduce_rows), context)


def _apply_first(laws: tuple[Law, ...], context: NodeContext) -> None:
    """Apply the first of `laws` (functions that return whether they apply) that applies to the
    node. Raises ModelError if none does.
    """
    if not any(law(context) for law in laws):
        raise context.unsupported_error()


def _apply_across_selections(context: NodeContext, operator_class: OperatorClass) -> bool:
    """Apply the laws of a scatter whose target has rows that one mask selects, and whose indices or
    updates have rows that another mask selects. Return False for another scatter, and if no law
    applies.
    """
    target, *others = context.facts
    if not isinstance(target, Indices | SelectedRows):
        return False
    if not any(isinstance(each, Indices | SelectedRows) for each in others):
        return False
    if all(each is None or each.selection.key == target.selection.key for each in others):
        return False
    others_aligned = align_selections(replace(context, facts=(None, *others)))
    context = replace(context, facts=(target, *others_aligned.facts[1:]))
    return any(law(context) for law in operator_class.laws)


def align_selections(context: NodeContext) -> NodeContext:
    """Return the context with the facts of all operands (what is recorded of operands whose shape
    depends on data) expressed in terms of one mask. Raises ModelError if data select the rows of
    the operands by masks with different elements.
    """
    facts = [each for each in context.facts if each is not None]
    if len({each.selection.key for each in facts}) > 1:
        raise context.unsupported_error()
    kinds = (Indices, SelectedRows, CountedNumbers)
    selection = next(each.selection for kind in kinds for each in facts if isinstance(each, kind))
    return replace(
        context, facts=tuple(_align_fact(context, each, selection) for each in context.facts)
    )


def _align_fact(context: NodeContext, fact: Fact | None, selection: Selection) -> Fact | None:
    """Return the fact of an operand, what is recorded of its rows, in terms of `selection`. The
    mask of `selection` has the same elements as the operand's mask, but may divide them into other
    dimensions. None for a static operand.
    """
    if isinstance(fact, Indices) and fact.selection.shape != selection.shape:
        fact = write_indices(context.write, fact)
    if isinstance(fact, SelectedRows):
        return context.write.reexpress(fact, selection)
    return None if fact is None else replace(fact, selection=selection)
