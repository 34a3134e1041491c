"""Philox4x32-10 as one Triton kernel. With torch operators, a draw launches about a hundred kernels
on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

Key = tuple[int, int] | tuple[Tensor, Tensor]

_BLOCKS_PER_PROGRAM = 1024
"""Number of blocks of four words that one program instance of the kernel draws."""


_VARIABLE_ARGUMENTS = [
    "first_stride",
    "second_stride",
    "third_stride",
    "fourth_stride",
    "start",
    "width",
    "total",
]
"""Arguments of the kernel whose values vary between calls. Triton must not compile a specialised
kernel for a particular value.
"""


@triton.jit(do_not_specialize=_VARIABLE_ARGUMENTS)  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    words,
    first,
    second,
    third,
    fourth,
    key,
    first_stride,
    second_stride,
    third_stride,
    fourth_stride,
    start,
    width,
    total,
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the words of block `start` + j of row i to entries [4 (i · width + j), 4 (i · width + j
    + 1)) of `words`. `total` is the number of blocks, `width` the number of blocks per row. With
    WIDE, the second counter word is the high half of first + start + j.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = place < total
    row = place // width
    position = tl.load(first + row * first_stride, mask=inside) + start + place % width
    c0 = (position & 0xFFFFFFFF).to(tl.uint32)
    if WIDE:
        c1 = (position >> 32).to(tl.uint32)
    else:
        c1 = tl.load(second + row * second_stride, mask=inside).to(tl.uint32)
    c2 = tl.load(third + row * third_stride, mask=inside).to(tl.uint32)
    c3 = tl.load(fourth + row * fourth_stride, mask=inside).to(tl.uint32)
    both = (tl.load(key + 1) << 32) | tl.load(key)
    w0, w1, w2, w3 = tl.philox(both, c0, c1, c2, c3)
    tl.store(words + 4 * place, w0.to(tl.int32, bitcast=True), mask=inside)
    tl.store(words + 4 * place + 1, w1.to(tl.int32, bitcast=True), mask=inside)
    tl.store(words + 4 * place + 2, w2.to(tl.int32, bitcast=True), mask=inside)
    tl.store(words + 4 * place + 3, w3.to(tl.int32, bitcast=True), mask=inside)


def draw_words_by_kernel(
    first: Tensor,
    second: Tensor | None,
    third: Tensor,
    fourth: Tensor,
    start: int,
    stop: int,
    key: Key,
) -> Tensor:
    """Return the random words of blocks [start, stop) of each row, as `philox.draw_words` does. A
    row is a sequence of blocks of four words. The tensors are those of `philox.CounterRows`.
    """
    device = first.device
    counters = (first, first if second is None else second, third, fourth)
    height = max(len(each) for each in counters)
    width = stop - start
    total = height * width
    words = torch.empty((height, 4 * width), dtype=torch.int32, device=device)
    if not total:
        return words
    strides = [each.stride(0) if len(each) > 1 else 0 for each in counters]
    grid = (triton.cdiv(total, _BLOCKS_PER_PROGRAM),)
    wide = second is None
    _draw[grid](
        words,
        *counters,
        _key_tensor(device, key),
        *strides,
        start,
        width,
        total,
        BLOCKS=_BLOCKS_PER_PROGRAM,
        WIDE=wide,
    )
    return words


def _key_tensor(device: torch.device, key: Key) -> Tensor:
    """Return both halves of the key in one tensor on the device, int64 [2]."""
    first, second = key
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.stack((first, second))
    halves = torch.empty(2, dtype=torch.int64, device=device)
    halves[0] = first
    halves[1] = second
    return halves
