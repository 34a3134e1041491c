"""Gated linear units, act(gate) · up (Shazeer, "GLU Variants Improve Transformer", 2020), element
by element.

Backward keeps gate and up alone: act(gate) is computed again, which costs a pass over memory and no
product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, up: Tensor, activation: str, alpha: float = 1.0) -> Tensor:
    """act(gate) · up, of two tensors of one shape; `activation` is "silu" (x · sigmoid(alpha · x)),
    "gelu", "tanh" (Gelu by tanh) or "relu2".
    """
    found: Tensor = _Gated.apply(gate, up, activation, alpha)  # type: ignore[no-untyped-call]
    return found


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate: Tensor, up: Tensor, activation: str, alpha: float) -> Tensor:
        context.activation = activation, alpha
        context.save_for_backward(gate, up)
        return _activated(gate, activation, alpha) * up

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gate, up) = context.saved_tensors
        (gradient,) = gradients
        (of_gate, of_up, *_) = context.needs_input_grad
        return (
            _derived((gradient * up).to(gate.dtype), gate, *context.activation)
            if of_gate
            else None,
            (gradient * _activated(gate, *context.activation)).to(up.dtype) if of_up else None,
            None,
            None,
        )


def _activated(gate: Tensor, activation: str, alpha: float) -> Tensor:
    if activation == "silu":
        return F.silu(gate) if alpha == 1.0 else F.silu(alpha * gate) / alpha
    if activation == "relu2":
        return F.relu(gate).square()
    return F.gelu(gate, approximate="tanh" if activation == "tanh" else "none")


def _derived(gradient: Tensor, gate: Tensor, activation: str, alpha: float) -> Tensor:
    """The gradient of the gate, from that of the activation."""
    found: Tensor
    if activation == "relu2":
        found = gradient * (2 * F.relu(gate))
    elif activation == "silu":
        found = torch.ops.aten.silu_backward(gradient, gate if alpha == 1.0 else alpha * gate)
    else:
        kind = "tanh" if activation == "tanh" else "none"
        found = torch.ops.aten.gelu_backward(gradient, gate, approximate=kind)
    return found
