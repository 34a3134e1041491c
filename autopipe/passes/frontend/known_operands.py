"""Check that operands are constant if an operator requires them before execution, for example the
axes of a reduction. Hints name the inputs that the operands are computed from.
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
"""By control-flow operator: the number of leading operands that decide what the operator executes,
and a part of the error message for the case that they are unknown.
"""


def deciding_inputs(name: str, nodes: Sequence[Node], inputs: Inputs) -> tuple[str, ...]:
    """Return the names of the inputs from which the value `name` is computed, if each of them has
    one element and no batch axis, in the order of `inputs`. Return () if the value also depends on
    another input.
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


def input_flags(names: Sequence[str]) -> str:
    """Return the command-line flags with which a user fixes the inputs `names` to numbers."""
    return " ".join(f"--set model.inputs.{name}=NUMBER" for name in names)


def hint_for_control_flow(node: onnx.NodeProto, names: Sequence[str]) -> str:
    """Return the hint for a control-flow operator whose condition or iteration count is unknown.
    `names` are the inputs of one element that it is computed from. Return "" if there are none.
    """
    if not names:
        return ""
    listed = ", ".join(map(repr, names))
    reason = f"{ASKED[node.op_type][1]} {plural(len(names), 'input')} {listed} can be any number"
    return f"{reason}: {input_flags(names)}"


def require_known(
    node: onnx.NodeProto,
    operands: tuple[str, ...],
    known: Container[str],
    settled: Container[str],
    is_input: Callable[[str], bool],
    deciding: Callable[[str], tuple[str, ...]],
    opset: int,
) -> None:
    """Raise ModelError if a node requires the data of an operand before execution, but the operand
    is not constant.

    - `operands` are the node's operands with aliases resolved.
    - `known` are the values whose data are available.
    - `settled` are values without available data that depend on no input. They suffice for an
      operand that only determines shapes, because the file declares these shapes.
    - `deciding` returns the inputs that a value is computed from, if each of them consists of one
      element; otherwise ().
    """
    row = OPERATORS.get(
        node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
    )
    if row is None:
        return
    unused = _ignored_operands(node)
    for index in row.static:
        name = operands[index] if index < len(operands) else ""
        if not name or name in known or index in row.computable or index in unused:
            continue
        if index in row.shaping and name in settled:
            continue
        origin = "is computed while running"
        hint = "make it a constant of the model"
        if is_input(name):
            origin = "is an input"
            hint = f"{hint}, or set its value in model.inputs"
        elif names := deciding(name):
            hint = f"{hint}, or set the inputs that determine it: {input_flags(names)}"
        title = _operand_name(node, index, opset)
        message = f"{title} must be a constant, but {node.input[index]!r} {origin}"
        raise ModelError(message, hint, f"{node.op_type} {node.name!r}")


def _ignored_operands(node: onnx.NodeProto) -> tuple[int, ...]:
    """Return the indices of operands that the node ignores because of its attributes."""
    mode = next((each.s for each in node.attribute if each.name == "mode"), b"constant")
    coordinates = next(
        (each.s for each in node.attribute if each.name == "coordinate_transformation_mode"), b""
    )
    if node.op_type == "Resize" and coordinates != b"tf_crop_and_resize":
        return (1,) if len(node.input) > 2 else ()
    return (2,) if node.op_type == "Pad" and mode != b"constant" else ()


def _operand_name(node: onnx.NodeProto, index: int, opset: int) -> str:
    """Return the name of an operand in ONNX's schema for messages; its index if there is no
    schema.
    """
    import onnx.defs

    try:
        return f"operand {onnx.defs.get_schema(node.op_type, opset).inputs[index].name!r}"
    except (onnx.defs.SchemaError, IndexError):
        return f"operand {index}"
