"""Functions of one number, applied to each element: activations, powers and logarithms, trigonometry, rounding."""

from __future__ import annotations

from autopipe.ir.ops.elementwise import broadcast
from autopipe.ir.ops.lines import names, spell
from autopipe.ir.ops.row import NotationLine, Operator, Signature, per_result


def _row(name: str, cost: float = 1.0, keeps: tuple[str, ...] = ("0",)) -> Operator:
    return Operator(name, broadcast, "elementwise", per_result(cost), 1.0, keeps)


def _step(name: str) -> Operator:
    """A function whose derivative is zero wherever it has one."""
    return Operator(name, broadcast, "elementwise", per_result(1.0), 0.0)


def per_channel(signature: Signature) -> NotationLine:
    """PRelu's slope: broadcasts from opset 7 on; before, one a channel (axis 1) or one for all."""
    slope = signature.operand(1).shape
    if signature.opset >= 7:
        return broadcast(signature)
    words = names(len(signature.operand(0).shape), "x")
    channels = [words[1] if slope == signature.operand(0).shape[1:2] else "1"]
    return spell([words, channels if slope else []], [words])


ACTIVATION = (
    _row("Abs"),
    _row("Neg", keeps=()),
    _row("Reciprocal", keeps=(">0",)),
    _row("Sqrt", keeps=(">0",)),
    _row("Exp", 4.0, keeps=(">0",)),
    _row("Log", 4.0),
    *(_row(name, 4.0) for name in ("Sin", "Cos", "Sinh", "Cosh", "Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh")),
    _row("Tan", 4.0, keeps=(">0",)),
    _row("Erf", 8.0),
    *(_step(name) for name in ("Ceil", "Floor", "Round", "Sign")),
    _row("Relu", keeps=(">0",)),
    _row("Sigmoid", 4.0, keeps=(">0",)),
    _row("Tanh", 4.0, keeps=(">0",)),
    _row("Gelu", 8.0),
    _row("HardSigmoid", 3.0),
    _row("HardSwish", 4.0),
    _row("LeakyRelu", 2.0),
    Operator("PRelu", per_channel, "elementwise", per_result(2.0), 1.0, keeps=("0", "1")),
    _row("Elu", 5.0),
    _row("Celu", 5.0),
    _row("Selu", 5.0),
    _row("ThresholdedRelu"),
    _row("Shrink", 2.0),
    _row("Softplus", 8.0),
    _row("Softsign", 3.0),
    _row("Mish", 12.0),
    _row("Swish", 5.0),
    _row("SwiGLU", 6.0, keeps=("0", "1", ">0")),  # the gate after Swish is as large as the result
)
