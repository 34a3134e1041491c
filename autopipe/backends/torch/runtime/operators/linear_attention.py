"""Linear attention, which sums up keys and values in a matrix, and the short causal convolution
that precedes it in models. Both return a state, which the next call takes as `past`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 64
NARROW_CHUNK_TOKENS = 16
"""Number of tokens that are computed together: `CHUNK_TOKENS` without decay or with one decay per
head, `NARROW_CHUNK_TOKENS` with one decay per feature, which needs more memory per token.
"""


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    heads: int,
    groups: int,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (y, S): the results of all tokens, and the state after the last token. Let q, k and v
    be the query, key and value of a token, and g and β its `decay` and `beta`. The token changes
    the state to S ← exp(g) S + k uᵀ, and its result is y = scale · Sᵀ q. Here u = v or, if `beta`
    is given, u = β (v - exp(g) Sᵀ k) with the former S.

    Queries, keys and values are [b, t, h · d] for b samples, t tokens, h heads and d features.
    `decay` g is [b, t, h] or [b, t, h · d], `beta` β is [b, t, h or 1], and the state S is [b, h, d
    of keys, d of values]. Keys, values and states have `groups` heads; each serves an equal number
    of the query `heads`. The default of `scale` is 1 / sqrt(d).

    The tokens are computed in chunks. Within a chunk, the vectors u are the solution of a
    triangular system (Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024).
    """
    with torch.autocast("cuda" if query.is_cuda else "cpu", enabled=False):
        q = _split_heads(query, heads)
        k = _split_heads(key, groups)
        v = _split_heads(value, groups)
        g = None if decay is None else _split_heads(decay, groups)
        b = None if beta is None else _split_heads(beta, min(groups, beta.shape[2]))
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        q = scale * q.unflatten(1, (groups, -1))
        state = v.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]) if past is None else past.float()
        size = CHUNK_TOKENS if g is None or g.shape[-1] == 1 else NARROW_CHUNK_TOKENS
        parts = []
        for start in range(0, query.shape[1], size):
            taken = slice(start, start + size)
            gates = [None if each is None else each[..., taken, :] for each in (g, b)]
            part, state = _compute_chunk(
                state, q[..., taken, :], k[..., taken, :], v[..., taken, :], *gates
            )
            parts.append(part)
        result = torch.cat(parts, 3).flatten(1, 2).transpose(1, 2).flatten(2)
    return result.to(query.dtype), state.to(query.dtype if past is None else past.dtype)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Return x [b, t, h · d] as [b, h, t, d] in float32."""
    heads_apart: Tensor = x.float().unflatten(2, (heads, -1))
    return heads_apart.transpose(1, 2)


def _compute_chunk(
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (results, state) of a chunk of tokens; `state` is the state before the chunk. Operands
    are as in `linear_attention`, but split into heads: [b, h, t, d].
    """
    total = None if decay is None else decay.cumsum(2)
    if beta is not None:
        known = torch.matmul(_apply_decay(key, total), state)
        mixing = beta * _decayed_scores(key, key, total)
        value = torch.linalg.solve_triangular(
            mixing, beta * (value - known), upper=False, unitriangular=True
        )
    behind = None if total is None else total.unsqueeze(2)
    scores = _decayed_scores(query, key.unsqueeze(2), behind)
    result = torch.matmul(_apply_decay(query, behind), state.unsqueeze(2)) + torch.matmul(
        scores, value.unsqueeze(2)
    )
    if total is None:
        return result, state + torch.matmul(key.mT, value)
    last = total[..., -1:, :]
    return result, last.exp().mT * state + torch.matmul((key * (last - total).exp()).mT, value)


def _apply_decay(x: Tensor, total: Tensor | None) -> Tensor:
    """Return x multiplied by exp(`total`), the decay since the start of the chunk; x if `total` is
    None.
    """
    return x if total is None else x * total.exp()


def _decayed_scores(left: Tensor, right: Tensor, total: Tensor | None) -> Tensor:
    """Return scores [..., t, t] of the t tokens of a chunk. Entry (i, j) for j <= i is the dot
    product of row i of `left` and row j of `right`, in which each product is multiplied by
    exp(total[i] - total[j]), the decay between the two tokens. Entries for j > i are 0. `total` is
    the cumulative sum of the decays from the start of the chunk, None without decay.
    """
    size = left.shape[-2]
    before = torch.ones(size, size, dtype=torch.bool, device=left.device).tril()
    if total is None:
        return torch.matmul(left, right.mT).masked_fill(~before, 0.0)
    between = total.unsqueeze(-2) - total.unsqueeze(-3)
    weights = between.masked_fill(~before[..., None], -math.inf).exp()
    if total.shape[-1] == 1:
        return torch.matmul(left, right.mT) * weights.squeeze(-1)
    return (left.unsqueeze(-2) * right.unsqueeze(-3) * weights).sum(-1)


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past: Tensor | None = None,
    *,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (result, state). The result is a convolution per channel of x [b, c, t], in which
    an element depends on itself and previous elements only; with `silu`, SiLU is applied. The
    state contains the last elements of `past` (zeros if it is None) followed by x, as many as
    the kernel needs. The next call takes it as `past`.
    """
    width = weight.shape[2] - 1
    joined = F.pad(x, (width, 0)) if past is None else torch.cat((past.to(x.dtype), x), 2)
    result = F.conv1d(joined, weight, bias, groups=x.shape[1])
    kept = joined.narrow(2, joined.shape[2] - width, width)
    return F.silu(result) if silu else result, kept
