"""Operators whose operands are numbers that depend on n, the number of rows that data select: shape
computations, and operators that expand, reshape or cut tensors to n rows.
"""

from __future__ import annotations

import math

import numpy as np

from autopipe.ir.graph import DType, Value
from autopipe.ir.ops.operator import nonnegative_axis
from autopipe.passes.frontend.dynamic_shapes.domain import (
    WITNESS,
    CountedNumbers,
    Indices,
    SelectedRows,
    Selection,
    replace_size,
    row_axes_of,
)
from autopipe.passes.frontend.dynamic_shapes.indices import write_indices
from autopipe.passes.frontend.dynamic_shapes.mask_roots import MaskRoots
from autopipe.passes.frontend.dynamic_shapes.node_context import (
    NodeContext,
    NodeFacts,
    make_selection,
)
from autopipe.passes.frontend.dynamic_shapes.prefixes import (
    express_by_base_selection,
    limit_selection,
    scaled_prefix,
)
from autopipe.passes.frontend.dynamic_shapes.sizes import (
    MINIMA,
    SIZE_OPERATORS,
    Number,
    SizeArray,
    evaluate_with_sizes,
    multiply_elements,
)

_INTEGER_TYPES = (6, 7)
"""ONNX's numbers of the element types int32 and int64, the types of shapes."""
_MAX_EXPANDED = 1 << 16
"""Maximum number of elements per row of a known array whose expansion to n rows is recorded as
`Indices`.
"""
_N = (0, 1)
"""Coefficients of the polynomial n."""


def compute_shape(context: NodeContext) -> bool:
    """Record the result of a Shape or Size: polynomials in n, the number of rows that data select.
    Return True.
    """
    (fact,) = context.facts
    assert fact is not None
    shape = fact.numbers.shape if isinstance(fact, CountedNumbers) else fact.row_type.shape
    start = context.integer("start")
    end = context.integer("end", len(shape))
    selection, scale, offset = express_by_base_selection(context, fact.selection)
    offsets = np.array(shape, np.int64)
    scales = np.zeros_like(offsets)
    for axis in row_axes_of(fact):
        scales[axis] = scale
        offsets[axis] = offset
    sizes = SizeArray.from_coefficients([offsets, scales])
    if context.node.op_type == "Shape":
        kept = [each[start:end] for each in sizes.coefficients]
        _record_numbers(
            context, context.node.output[0], selection, SizeArray.from_coefficients(kept)
        )
        return True
    total = multiply_elements(sizes)
    _record_numbers(context, context.node.output[0], selection, total)
    return True


def _record_numbers(
    context: NodeContext, name: str, selection: Selection, numbers: SizeArray
) -> None:
    """Record that the result `name` has the polynomials `numbers` in n, the number of rows that
    `selection` selects. If they do not depend on n, write the result as a constant instead.
    """
    if numbers.degree:
        context.results[name] = CountedNumbers(selection, numbers)
        return
    write = context.write
    flat = write.vector(numbers.offset.reshape(-1).astype(np.int64).tolist())
    write.cast(write.reshape(flat, numbers.shape), DType(numbers.dtype.name), name)


def compute_sizes(context: NodeContext) -> bool:
    """Compute a node whose operands are static or numbers that depend on n, the number of rows that
    data select. A result that is not a polynomial in n is computed while running. Return True.
    """
    numbers = context.operand_numbers()
    operator = context.node.op_type
    selection = next(each.selection for each in context.facts if each is not None)
    is_complete = all(
        each is not None for name, each in zip(context.operands, numbers, strict=True) if name
    )
    if operator in ("Expand", "ConstantOfShape"):
        _expand_to_rows(context, numbers[-1], selection)
        return True
    if operator == "Reshape" and numbers[0] is None and isinstance(numbers[1], SizeArray):
        _reshape_to_rows(context, numbers[1])
        return True
    if is_complete and operator == "Range" and _compute_range(context, selection):
        return True
    if is_complete and operator in MINIMA and _compute_minimum(context, selection):
        return True
    found = size_results(context)
    if found is not None:
        for name, each in found.items():
            _record_numbers(context, name, selection, each)
        return True
    names = [
        write_numbers(context, name, each) if isinstance(each, CountedNumbers) else name
        for name, each in zip(context.operands, context.facts, strict=True)
    ]
    context.write.rewrite_node(names, context.node.output)
    return True


def size_results(context: NodeFacts) -> dict[str, SizeArray] | None:
    """Return the results of a shape computation by name, as polynomials in n, the number of rows
    that data select.

    None for an operator that is not in `SIZE_OPERATORS`, for a Cast to a type that is not an
    integer, if an operand is unknown, or if a result is not known to be a polynomial.
    """
    node = context.node
    numbers = context.operand_numbers()
    named = zip(context.operands, numbers, strict=True)
    if node.op_type not in SIZE_OPERATORS or any(name and each is None for name, each in named):
        return None
    if node.op_type == "Cast" and context.integer("to") not in _INTEGER_TYPES:
        return None
    found = evaluate_with_sizes(
        node, numbers, lambda arrays: context.inference.evaluate(node, tuple(arrays), ())
    )
    return None if found is None else dict(zip(node.output, found, strict=True))


