"""Dynamic loss scaling for fp16, whose small gradients would be zero (Micikevicius et al., "Mixed Precision Training",
ICLR 2018, section 3.2), with the factors of `torch.amp.GradScaler`. All ranks agree on whether a step overflowed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from autopipe.backends.torch.runtime.transport import Transport

_GROWTH, _BACKOFF = 2.0, 0.5
_GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the scale grows."""


class LossScaler:
    """The scale of the loss, the same on all ranks. A step's losses enter backward times `scale`; then come `unscale`,
    `update`, and `end_step`. The host reads nothing of it but what `update` says."""

    def __init__(self, scale: float, transport: Transport) -> None:
        self._transport = transport
        device = transport.device
        self.scale = torch.full((), scale, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._overflow = torch.zeros((), dtype=torch.float32, device=device)
        self.outcome = torch.stack((self.scale, self._overflow))
        """Of the step that ended last, on the device: its scale, and 1 where an overflow skipped its update, else 0."""

    def unscale(self, tensors: Iterable[torch.Tensor]) -> None:
        """Divide the gradients of what this rank updates by the scale. All ranks together learn whether any of them has
        one that is no finite number."""
        self._overflow = torch.zeros_like(self.scale)
        by_dtype = defaultdict[torch.dtype, list[torch.Tensor]](list)
        for tensor in tensors:
            if tensor.grad is not None:
                by_dtype[tensor.grad.dtype].append(tensor.grad)
        inverse = self.scale.double().reciprocal().float()
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._overflow, inverse)
        self._overflow = self._transport.maximum(self._overflow)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step, unless the gradients overflowed. A fused optimizer decides that on the device; for
        any other the host reads it, once a step."""
        groups = optimizer.param_groups
        if not all(group.get("fused") for group in groups):
            if not self._overflow.item():
                optimizer.step()
            return
        # Where torch's fused SGD skips its first step, it keeps a momentum that it has never written.
        for group in groups:
            if group.get("momentum"):
                for parameter in group["params"]:
                    if optimizer.state[parameter].get("momentum_buffer") is None:
                        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        optimizer.found_inf = self._overflow  # type: ignore[attr-defined]
        optimizer.step()

    def end_step(self) -> None:
        """Halve the scale after an overflow; double it after enough steps without one."""
        self.outcome = torch.stack((self.scale, self._overflow))
        torch._amp_update_scale_(self.scale, self._good_steps, self._overflow, _GROWTH, _BACKOFF, _GROWTH_INTERVAL)

    def was_skipped(self) -> bool:
        """True if the last step was, and a smaller scale may save it. The host waits for the device."""
        scale, overflow = self.outcome.tolist()
        return bool(overflow) and scale > 1.0

    def state(self) -> tuple[float, int]:
        """The scale, and the steps without an overflow since it changed. The host waits for the device."""
        return float(self.scale), int(self._good_steps)

    def restore(self, scale: float, good_steps: int) -> None:
        self.scale.fill_(scale)
        self._good_steps.fill_(good_steps)
