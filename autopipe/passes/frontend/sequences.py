"""Sequences of tensors, taken apart while a file is read: each is a tuple of the names of the
values in it.

That takes lengths and positions that are known before running, as exporters write them for
`torch.split` and `stack`. An Optional is the tensor or the sequence that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.passes.frontend.elements import made_node

if TYPE_CHECKING:
    import onnx

    from autopipe.ir.graph import Value

SEQUENCE_OPERATORS = frozenset(
    {
        "ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt",
        "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SplitToSequence",
    }
)  # fmt: skip
_AXES_ARE_OPERANDS = 13
"""From this operator set on, Split, Squeeze and Unsqueeze take sizes and axes as operands, before
it as attributes.
"""
MOST_TENSORS = 1 << 16
"""Tensors in all sequences of a file together: a few bytes can spell a split into 10⁹ parts."""


class Sequences(dict[str, tuple[str, ...]]):
    """The names of the values in each sequence that has been read, by the sequence's name; none in
    `absent` ones.
    """

    def __init__(self, opset: int) -> None:
        super().__init__()
        self.absent: set[str] = set()
        """Optionals that hold nothing."""
        self._stacks: set[str] = set()
        """Sequences that are slices of one tensor, and only ever put together again."""
        self._opset = opset
        self._held = 0

    def concern(self, node: onnx.NodeProto) -> bool:
        """True if a node makes, reads or hands on a sequence."""
        standard = node.domain in ("", "ai.onnx")
        return (standard and node.op_type in SEQUENCE_OPERATORS) or any(
            name in self for name in node.input
        )

    def taken_apart(
        self,
        node: onnx.NodeProto,
        operands: tuple[str, ...],
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
    ) -> list[onnx.NodeProto]:
        """The nodes without sequences that stand for this one; its sequence, where it writes one,
        is noted.

        `operands` are the node's own with aliases resolved, `types` and `arrays` hold what is known
        of them. Raises ModelError where a length or a position depends on data, lies outside the
        sequence, where sequences are too long, and where the operator cannot take a sequence.
        """
        where = f"{node.op_type} {node.name!r}"
        result = node.output[0]
        stated = {each.name: each.i for each in node.attribute}
        match node.op_type:
            case "Optional" | "OptionalGetElement" | "OptionalHasElement":
                return self._optional(node, operands, where)
            case "SplitToSequence":
                return self._split(node, operands, types, arrays, stated, where)
            case "SequenceConstruct" | "SequenceEmpty":
                if any(name in self for name in operands):
                    raise ModelError("it cannot take a sequence", where=where)
                self._note(result, operands, where)
                return []
        if not operands or operands[0] not in self or any(name in self for name in operands[1:]):
            raise ModelError("it cannot take a sequence here", where=where)
        if operands[0] in self._stacks:
            return self._put_together(
                node, operands[0], types[f"{operands[0]}/stack"].shape, stated
            )
        tensors = self[operands[0]]
        last = len(tensors) - 1
        match node.op_type:
            case "Identity":
                self._hand_on(operands[0], result, where)
            case "SequenceLength":
                return [made_node(node, "Constant", [], [result], value_int=len(tensors))]
            case "SequenceAt":
                place = _position(operands[1:], arrays, len(tensors), last, where)
                return [made_node(node, "Identity", [tensors[place]], [result])]
            case "SequenceErase":
                place = _position(operands[1:], arrays, len(tensors), last, where)
                self._note(result, tensors[:place] + tensors[place + 1 :], where)
            case "SequenceInsert":
                place = _position(operands[2:], arrays, len(tensors), last + 1, where)
                self._note(result, (*tensors[:place], operands[1], *tensors[place:]), where)
            case "ConcatFromSequence":
                axis = stated.get("axis", 0)
                if not stated.get("new_axis"):
                    return [made_node(node, "Concat", tensors, [result], axis=axis)]
                wide = [f"{result}/{number}" for number in range(len(tensors))]
                lifted = [
                    each
                    for tensor, name in zip(tensors, wide, strict=True)
                    for each in self._with_numbers(node, "Unsqueeze", tensor, [name], [axis])
                ]
                return [*lifted, made_node(node, "Concat", wide, [result], axis=axis)]
            case _:
                raise ModelError("it cannot take a sequence", where=where)
        return []

    def stacked(
        self, origin: onnx.NodeProto, name: str, readers: Sequence[str]
    ) -> list[onnx.NodeProto]:
        """The nodes that make a sequence of the slices of `name`/stack; none where `readers`, the
        operators that read it, only put them together again.
        """
        if readers and set(readers) == {"ConcatFromSequence"}:
            self._stacks.add(name)
            self[name] = ()
            return []
        return [made_node(origin, "SplitToSequence", [f"{name}/stack"], [name], axis=0, keepdims=0)]

    def _put_together(
        self, node: onnx.NodeProto, name: str, shape: tuple[int, ...], stated: Mapping[str, int]
    ) -> list[onnx.NodeProto]:
        """The slices of a tensor along its first axis as one tensor again."""
        source = f"{name}/stack"
        result = node.output[0]
        is_new = bool(stated.get("new_axis"))
        axis = stated.get("axis", 0) % (len(shape) - (not is_new))
        order = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
        if is_new:
            return [made_node(node, "Transpose", [source], [result], perm=order)]
        moved = [shape[place] for place in order]
        extents = [*moved[:axis], moved[axis] * moved[axis + 1], *moved[axis + 2 :]]
        return [
            made_node(node, "Transpose", [source], [f"{result}/moved"], perm=order),
            made_node(node, "Constant", [], [f"{result}/shape"], value_ints=extents),
            made_node(node, "Reshape", [f"{result}/moved", f"{result}/shape"], [result]),
        ]

    def _note(self, name: str, tensors: tuple[str, ...], where: str) -> None:
        self[name] = tensors
        self._held += len(tensors)
        if self._held > MOST_TENSORS:
            raise ModelError(
                f"the file's sequences hold more than {MOST_TENSORS:,} tensors", where=where
            )

    def _hand_on(self, source: str, result: str, where: str) -> None:
        self._note(result, self[source], where)
        if source in self.absent:
            self.absent.add(result)

    def _optional(
        self, node: onnx.NodeProto, operands: tuple[str, ...], where: str
    ) -> list[onnx.NodeProto]:
        source = next(iter(operands), "")
        result = node.output[0]
        is_held = bool(source) and source not in self.absent
        if node.op_type == "OptionalHasElement":
            return [truth(node, result, is_held)]
        if not is_held and node.op_type == "OptionalGetElement":
            raise ModelError("the Optional that it reads holds nothing", where=where)
        if source and source not in self:
            return [made_node(node, "Identity", [source], [result])]
        if source:
            self._hand_on(source, result, where)
        else:
            self._note(result, (), where)
            self.absent.add(result)
        return []

    def _split(
        self,
        node: onnx.NodeProto,
        operands: tuple[str, ...],
        types: Mapping[str, Value],
        arrays: Mapping[str, np.ndarray],
        stated: Mapping[str, int],
        where: str,
    ) -> list[onnx.NodeProto]:
        """A Split into the parts; those of a SplitToSequence without sizes lose the axis unless
        `keepdims`.
        """
        source = operands[0]
        result = node.output[0]
        axis = stated.get("axis", 0)
        sized = len(operands) > 1 and bool(operands[1])
        if source not in types or (sized and operands[1] not in arrays):
            raise ModelError("the number of its parts depends on data", where=where)
        shape = types[source].shape
        if not -len(shape) <= axis < len(shape):
            raise ModelError(f"there is no axis {axis} in {list(shape)}", where=where)
        extent = shape[axis]
        sizes = arrays[operands[1]] if sized else np.asarray(1)
        if sizes.shape:
            parts = [int(each) for each in sizes.reshape(-1)]
        else:
            part = max(int(sizes), 0)
            starts = range(0, extent, part)[: MOST_TENSORS + 1] if part else ()
            parts = [min(part, extent - start) for start in starts]
        self._note(result, tuple(f"{result}/{number}" for number in range(len(parts))), where)
        if sum(parts) != extent or min(parts, default=0) < 0:
            raise ModelError(f"parts of {sizes.tolist()} do not make up {extent}", where=where)
        if sized or stated.get("keepdims", 1):
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
        """A Split by sizes, or a node with axes, behind the constant that holds these where they
        are an operand.
        """
        title, attributes = ("split", {"axis": axis}) if operator == "Split" else ("axes", {})
        if self._opset < _AXES_ARE_OPERANDS:
            return [made_node(node, operator, [operand], results, **attributes, **{title: sizes})]
        held = f"{results[0]}/{title}"
        constant = made_node(node, "Constant", [], [held], value_ints=sizes)
        return [constant, made_node(node, operator, [operand, held], results, **attributes)]


def truth(origin: onnx.NodeProto, result: str, value: bool) -> Any:
    """A Constant that is true or false."""
    import onnx

    tensor = onnx.TensorProto(data_type=onnx.TensorProto.BOOL, raw_data=bytes([value]))
    return made_node(origin, "Constant", [], [result], value=tensor)


def empty(origin: onnx.NodeProto, result: str, kind: int, shape: Sequence[int]) -> list[Any]:
    """The nodes that make a tensor of this type without elements."""
    import onnx.helper

    size = onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
    number = onnx.TensorProto(data_type=kind, dims=[1], raw_data=bytes(size))
    return [
        made_node(origin, "Constant", [], [f"{result}/shape"], value_ints=shape),
        made_node(origin, "ConstantOfShape", [f"{result}/shape"], [result], value=number),
    ]


def _position(
    operands: tuple[str, ...], arrays: Mapping[str, np.ndarray], length: int, last: int, where: str
) -> int:
    """The position that an operand names in a sequence, counted from its start; `last` where there
    is no operand.
    """
    if not operands or not operands[0]:
        place = last
    elif operands[0] in arrays and arrays[operands[0]].size == 1:
        place = int(arrays[operands[0]].reshape(-1)[0])
    else:
        raise ModelError("the position in the sequence depends on data", where=where)
    if not -length <= place <= last:
        raise ModelError(f"there is no position {place} in a sequence of {length}", where=where)
    return place + length if place < 0 else place