def _compute_minimum(context: NodeContext, selection: Selection) -> bool:
    """Record the result of min(n, constants …), where n is the number of rows that `selection`
    selects: it is the number of rows of the selection of its first rows. Return False for a minimum
    of other numbers.
    """
    is_reduction = context.node.op_type == "ReduceMin"
    numbers = context.operand_numbers()[: 1 if is_reduction else None]
    elements: set[tuple[int | float, ...]] = set()
    for each in numbers:
        if isinstance(each, SizeArray):
            elements.update(each.elements())
        elif each is not None:
            elements.update((int(number),) for number in each.flat)
    constants = [int(each[0]) for each in elements if not any(each[1:])]
    others = {each for each in elements if any(each[1:])}
    results = context.evaluate_row(context.operand_numbers_for(WITNESS), ())
    if results is None or results[0].size != 1 or others != {_N}:
        return False
    maximum = min(constants, default=selection.capacity)
    if maximum < 1:
        return False
    if maximum < selection.capacity:
        selection = limit_selection(context, selection, maximum)
    context.results[context.node.output[0]] = CountedNumbers(
        selection, SizeArray.affine(results[0].shape, 1, 0)
    )
    return True


def _reshape_to_rows(context: NodeContext, target: SizeArray) -> None:
    """Write a Reshape of a static value to the shape `target`, one size of which is n, the number
    of rows that data select. Instead of n, the shape has the number that the value's elements fill.
    The file is valid only if n is this number.
    """
    elements = target.elements()
    sizes = [int(each[0]) for each in elements if each != _N]
    if len(sizes) != len(elements) - 1 or any(any(each[1:]) for each in elements if each != _N):
        raise context.unsupported_error()
    others = math.prod(sizes)
    if others < 1 or context.types[context.operands[0]].elements % others:
        raise context.unsupported_error()
    count = context.types[context.operands[0]].elements // others
    shape = context.write.vector([count if each == _N else int(each[0]) for each in elements])
    context.write.rewrite_node([context.operands[0], shape], context.node.output)


def write_numbers(context: NodeContext, name: str, counted: CountedNumbers) -> str:
    """Write numbers that are polynomials in n, computed while running from the mask that selects n
    elements. Return their name: `name` if they are floating-point numbers, which the graph computes
    already.
    """
    numbers = counted.numbers
    if numbers.dtype.kind == "f":
        # A graph that counts in floating-point numbers already computes the value `name`, so no
        # nodes are written.
        return name
    if numbers.dtype.kind != "i":
        raise context.unsupported_error()
    write = context.write
    total, *coefficients = [
        write.reshape(write.vector(each.reshape(-1).tolist()), each.shape)
        for each in reversed(numbers.coefficients)
    ]
    count = write.count_selected(counted.selection)
    for coefficient in coefficients:
        total = write.node("Add", [write.node("Mul", [count, total]), coefficient])
    return write.cast(total, DType(numbers.dtype.name))


def _expand_to_rows(context: NodeContext, target: Number, selection: Selection) -> None:
    """Record the result of an Expand or ConstantOfShape to the shape `target`, one size of which is
    n, the number of rows that data select. All rows are equal, so one row is written, or none if
    the row consists of known integers.
    """
    write = context.write
    result = context.node.output[0]
    operand = context.operands[0] if context.node.op_type == "Expand" else ""
    if not isinstance(target, SizeArray) or (operand and operand not in context.types):
        raise context.unsupported_error()
    if any(any(each[1:]) and each != _N for each in target.elements()):
        raise context.unsupported_error()
    shape = tuple(target.value_at(WITNESS).reshape(-1).tolist())
    if operand:
        shape = tuple(np.broadcast_shapes(shape, context.types[operand].shape))
    if shape.count(WITNESS) != 1 or max(shape) > WITNESS:
        raise context.unsupported_error()
    axis = shape.index(WITNESS)
    row_shape = replace_size(shape, axis, 1)
    array = context.arrays.get(operand)
    is_known_index = array is not None and array.dtype.kind == "i"
    if array is not None and is_known_index and math.prod(row_shape) <= _MAX_EXPANDED:
        zeros = np.zeros(row_shape, array.dtype)
        terms = (np.broadcast_to(array, row_shape), *[zeros] * (len(selection.shape) + 1))
        context.results[result] = Indices(selection, context.types[operand].dtype, axis, terms)
        return
    value = f"{result}/rows"
    write.rewrite_node([*([operand] if operand else []), write.vector(row_shape)], [value])
    dtype = context.types[operand].dtype if operand else _constant_type(context)
    context.results[result] = SelectedRows(selection, Value("", dtype, row_shape), axis, (), value)


def _constant_type(context: NodeContext) -> DType:
    """Return the element type of the result of the ConstantOfShape node. Raises ModelError if it
    cannot be inferred.
    """
    shape = Value("", DType.INT64, (1,))
    (result,) = context.inference.types(context.node, ((shape, np.ones(1, np.int64)),))
    if result is None:
        raise context.unsupported_error()
    return result.dtype


