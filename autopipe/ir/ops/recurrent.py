"""Recurrent layers: samples are independent, everything else stays whole."""

from __future__ import annotations

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Node
from autopipe.ir.ops.lines import spell
from autopipe.ir.ops.row import Line, Operator, Signature
from autopipe.ir.space import Space

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
"""Gates of a cell."""


ACTIVATIONS = {
    "affine", "elu", "hardsigmoid", "leakyrelu", "relu", "scaledtanh", "sigmoid", "softplus", "softsign", "tanh",
    "thresholdedrelu",
}  # fmt: skip
"""Activations of gates, in lower case as their names may be spelled."""


def _check(node: Node) -> None:
    """Raise ModelError for a direction or an activation that ONNX does not define."""
    direction = node.text("direction", "forward")
    unknown = [name for name in node.texts("activations") if name.lower() not in ACTIVATIONS]
    if direction not in ("forward", "reverse", "bidirectional"):
        raise ModelError(f"{node.op} has direction {direction!r}", where=repr(node.name))
    if unknown:
        raise ModelError(f"{node.op} has no activation {unknown[0]!r}", where=repr(node.name))


def recurrent(signature: Signature) -> Line:
    """`s b i, e gh i, e gh h, e bias, b, e b h -> s e b h, e b h` (e: directions); with layout 1 b goes first."""
    _check(signature.node)
    batch_first = signature.node.integer("layout") == 1
    state = ["b", "e!", "h!"] if batch_first else ["e!", "b", "h!"]
    words = [
        ["b", "s!", "i!"] if batch_first else ["s!", "b", "i!"],
        ["e!", "gh!", "i!"],
        ["e!", "gh!", "h!"],
        ["e!", "gates!"],
        ["b"],
        state,
        state,
        ["e!", "peepholes!"],
    ]
    whole = ["b", "s!", "e!", "h!"] if batch_first else ["s!", "e!", "b", "h!"]
    operands = [None if value is None else words[index] for index, value in enumerate(signature.operands)]
    results = [whole, state, state]
    return spell(operands, [None if value is None else results[index] for index, value in enumerate(signature.results)])


def _flops(signature: Signature, space: Space) -> float:
    """Two products a step, direction and gate: of the input and of the state."""
    shape = signature.operand(0).shape
    directions, rows, hidden = signature.operand(2).shape
    return 2.0 * shape[0] * shape[1] * directions * rows * (shape[2] + hidden)


RECURRENT = tuple(Operator(name, recurrent, "recurrent", _flops, 2.0, ("0", ">0")) for name in GATES)
