"""Mixtures of experts. Tokens are sorted by expert, so that each expert computes all its tokens in
one matmul per layer.
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
"""Weights [experts, rows, columns] and biases [experts, rows] or None. For packed weights also
scales, and zero points or None.
"""


@dataclass(frozen=True, slots=True)
class _MixtureSettings:
    """The settings of a mixture, without its tensors."""

    route: Callable[..., tuple[Tensor, Tensor]]
    """Function from the two routing operands to the selected experts and their weights, each
    [tokens, k].
    """
    sizes: tuple[int, ...]
    """Number of tensors of the first layer, of the second layer, and of the gate."""
    activation: Callable[[Tensor], Tensor]
    bits: int = 0
    group: Group | None = None
    listed: bool = False
    """True if each expert has separate tensors (in expert order) instead of rows of stacked
    tensors.
    """

    def count(self, layers: Sequence[Tensor | None]) -> int:
        """Return the number of this rank's experts."""
        return len(layers) // sum(self.sizes) if self.listed else len(cast(Tensor, layers[0]))

    def own(self, layers: Sequence[Tensor | None], expert: int) -> list[Tensor | None]:
        """Return the tensors of one expert, as views."""
        if self.listed:
            size = sum(self.sizes)
            return list(layers[expert * size : expert * size + size])
        return [None if each is None else each[expert] for each in layers]

    def parts(self, chosen: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
        """Yield each of this rank's experts that has tokens, with the indices of its entries in the
        flattened `chosen`.
        """
        order = chosen.flatten().argsort(stable=True)
        first = 0 if self.group is None else self.group.position * experts
        counts = torch.bincount(chosen.flatten(), minlength=first + experts).tolist()
        begin = sum(counts[:first])
        for expert, count in enumerate(counts[first : first + experts]):
            if count:
                yield expert, order[begin : begin + count]
            begin += count

    def results_of_expert(
        self, x: Tensor, share: Tensor, operands: Sequence[Tensor | None]
    ) -> Tensor:
        """Return the results of one expert for its tokens, multiplied by the tokens' weights
        `share`.
        """
        own = iter(operands)
        first, second, gate = (tuple(itertools.islice(own, size)) for size in self.sizes)
        hidden = self.activation(_apply_layer(x, first, self.bits))
        if gate[0] is not None:
            hidden = hidden * _apply_layer(x, gate, self.bits)
        return _apply_layer(hidden, second, self.bits) * share.unsqueeze(-1)


class _Experts(torch.autograd.Function):
    """A mixture that saves only its operands for backward. Backward recomputes one expert at a
    time.
    """

    @staticmethod
    def forward(
        context: Any, mixture: _MixtureSettings, x: Tensor, *operands: Tensor | None
    ) -> Tensor:
        context.mixture = mixture
        context.autocast = _autocast_type(x)
        context.save_for_backward(x, *operands)
        routing = operands[:2]
        layers = operands[2:]
        chosen, shares = mixture.route(*routing)
        tokens = x.reshape(-1, x.shape[-1])
        total = torch.zeros_like(tokens)
        for expert, places in mixture.parts(chosen, mixture.count(layers)):
            rows = places // chosen.shape[-1]
            result = mixture.results_of_expert(
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
            routing = [_detached_leaf(each) for each in operands[:2]]
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
            weights = [each if place is None else _detached_leaf(each) for each, place in pairs]
            with (
                torch.enable_grad(),
                torch.autocast(x.device.type, context.autocast, context.autocast is not None),
            ):
                result = mixture.results_of_expert(own[0], own[1], weights)
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
        return (
            None,
            of_tokens.reshape(x.shape),
            *_routing_gradients(routing, shares, of_shares),
            *found,
        )


def _routing_gradients(
    routing: Sequence[Tensor | None], shares: Tensor, gradient: Tensor
) -> Iterator[Tensor | None]:
    """Return the gradients of the routing operands from the gradient of the experts' weights
    `shares`.
    """
    leaves = [each for each in routing if each is not None and each.requires_grad]
    told = (
        torch.autograd.grad(shares, leaves, gradient.reshape(shares.shape), allow_unused=True)
        if leaves
        else ()
    )
    found = iter(told)
    return (next(found) if each is not None and each.requires_grad else None for each in routing)


def _detached_leaf(tensor: Tensor | None) -> Tensor | None:
    """Return a detached tensor with the data of `tensor`. It requires a gradient if it is
    floating-point.
    """
    return tensor if tensor is None else tensor.detach().requires_grad_(tensor.is_floating_point())


def _autocast_type(x: Tensor) -> torch.dtype | None:
    """Return the autocast type of `x`'s device, or None if autocast is off."""
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
    """Return the weighted sum of the results of the k experts with the largest scores, per token.

    The weights are the softmax of all scores, with `normalize` the softmax of the k largest scores.
    If `weights` is given, they are its entries at the selected experts; `normalize` then divides
    them by their sum.

    With `group`, each rank has a shard of the experts and returns their partial sum.
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
    settings = _MixtureSettings(route, tuple(map(len, layers)), activation, bits, group)
    return _apply_mixture(settings, x, (scores, weights), itertools.chain(*layers))


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
    """Return the sum of the results of the experts `chosen` per token, weighted by `shares`. Both
    have shape [tokens, k].

    With `group`, each rank has a shard of the experts and returns their partial sum.
    """
    layers = first, second, gate or (None,)
    settings = _MixtureSettings(_identity_route, tuple(map(len, layers)), activation, group=group)
    return _apply_mixture(settings, x, (chosen, shares), itertools.chain(*layers))


def listed_experts(x: Tensor, chosen: Tensor, shares: Tensor, *weights: Tensor) -> Tensor:
    """Return the weighted sum of experts (silu(x G) · x U) D. `weights` contains G, U and D of the
    first expert, then of the next, and so on. `chosen` and `shares` are as in `experts`.
    """
    operands: list[Tensor | None] = []
    for place in range(0, len(weights), 3):
        gate, up, down = weights[place : place + 3]
        operands += [gate.t(), None, down.t(), None, up.t(), None]
    return _apply_mixture(
        _MixtureSettings(_identity_route, (2, 2, 2), F.silu, listed=True),
        x,
        (chosen, shares),
        operands,
    )


def _identity_route(chosen: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    return chosen, shares


def _apply_mixture(
    settings: _MixtureSettings,
    x: Tensor,
    routing: tuple[Tensor | None, Tensor | None],
    operands: Iterable[Tensor | None],
) -> Tensor:
    x = x.to(_autocast_type(x) or x.dtype)  # Backward then saves x in autocast's type.
    found: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        settings, x, *routing, *operands
    )
    return found


def _apply_layer(x: Tensor, layer: ExpertLayer, bits: int) -> Tensor:
    """Return one layer of an expert. Packed weights are unpacked here."""
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
    """Return the function g σ(α g) (l + β) of gates g and linear parts l. g is clamped to at most
    `limit`, and l to [-limit, limit].

    The last dimension alternates between g and l if `turns`, otherwise all g precede all l.
    """

    def function(x: Tensor) -> Tensor:
        gates, linear = (x[..., ::2], x[..., 1::2]) if turns else x.chunk(2, -1)
        if limit < math.inf:
            gates = gates.clamp(max=limit)
            linear = linear.clamp(-limit, limit)
        # For α = 0, σ(α g) is 1/2; `gated` divides by α and therefore gets a tiny value.
        return gated(gates, linear + beta if beta else linear, "silu", alpha or 1e-6)

    return function
