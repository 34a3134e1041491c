"""Recurrent layers as ONNX defines them.

`x` is [s, b, i], weights are [directions, gates * h, i] and [directions, gates * h, h], biases [directions,
2 * gates * h] (input's, then recurrence's), states [directions, b, h]; with `batch_first` b is the first axis of x and
of the states. Torch's fused layers do the work where they compute the same, else a loop over the steps does. With
`group` the cell and all results are those of this rank's hidden units; everything else is whole.

Common parts of recurrent layers: their operands, the loop over the steps, and torch's fused kernels.

Where ranks share a layer, each has some of the hidden units, in every gate and direction: it holds the weights whole
and uses the rows of its own units, and all units' outputs are gathered before each step but the first.

Activations that recurrent layers of ONNX name for their gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.operators.sharded import ShardedAxis

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


Activation = Callable[[Tensor], Tensor]

_PLAIN: dict[str, Activation] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softsign": F.softsign,
    "softplus": F.softplus,
}
_DEFAULTS = {
    "affine": (1.0, 0.0),
    "leakyrelu": (0.01, None),
    "thresholdedrelu": (1.0, None),
    "scaledtanh": (1.0, 1.0),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0, None),
}
"""alpha and beta by activation; None where it takes none."""


def activation_named(name: str, alphas: Iterator[float], betas: Iterator[float]) -> Activation:
    """The activation called `name` in lower case; the next of `alphas` and `betas` are its parameters if it has any.

    Raises ValueError for a name that ONNX does not define.
    """
    if name in _PLAIN:
        return _PLAIN[name]
    if name not in _DEFAULTS:
        raise ValueError(f"no activation is called {name!r}")
    default_alpha, default_beta = _DEFAULTS[name]
    alpha = next(alphas, default_alpha)
    beta = 0.0 if default_beta is None else next(betas, default_beta)
    return _with_parameters(name, alpha, beta)


def _with_parameters(name: str, alpha: float, beta: float) -> Activation:
    functions: dict[str, Activation] = {
        "affine": lambda x: alpha * x + beta,
        "leakyrelu": lambda x: F.leaky_relu(x, alpha),
        "thresholdedrelu": lambda x: torch.where(x > alpha, x, torch.zeros_like(x)),
        "scaledtanh": lambda x: alpha * torch.tanh(beta * x),
        "hardsigmoid": lambda x: torch.clamp(alpha * x + beta, 0, 1),
        "elu": lambda x: F.elu(x, alpha),
    }
    return functions[name]


def _activations(
    names: tuple[str, ...],
    default: tuple[str, ...],
    alpha: tuple[float, ...],
    beta: tuple[float, ...],
    directions: int,
) -> list[list[Activation]]:
    """For each direction, its gates' activations; parameters are consumed in order by those that take them."""
    names = names or default * directions
    alphas, betas = iter(alpha), iter(beta)
    found = [activation_named(name, alphas, betas) for name in names]
    count = len(found) // directions
    return [found[start : start + count] for start in range(0, len(found), count)]


def rnn(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    *,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    hidden: Tensor | None = None,
    direction: str = "forward",
    activations: tuple[str, ...] = (),
    alpha: tuple[float, ...] = (),
    beta: tuple[float, ...] = (),
    clip: float | None = None,
    batch_first: bool = False,
    group: ShardedAxis | None = None,
) -> tuple[Tensor, ...]:
    """Elman's network: `h' = f(W x + R h + b)`. Returns all outputs and the last states."""
    layer = layer_of(x, weight, recurrence, bias, lengths, hidden, (), direction, clip, batch_first, group)
    kinds = set(activations or ("tanh",))
    if group is None and lengths is None and clip is None and kinds in ({"tanh"}, {"relu"}):
        y, states = fused(torch.rnn_tanh if kinds == {"tanh"} else torch.rnn_relu, layer, (0,))
        return arranged(y, states, batch_first)

    def cell(place: int, functions: list[Activation]) -> Cell:
        _, bias_h = layer.biases(place)

        def step(x: Tensor, states: list[Tensor], seen: Tensor) -> list[Tensor]:
            gate = x + seen @ layer.recurrence[place].t() + bias_h
            return [functions[0](layer.clipped(gate))]

        return step

    chosen = _activations(activations, ("tanh",), alpha, beta, weight.shape[0])
    y, states = loop(layer, [cell(place, functions) for place, functions in enumerate(chosen)])
    return arranged(y, states, batch_first)


