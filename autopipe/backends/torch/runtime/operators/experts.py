"""Mixtures of experts. The tokens are sorted by expert, so that each expert computes all its tokens
in one matmul per layer.

An expert computes second(activation(first(x))), or second(activation(first(x)) · gate(x)) if there
is a gate. `first`, `second` and `gate` are linear layers.
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
from autopipe.backends.torch.runtime.operators.quantized import dequantize_packed

ExpertLayer = tuple[Tensor | None, ...]
"""One linear layer of all experts: weights [experts, rows, columns], and biases [experts, rows] or
None. If the weights are packed integers, scales follow, and zero points or None.
"""


@dataclass(frozen=True, slots=True)
class _MixtureSettings:
    """The settings of a mixture of experts, without its tensors. In the methods, `layers` are all
    tensors of the experts' layers: first, second and gate. If `group` is given, each of its ranks
    has a shard of the experts; otherwise this rank has all experts.
    """

    route: Callable[..., tuple[Tensor, Tensor]]
    """Function from the two routing operands to (selected experts, their weights in the sum), both
    [tokens, k].
    """
    sizes: tuple[int, ...]
    """Numbers of tensors of the first layer, of the second layer, and of the gate."""
    activation: Callable[[Tensor], Tensor]
    bits: int = 0
    """Bits of a packed weight; 0 if weights are not packed."""
    group: Group | None = None
    listed: bool = False
    """True if each expert has its own tensors, listed expert by expert. False if each tensor
    contains the slices of all experts.
    """

    def expert_count(self, layers: Sequence[Tensor | None]) -> int:
        """Return the number of experts of this rank."""
        return len(layers) // sum(self.sizes) if self.listed else len(cast(Tensor, layers[0]))

    def tensors_of_expert(
        self, layers: Sequence[Tensor | None], expert: int
    ) -> list[Tensor | None]:
        """Return the tensors of one expert, as views. `expert` is its index on this rank."""
        if self.listed:
            size = sum(self.sizes)
            return list(layers[expert * size : expert * size + size])
        return [None if each is None else each[expert] for each in layers]

    def entries_by_expert(self, chosen: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (expert, entries) for each expert of this rank that is selected for any token.
        `chosen` [tokens, k] has the experts that are selected for each token, and `experts` is the
        number of experts on this rank.

        expert: index of the expert on this rank.
        entries: indices in the flattened `chosen` at which the expert is selected.
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
        """Return the results of one expert for the tokens x [n, features], each multiplied by the
        token's weight in `share` [n]. `operands` are the tensors of the expert.
        """
        own = iter(operands)
        first, second, gate = (tuple(itertools.islice(own, size)) for size in self.sizes)
        hidden = self.activation(_apply_layer(x, first, self.bits))
        if gate[0] is not None:
            hidden = hidden * _apply_layer(x, gate, self.bits)
        return _apply_layer(hidden, second, self.bits) * share.unsqueeze(-1)


class _Experts(torch.autograd.Function):
    """A mixture that saves only its operands for backward. Backward recomputes the experts one by
    one.
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
        for expert, places in mixture.entries_by_expert(chosen, mixture.expert_count(layers)):
            rows = places // chosen.shape[-1]
            result = mixture.results_of_expert(
                tokens[rows], shares.flatten()[places], mixture.tensors_of_expert(layers, expert)
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
        for expert, places in mixture.entries_by_expert(chosen, mixture.expert_count(layers)):
            rows = places // chosen.shape[-1]
            own = [tokens[rows].requires_grad_(), flat[places].requires_grad_()]
            told_to = mixture.tensors_of_expert(found, expert)
            pairs = zip(mixture.tensors_of_expert(layers, expert), told_to, strict=True)
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
    """Yield the gradient of each of the two tensors in `routing`, from which `shares`, the weights
    of the selected experts, were computed; None for a tensor that needs no gradient. `gradient` is
    the gradient of `shares`.
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
    """Return a tensor that shares the data of `tensor`, as a new leaf of autograd's graph. It
    requires a gradient if it is floating-point. None stays None.
    """
    return tensor if tensor is None else tensor.detach().requires_grad_(tensor.is_floating_point())


def _autocast_type(x: Tensor) -> torch.dtype | None:
    """Return the type to which autocast converts operands on the device of x; None if autocast is
    off.
    """
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
    """Return, for each token of x, the weighted sum of the results of the k experts with the
    largest `scores` [tokens, experts].

    The weight of an expert is its probability in the softmax over all scores; with `normalize`, in
    the softmax over the k largest scores. If `weights` [tokens, experts] is given, the weight is
    its entry there instead; with `normalize`, it is divided by the sum of the k weights.

    `bits` is the number of bits of packed weights, 0 if weights are not packed. With `group`, each
    rank has a shard of the experts and returns the partial sum over them.
    """

    def route(scores: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (selected experts, their weights), both [tokens, k]."""
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
    """Return, for each token of x, the sum of the results of the experts `chosen`, weighted by
    `shares`. Both are [tokens, k].

    With `group`, each rank has a shard of the experts and returns the partial sum over them.
    """
    layers = first, second, gate or (None,)
    settings = _MixtureSettings(_identity_route, tuple(map(len, layers)), activation, group=group)
    return _apply_mixture(settings, x, (chosen, shares), itertools.chain(*layers))


def listed_experts(x: Tensor, chosen: Tensor, shares: Tensor, *weights: Tensor) -> Tensor:
    """Return, for each token of x, the weighted sum of experts (silu(x G) · x U) D. `weights`
    contains the matrices G, U, D of the first expert, then of the second expert, and so on.
    `chosen` and `shares` [tokens, k] are the selected experts of each token, and their weights in
    the sum.
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
    """Return (chosen, shares) unchanged: the selected experts of each token, and their weights."""
    return chosen, shares


def _apply_mixture(
    settings: _MixtureSettings,
    x: Tensor,
    routing: tuple[Tensor | None, Tensor | None],
    operands: Iterable[Tensor | None],
) -> Tensor:
    """Return the result of a mixture of experts for the tokens x. `routing` are the two arguments
    of `settings.route`, from which it selects the experts. `operands` are all tensors of the
    experts' layers.
    """
    # `_Experts` saves x for backward. x is converted to autocast's type before the call, so that it
    # is saved in this type.
    x = x.to(_autocast_type(x) or x.dtype)
    found: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        settings, x, *routing, *operands
    )
    return found


def _apply_layer(x: Tensor, layer: ExpertLayer, bits: int) -> Tensor:
    """Return the result of one linear layer of one expert for x. Packed weights of `bits` bits are
    unpacked here, so that few are in memory at one time.
    """
    weight, bias, *packed = layer
    assert weight is not None
    if packed:
        scales, points = packed
        assert scales is not None
        weight = dequantize_packed(weight, scales, points, bits)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def gelu_by_tanh(x: Tensor) -> Tensor:
    """Return Gelu of x in its approximation by tanh."""
    return F.gelu(x, approximate="tanh")


def swiglu(
    alpha: float = 1.0, beta: float = 0.0, limit: float = math.inf, turns: bool = True
) -> Callable[[Tensor], Tensor]:
    """Return a function that maps [..., 2 n] to [..., n]. From gates g and linear parts l it
    computes g σ(α g) (l + β), with g clamped to at most `limit`, and l to [-limit, limit].

    Gates and linear parts alternate in the last dimension if `turns`; otherwise all gates precede
    all linear parts.
    """

    def function(x: Tensor) -> Tensor:
        gates, linear = (x[..., ::2], x[..., 1::2]) if turns else x.chunk(2, -1)
        if limit < math.inf:
            gates = gates.clamp(max=limit)
            linear = linear.clamp(-limit, limit)
        # For α = 0, the factor σ(α g) of the gate is 1/2. `gated` divides by α, so a tiny α
        # replaces 0.
        return gated(gates, linear + beta if beta else linear, "silu", alpha or 1e-6)

    return function