def _compute_range(context: NodeContext, selection: Selection) -> bool:
    """Record the result of a Range from 0 in steps of 1 up to n, the number of rows that
    `selection` selects, or up to `scale * n + offset` if it selects first rows. Return False for
    another Range.
    """
    start, end, step = context.operand_numbers()
    if not isinstance(start, np.ndarray) or not isinstance(step, np.ndarray):
        return False
    if not isinstance(end, SizeArray) or (start.item(), step.item()) != (0, 1):
        return False
    (limit,) = end.elements()
    if limit != _N:
        if selection.first_rows is None or end.degree != 1 or limit[1] < 1:
            return False
        if limit[0] != int(limit[0]) or limit[1] != int(limit[1]):
            return False
        selection = scaled_prefix(context, selection, int(limit[1]), int(limit[0]))
    number_rows(context, selection)
    return True


def number_rows(context: NodeContext, selection: Selection) -> None:
    """Record that the result of a Range numbers the rows that `selection` selects, from 0 on."""
    rank = len(selection.shape)
    # If the first rows are selected, the rank of a row is its coordinate. The coordinate is used,
    # since reading and writing by reordered dimensions support coordinates but not ranks.
    numbered = 1 if selection.first_rows is not None else rank + 1
    terms = tuple(np.array([int(term == numbered)]) for term in range(rank + 2))
    indices = Indices(selection, DType.INT64, 0, terms)
    known = next(each for each in context.operand_numbers() if each is not None)
    result = context.node.output[0]
    if known.dtype == np.int64:
        context.results[result] = indices
        return
    rows = write_indices(context.write, indices)
    dtype = DType(known.dtype.name)
    context.results[result] = SelectedRows(
        selection,
        Value("", dtype, rows.row_type.shape),
        rows.axis,
        rows.over,
        context.write.cast(rows.value, dtype),
    )


def slices_to_count(context: NodeContext) -> bool:
    """True for a Slice whose end depends on the number of rows that a mask selects, and whose first
    operand is static or has rows that another mask selects.
    """
    end = context.fact(2)
    if context.node.op_type != "Slice" or not isinstance(end, CountedNumbers):
        return False
    data = context.fact(0)
    is_other = isinstance(data, SelectedRows) and data.selection.key != end.selection.key
    return data is None or is_other


def slice_to_count(context: NodeContext) -> bool:
    """Write a Slice that keeps the first n rows of a value, where n is the number of true elements
    of a mask that does not select rows of this value. The result has a row per true element: the
    element of rank r (the number of true elements before it) gets row r. Return False for another
    Slice.
    """
    if not slices_to_count(context):
        return False
    write = context.write
    data = context.fact(0)
    end = context.fact(2)
    if isinstance(data, SelectedRows):
        source = write.pack(data)
    else:
        source = context.types[context.operands[0]]
    starts, axes, steps = (context.operand_number(slot) for slot in (1, 3, 4))
    if isinstance(axes, SizeArray) or isinstance(steps, SizeArray):
        raise context.unsupported_error()
    axis = 0 if axes is None else nonnegative_axis(int(axes.reshape(-1)[0]), len(source.shape))
    starts_at_zero = isinstance(starts, np.ndarray) and not starts.any()
    ends_at_n = isinstance(end, CountedNumbers) and end.numbers.elements() == [_N]
    has_steps = steps is not None and bool((steps != 1).any())
    if not starts_at_zero or not ends_at_n or has_steps:
        raise context.unsupported_error()
    if isinstance(data, SelectedRows) and data.axis != axis:
        raise context.unsupported_error()
    assert isinstance(end, CountedNumbers)
    context.results[context.node.output[0]] = write.unpack(end.selection, source, axis)
    return True


def match_mask_count(context: NodeFacts, roots: MaskRoots) -> CountedNumbers | None:
    """Return what is recorded of the result of a ReduceSum if it is the number of true elements of
    a boolean mask, which is cast to integers and summed over all axes. None for another ReduceSum.
    """
    data = context.types.get(context.operands[0])
    root = roots.root(context.operands[0], context.types, context.arrays)
    mask = context.types.get(root)
    axes_array = context.arrays.get(context.operands[1]) if len(context.operands) > 1 else None
    axes = [
        int(each) for node in context.node.attribute if node.name == "axes" for each in node.ints
    ]
    if axes_array is not None:
        axes = axes_array.reshape(-1).tolist()
    if data is None or not data.dtype.is_integer:
        return None
    if mask is None or mask.dtype is not DType.BOOL or not mask.shape:
        return None
    has_unknown_axes = len(context.operands) > 1 and context.operands[1] and axes_array is None
    if has_unknown_axes or (axes and len(axes) < len(data.shape)):
        return None
    if not axes and context.integer("noop_with_empty_axes"):
        return None
    shape = (1,) * len(data.shape) if context.integer("keepdims", 1) else ()
    selection = make_selection(context, mask.name, mask.shape, mask.shape, root)
    return CountedNumbers(selection, SizeArray.affine(shape, 1, 0))
