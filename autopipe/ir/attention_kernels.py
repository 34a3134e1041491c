"""Choice of the torch kernel that computes softmax(scale · Q Kᵀ + mask) V on a CUDA device.

Generated programs select this kernel, and the cost model uses its cost. The rules are at least as
strict as those of torch 2.6 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). The `math`
kernel, which writes the attention scores to memory, is chosen if no fused kernel fits.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster

Capability = tuple[int, int]
"""Compute capability of a CUDA device: (major, minor)."""


class Kernel(enum.Enum):
    """Backend of `torch.nn.attention.sdpa_kernel`; values are the names in `SDPBackend`."""

    FLASH = "FLASH_ATTENTION"
    EFFICIENT = "EFFICIENT_ATTENTION"
    MATH = "MATH"


@dataclass(frozen=True, slots=True)
class AttentionProperties:
    """Properties of an attention that determine its kernel."""

    dtype: str
    """Element type of the computation; under autocast the type of autocast."""
    head_size: int
    value_size: int
    masked: bool = False
    causal: bool = False
    square: bool = True
    """True if there are as many queries as keys."""
    grouped: bool = False
    """True if several query heads use the same key-value head (grouped-query attention)."""


def usable_kernels(form: AttentionProperties, capability: Capability) -> tuple[Kernel, ...]:
    """Return the kernels that can compute the attention, the fastest first."""
    found = [
        kernel
        for kernel, takes in (
            (Kernel.FLASH, _supports_flash),
            (Kernel.EFFICIENT, _supports_efficient),
        )
        if takes(form, capability)
    ]
    return tuple(found) or (Kernel.MATH,)


def must_repeat_heads(form: AttentionProperties, capability: Capability) -> bool:
    """True if keys and values must be repeated for each query head before the attention.

    This is the case if the fastest kernel is `EFFICIENT`, which does not support grouped-query
    attention. The math kernel would repeat keys and values too, and also write the scores.
    """
    return form.grouped and usable_kernels(form, capability)[0] is Kernel.EFFICIENT


def _supports_flash(form: AttentionProperties, capability: Capability) -> bool:
    """True for 16-bit types from capability 8.0, without a mask, with a head size of at most 256
    (192 on devices with little shared memory).
    """
    small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    return (
        (8, 0) <= capability <= (12, 1)
        and form.dtype in ("float16", "bfloat16")
        and form.head_size == form.value_size <= (192 if small else 256)
        and not form.masked
        and (form.square or not form.causal)
    )


def _supports_efficient(form: AttentionProperties, capability: Capability) -> bool:
    """True for fp32, fp16 and, from capability 8.0, bf16, if the head sizes are aligned."""
    narrow = form.dtype in ("float16", "bfloat16")
    least = (8, 0) if form.dtype == "bfloat16" else (5, 0)
    alignment = 4 if capability >= (8, 0) else 1
    if narrow and capability >= (7, 0):
        alignment = 8
    return (
        least <= capability <= (12, 1)
        and (narrow or form.dtype == "float32")
        and form.head_size % alignment == form.value_size % alignment == 0
    )


def min_cuda_capability(cluster: Cluster) -> Capability | None:
    """Return a lower bound of the compute capability of all devices of a cluster: (8, 0) if all
    declare a bf16 peak, (7, 0) if all declare an fp16 peak, otherwise None.
    """
    found = [{name for name, _ in device.peak_flops} for device in cluster.kinds]
    if all("bf16" in stated for stated in found):
        return 8, 0
    return (7, 0) if all("fp16" in stated for stated in found) else None
