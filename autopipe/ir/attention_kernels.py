"""Choice of the torch kernel that computes the attention softmax(scale · Q Kᵀ + mask) V on a CUDA
device.

Generated programs select this kernel, and the cost model uses its cost. The conditions for a kernel
are at least as strict as those of torch 2.6 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
If no fused kernel is possible, the kernel `math` is chosen, which writes the attention scores to
memory.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster
from autopipe.ir.memo import memoize

Capability = tuple[int, int]
"""Compute capability of a CUDA device, as (major, minor)."""


class Kernel(enum.Enum):
    """Implementation of attention in torch (`torch.nn.attention.sdpa_kernel`). The values are the
    names in `SDPBackend`.
    """

    FLASH = "FLASH_ATTENTION"
    EFFICIENT = "EFFICIENT_ATTENTION"
    MATH = "MATH"


@dataclass(frozen=True, slots=True)
class AttentionProperties:
    """The properties of an attention on which the choice of its kernel depends."""

    dtype: str
    """Element type in which the attention is computed. Under autocast, it is the type of autocast.
    """
    head_size: int
    value_size: int
    masked: bool = False
    causal: bool = False
    square: bool = True
    """True if the numbers of queries and keys are equal."""
    grouped: bool = False
    """True if several query heads share a key-value head (grouped-query attention)."""


def usable_kernels(form: AttentionProperties, capability: Capability) -> tuple[Kernel, ...]:
    """Return the kernels that can compute an attention with the properties `form`, the fastest
    first.
    """
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
    """Return True if the program must repeat keys and values for each query head before it calls
    the attention.

    This is the case if the fastest kernel is `EFFICIENT`, which does not support grouped-query
    attention. Without the repetition, torch would use the math kernel, which repeats keys and
    values too, and also writes the scores to memory.
    """
    return form.grouped and usable_kernels(form, capability)[0] is Kernel.EFFICIENT


def _supports_flash(form: AttentionProperties, capability: Capability) -> bool:
    """Return True if the flash kernel is possible: a 16-bit type, a compute capability from 8.0 to
    12.1, no mask, equal head sizes of keys and values of at most 256 (192 on devices with little
    shared memory) and, for a causal attention, as many queries as keys.
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
    """Return True if the memory-efficient kernel is possible: a compute capability of up to 12.1,
    fp32, fp16 or (from capability 8.0 on) bf16, and aligned head sizes.
    """
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


@memoize(2)
def min_cuda_capability(cluster: Cluster) -> Capability | None:
    """Return a lower bound of the compute capability of all devices of a cluster: (8, 0) if all of
    them declare a peak for bf16, (7, 0) if all declare a peak for fp16, otherwise None.
    """
    found = [{name for name, _ in device.peak_flops} for device in cluster.kinds]
    if all("bf16" in stated for stated in found):
        return 8, 0
    return (7, 0) if all("fp16" in stated for stated in found) else None
