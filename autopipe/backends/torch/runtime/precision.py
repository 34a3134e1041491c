"""The precision in which a rank computes: 16-bit types through autocast, and TF32 or IEEE products of fp32 on CUDA."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward at a program's precision."""
    dtype = _AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


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
