"""The norm of all gradients of a step, over all ranks, and their clipping to a largest norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopipe.backends.torch.runtime.transport import Transport

_EPS = 1e-6  # Of torch's clip_grad_norm_.


class GradientClipping:
    """Scales a step's gradients so that their norm over all ranks is `max_norm` at most, as torch's `clip_grad_norm_`
    does on one device. Nothing waits for the device."""

    def __init__(
        self, max_norm: float, transport: Transport, counted: Iterable[torch.Tensor], updated: Sequence[torch.Tensor]
    ) -> None:
        """`updated` are all tensors that this rank's optimizer updates, `counted` those of them that no other rank
        counts."""
        self._max_norm = max_norm
        self._transport = transport
        self._counted = tuple(counted)
        self._updated = tuple(updated)

    def clip(self) -> torch.Tensor:
        """The norm before, on the device, []. All ranks together."""
        squares = torch.zeros((), dtype=torch.float64, device=self._transport.device)
        if counted := [each.grad for each in self._counted if each.grad is not None]:
            squares = torch.stack([norm.double() for norm in torch._foreach_norm(counted)]).square().sum()
        norm = self._transport.total(squares).sqrt()
        factor = torch.clamp(self._max_norm / (norm + _EPS), max=1.0)
        scale_gradients(self._updated, factor)
        return norm


def scale_gradients(tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply the gradients of tensors by a number that is on their device, []."""
    gradients = [each.grad for each in tensors if each.grad is not None]
    for dtype in {each.dtype for each in gradients}:
        torch._foreach_mul_([each for each in gradients if each.dtype is dtype], factor.to(dtype))
