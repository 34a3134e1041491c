"""Linear attention in chunks and its gradients are those of the recurrence token by token, in
double precision.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from autopipe.backends.torch.runtime.operators import linear_attention

BATCH = 2
TOKENS = 70
HEADS = 4
GROUPS = 2
SIZE = 8
WIDTH = 6


def token_by_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor]:
    query, key = (each.unflatten(2, (-1, SIZE)) for each in (query, key))
    value = value.unflatten(2, (-1, WIDTH))
    results = []
    for t in range(TOKENS):
        if decay is not None:
            state = state * decay.unflatten(2, (GROUPS, -1))[:, t].exp()[..., None]
        written = value[:, t]
        if beta is not None:
            written = beta[:, t, :, None] * (
                written - torch.einsum("bhdv,bhd->bhv", state, key[:, t])
            )
        state = state + key[:, t, :, :, None] * written[:, :, None]
        shared = state.repeat_interleave(HEADS // GROUPS, 1)
        results.append(torch.einsum("bhd,bhdv->bhv", query[:, t], shared) / math.sqrt(SIZE))
    return torch.stack(results, 1).flatten(2), state


@pytest.mark.parametrize(
    ("decay", "beta"), [*itertools.product((None, GROUPS, GROUPS * SIZE), (None, 1, GROUPS))]
)
def test_chunks_are_the_recurrence(decay: int | None, beta: int | None) -> None:
    random = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    tensors = [
        drawn(BATCH, TOKENS, HEADS * SIZE),
        drawn(BATCH, TOKENS, GROUPS * SIZE) / 3,
        drawn(BATCH, TOKENS, GROUPS * WIDTH),
        drawn(BATCH, GROUPS, SIZE, WIDTH),
        None if decay is None else -3 * drawn(BATCH, TOKENS, decay).abs(),
        None if beta is None else drawn(BATCH, TOKENS, beta).sigmoid(),
    ]
    exact = [None if each is None else each.clone().requires_grad_() for each in tensors]
    single = [None if each is None else each.float().requires_grad_() for each in tensors]
    wanted = token_by_token(*exact)  # type: ignore[arg-type]
    found = linear_attention(*single, heads=HEADS, groups=GROUPS)
    for results in (wanted, found):
        sum(result.square().sum() for result in results).backward()
    pairs = [*zip(found, wanted, strict=True)]
    pairs += [
        (a.grad, b.grad)
        for a, b in zip(single, exact, strict=True)
        if a is not None and b is not None
    ]
    for left, right in pairs:
        assert (left.double() - right).norm() < 1e-5 * right.norm()
