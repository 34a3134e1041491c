"""Operands whose numbers must be known before running, such as the axes of a reduction."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from autopipe.ir.errors import ModelError
from autopipe.ir.ops import OPERATORS

if TYPE_CHECKING:
    import onnx


def require_known(
    node: onnx.NodeProto,
    operands: tuple[str, ...],
    known: Container[str],
    settled: Container[str],
    is_input: Callable[[str], bool],
    opset: int,
) -> None:
    """Raise ModelError if the numbers of an operand must be known before running and are not.

    `operands` are the node's own with aliases resolved, `known` the values whose numbers are known, `settled` other
    values that depend on no input: shapes that the file states follow from their numbers.
    """
    row = OPERATORS.get(node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}")
    if row is None:
        return
    unused = _unused(node)
    for place in row.static:
        name = operands[place] if place < len(operands) else ""
        if not name or name in known or place in row.computable or place in unused:
            continue
        if place in row.shaping and name in settled:
            continue
        origin, hint = "is computed while running", "make it a constant of the file"
        if is_input(name):
            origin, hint = "is an input", f"{hint}, or give its number in model.inputs"
        title = _operand_name(node, place, opset)
        message = f"{title} must be known before running, and {node.input[place]!r} {origin}"
        raise ModelError(message, hint, f"{node.op_type} {node.name!r}")


def _unused(node: onnx.NodeProto) -> tuple[int, ...]:
    """Return the places of the operands that a node has and that its mode does not read."""
    mode = next((each.s for each in node.attribute if each.name == "mode"), b"constant")
    places = next((each.s for each in node.attribute if each.name == "coordinate_transformation_mode"), b"")
    if node.op_type == "Resize" and places != b"tf_crop_and_resize":
        return (1,) if len(node.input) > 2 else ()
    return (2,) if node.op_type == "Pad" and mode != b"constant" else ()


def _operand_name(node: onnx.NodeProto, place: int, opset: int) -> str:
    """Return the name that ONNX gives an operand."""
    import onnx.defs

    try:
        return f"its operand {onnx.defs.get_schema(node.op_type, opset).inputs[place].name!r}"
    except (onnx.defs.SchemaError, IndexError):
        return f"its operand {place}"
