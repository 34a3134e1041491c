"""Attention (with key-value caches, windows, soft caps and captured scores) and rotary position
embeddings.

Shapes: b samples, h heads, s tokens, d features per head.
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
    """Return softmax(scale · Q Kᵀ + mask) V by a fused kernel of torch, for tensors [b, h, s, d].
    The number of query heads may be a multiple of the number of key-value heads. `mask` is as in
    torch's `scaled_dot_product_attention`; the default of `scale` is 1 / sqrt(d).

    On CUDA, only the kernels that `autopipe.ir.attention_kernels` allows are used. If none of them
    supports the operands, torch warns of the reasons and raises RuntimeError.
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
    # Fused kernels require that the last dimension of each operand is contiguous.
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
    """Return the properties of an attention on CUDA that determine its kernel. The operands are [b,
    h, s, d]. Under autocast, the element type is autocast's type.
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
    """Attention of queries, keys and values [b, h, s, d], with the options of ONNX. The number of
    query heads may be a multiple of the number of key-value heads.

    `past_key` and `past_value` are cached keys and values, which precede `key` and `value`.
    `lengths` [b] is the number of valid keys of each sample. `sink` [h] is an additional score of
    each head; it takes part in the softmax, but it has no value.

    Let a query have position i, and let the offset be the number of cached keys; without a cache,
    `lengths` minus the number of queries if `lengths` is given, otherwise 0. The query attends to
    keys from `window[0]` positions before to `window[1]` positions after i + offset; -1 means no
    bound. If `causal`, it attends to no key after i + offset.

    Return (result, all keys, all values, captured). The result is [b, h, s, d], or [b, s, h * d]
    with `merge`. `capture` selects what `captured` is: the scores unchanged (0), after the soft cap
    (1), after masking (2), or the probabilities (3). `captured` is None if `capture` is None.

    With `group`, the queries are sharded along s; all ranks have all other operands in full.
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
        # A causal attention reads no key after the query, so the second number of `window` is 0.
        # The number -1 would mean no limit.
        window = window[0], 0
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
            # `_StepwiseAttention` saves its operands for backward. They are converted to autocast's
            # type before the call, so that it saves them in this type.
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
    """Return a mask that broadcasts to [b, h, queries, keys] and combines positions with `mask`:
    Boolean, true where a query attends to a key; or a bias that is added to scores, -inf where it
    does not. Return None if all queries attend to all keys.

    `offset` is added to the positions of queries. If `mask` has fewer columns than there are keys,
    the remaining keys are excluded.
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
    """Settings of the probabilities of an attention. `precision` is the element type of the
    softmax, None for the type of the scores. `autocast` is the type to which autocast converts
    operands of matmuls, None without autocast.
    """

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
        """Return (probabilities, captured), computed without a fused kernel. `bias` is a mask from
        `_visibility_mask`. `sink` [h] is an additional score of each head, which takes part in the
        softmax only. `capture` selects what `captured` is: the scores unchanged (0), after the soft
        cap (1), after masking (2), or the probabilities (3). Without `capture`, `captured` is not
        meaningful. All probabilities of a query that attends to no key are 0.
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
            # The softmax of a row of -inf is NaN, and so is its gradient. So the scores of these
            # rows are set to 0 before the softmax, and the probabilities to 0 after it.
            probabilities = torch.softmax(kept.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
        return probabilities.to(query.dtype), probabilities if capture == 3 else captured


def _repeat_for_query_heads(query: Tensor, key: Tensor) -> Tensor:
    """Return `key` (keys or values) with each head repeated, so that it has as many heads as
    `query`.
    """
    repeats = query.shape[1] // key.shape[1]
    return key.repeat_interleave(repeats, 1) if repeats > 1 else key


class _StepwiseAttention(torch.autograd.Function):
    """Attention without a fused kernel. It saves only its operands for backward, which computes the
    probabilities again.
    """

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
    """Return x with its features rotated by `rotary`. x is [b, h, s, d]; with `head_axis` 2, it is
    [b, s, h, d].

    `cosines` and `sines` are [b, s, width / 2]. If `positions` [b, s] is given, they are tables
    [positions, width / 2] instead, whose rows at these positions are used.
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
    """Return x with the first `width` features of each head rotated; 0 means all features (Su et
    al., "RoFormer", 2021).

    A pair (a, b) of features becomes (a · cos - b · sin, b · cos + a · sin). The two features of a
    pair are neighbours if `interleaved`; otherwise their distance is half of the width. The results
    are at the positions of the pair. With `interleaved` and `apart`, their distance is half of the
    width instead.

    Cosines and sines broadcast to x. Their last dimension has one value per feature or one value
    per pair.
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
    """Return a view [..., 2, width / 2] of x [..., width], in which index 0 or 1 of the second last
    dimension selects the first or second feature of each pair.
    """
    found: Tensor = x.unflatten(-1, (-1, 2)).mT if interleaved else x.unflatten(-1, (2, -1))
    return found


_RotaryForm = tuple[bool, bool, int]
"""(pairs of the operand are neighbours, pairs of the result are neighbours, number of rotated
features).
"""


class _Rotary(torch.autograd.Function):
    """Rotation of pairs of features. Backward rotates the gradients back. x is saved for backward
    only if cosines or sines require gradients.
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
    """Return x with the pairs of its first features rotated, in the order that `form` specifies.
    Cosines and sines are [..., 2 or 1, width / 2].
    """
    read, written, width = form
    pairs = _view_as_pairs(x[..., :width], read)
    turned = pairs * cosines
    turned[..., 0, :].addcmul_(pairs[..., 1, :], sines[..., 0, :], value=-1)
    turned[..., 1, :].addcmul_(pairs[..., 0, :], sines[..., -1, :])
    turned = (turned.mT if written else turned).flatten(-2)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)
