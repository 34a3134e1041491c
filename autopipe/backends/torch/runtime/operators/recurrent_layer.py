"""Common parts of recurrent layers: their operands, the loop over the steps, and torch's fused kernels.

Where ranks share a layer, each has some of the hidden units, in every gate and direction: it holds the weights whole
and uses the rows of its own units, and all units' outputs are gathered before each step but the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopipe.backends.torch.runtime.operators.joint import ShardedAxis

Cell = Callable[[Tensor, list[Tensor], Tensor], list[Tensor]]
"""From a step's input, as all gates have it, the states before it and all units' outputs before it, to the states after
it, the output first."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Operands and settings that all three layers share, batch second; weights and states are those of own units."""

    x: Tensor
    weight: Tensor
    recurrence: Tensor
    bias: Tensor | None
    lengths: Tensor | None
    start: Tensor
    """All units' first outputs."""
    states: list[Tensor]
    direction: str
    clip: float | None
    group: ShardedAxis | None

    @property
    def width(self) -> int:
        """Own units: the size of the state."""
        return self.states[0].shape[2]

    def biases(self, direction: int) -> tuple[Tensor, Tensor]:
        """Input's and recurrence's bias of one direction."""
        if self.bias is None:
            zeros = self.x.new_zeros(self.weight.shape[1])
            return zeros, zeros
        first, second = self.bias[direction].chunk(2)
        return first, second

    def clipped(self, gate: Tensor) -> Tensor:
        """A gate before its activation, within [-clip, clip]."""
        return gate if self.clip is None else torch.clamp(gate, -self.clip, self.clip)

    def gathered(self, own: Tensor) -> Tensor:
        """All units' numbers, from those of own units."""
        return own if self.group is None else self.group.all_gather(own.to(self.recurrence.dtype), 1)


def layer_of(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    hidden: Tensor | None,
    others: tuple[Tensor | None, ...],
    direction: str,
    clip: float | None,
    batch_first: bool,
    group: ShardedAxis | None,
) -> Layer:
    """The layer from its operator's operands; `hidden` is that of all units, `others` are own units' other states."""
    if batch_first:
        x = x.transpose(0, 1)
        hidden = None if hidden is None else hidden.transpose(0, 1)
        others = tuple(None if state is None else state.transpose(0, 1) for state in others)
    directions, rows, units = recurrence.shape
    gates = rows // units
    start = x.new_zeros(directions, x.shape[1], units) if hidden is None else hidden
    states = [own_units(start, 1, 2, group)]
    states += [torch.zeros_like(states[0]) if state is None else state for state in others]
    weight, recurrence = (own_units(each, gates, 1, group) for each in (weight, recurrence))
    bias = None if bias is None else own_units(bias, 2 * gates, 1, group)
    return Layer(x, weight, recurrence, bias, lengths, start, states, direction, clip, group)


def own_units(tensor: Tensor, gates: int, dim: int, group: ShardedAxis | None) -> Tensor:
    """Of a dimension that counts units in each gate, those of this rank."""
    if group is None:
        return tensor
    apart: Tensor = tensor.unflatten(dim, (gates, group.size, -1))
    return apart.select(dim + 1, group.position).flatten(dim, dim + 1)


def arranged(y: Tensor, states: list[Tensor], batch_first: bool) -> tuple[Tensor, ...]:
    """[s, directions, b, h] and the last states as the layout asks."""
    if batch_first:
        return y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in states)
    return y, *states


def loop(layer: Layer, cells: list[Cell]) -> tuple[Tensor, list[Tensor]]:
    """Every direction's cell over the steps; samples shorter than the longest keep their state and give 0 after."""
    steps = layer.x.shape[0]
    outputs, finals = [], []
    for direction, cell in enumerate(cells):
        backward = direction == 1 or layer.direction == "reverse"
        x = _reversed(layer.x, layer.lengths) if backward else layer.x
        from_x = x @ layer.weight[direction].t() + layer.biases(direction)[0]
        states = [state[direction] for state in layer.states]
        found = []
        for step in range(steps):
            seen = layer.gathered(states[0]) if step else layer.start[direction]
            after = cell(from_x[step], states, seen)
            shown = after[0]
            if layer.lengths is not None:
                alive = (step < layer.lengths).unsqueeze(-1)
                after = [torch.where(alive, new, old) for new, old in zip(after, states, strict=True)]
                shown = torch.where(alive, shown, torch.zeros_like(shown))
            states = after
            found.append(shown)
        y = torch.stack(found)
        outputs.append(_reversed(y, layer.lengths) if backward else y)
        finals.append(states)
    lasts = [torch.stack(direction_states) for direction_states in zip(*finals, strict=True)]
    return torch.stack(outputs, 1), lasts


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Steps back to front, of each sample only its own."""
    if lengths is None:
        return x.flip(0)
    steps = torch.arange(x.shape[0], device=x.device)[:, None]
    order = torch.where(steps < lengths, lengths.long() - 1 - steps, steps)
    return x.gather(0, order.unsqueeze(-1).expand_as(x))


def _fused_parameters(layer: Layer, order: tuple[int, ...]) -> list[Tensor]:
    """Weights of all directions as torch's fused layers take them, gates brought into `order`."""

    def reordered(tensor: Tensor) -> Tensor:
        if order == tuple(range(len(order))):
            return tensor
        gates = tensor.chunk(len(order))
        return torch.cat([gates[place] for place in order])

    found = []
    for direction in range(layer.weight.shape[0]):
        found += [reordered(layer.weight[direction]), reordered(layer.recurrence[direction])]
        if layer.bias is not None:
            found += [reordered(bias) for bias in layer.bias[direction].chunk(2)]
    return found


def fused(
    kernel: Callable[..., tuple[Tensor, ...]], layer: Layer, order: tuple[int, ...]
) -> tuple[Tensor, list[Tensor]]:
    """The whole layer by one of torch's kernels."""
    backward = layer.direction == "reverse"
    # Kernels want contiguous tensors of the weights' type, which under autocast the operands may not have.
    x = (layer.x.flip(0) if backward else layer.x).to(layer.weight.dtype).contiguous()
    states = [state.to(layer.weight.dtype).contiguous() for state in layer.states]
    start = tuple(states) if len(states) > 1 else states[0]
    directions = layer.weight.shape[0]
    y, *finals = kernel(
        x,
        start,
        _fused_parameters(layer, order),
        layer.bias is not None,
        1,
        0.0,
        torch.is_grad_enabled(),
        directions == 2,
        False,
    )
    y = y.unflatten(2, (directions, layer.width)).transpose(1, 2)
    return y.flip(0) if backward else y, list(finals)
