"""Activations that recurrent layers of ONNX name for their gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]

_PLAIN: dict[str, Activation] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softsign": F.softsign,
    "softplus": F.softplus,
}
_DEFAULTS = {
    "affine": (1.0, 0.0),
    "leakyrelu": (0.01, None),
    "thresholdedrelu": (1.0, None),
    "scaledtanh": (1.0, 1.0),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0, None),
}
"""alpha and beta by activation; None where it takes none."""


def activation_named(name: str, alphas: Iterator[float], betas: Iterator[float]) -> Activation:
    """The activation called `name` in lower case; the next of `alphas` and `betas` are its parameters if it has any.

    Raises ValueError for a name that ONNX does not define.
    """
    if name in _PLAIN:
        return _PLAIN[name]
    if name not in _DEFAULTS:
        raise ValueError(f"no activation is called {name!r}")
    default_alpha, default_beta = _DEFAULTS[name]
    alpha = next(alphas, default_alpha)
    beta = 0.0 if default_beta is None else next(betas, default_beta)
    return _with_parameters(name, alpha, beta)


def _with_parameters(name: str, alpha: float, beta: float) -> Activation:
    functions: dict[str, Activation] = {
        "affine": lambda x: alpha * x + beta,
        "leakyrelu": lambda x: F.leaky_relu(x, alpha),
        "thresholdedrelu": lambda x: torch.where(x > alpha, x, torch.zeros_like(x)),
        "scaledtanh": lambda x: alpha * torch.tanh(beta * x),
        "hardsigmoid": lambda x: torch.clamp(alpha * x + beta, 0, 1),
        "elu": lambda x: F.elu(x, alpha),
    }
    return functions[name]
