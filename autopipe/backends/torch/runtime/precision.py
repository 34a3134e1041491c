"""The precision in which a rank computes: 16-bit types through autocast, and TF32 or IEEE products of fp32 on CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from autopipe.backends.torch.runtime.manifest import Manifest

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward at a program's precision."""
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


class LowPrecisionCopies:
    """Copies of parameters in 16 bits, which autocast would otherwise make in every forward. To autograd a copy is a
    cast of its parameter, to which gradients go on and are added in fp32."""

    def __init__(self, parameters: Mapping[int, torch.Tensor], manifest: Manifest) -> None:
        dtype = _AUTOCAST.get(manifest.precision)
        held = [index for index in manifest.low_precision if index in parameters]
        self._parameters = [parameters[index] for index in held]
        self.tensors = {index: parameters[index].to(dtype) for index in held}
        """By the parameter's index, for as long as the program runs."""

    def refresh(self) -> None:
        """Write the parameters' numbers of now; no backward that reads the earlier ones may still be to come."""
        with torch.no_grad():
            for copy, parameter in zip(self.tensors.values(), self._parameters, strict=True):
                copy.detach().copy_(parameter)


def set_products(precision: str, exact: bool = False) -> None:
    """Set how CUDA computes products, convolutions and recurrent layers of fp32 tensors in this process: in IEEE
    precision, or where `precision` is `tf32` with operands rounded to 19 bits. Torch's own default is IEEE for products
    and TF32 for the others. With `exact` it is IEEE in any case, and products of 16-bit tensors are summed in fp32."""
    tf32 = precision == "tf32" and not exact
    cublas: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    # Not by `fp32_precision`, which torch has from 2.9 on: torch.export then refuses to read these.
    cublas.allow_tf32 = cudnn.allow_tf32 = tf32
    if exact:
        cublas.allow_bf16_reduced_precision_reduction = cublas.allow_fp16_reduced_precision_reduction = False
