"""Emission of operators that work element by element."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter


def _infix(symbol: str) -> Emitter:
    """`a + b`, with a known scalar written as a number."""

    def emit(call: Call) -> str:
        left = call.arg(0)
        right = call.scalar(1) or call.arg(1)
        return f"{left} {symbol} {right}"

    return emit


def _unary(function: str) -> Emitter:
    return lambda call: f"{function}({call.arg(0)})"


ELEMENTWISE: dict[str, Emitter] = {
    "Add": _infix("+"),
    "Sub": _infix("-"),
    "Mul": _infix("*"),
    "Relu": _unary("torch.relu"),
    "Tanh": _unary("torch.tanh"),
    "Sigmoid": _unary("torch.sigmoid"),
}
