"""Recurrent layers: samples are independent, and devices with some of the hidden units each compute together."""

from __future__ import annotations

from collections.abc import Mapping

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Node
from autopipe.ir.ops.lines import spell
from autopipe.ir.ops.row import NotationLine, Operator, Signature
from autopipe.ir.ops.statistics import Statistic, joint_splits, points
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


def recurrent(signature: Signature) -> NotationLine:
    """`s b i, e gh i, e gh k, e bias, b, e b k, e b h -> s e b h, e b h, e b h`; with layout 1 b goes first.

    e are directions, h hidden units, and k the same units where all of them are read: a device with some of them holds
    the weights whole, since its rows lie apart, gate by gate.
    """
    _check(signature.node)
    batch_first = signature.node.integer("layout") == 1
    state = ["b", "e!", "h&"] if batch_first else ["e!", "b", "h&"]
    words = [
        ["b", "s!", "i!"] if batch_first else ["s!", "b", "i!"],
        ["e!", "gh!", "i!"],
        ["e!", "gh!", "k!"],
        ["e!", "gates!"],
        ["b"],
        [*state[:2], "k!"],
        state,
        ["e!", "peepholes!"],
    ]
    whole = ["b", "s!", "e!", "h&"] if batch_first else ["s!", "e!", "b", "h&"]
    operands = [None if value is None else words[index] for index, value in enumerate(signature.operands)]
    results = [whole, state, state]
    return spell(operands, [None if value is None else results[index] for index, value in enumerate(signature.results)])


def _flops(signature: Signature, space: Space) -> float:
    """Two products a step, direction and gate: of the input and of the state."""
    shape = signature.operand(0).shape
    directions, rows, hidden = signature.operand(2).shape
    return 2.0 * shape[0] * shape[1] * directions * rows * (shape[2] + hidden)


def _statistics(signature: Signature, space: Space, degrees: Mapping[str, int]) -> tuple[Statistic, ...]:
    """All units' outputs before each step but the first; where a GRU resets before its product, what it resets too."""
    axes = joint_splits(space, degrees)
    if not axes:
        return ()
    before_product = signature.node.op == "GRU" and not signature.node.integer("linear_before_reset")
    steps, directions = space.axis("s").extent, space.axis("e").extent
    times = directions * (steps - 1 + steps * before_product)
    size = points(space, degrees, "b") * space.axis("h").extent * signature.operand(2).dtype.itemsize
    operands = tuple(index for index in range(len(signature.operands)) if index != _LENGTHS)
    return (
        Statistic(axes, size, "all_gather", times=times),
        Statistic(axes, size, "reduce_scatter", times=times, backward=True, through=operands),
    )


_LENGTHS = 4
"""The operand that says how many steps each sample has."""

RECURRENT = tuple(
    Operator(name, recurrent, "recurrent", _flops, 2.0, ("0", ">0"), statistics=_statistics) for name in GATES
)
