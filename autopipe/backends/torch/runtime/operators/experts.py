"""Mixtures of experts: tokens in the order of the experts that they go to, each expert's rows in one product."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.collectives import Group
from autopipe.backends.torch.runtime.operators.quantized import numbers_of

ExpertLayer = tuple[Tensor | None, ...]
"""Weights [experts, rows, columns], and biases [experts, rows] or None; of packed weights also scales and zero points,
which may be None."""


class _Recomputed(torch.autograd.Function):
    """A function of which backward keeps the operands alone."""

    @staticmethod
    def forward(context: Any, function: Callable[..., Tensor], *operands: Tensor | None) -> Tensor:
        context.function = function
        context.save_for_backward(*operands)
        return function(*operands)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = context.needs_input_grad[1:]
        pairs = list(zip(context.saved_tensors, wanted, strict=True))
        operands = [each if each is None else each.detach().requires_grad_(flows) for each, flows in pairs]
        with torch.enable_grad():
            result = context.function(*operands)
        leaves = [each for each in operands if each is not None and each.requires_grad]
        found = iter(torch.autograd.grad(result, leaves, gradients[0].to(result.dtype), allow_unused=True))
        return None, *(next(found) if flows else None for _, flows in pairs)


def mixture(
    x: Tensor,
    scores: Tensor,
    first: ExpertLayer,
    second: ExpertLayer,
    gate: ExpertLayer | None = None,
    weights: Tensor | None = None,
    *,
    k: int,
    activation: Callable[[Tensor], Tensor],
    normalize: bool = False,
    bits: int = 0,
    group: Group | None = None,
) -> Tensor:
    """The sum over the k experts with the largest scores of their results, by the softmax of the scores (of all, or
    with `normalize` of the k), or by `weights` at those experts. With `group` of this rank's experts alone."""
    layers = (first, second, gate or (None,))
    sizes = [len(layer) for layer in layers]

    def function(x: Tensor, scores: Tensor, weights: Tensor | None, *rest: Tensor | None) -> Tensor:
        own, parts = iter(rest), []
        for size in sizes:
            parts.append(tuple(next(own) for _ in range(size)))
        return _mixture(x, scores, weights, parts, k, activation, normalize, bits, group)

    operands = (each for layer in layers for each in layer)
    found: Tensor = _Recomputed.apply(function, x, scores, weights, *operands)  # type: ignore[no-untyped-call]
    return found


def _mixture(
    x: Tensor,
    scores: Tensor,
    weights: Tensor | None,
    layers: list[ExpertLayer],
    k: int,
    activation: Callable[[Tensor], Tensor],
    normalize: bool,
    bits: int,
    group: Group | None,
) -> Tensor:
    tokens = x.reshape(-1, x.shape[-1])
    largest, chosen = scores.float().topk(k, dim=-1)
    if weights is not None:
        shares = weights.float().gather(-1, chosen)
        shares = shares / shares.sum(-1, keepdim=True) if normalize else shares
    elif normalize:
        shares = largest.softmax(-1)
    else:
        shares = scores.float().softmax(-1).gather(-1, chosen)
    experts, order = chosen.flatten().sort(stable=True)
    counts = torch.bincount(experts, minlength=scores.shape[-1]).tolist()
    rows, shares = order // k, shares.flatten()[order].to(x.dtype)
    assert layers[0][0] is not None
    own = len(layers[0][0])
    start = 0 if group is None else group.position * own
    begin = sum(counts[:start])
    total = torch.zeros_like(tokens)
    for expert in range(own):
        end = begin + counts[start + expert]
        if end > begin:
            picked = rows[begin:end]
            hidden = activation(_layer(tokens[picked], layers[0], expert, bits))
            if layers[2][0] is not None:
                hidden = hidden * _layer(tokens[picked], layers[2], expert, bits)
            result = _layer(hidden, layers[1], expert, bits) * shares[begin:end].unsqueeze(-1)
            total = total.index_add(0, picked, result.to(total.dtype))
        begin = end
    return total.reshape(x.shape)


def _layer(x: Tensor, layer: ExpertLayer, expert: int, bits: int) -> Tensor:
    """One expert's layer; its packed weights become numbers here."""
    weight, bias, *packed = (None if each is None else each[expert] for each in layer)
    assert weight is not None
    if packed:
        scales, points = packed
        assert scales is not None
        weight = numbers_of(weight, scales, points, bits)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def gelu_by_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def swiglu(
    alpha: float = 1.0, beta: float = 0.0, limit: float = math.inf, turns: bool = True
) -> Callable[[Tensor], Tensor]:
    """A function of gates g and what they gate, l, both clamped, which stand in turn or one behind the other:
    `g σ(α g) (l + β)`."""

    def function(x: Tensor) -> Tensor:
        gates, linear = (x[..., ::2], x[..., 1::2]) if turns else x.chunk(2, -1)
        gates, linear = gates.clamp(max=limit), linear.clamp(-limit, limit)
        return gates * torch.sigmoid(alpha * gates) * (linear + beta)

    return function
