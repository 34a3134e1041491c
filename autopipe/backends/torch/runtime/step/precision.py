"""The precision in which a rank computes: 16-bit types through autocast, TF32 or IEEE products of
fp32 on CUDA, and dynamic loss scaling for fp16, whose small gradients would be zero (Micikevicius
et al., "Mixed Precision Training", ICLR 2018, section 3.2), with the factors of
`torch.amp.GradScaler`. All ranks agree on whether a step overflowed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from autopipe.backends.torch.runtime.communication.transport import Transport
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.torch_interfaces import (
    foreach_copy_,
    unscale_and_find_overflow_,
    update_loss_scale_,
)

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def low_precision_type(precision: str) -> torch.dtype | None:
    """The 16-bit type of a program's precision, None where it has none."""
    return _AUTOCAST.get(precision)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward at a program's precision."""
    dtype = low_precision_type(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


class LowPrecisionCopies:
    """Copies of parameters in 16 bits, which autocast would otherwise make in every forward. To
    autograd a copy is a cast of its parameter, to which gradients go on and are added in fp32. In
    inference it is the parameter itself.
    """

    def __init__(self, parameters: Mapping[int, torch.Tensor], manifest: Manifest) -> None:
        dtype = low_precision_type(manifest.precision)
        held = [index for index in manifest.low_precision if index in parameters]
        self._parameters = [parameters[index] for index in held]
        self.tensors = {index: parameters[index].to(dtype) for index in held}
        """By the parameter's index, for as long as the program runs."""
        self._written = [each.detach() for each in self.tensors.values()]

    def refresh(self) -> None:
        """Write the present values of the parameters; every backward that reads the earlier values
        has run.
        """
        if self._parameters:
            with torch.no_grad():
                foreach_copy_(self._written, self._parameters)


def set_products(precision: str, exact: bool = False) -> None:
    """Set how CUDA computes products, convolutions and recurrent layers of fp32 tensors in this
    process: in IEEE precision, or where `precision` is `tf32` with operands rounded to 19 bits.
    Torch's own default is IEEE for products and TF32 for the others. With `exact` it is IEEE in any
    case, and products of 16-bit tensors are summed in fp32.
    """
    tf32 = precision == "tf32" and not exact
    cublas: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    # Not by `fp32_precision`, which torch has from 2.9 on: torch.export then refuses to read these.
    cublas.allow_tf32 = cudnn.allow_tf32 = tf32
    if exact:
        cublas.allow_bf16_reduced_precision_reduction = (
            cublas.allow_fp16_reduced_precision_reduction
        ) = False


_GROWTH = 2.0
_BACKOFF = 0.5
_GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the scale grows."""


class LossScaler:
    """The scale of the loss, the same on all ranks. A step's losses enter backward times `scale`;
    then come `unscale`, `update`, and `end_step`. The host reads nothing of it but what `update`
    says.
    """

    def __init__(self, scale: float, transport: Transport) -> None:
        self._transport = transport
        device = transport.device
        self.scale = torch.full((), scale, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._overflow = torch.zeros((), dtype=torch.float32, device=device)
        self.outcome = torch.stack((self.scale, self._overflow))
        """Of the step that ended last, on the device: its scale, and 1 where an overflow skipped
        its update, else 0.
        """

    def unscale(self, tensors: Iterable[torch.Tensor]) -> None:
        """Divide the gradients of what this rank updates by the scale. All ranks together learn
        whether any of them has one that is no finite number.
        """
        self._overflow = torch.zeros_like(self.scale)
        by_dtype = defaultdict[torch.dtype, list[torch.Tensor]](list)
        for tensor in tensors:
            if tensor.grad is not None:
                by_dtype[tensor.grad.dtype].append(tensor.grad)
        inverse = self.scale.double().reciprocal().float()
        for gradients in by_dtype.values():
            unscale_and_find_overflow_(gradients, self._overflow, inverse)
        self._overflow = self._transport.maximum(self._overflow)

    @property
    def overflow(self) -> torch.Tensor:
        """1 if a gradient of the step is not a finite number, otherwise 0; on the device, []."""
        return self._overflow

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step, unless the gradients overflowed. A fused optimizer decides
        that on the device; for any other the host reads it, once a step.
        """
        groups = optimizer.param_groups
        if not all(group.get("fused") for group in groups):
            if not self._overflow.item():
                optimizer.step()
            return
        # Where torch's fused SGD skips its first step, it keeps a momentum that it has never
        # written.
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
        update_loss_scale_(
            self.scale, self._good_steps, self._overflow, _GROWTH, _BACKOFF, _GROWTH_INTERVAL
        )

    def was_skipped(self) -> bool:
        """True if the last step was, and a smaller scale may save it. The host waits for the
        device.
        """
        scale, overflow = self.outcome.tolist()
        return bool(overflow) and scale > 1.0

    def state(self) -> tuple[float, int]:
        """The scale, and the steps without an overflow since it changed. The host waits for the
        device.
        """
        return float(self.scale), int(self._good_steps)

    def restore(self, scale: float, good_steps: int) -> None:
        self.scale.fill_(scale)
        self._good_steps.fill_(good_steps)
