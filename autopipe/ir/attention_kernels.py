"""Which of torch's kernels computes softmax(scale · Q Kᵀ + mask) V on a CUDA device: generated
programs pin it, and costs price it.

The rules are those by which torch itself chooses
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), as of torch 2.6, or stricter. Its `math`
kernel, which writes all scores to memory, is taken where no fused one is left.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster

Capability = tuple[int, int]
"""Major and minor number of a CUDA device's compute capability."""


class Kernel(enum.Enum):
    """The name of a backend of torch's `sdpa_kernel`."""

    FLASH = "FLASH_ATTENTION"
    EFFICIENT = "EFFICIENT_ATTENTION"
    MATH = "MATH"


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """The traits of an attention that decide about its kernel. `dtype` is that in which it
    computes, autocast's where that is on; `square` says that queries are as many as keys, `grouped`
    that query heads share key-value heads.
    """

    dtype: str
    head_size: int
    value_size: int
    masked: bool = False
    causal: bool = False
    square: bool = True
    grouped: bool = False


def kernels_of(form: AttentionForm, capability: Capability) -> tuple[Kernel, ...]:
    """The kernels that may compute it, the fastest first."""
    found = [
        kernel
        for kernel, takes in ((Kernel.FLASH, _is_flash), (Kernel.EFFICIENT, _is_efficient))
        if takes(form, capability)
    ]
    return tuple(found) or (Kernel.MATH,)


def repeats_heads(form: AttentionForm, capability: Capability) -> bool:
    """True if keys and values are repeated for each query head before, as the fused kernel for
    masks and fp32 does not know groups: the math kernel repeats them as well, and writes scores
    besides.
    """
    return form.grouped and kernels_of(form, capability)[0] is Kernel.EFFICIENT


def _is_flash(form: AttentionForm, capability: Capability) -> bool:
    """16 bits from capability 8.0 on, heads of at most 256 numbers (192 where shared memory is
    small), no mask.
    """
    small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    return (
        (8, 0) <= capability <= (12, 1)
        and form.dtype in ("float16", "bfloat16")
        and form.head_size == form.value_size <= (192 if small else 256)
        and not form.masked
        and (form.square or not form.causal)
    )


def _is_efficient(form: AttentionForm, capability: Capability) -> bool:
    """fp32 and fp16, bf16 from 8.0 on, where rows of heads are aligned for tensor cores."""
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


def capability_of(cluster: Cluster) -> Capability | None:
    """The least of a cluster's devices, by the precisions that they state a peak for; None where
    one may be no GPU.
    """
    found = [{name for name, _ in device.peak_flops} for device in cluster.kinds]
    if all("bf16" in stated for stated in found):
        return 8, 0
    return (7, 0) if all("fp16" in stated for stated in found) else None
