"""Precision of a rank: autocast to 16-bit types, TF32 or IEEE precision of matmuls of fp32 tensors
on CUDA, and dynamic loss scaling.

In fp16, small gradients would underflow to zero. So the loss is multiplied by a scale, and the
gradients are divided by it (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section
3.2). The scale grows and shrinks by the factors of `torch.amp.GradScaler`. All ranks agree on
whether gradients of a step overflowed.
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

_AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def low_precision_type(precision: str) -> torch.dtype | None:
    """Return the 16-bit type of the precision `bf16` or `fp16`; None for other precisions."""
    return _AUTOCAST_TYPES.get(precision)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context manager in which a forward runs at a program's precision: autocast for
    `bf16` and `fp16`, otherwise one without effect.
    """
    dtype = low_precision_type(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


class LowPrecisionCopies:
    """16-bit copies of parameters, which autocast would otherwise make in every forward. For
    autograd, a copy is a cast of its fp32 parameter, so gradients are added up in fp32. In
    inference, these parameters are loaded in 16 bits, and a copy is the parameter itself.
    """

    def __init__(self, parameters: Mapping[int, torch.Tensor], manifest: Manifest) -> None:
        dtype = low_precision_type(manifest.precision)
        held = [index for index in manifest.low_precision if index in parameters]
        self._parameters = [parameters[index] for index in held]
        self.tensors = {index: parameters[index].to(dtype) for index in held}
        """The copies by parameter index. The tensors stay the same for the whole run; `refresh`
        changes their values.
        """
        self._written = [each.detach() for each in self.tensors.values()]

    def refresh(self) -> None:
        """Write the present values of the parameters into the copies. Must be called after an
        update, when no backward that uses the former values is still to run.
        """
        if self._parameters:
            with torch.no_grad():
                foreach_copy_(self._written, self._parameters)


def set_matmul_precision(precision: str, exact: bool = False) -> None:
    """Set the precision of CUDA matmuls, convolutions and recurrent layers of fp32 tensors in this
    process: TF32 if `precision` is `tf32`, otherwise IEEE. Torch's default is IEEE for matmuls and
    TF32 for convolutions and recurrent layers.

    With `exact`, the precision is IEEE in all cases, and matmuls of 16-bit tensors accumulate in
    fp32.
    """
    tf32 = precision == "tf32" and not exact
    cublas: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    # The newer setting `fp32_precision` of torch 2.9 is not used, because torch.export fails to
    # read `allow_tf32` after its use.
    cublas.allow_tf32 = cudnn.allow_tf32 = tf32
    if exact:
        cublas.allow_bf16_reduced_precision_reduction = (
            cublas.allow_fp16_reduced_precision_reduction
        ) = False


_GROWTH_FACTOR = 2.0
_BACKOFF_FACTOR = 0.5
_GROWTH_INTERVAL_STEPS = 2000
"""Number of consecutive steps without an overflow after which the loss scale grows."""


class LossScaler:
    """The dynamic scale of the loss, equal on all ranks. The gradients from which a backward starts
    are multiplied by `scale`. After the backward passes of a step, `unscale`, `step_optimizer` and
    `end_step` are called in this order. The host waits for the device only in `step_optimizer`, and
    only if the optimizer is not fused.
    """

    def __init__(self, scale: float, transport: Transport) -> None:
        self._transport = transport
        device = transport.device
        self.scale = torch.full((), scale, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._overflow = torch.zeros((), dtype=torch.float32, device=device)
        self.outcome = torch.stack((self.scale, self._overflow))
        """(scale, overflow) of the last step, float32 [2] on the device: `overflow` is 1 if
        gradients overflowed, so that the update was skipped, otherwise 0.
        """

    def unscale(self, tensors: Iterable[torch.Tensor]) -> None:
        """Divide the gradients of `tensors`, which this rank updates, by the scale, and determine
        whether the gradients of any rank are infinite or NaN. Collective over all ranks.
        """
        self._overflow = torch.zeros_like(self.scale)
        by_dtype = defaultdict[torch.dtype, list[torch.Tensor]](list)
        for tensor in tensors:
            if tensor.grad is not None:
                by_dtype[tensor.grad.dtype].append(tensor.grad)
        inverse = self.scale.double().reciprocal().float()
        for gradients in by_dtype.values():
            unscale_and_find_overflow_(gradients, self._overflow, inverse)
        self._overflow = self._transport.scalar_max(self._overflow)

    @property
    def overflow(self) -> torch.Tensor:
        """1 if a gradient of the step is infinite or NaN on any rank, otherwise 0; float32 [] on
        the device.
        """
        return self._overflow

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the optimizer's step, unless gradients overflowed. A fused optimizer reads the
        overflow on the device. For other optimizers, the host waits for the device and reads the
        overflow.
        """
        groups = optimizer.param_groups
        if not all(group.get("fused") for group in groups):
            if not self._overflow.item():
                optimizer.step()
            return
        # Torch's fused SGD does not initialise the momentum buffers if it skips its first step
        # because of an overflow. So the buffers are created here, with zeros.
        for group in groups:
            if group.get("momentum"):
                for parameter in group["params"]:
                    if optimizer.state[parameter].get("momentum_buffer") is None:
                        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        optimizer.found_inf = self._overflow  # type: ignore[attr-defined]
        optimizer.step()

    def end_step(self) -> None:
        """Halve the scale if gradients overflowed in the step. Double it after
        `_GROWTH_INTERVAL_STEPS` consecutive steps without an overflow.
        """
        self.outcome = torch.stack((self.scale, self._overflow))
        update_loss_scale_(
            self.scale,
            self._good_steps,
            self._overflow,
            _GROWTH_FACTOR,
            _BACKOFF_FACTOR,
            _GROWTH_INTERVAL_STEPS,
        )

    def was_skipped(self) -> bool:
        """Return True if gradients overflowed in the last step and its scale was above 1, so that a
        repetition has a smaller scale. The host waits for the device.
        """
        scale, overflow = self.outcome.tolist()
        return bool(overflow) and scale > 1.0

    def state(self) -> tuple[float, int]:
        """Return (scale, number of steps without an overflow since the scale last changed). The
        host waits for the device.
        """
        return float(self.scale), int(self._good_steps)

    def restore(self, scale: float, good_steps: int) -> None:
        """Set the scale and the number of steps, which `state` returned in an earlier run."""
        self.scale.fill_(scale)
        self._good_steps.fill_(good_steps)
