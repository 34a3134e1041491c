"""Emission of functions of one number."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter, number
from autopipe.backends.torch.emission.elementwise import unary


def _gelu(call: Call) -> str:
    approximate = call.choice("approximate", "none", ("none", "tanh"))
    return f'F.gelu({call.arg(0)}, approximate="tanh")' if approximate == "tanh" else f"F.gelu({call.arg(0)})"


def _hard_sigmoid(call: Call) -> str:
    if (call.stated("alpha", 0.2), call.stated("beta", 0.5)) == (number(1 / 6), "0.5"):
        return f"F.hardsigmoid({call.arg(0)})"
    return f"torch.clamp({call.stated('alpha', 0.2)} * {call.arg(0)} + {call.stated('beta', 0.5)}, 0.0, 1.0)"


def _prelu(call: Call) -> str:
    data, slope = call.arg(0), call.operand(1)
    channels = call.operand(0).shape[1:2]
    spread = channels + (1,) * (len(call.operand(0).shape) - 2)
    if call.opset < 7 or (channels and (slope.elements == 1 or slope.shape == spread)):
        return f"F.prelu({data}, {call.arg(1)}.reshape(-1))"
    return f"torch.where({data} < 0, {data} * {call.arg(1)}, {data})"


def _elu(function: str, default: float) -> Emitter:
    return lambda call: f"{function}({call.arg(0)}, {call.stated('alpha', default)})"


def _selu(call: Call) -> str:
    if call.node.has("alpha") or call.node.has("gamma"):
        alpha, gamma = call.stated("alpha", 1.6732632), call.stated("gamma", 1.050701)
        return f"{gamma} * F.elu({call.arg(0)}, {alpha})"
    return f"F.selu({call.arg(0)})"


def _thresholded_relu(call: Call) -> str:
    return f"F.threshold({call.arg(0)}, {call.stated('alpha', 1.0)}, 0.0)"


def _shrink(call: Call) -> str:
    return f"operators.shrink({call.arg(0)}, {call.stated('lambd', 0.5)}, {call.stated('bias', 0.0)})"


def _swish(call: Call) -> str:
    alpha, data = call.stated("alpha", 1.0), call.arg(0)
    return f"F.silu({data})" if alpha == "1.0" else f"{data} * torch.sigmoid({alpha} * {data})"


def _swiglu(call: Call) -> str:
    return f"{_swish(call)} * {call.arg(1)}"


_TORCH = {
    "Abs": "abs", "Reciprocal": "reciprocal", "Sqrt": "sqrt", "Exp": "exp", "Log": "log",
    "Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin", "Acos": "acos", "Atan": "atan",
    "Sinh": "sinh", "Cosh": "cosh", "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh", "Erf": "erf",
    "Ceil": "ceil", "Floor": "floor", "Round": "round", "Sign": "sign",
    "Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh",
}  # fmt: skip

ACTIVATION: dict[str, Emitter] = {
    **{name: unary(f"torch.{function}") for name, function in _TORCH.items()},
    "Neg": lambda call: f"-{call.arg(0)}",
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": unary("F.hardswish"),
    "LeakyRelu": lambda call: f"F.leaky_relu({call.arg(0)}, {call.stated('alpha', 0.01)})",
    "PRelu": _prelu,
    "Elu": _elu("F.elu", 1.0),
    "Celu": _elu("F.celu", 1.0),
    "Selu": _selu,
    "ThresholdedRelu": _thresholded_relu,
    "Shrink": _shrink,
    "Softplus": unary("F.softplus"),
    "Softsign": unary("F.softsign"),
    "Mish": unary("F.mish"),
    "Swish": _swish,
    "SwiGLU": _swiglu,
}
