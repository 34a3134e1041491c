"""Emission of Reshape and its like, always from the local shape of the result."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter
from autopipe.ir.ops.operator import axes_of


def shape_arguments(shape: tuple[int, ...]) -> str:
    """`8, 128, 768` for a method that takes extents one by one; `()` for a scalar."""
    return ", ".join(map(str, shape)) or "()"


def reshaped(code: str, shape: tuple[int, ...]) -> str:
    """`x.reshape(8, 128, 768)`."""
    return f"{code}.reshape({shape_arguments(shape)})"


def _reshape(call: Call) -> str:
    return reshaped(call.arg(0), call.result().shape)


def _unsqueeze(call: Call) -> str:
    axes = axes_of(call.signature, 1) or ()
    return f"{call.arg(0)}.unsqueeze({axes[0]})" if len(axes) == 1 else _reshape(call)


def _squeeze(call: Call) -> str:
    axes = axes_of(call.signature, 1) or ()
    return f"{call.arg(0)}.squeeze({axes[0]})" if len(axes) == 1 else _reshape(call)


REGROUP: dict[str, Emitter] = {
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
}
