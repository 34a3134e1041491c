"""Gated linear units: the elementwise part act(gate) · up (Shazeer, "GLU Variants Improve
Transformer", 2020).

Only gate and up are saved for backward, which computes act(gate) again. This costs a pass over
memory, but no matmul.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, up: Tensor, activation: str, alpha: float = 1.0) -> Tensor:
    """Return act(gate) · up of two tensors of equal shape. `activation` names act: "silu" (x ·
    sigmoid(alpha · x)), "gelu", "tanh" (Gelu in its approximation by tanh) or "relu2" (the square
    of ReLU).
    """
    found: Tensor = _Gated.apply(gate, up, activation, alpha)  # type: ignore[no-untyped-call]
    return found


class _Gated(torch.autograd.Function):
    """act(gate) · up, with gate and up saved for backward."""

    @staticmethod
    def forward(context: Any, gate: Tensor, up: Tensor, activation: str, alpha: float) -> Tensor:
        context.activation = activation, alpha
        context.save_for_backward(gate, up)
        return _activate(gate, activation, alpha) * up

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gate, up) = context.saved_tensors
        (gradient,) = gradients
        (of_gate, of_up, *_) = context.needs_input_grad
        return (
            _gate_gradient((gradient * up).to(gate.dtype), gate, *context.activation)
            if of_gate
            else None,
            (gradient * _activate(gate, *context.activation)).to(up.dtype) if of_up else None,
            None,
            None,
        )


def _activate(gate: Tensor, activation: str, alpha: float) -> Tensor:
    """Return act(gate). `activation` names act: "silu" (x · sigmoid(`alpha` · x)), "gelu", "tanh"
    (Gelu in its approximation by tanh) or "relu2" (the square of ReLU).
    """
    if activation == "silu":
        return F.silu(gate) if alpha == 1.0 else F.silu(alpha * gate) / alpha
    if activation == "relu2":
        return F.relu(gate).square()
    return F.gelu(gate, approximate="tanh" if activation == "tanh" else "none")


def _gate_gradient(gradient: Tensor, gate: Tensor, activation: str, alpha: float) -> Tensor:
    """Return the gradient of gate; `gradient` is the gradient of act(gate)."""
    found: Tensor
    if activation == "relu2":
        found = gradient * (2 * F.relu(gate))
    elif activation == "silu":
        found = torch.ops.aten.silu_backward(gradient, gate if alpha == 1.0 else alpha * gate)
    else:
        kind = "tanh" if activation == "tanh" else "none"
        found = torch.ops.aten.gelu_backward(gradient, gate, approximate=kind)
    return found
