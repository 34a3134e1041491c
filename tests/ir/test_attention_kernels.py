"""Which kernel computes an attention, by torch's own rules: the filters in sdp_utils.cpp of torch
2.6 to 2.13.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.ir.attention_kernels import (
    AttentionProperties,
    Capability,
    Kernel,
    min_cuda_capability,
    must_repeat_heads,
    usable_kernels,
)
from tests.passes.cost.graphs import cluster

FUSED = (Kernel.FLASH, Kernel.EFFICIENT)
EFFICIENT = (Kernel.EFFICIENT,)
MATH = (Kernel.MATH,)
A100 = (8, 0)
RTX_4090 = (8, 9)
H100 = (9, 0)
V100 = (7, 0)
GTX_1080 = (6, 1)


@pytest.mark.parametrize(
    ("form", "capability", "expected"),
    [
        # check_dtypes_flash_attention, check_flash_attention_hardware_support
        (AttentionProperties("bfloat16", 64, 64, causal=True), H100, FUSED),
        (AttentionProperties("float16", 64, 64), A100, FUSED),
        (AttentionProperties("float16", 64, 64), V100, EFFICIENT),
        (AttentionProperties("float32", 64, 64, causal=True), H100, EFFICIENT),
        # check_for_attn_mask
        (AttentionProperties("bfloat16", 64, 64, masked=True), H100, EFFICIENT),
        # check_flash_causal_non_square_seqlens
        (AttentionProperties("bfloat16", 64, 64, causal=True, square=False), H100, EFFICIENT),
        (AttentionProperties("bfloat16", 64, 64, square=False), H100, FUSED),
        # check_head_dim_size_flash: equal, at most 256; flash pads to multiples of 8, the efficient
        # kernel does not
        (AttentionProperties("bfloat16", 64, 32), H100, EFFICIENT),
        (AttentionProperties("bfloat16", 256, 256), H100, FUSED),
        (AttentionProperties("bfloat16", 264, 264), H100, EFFICIENT),
        (AttentionProperties("bfloat16", 20, 20), H100, (Kernel.FLASH,)),
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
        (AttentionProperties("bfloat16", 224, 224), A100, FUSED),
        (AttentionProperties("bfloat16", 224, 224), RTX_4090, EFFICIENT),
        (AttentionProperties("bfloat16", 224, 224), (12, 0), EFFICIENT),
        # check_head_dim_size_mem_efficient with minimum_gemm_alignment
        (AttentionProperties("float32", 20, 20), H100, EFFICIENT),
        (AttentionProperties("float32", 18, 18), H100, MATH),
        (AttentionProperties("float32", 20, 18), H100, MATH),
        (AttentionProperties("float32", 18, 18), V100, EFFICIENT),
        (AttentionProperties("float16", 20, 20), V100, MATH),
        (AttentionProperties("float16", 20, 20), GTX_1080, EFFICIENT),
        (AttentionProperties("bfloat16", 20, 20, masked=True), H100, MATH),
        # less_than_sm80_mem_efficient_dtypes, check_mem_efficient_hardware_support
        (AttentionProperties("bfloat16", 64, 64), V100, MATH),
        (AttentionProperties("float64", 64, 64), H100, MATH),
        (AttentionProperties("float32", 64, 64), (3, 5), MATH),
        (AttentionProperties("bfloat16", 64, 64), (13, 0), MATH),
    ],
)
def test_the_kernels_that_torch_would_take(
    form: AttentionProperties, capability: Capability, expected: tuple[Kernel, ...]
) -> None:
    assert usable_kernels(form, capability) == expected


@pytest.mark.parametrize(
    ("form", "repeated"),
    [
        (AttentionProperties("bfloat16", 64, 64, grouped=True), False),  # Flash knows groups.
        (AttentionProperties("float32", 64, 64, grouped=True), True),
        (AttentionProperties("bfloat16", 64, 64, masked=True, grouped=True), True),
        (AttentionProperties("bfloat16", 64, 64, masked=True), False),
        (
            AttentionProperties("float64", 64, 64, grouped=True),
            False,
        ),  # The math kernel repeats them itself.
    ],
)
def test_heads_are_repeated_for_the_kernel_that_knows_no_groups(
    form: AttentionProperties, repeated: bool
) -> None:
    assert must_repeat_heads(form, H100) is repeated


@pytest.mark.parametrize(
    ("stated", "expected"),
    [(("fp32",), None), (("fp32", "fp16"), V100), (("fp32", "fp16", "bf16"), A100)],
)
def test_precisions_tell_the_least_capability(
    stated: tuple[str, ...], expected: Capability | None
) -> None:
    peaks = tuple((name, 1e12) for name in stated)
    own = cluster(2)
    assert (
        min_cuda_capability(replace(own, devices=(replace(own.devices[0], peak_flops=peaks),) * 2))
        == expected
    )
