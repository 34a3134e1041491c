"""Replacement of sequences of tensors by their tensors while a file is read, because a graph cannot
contain sequences.

Lengths of sequences and positions in them must be constants, as they are in exports of
`torch.split` and `torch.stack`. An Optional is replaced by the tensor or the sequence in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.passes.frontend.elements import replacement_node

if TYPE_CHECKING:
    import onnx

    from autopipe.ir.graph import Value

SEQUENCE_OPERATORS = frozenset(
    {
        "ConcatFromSequence",
        "Optional",
        "OptionalGetElement",
        "OptionalHasElement",
        "SequenceAt",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceErase",
        "SequenceInsert",
        "SequenceLength",
        "SplitToSequence",
    }
)
AXES_OPERANDS_SINCE = 13
"""The first opset in which Split reads sizes, and Squeeze and Unsqueeze read axes, as operands.
Before, they are attributes.
"""
MAX_TENSORS = 1 << 16
"""Maximum number of tensors in all sequences of a file. The limit is needed because a file of a few
bytes can declare a split into 10⁹ parts.
"""


class Sequences(dict[str, tuple[str, ...]]):
    """The names of the tensors in each sequence that has been read, by the name of the sequence. An
    empty Optional is an empty sequence whose name is in `absent`.
    """

    def __init__(self, opset: int) -> None:
        super().__init__()
        self.absent: set[str] = set()
        """Names of empty Optionals."""
        self._stacks: set[str] = set()
        """Names of sequences that consist of the slices of one tensor, NAME/stack, and are only
        concatenated again. They have no tensors here, because the tensor is not sliced.
        """
        self._opset = opset
        self._held = 0

    def handles(self, node: onnx.NodeProto) -> bool:
        """True if a node is a sequence operator or reads a sequence, so that `replace` must be
        called for it.
        """
        standard = node.domain in ("", "ai.onnx")
        return (standard and node.op_type in SEQUENCE_OPERATORS) or any(
            name in self for name in node.input
        )

    def replace(
        self,
        node: onnx.NodeProto,
        operands: tuple[str, ...],
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
    ) -> list[onnx.NodeProto]:
        """Return the nodes that replace a node that reads or writes sequences. The new nodes read
        and write tensors only, with one exception: the parts of a sequence are recorded here if the
        node writes a sequence.

        `operands` are the node's operands with aliases resolved; `types` and `arrays` contain the
        types and known data of tensors. Raises ModelError in these cases:

        - A length or position depends on data, or a position is out of range.
        - The sequences of the file have more than `MAX_TENSORS` tensors.
        - An operator does not accept a sequence, or lacks one.
        """
        where = f"{node.op_type} {node.name!r}"
        result = node.output[0]
        stated = {each.name: each.i for each in node.attribute}
        match node.op_type:
            case "Optional" | "OptionalGetElement" | "OptionalHasElement":
                return self._replace_optional(node, operands, where)
            case "SplitToSequence":
                return self._replace_split(node, operands, types, arrays, stated, where)
            case "SequenceConstruct" | "SequenceEmpty":
                if any(name in self for name in operands):
                    raise ModelError("an operand is a sequence, expected a tensor", where=where)
                self._record(result, operands, where)
                return []
        if not operands or operands[0] not in self or any(name in self for name in operands[1:]):
            raise ModelError(
                "the first operand must be a sequence, and the other operands must be tensors",
                where=where,
            )
        if operands[0] in self._stacks:
            return self._concatenate_stack(
                node, operands[0], types[f"{operands[0]}/stack"].shape, stated
            )
        tensors = self[operands[0]]
        last = len(tensors) - 1
        match node.op_type:
            case "Identity":
                self._record_alias(operands[0], result, where)
            case "SequenceLength":
                return [replacement_node(node, "Constant", [], [result], value_int=len(tensors))]
            case "SequenceAt":
                index = _known_position(operands[1:], arrays, len(tensors), last, where)
                return [replacement_node(node, "Identity", [tensors[index]], [result])]
            case "SequenceErase":
                index = _known_position(operands[1:], arrays, len(tensors), last, where)
                self._record(result, tensors[:index] + tensors[index + 1 :], where)
            case "SequenceInsert":
                index = _known_position(operands[2:], arrays, len(tensors), last + 1, where)
                self._record(result, (*tensors[:index], operands[1], *tensors[index:]), where)
            case "ConcatFromSequence":
                axis = stated.get("axis", 0)
                if not stated.get("new_axis"):
                    return [replacement_node(node, "Concat", tensors, [result], axis=axis)]
                unsqueezed = [f"{result}/{number}" for number in range(len(tensors))]
                nodes = [
                    each
                    for tensor, name in zip(tensors, unsqueezed, strict=True)
                    for each in self._with_numbers(node, "Unsqueeze", tensor, [name], [axis])
                ]
                return [*nodes, replacement_node(node, "Concat", unsqueezed, [result], axis=axis)]
            case _:
                raise ModelError("an operand is a sequence, expected a tensor", where=where)
        return []

    def record_stacked(
        self, origin: onnx.NodeProto, name: str, readers: Sequence[str]
    ) -> list[onnx.NodeProto]:
        """Record the sequence `name`, which consists of the slices of the tensor NAME/stack along
        its axis 0. Return the nodes that slice the tensor.

        `readers` are the operators that read the sequence. If all are ConcatFromSequence, no nodes
        are returned: the tensor is later transposed and reshaped instead of being sliced and
        concatenated.
        """
        if readers and set(readers) == {"ConcatFromSequence"}:
            self._stacks.add(name)
            self[name] = ()
            return []
        return [
            replacement_node(
                origin, "SplitToSequence", [f"{name}/stack"], [name], axis=0, keepdims=0
            )
        ]

    def _concatenate_stack(
        self, node: onnx.NodeProto, name: str, shape: tuple[int, ...], stated: Mapping[str, int]
    ) -> list[onnx.NodeProto]:
        """Return the nodes that replace a ConcatFromSequence of the slices of the tensor NAME/stack
        along its axis 0. They transpose and reshape that tensor, whose shape is `shape`. `stated`
        has the node's attributes.
        """
        source = f"{name}/stack"
        result = node.output[0]
        is_new = bool(stated.get("new_axis"))
        axis = stated.get("axis", 0) % (len(shape) - (not is_new))
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
        if is_new:
            return [replacement_node(node, "Transpose", [source], [result], perm=order)]
        moved = [shape[each] for each in order]
        merged = [*moved[:axis], moved[axis] * moved[axis + 1], *moved[axis + 2 :]]
        return [
            replacement_node(node, "Transpose", [source], [f"{result}/moved"], perm=order),
            replacement_node(node, "Constant", [], [f"{result}/shape"], value_ints=merged),
            replacement_node(node, "Reshape", [f"{result}/moved", f"{result}/shape"], [result]),
        ]

    def _record(self, name: str, tensors: tuple[str, ...], where: str) -> None:
        """Record the sequence `name`. Raises ModelError if the sequences of the file now have too
        many tensors.
        """
        self[name] = tensors
        self._held += len(tensors)
        if self._held > MAX_TENSORS:
            raise ModelError(
                f"the sequences of the model have more than {MAX_TENSORS:,} tensors, which is "
                "not supported",
                where=where,
            )

    def _record_alias(self, source: str, result: str, where: str) -> None:
        """Record `result` as another name of the sequence `source`."""
        self._record(result, self[source], where)
        if source in self.absent:
            self.absent.add(result)

    def _replace_optional(
        self, node: onnx.NodeProto, operands: tuple[str, ...], where: str
    ) -> list[onnx.NodeProto]:
        """Return the nodes that replace an operator on an Optional. Raises ModelError if the
        element of an empty Optional is read.
        """
        source = next(iter(operands), "")
        result = node.output[0]
        is_held = bool(source) and source not in self.absent
        if node.op_type == "OptionalHasElement":
            return [boolean_constant(node, result, is_held)]
        if not is_held and node.op_type == "OptionalGetElement":
            raise ModelError("the operand is an empty Optional, expected a value", where=where)
        if source and source not in self:
            return [replacement_node(node, "Identity", [source], [result])]
        if source:
            self._record_alias(source, result, where)
        else:
            self._record(result, (), where)
            self.absent.add(result)
        return []

    def _replace_split(
        self,
        node: onnx.NodeProto,
        operands: tuple[str, ...],
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
        stated: Mapping[str, int],
        where: str,
    ) -> list[onnx.NodeProto]:
        """Return the nodes that replace a SplitToSequence, and record the sequence. If the node has
        no sizes, each part has size 1, and loses the axis if attribute `keepdims` is 0. Raises
        ModelError if the sizes are unknown or do not add up to that of the axis.
        """
        source = operands[0]
        result = node.output[0]
        axis = stated.get("axis", 0)
        has_sizes = len(operands) > 1 and bool(operands[1])
        if source not in types or (has_sizes and operands[1] not in arrays):
            raise ModelError("the number or the sizes of the parts depend on data", where=where)
        shape = types[source].shape
        if not -len(shape) <= axis < len(shape):
            raise ModelError(
                f"axis {axis} is out of range for the shape {list(shape)}", where=where
            )
        size = shape[axis]
        sizes = arrays[operands[1]] if has_sizes else np.asarray(1)
        if sizes.shape:
            parts = [int(each) for each in sizes.reshape(-1)]
        else:
            part = max(int(sizes), 0)
            starts = range(0, size, part)[: MAX_TENSORS + 1] if part else ()
            parts = [min(part, size - start) for start in starts]
        self._record(result, tuple(f"{result}/{number}" for number in range(len(parts))), where)
        if sum(parts) != size or min(parts, default=0) < 0:
            raise ModelError(
                f"the sizes {sizes.tolist()} do not add up to {size}, the size of axis {axis}",
                where=where,
            )
        if has_sizes or stated.get("keepdims", 1):
            return self._with_numbers(node, "Split", source, self[result], parts, axis)
        rows = [f"{name}/row" for name in self[result]]
        found = self._with_numbers(node, "Split", source, rows, parts, axis)
        for row, name in zip(rows, self[result], strict=True):
            found += self._with_numbers(node, "Squeeze", row, [name], [axis])
        return found

    def _with_numbers(
        self,
        node: onnx.NodeProto,
        operator: str,
        operand: str,
        results: Sequence[str],
        sizes: list[int],
        axis: int = 0,
    ) -> list[onnx.NodeProto]:
        """Return a Split with `sizes`, or a Squeeze or Unsqueeze whose axes are `sizes`. From opset
        `AXES_OPERANDS_SINCE` on, a Constant with these integers precedes it.
        """
        title, attributes = ("split", {"axis": axis}) if operator == "Split" else ("axes", {})
        if self._opset < AXES_OPERANDS_SINCE:
            return [
                replacement_node(node, operator, [operand], results, **attributes, **{title: sizes})
            ]
        held = f"{results[0]}/{title}"
        constant = replacement_node(node, "Constant", [], [held], value_ints=sizes)
        return [constant, replacement_node(node, operator, [operand, held], results, **attributes)]


def boolean_constant(origin: onnx.NodeProto, result: str, value: bool) -> Any:
    """Return a Constant node that writes the boolean scalar `value` as `result`."""
    import onnx

    tensor = onnx.TensorProto(data_type=onnx.TensorProto.BOOL, raw_data=bytes([value]))
    return replacement_node(origin, "Constant", [], [result], value=tensor)


def empty_tensor_nodes(
    origin: onnx.NodeProto, result: str, kind: int, shape: Sequence[int]
) -> list[Any]:
    """Return the nodes that write `result`, a tensor of `shape`, which has no elements. `kind` is
    ONNX's number of the element type.
    """
    import onnx.helper

    size = onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
    number = onnx.TensorProto(data_type=kind, dims=[1], raw_data=bytes(size))
    return [
        replacement_node(origin, "Constant", [], [f"{result}/shape"], value_ints=shape),
        replacement_node(origin, "ConstantOfShape", [f"{result}/shape"], [result], value=number),
    ]


def _known_position(
    operands: tuple[str, ...], arrays: Mapping[str, np.ndarray], length: int, last: int, where: str
) -> int:
    """Return the position in a sequence that `operands[0]` holds, counted from 0; without such an
    operand, `last`, the largest valid position. Raises ModelError if the position depends on data
    or is out of range.
    """
    if not operands or not operands[0]:
        position = last
    elif operands[0] in arrays and arrays[operands[0]].size == 1:
        position = int(arrays[operands[0]].reshape(-1)[0])
    else:
        raise ModelError("the position in a sequence depends on data", where=where)
    if not -length <= position <= last:
        raise ModelError(
            f"position {position} is out of range for a sequence of length {length}", where=where
        )
    return position + length if position < 0 else position
