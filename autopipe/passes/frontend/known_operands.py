"""Operands whose numbers must be known before running, such as the axes of a reduction, and inputs
that tell them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

from autopipe.ir.errors import ModelError
from autopipe.ir.ops import OPERATORS
from autopipe.ir.words import plural

if TYPE_CHECKING:
    import onnx

    from autopipe.ir.graph import Node
    from autopipe.passes.frontend.input_shapes import Inputs

ASKED = {
    "If": (1, "both branches are read, since"),
    "Loop": (2, "the number of iterations is unknown, since"),
}
"""By operator: the number of its first operands that say what it runs, and words for what follows
if they are not known.
"""


def deciding_inputs(name: str, nodes: Sequence[Node], inputs: Inputs) -> tuple[str, ...]:
    """Return the inputs of one number each that a value of `nodes` is computed from, in the order
    of `inputs`.

    Returns none if the value also depends on another input: then these numbers do not tell it.
    """
    sources = {result: node.inputs for node in nodes for result in node.outputs}
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            waiting.extend(sources.get(each, ()))
    batched = {each for each, _ in inputs.batch_axes}
    read = [value for value in inputs.values if value.name in seen]
    if any(value.elements != 1 or value.name in batched for value in read):
        return ()
    return tuple(value.name for value in read)


def settings_of(names: Sequence[str]) -> str:
    """Return the flags that give inputs their numbers."""
    return " ".join(f"--set model.inputs.{name}=NUMBER" for name in names)


def hint_for_control_flow(node: onnx.NodeProto, names: Sequence[str]) -> str:
    """Return the hint for a control flow operator that could not be read, where `names` are the
    inputs of one number each that its condition or number of iterations is computed from; "" if
    there are none.
    """
    if not names:
        return ""
    listed = ", ".join(map(repr, names))
    reason = f"{ASKED[node.op_type][1]} {plural(len(names), 'input')} {listed} can be any number"
    return f"{reason}: {settings_of(names)}"


def require_known(
    node: onnx.NodeProto,
    operands: tuple[str, ...],
    known: Container[str],
    settled: Container[str],
    is_input: Callable[[str], bool],
    deciding: Callable[[str], tuple[str, ...]],
    opset: int,
) -> None:
    """Raise ModelError if the numbers of an operand must be known before running and are not.

    `operands` are the node's own with aliases resolved, `known` the values whose numbers are known,
    `settled` other values that depend on no input: shapes that the file states follow from their
    numbers. `deciding` returns the inputs of one number each that tell a value.
    """
    row = OPERATORS.get(
        node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
    )
    if row is None:
        return
    unused = _unused(node)
    for place in row.static:
        name = operands[place] if place < len(operands) else ""
        if not name or name in known or place in row.computable or place in unused:
            continue
        if place in row.shaping and name in settled:
            continue
        origin = "is computed while running"
        hint = "make it a constant of the file"
        if is_input(name):
            origin = "is an input"
            hint = f"{hint}, or give its number in model.inputs"
        elif names := deciding(name):
            hint = f"{hint}, or give what it is computed from: {settings_of(names)}"
        title = _operand_name(node, place, opset)
        message = f"{title} must be known before running, and {node.input[place]!r} {origin}"
        raise ModelError(message, hint, f"{node.op_type} {node.name!r}")


def _unused(node: onnx.NodeProto) -> tuple[int, ...]:
    """Return the places of the operands that a node has and that its mode does not read."""
    mode = next((each.s for each in node.attribute if each.name == "mode"), b"constant")
    places = next(
        (each.s for each in node.attribute if each.name == "coordinate_transformation_mode"), b""
    )
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
