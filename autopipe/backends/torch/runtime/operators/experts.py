"""Mixtures of experts: tokens in the order of the experts that they go to, each expert's rows in
one product.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.communication.collectives import Group
from autopipe.backends.torch.runtime.operators.gated import gated
from autopipe.backends.torch.runtime.operators.quantized import numbers_of

ExpertLayer = tuple[Tensor | None, ...]
"""Weights [experts, rows, columns], and biases [experts, rows] or None; of packed weights also
scales and zero points, which may be None.
"""


@dataclass(frozen=True, slots=True)
class _Mixture:
    """The settings of a mixture, all but its tensors."""

    route: Callable[..., tuple[Tensor, Tensor]]
    """From the two operands behind the tokens to the chosen experts and their shares, [tokens, k]
    each.
    """
    sizes: tuple[int, ...]
    """Tensors of the first layer, the second, and the one that gates the first."""
    activation: Callable[[Tensor], Tensor]
    bits: int = 0
    group: Group | None = None
    listed: bool = False
    """True if each expert has tensors of its own, one behind the other, not rows of stacked ones.
    """

    def count(self, layers: Sequence[Tensor | None]) -> int:
        """This rank's experts."""
        return len(layers) // sum(self.sizes) if self.listed else len(cast(Tensor, layers[0]))

    def own(self, layers: Sequence[Tensor | None], expert: int) -> list[Tensor | None]:
        """The tensors of one expert, in place."""
        if self.listed:
            size = sum(self.sizes)
            return list(layers[expert * size : expert * size + size])
        return [None if each is None else each[expert] for each in layers]

    def parts(self, chosen: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
        """Each of this rank's `experts` that has tokens, and its places among the chosen, flat."""
        order = chosen.flatten().argsort(stable=True)
        first = 0 if self.group is None else self.group.position * experts
        counts = torch.bincount(chosen.flatten(), minlength=first + experts).tolist()
        begin = sum(counts[:first])
        for expert, count in enumerate(counts[first : first + experts]):
            if count:
                yield expert, order[begin : begin + count]
            begin += count

    def of_one(self, x: Tensor, share: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
        """The results of one expert for its tokens, times their shares."""
        own = iter(operands)
        first, second, gate = (tuple(itertools.islice(own, size)) for size in self.sizes)
        hidden = self.activation(_layer(x, first, self.bits))
        if gate[0] is not None:
            hidden = hidden * _layer(x, gate, self.bits)
        return _layer(hidden, second, self.bits) * share.unsqueeze(-1)


class _Experts(torch.autograd.Function):
    """A mixture of which backward keeps the operands alone: it computes one expert after the other
    again.
    """

    @staticmethod
    def forward(context: Any, mixture: _Mixture, x: Tensor, *operands: Tensor | None) -> Tensor:
        context.mixture = mixture
        context.autocast = _autocast(x)
        context.save_for_backward(x, *operands)
        routing = operands[:2]
        layers = operands[2:]
        chosen, shares = mixture.route(*routing)
        tokens = x.reshape(-1, x.shape[-1])
        total = torch.zeros_like(tokens)
        for expert, places in mixture.parts(chosen, mixture.count(layers)):
            rows = places // chosen.shape[-1]
            result = mixture.of_one(
                tokens[rows], shares.flatten()[places], mixture.own(layers, expert)
            )
            total.index_add_(0, rows, result.to(total.dtype))
        return total.reshape(x.shape)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mixture = context.mixture
        (x, *operands) = context.saved_tensors
        layers = operands[2:]
        flows = context.needs_input_grad[4:]
        with torch.enable_grad():
            routing = [_leaf(each) for each in operands[:2]]
            chosen, shares = mixture.route(*routing)
        tokens = x.reshape(-1, x.shape[-1])
        flat = shares.detach().flatten()
        gradient = gradients[0].flatten(0, -2)
        of_tokens = torch.zeros_like(tokens)
        of_shares = torch.zeros_like(flat)
        found = [
            torch.zeros_like(each) if wanted else None
            for each, wanted in zip(layers, flows, strict=True)
        ]
        for expert, places in mixture.parts(chosen, mixture.count(layers)):
            rows = places // chosen.shape[-1]
            own = [tokens[rows].requires_grad_(), flat[places].requires_grad_()]
            told_to = mixture.own(found, expert)
            pairs = zip(mixture.own(layers, expert), told_to, strict=True)
            weights = [each if place is None else _leaf(each) for each, place in pairs]
            with (
                torch.enable_grad(),
                torch.autocast(x.device.type, context.autocast, context.autocast is not None),
            ):
                result = mixture.of_one(own[0], own[1], weights)
            own += [
                each
                for each, place in zip(weights, told_to, strict=True)
                if each is not None and place is not None
            ]
            told = torch.autograd.grad(result, own, gradient[rows].to(result.dtype))
            of_tokens.index_add_(0, rows, told[0])
            of_shares[places] = told[1]
            for place, part in zip(
                (each for each in told_to if each is not None), told[2:], strict=True
            ):
                place.copy_(part)
        return None, of_tokens.reshape(x.shape), *_of_routing(routing, shares, of_shares), *found


def _of_routing(
    routing: Sequence[Tensor | None], shares: Tensor, gradient: Tensor
) -> Iterator[Tensor | None]:
    """The gradients of what shares come of, from theirs."""
    leaves = [each for each in routing if each is not None and each.requires_grad]
    told = (
        torch.autograd.grad(shares, leaves, gradient.reshape(shares.shape), allow_unused=True)
        if leaves
        else ()
    )
    found = iter(told)
    return (next(found) if each is not None and each.requires_grad else None for each in routing)


def _leaf(tensor: Tensor | None) -> Tensor | None:
    """The same numbers, with a gradient of their own if they can have one."""
    return tensor if tensor is None else tensor.detach().requires_grad_(tensor.is_floating_point())


def _autocast(x: Tensor) -> torch.dtype | None:
    """The type that products take on `x`'s device, None where autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


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
    """The sum over the k experts with the largest scores of their results, by the softmax of the
    scores (of all, or with `normalize` of the k), or by `weights` at those experts. With `group` of
    this rank's experts alone.
    """

    def route(scores: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        largest, chosen = scores.float().topk(k, dim=-1)
        if weights is not None:
            shares = weights.float().gather(-1, chosen)
            shares = shares / shares.sum(-1, keepdim=True) if normalize else shares
        elif normalize:
            shares = largest.softmax(-1)
        else:
            shares = scores.float().softmax(-1).gather(-1, chosen)
        return chosen, shares

    layers = first, second, gate or (None,)
    settings = _Mixture(route, tuple(map(len, layers)), activation, bits, group)
    return _applied(settings, x, (scores, weights), itertools.chain(*layers))


def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    first: ExpertLayer,
    second: ExpertLayer,
    gate: ExpertLayer | None = None,
    *,
    activation: Callable[[Tensor], Tensor],
    group: Group | None = None,
) -> Tensor:
    """The sum over the experts `chosen` for each token of their results times `shares`, [tokens, k]
    both. With `group` of this rank's experts alone.
    """
    layers = first, second, gate or (None,)
    settings = _Mixture(_as_given, tuple(map(len, layers)), activation, group=group)
    return _applied(settings, x, (chosen, shares), itertools.chain(*layers))


def listed_experts(x: Tensor, chosen: Tensor, shares: Tensor, *weights: Tensor) -> Tensor:
    """The same of experts (silu(x G) · x U) D, without stacked weights: G, U and D of one after the
    other.
    """
    operands: list[Tensor | None] = []
    for place in range(0, len(weights), 3):
        gate, up, down = weights[place : place + 3]
        operands += [gate.t(), None, down.t(), None, up.t(), None]
    return _applied(
        _Mixture(_as_given, (2, 2, 2), F.silu, listed=True), x, (chosen, shares), operands
    )


def _as_given(chosen: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    return chosen, shares


def _applied(
    settings: _Mixture,
    x: Tensor,
    routing: tuple[Tensor | None, Tensor | None],
    operands: Iterable[Tensor | None],
) -> Tensor:
    x = x.to(_autocast(x) or x.dtype)  # Else backward would keep what products round anyway.
    found: Tensor = _Experts.apply(settings, x, *routing, *operands)  # type: ignore[no-untyped-call]
    return found


def _layer(x: Tensor, layer: ExpertLayer, bits: int) -> Tensor:
    """One expert's layer; its packed weights become numbers here."""
    weight, bias, *packed = layer
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
    """A function of gates g and what they gate, l, both clamped, which stand in turn or one behind
    the other: `g σ(α g) (l + β)`.
    """

    def function(x: Tensor) -> Tensor:
        gates, linear = (x[..., ::2], x[..., 1::2]) if turns else x.chunk(2, -1)
        if limit < math.inf:
            gates = gates.clamp(max=limit)
            linear = linear.clamp(-limit, limit)
        return gated(
            gates, linear + beta if beta else linear, "silu", alpha or 1e-6
        )  # By none: half of the gate.

    return function
