"""Attention with key-value caches, windows, soft caps and captured scores, and rotary position
embeddings.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopipe.backends.torch.runtime.communication.collectives import Group
from autopipe.ir.attention_kernels import (
    AttentionProperties,
    Kernel,
    must_repeat_heads,
    usable_kernels,
)

_BACKENDS = {kernel: SDPBackend.__members__[kernel.value] for kernel in Kernel}


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of [b, h, s, d] tensors. The number of query heads may be a multiple of the number
    of key-value heads.

    On CUDA, only the kernels that `autopipe.ir.attention_kernels` allows are used. torch raises
    RuntimeError, with reasons as warnings, if none of them supports the operands.
    """
    grouped = query.shape[1] != key.shape[1]
    if not query.is_cuda:
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    form = attention_properties_of(query, key, value, mask, causal)
    capability = torch.cuda.get_device_capability(query.device)
    if must_repeat_heads(form, capability):
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
        grouped = False
    # Fused kernels require that the last dimension is contiguous.
    query, key, value = (
        each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value)
    )
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    with sdpa_kernel([_BACKENDS[kernel] for kernel in usable_kernels(form, capability)]):
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )


def attention_properties_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
) -> AttentionProperties:
    """Return the properties of an attention of [b, h, s, d] tensors on CUDA that determine its
    kernel. The type is autocast's type if autocast is on.
    """
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    return AttentionProperties(
        str(dtype).removeprefix("torch."),
        query.shape[-1],
        value.shape[-1],
        mask is not None,
        causal,
        query.shape[2] == key.shape[2],
        query.shape[1] != key.shape[1],
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    lengths: Tensor | None = None,
    sink: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    precision: torch.dtype | None = None,
    capture: int | None = None,
    merge: bool = False,
    group: Group | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Attention of [b, h, s, d] tensors. The number of query heads may be a multiple of the number
    of key-value heads.

    `past_key` and `past_value` precede the keys and values. `lengths` [b] is the number of valid
    keys per sample. `sink` [h] is a score per head that is part of the softmax and has no value.

    A query at position i attends to keys up to i + offset if `causal`, and to keys from `window[0]`
    before to `window[1]` after i + offset (-1: no bound). The offset is the number of past keys;
    without past keys, it is `lengths` minus the number of queries if `lengths` is given, otherwise
    0.

    Return (result, all keys, all values, captured). The result is [b, h, s, d], or [b, s, h * d]
    with `merge`. `capture` selects the captured scores: unchanged (0), capped (1), masked (2), or
    the probabilities (3); None without `capture`.

    With `group`, the queries are sharded along s; all other operands are replicated.
    """
    queries = query.shape[2] * (1 if group is None else group.size)
    first = 0 if group is None else group.position * query.shape[2]
    offset: int | Tensor = first
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2] + first
        key = torch.cat((past_key, key), 2)
        value = torch.cat((past_value, value), 2)
    elif lengths is not None:
        offset = lengths.reshape(-1, 1, 1, 1) - queries + first
    if causal:
        window = window[0], 0  # No keys after the query.
    bias = _visibility_mask(query, key, mask, offset, window, lengths)
    if softcap == 0 and precision is None and capture is None and sink is None:
        result = fused_attention(query, key, value, bias, scale=scale)
        captured = None
    else:
        kind = query.device.type
        narrows = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        autocast = torch.get_autocast_dtype(kind) if narrows else None
        softmax = _SoftmaxSettings(scale, softcap, precision, autocast)
        if capture is None:
            # Backward then saves the operands in autocast's type.
            operands = (each.to(autocast or each.dtype) for each in (query, key, value))
            result = _StepwiseAttention.apply(  # type: ignore[no-untyped-call]
                softmax, *operands, bias, sink
            )
            captured = None
        else:
            probabilities, captured = softmax.probabilities(query, key, bias, sink, capture)
            result = torch.matmul(probabilities, _repeat_for_query_heads(query, value))
            captured = captured.to(query.dtype)
    return result.transpose(1, 2).flatten(2) if merge else result, key, value, captured


def _visibility_mask(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    offset: int | Tensor,
    window: tuple[int, int],
    lengths: Tensor | None,
) -> Tensor | None:
    """Return a mask of the keys that each query attends to, from positions and `mask`: Boolean, or
    a bias that is added to the scores. None if all queries attend to all keys. Keys beyond the end
    of `mask` are masked.
    """
    columns = torch.arange(key.shape[2], device=query.device)
    distance = columns - (torch.arange(query.shape[2], device=query.device)[:, None] + offset)
    before, behind = window
    rules = []
    if before >= 0:
        rules.append(distance >= -before)
    if behind >= 0:
        rules.append(distance <= behind)
    if lengths is not None:
        rules.append(columns < lengths.reshape(-1, 1, 1, 1))
    allowed = reduce(torch.bitwise_and, rules) if rules else None
    if mask is None:
        return allowed
    missing = key.shape[2] - mask.shape[-1]
    truth = mask.dtype is torch.bool
    if missing > 0:
        mask = F.pad(mask, (0, missing), value=False if truth else -math.inf)
    if mask.dim() == 1:
        mask = mask[None]
    if not truth:
        mask = mask.to(query.dtype)
        return mask if allowed is None else mask.masked_fill(~allowed, -math.inf)
    return mask if allowed is None else mask & allowed


@dataclass(frozen=True, slots=True)
class _SoftmaxSettings:
    """The settings of a softmax over attention scores."""

    scale: float | None
    softcap: float
    precision: torch.dtype | None
    autocast: torch.dtype | None

    def probabilities(
        self,
        query: Tensor,
        key: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        capture: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (probabilities, captured scores), computed step by step. A query that attends to
        no key has probabilities of zero.
        """
        root = math.sqrt(self.scale if self.scale is not None else 1 / math.sqrt(query.shape[-1]))
        key = _repeat_for_query_heads(query, key)
        scores = torch.matmul(query * root, key.transpose(-1, -2) * root)
        captured = scores
        if self.softcap > 0:
            scores = torch.tanh(scores / self.softcap) * self.softcap
            captured = scores if capture == 1 else captured
        blind = None
        if bias is not None:
            hidden = ~bias if bias.dtype is torch.bool else torch.isneginf(bias)
            scores = (
                scores.masked_fill(hidden, -math.inf) if bias.dtype is torch.bool else scores + bias
            )
            blind = hidden.all(-1, keepdim=True)
        captured = scores if capture == 2 else captured
        kept = scores if self.precision is None else scores.to(self.precision)
        if sink is not None:
            column = sink.to(kept.dtype).reshape(-1, 1, 1).expand(*kept.shape[:-1], 1)
            probabilities = torch.softmax(torch.cat((kept, column), -1), -1)[..., :-1]
        elif blind is None:
            probabilities = torch.softmax(kept, -1)
        else:
            # The softmax of a row of -inf is NaN, and its gradient too. These rows are set to 0
            # before and after the softmax.
            probabilities = torch.softmax(kept.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
        return probabilities.to(query.dtype), probabilities if capture == 3 else captured


def _repeat_for_query_heads(query: Tensor, key: Tensor) -> Tensor:
    """Return keys or values, repeated for each query head."""
    repeats = query.shape[1] // key.shape[1]
    return key.repeat_interleave(repeats, 1) if repeats > 1 else key


class _StepwiseAttention(torch.autograd.Function):
    """Attention that saves only its operands. Backward recomputes the probabilities."""

    @staticmethod
    def forward(
        context: Any,
        softmax: _SoftmaxSettings,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *others: Any,
    ) -> Tensor:
        context.softmax = softmax
        context.save_for_backward(query, key, value, *others)
        return torch.matmul(
            softmax.probabilities(query, key, *others)[0], _repeat_for_query_heads(query, value)
        )

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, _, value, *_ = context.saved_tensors
        softmax = context.softmax
        wanted = context.needs_input_grad[1:]
        (gradient,) = gradients
        places = [place for place in (0, 1, 3, 4) if wanted[place]]
        leaves: list[Any] = [
            each if each is None else each.detach() for each in context.saved_tensors
        ]
        flowing: list[Tensor] = [leaves[place].requires_grad_() for place in places]
        kind = query.device.type
        dtype = softmax.autocast
        with (
            torch.enable_grad(),
            torch.autocast(kind, dtype) if dtype is not None else nullcontext(),
        ):
            probabilities, _ = softmax.probabilities(leaves[0], leaves[1], leaves[3], leaves[4])
        found: list[Tensor | None] = [None] * len(leaves)
        if wanted[2]:
            of_value = torch.matmul(probabilities.detach().transpose(-1, -2), gradient)
            found[2] = of_value.unflatten(1, (value.shape[1], -1)).sum(2)
        if flowing:
            of_probabilities = torch.matmul(
                gradient, _repeat_for_query_heads(query, value).transpose(-1, -2)
            )
            for place, each in zip(
                places, torch.autograd.grad(probabilities, flowing, of_probabilities), strict=True
            ):
                found[place] = each
        return None, *found


def rotary_embedding(
    x: Tensor,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
    width: int = 0,
    head_axis: int = 1,
) -> Tensor:
    """Return `rotary` with cosines and sines from caches [b, s, width / 2], or from tables at
    `positions` [b, s]. x is [b, h, s, d], or [b, s, h, d] with `head_axis` 2.
    """
    if positions is not None:
        cosines = F.embedding(positions, cosines)
        sines = F.embedding(positions, sines)
    return rotary(x, cosines.unsqueeze(head_axis), sines.unsqueeze(head_axis), interleaved, width)


def rotary(
    x: Tensor,
    cosines: Tensor,
    sines: Tensor,
    interleaved: bool = False,
    width: int = 0,
    apart: bool = False,
) -> Tensor:
    """Rotate the first `width` features (0: all) of each head (Su et al., "RoFormer", 2021).

    A pair (a, b) becomes (a · cos - b · sin, b · cos + a · sin). If `interleaved`, the features of
    a pair are adjacent, otherwise half a width apart. The results have the positions of the pair,
    or are half a width apart with `apart`.

    Cosines and sines broadcast. They have one value per feature, or one value per pair.
    """
    width = width or x.shape[-1]
    cosines, sines = (
        _view_as_pairs(each, interleaved) if each.shape[-1] == width else each.unsqueeze(-2)
        for each in (cosines, sines)
    )
    form = interleaved, interleaved and not apart, width
    found: Tensor = _Rotary.apply(x, cosines, sines, form)  # type: ignore[no-untyped-call]
    return found


def _view_as_pairs(x: Tensor, interleaved: bool) -> Tensor:
    """Return a view [..., 2, width / 2] of x [..., width]."""
    found: Tensor = x.unflatten(-1, (-1, 2)).mT if interleaved else x.unflatten(-1, (2, -1))
    return found


_RotaryForm = tuple[bool, bool, int]
"""(pairs of the operand are adjacent, pairs of the result are adjacent, rotated width)."""


class _Rotary(torch.autograd.Function):
    """Rotation by cosines and sines. Backward rotates gradients back. x is saved only if cosines or
    sines require gradients.
    """

    @staticmethod
    def forward(
        context: Any, x: Tensor, cosines: Tensor, sines: Tensor, form: _RotaryForm
    ) -> Tensor:
        context.form = form
        context.save_for_backward(
            cosines, sines, *([x] if any(context.needs_input_grad[1:]) else [])
        )
        return _rotate_pairs(x, cosines, sines, form)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (cosines, sines, *kept) = context.saved_tensors
        (gradient,) = gradients
        (read, written, width) = context.form
        found: list[Tensor | None] = [None] * 4
        if context.needs_input_grad[0]:
            found[0] = _rotate_pairs(gradient, cosines, -sines.flip(-2), (written, read, width))
        for x in kept:
            pairs = _view_as_pairs(x[..., :width], read)
            back = _view_as_pairs(gradient[..., :width], written)
            found[1] = (pairs * back).sum_to_size(cosines.shape)
            crossed = pairs.flip(-2) * back
            found[2] = torch.stack((-crossed[..., 0, :], crossed[..., 1, :]), -2).sum_to_size(
                sines.shape
            )
        return tuple(found)


def _rotate_pairs(x: Tensor, cosines: Tensor, sines: Tensor, form: _RotaryForm) -> Tensor:
    read, written, width = form
    pairs = _view_as_pairs(x[..., :width], read)
    turned = pairs * cosines
    turned[..., 0, :].addcmul_(pairs[..., 1, :], sines[..., 0, :], value=-1)
    turned[..., 1, :].addcmul_(pairs[..., 0, :], sines[..., -1, :])
    turned = (turned.mT if written else turned).flatten(-2)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)