def gru(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    *,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    hidden: Tensor | None = None,
    direction: str = "forward",
    activations: tuple[str, ...] = (),
    alpha: tuple[float, ...] = (),
    beta: tuple[float, ...] = (),
    clip: float | None = None,
    reset_after: bool = False,
    batch_first: bool = False,
    group: ShardedAxis | None = None,
) -> tuple[Tensor, ...]:
    """Gated recurrent unit, gates in ONNX's order: update, reset, hidden. Returns all outputs and the last states.

    Cho et al., 2014; `reset_after` applies the reset gate behind the recurrence's product.
    """
    layer = layer_of(x, weight, recurrence, bias, lengths, hidden, (), direction, clip, batch_first, group)
    if group is None and reset_after and lengths is None and clip is None and not activations:
        y, states = fused(torch.gru, layer, (1, 0, 2))
        return arranged(y, states, batch_first)

    def cell(place: int, functions: list[Activation]) -> Cell:
        _, bias_h = layer.biases(place)
        width = layer.width
        gate, output = functions

        def step(x: Tensor, states: list[Tensor], seen: Tensor) -> list[Tensor]:
            (before,) = states
            gates = layer.recurrence[place]
            from_h = seen @ gates[: 2 * width].t() + bias_h[: 2 * width]
            update, reset = gate(layer.clipped(x[:, : 2 * width] + from_h)).chunk(2, 1)
            if reset_after:
                inner = reset * (seen @ gates[2 * width :].t() + bias_h[2 * width :])
            else:
                inner = layer.gathered(reset * before) @ gates[2 * width :].t() + bias_h[2 * width :]
            new = output(layer.clipped(x[:, 2 * width :] + inner))
            return [(1 - update) * new + update * before]

        return step

    chosen = _activations(activations, ("sigmoid", "tanh"), alpha, beta, weight.shape[0])
    y, states = loop(layer, [cell(place, functions) for place, functions in enumerate(chosen)])
    return arranged(y, states, batch_first)


def lstm(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    *,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    peepholes: Tensor | None = None,
    direction: str = "forward",
    activations: tuple[str, ...] = (),
    alpha: tuple[float, ...] = (),
    beta: tuple[float, ...] = (),
    clip: float | None = None,
    coupled: bool = False,
    batch_first: bool = False,
    group: ShardedAxis | None = None,
) -> tuple[Tensor, ...]:
    """Long short-term memory, gates in ONNX's order: input, output, forget, cell.

    `peepholes` [directions, 3 * h] let gates see the cell; `coupled` makes the forget gate 1 - the input gate. Returns
    all outputs, the last outputs and the last cells. Hochreiter and Schmidhuber, 1997; Gers et al., 2002.
    """
    layer = layer_of(x, weight, recurrence, bias, lengths, hidden, (cell,), direction, clip, batch_first, group)
    if group is None and lengths is None and clip is None and peepholes is None and not activations and not coupled:
        y, states = fused(torch.lstm, layer, (0, 2, 3, 1))
        return arranged(y, states, batch_first)

    def make(place: int, functions: list[Activation]) -> Cell:
        _, bias_h = layer.biases(place)
        gate, inner, outer = functions
        if peepholes is None:
            sights = x.new_zeros(3, layer.width)
        else:
            sights = own_units(peepholes[place], 3, 0, group).reshape(3, -1)

        def step(x: Tensor, states: list[Tensor], seen: Tensor) -> list[Tensor]:
            cell_before = states[1]
            gates = x + seen @ layer.recurrence[place].t() + bias_h
            enter, leave, keep, new = gates.chunk(4, 1)
            enter = gate(layer.clipped(enter + sights[0] * cell_before))
            keep = 1 - enter if coupled else gate(layer.clipped(keep + sights[2] * cell_before))
            after = keep * cell_before + enter * inner(layer.clipped(new))
            leave = gate(layer.clipped(leave + sights[1] * after))
            return [leave * outer(after), after]

        return step

    chosen = _activations(activations, ("sigmoid", "tanh", "tanh"), alpha, beta, weight.shape[0])
    y, states = loop(layer, [make(place, functions) for place, functions in enumerate(chosen)])
    return arranged(y, states, batch_first)
