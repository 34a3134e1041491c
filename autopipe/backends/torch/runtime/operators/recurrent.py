"""Recurrent layers as ONNX defines them.

`x` is [s, b, i], weights are [directions, gates * h, i] and [directions, gates * h, h], biases [directions,
2 * gates * h] (input's, then recurrence's), states [directions, b, h]; with `batch_first` b is the first axis of x and
of the states. Torch's fused layers do the work where they compute the same, else a loop over the steps does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopipe.backends.torch.runtime.operators.gates import Activation, activation_named

Cell = Callable[[Tensor, list[Tensor]], list[Tensor]]
"""From a step's input and the states before it to the states after it, the output first."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Operands and settings that all three layers share, batch second."""

    x: Tensor
    weight: Tensor
    recurrence: Tensor
    bias: Tensor | None
    lengths: Tensor | None
    states: list[Tensor]
    direction: str
    clip: float | None

    @property
    def width(self) -> int:
        """Size of the state."""
        return self.recurrence.shape[2]

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


def _layer(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    states: tuple[Tensor | None, ...],
    direction: str,
    clip: float | None,
    batch_first: bool,
) -> Layer:
    if batch_first:
        x = x.transpose(0, 1)
        states = tuple(None if state is None else state.transpose(0, 1) for state in states)
    shape = (weight.shape[0], x.shape[1], recurrence.shape[2])
    given = [x.new_zeros(shape) if state is None else state for state in states]
    return Layer(x, weight, recurrence, bias, lengths, given, direction, clip)


def _arranged(y: Tensor, states: list[Tensor], batch_first: bool) -> tuple[Tensor, ...]:
    """[s, directions, b, h] and the last states as the layout asks."""
    if batch_first:
        return y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in states)
    return y, *states


def _loop(layer: Layer, cells: list[Cell]) -> tuple[Tensor, list[Tensor]]:
    """Every direction's cell over the steps; samples shorter than the longest keep their state and give 0 after."""
    steps = layer.x.shape[0]
    outputs, finals = [], []
    for direction, cell in enumerate(cells):
        backward = direction == 1 or layer.direction == "reverse"
        x = _reversed(layer.x, layer.lengths) if backward else layer.x
        states = [state[direction] for state in layer.states]
        found = []
        for step in range(steps):
            after = cell(x[step], states)
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


def _fused(
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
) -> tuple[Tensor, ...]:
    """Elman's network: `h' = f(W x + R h + b)`. Returns all outputs and the last states."""
    layer = _layer(x, weight, recurrence, bias, lengths, (hidden,), direction, clip, batch_first)
    kinds = set(activations or ("tanh",))
    if lengths is None and clip is None and kinds in ({"tanh"}, {"relu"}):
        y, states = _fused(torch.rnn_tanh if kinds == {"tanh"} else torch.rnn_relu, layer, (0,))
        return _arranged(y, states, batch_first)

    def cell(place: int, functions: list[Activation]) -> Cell:
        bias_x, bias_h = layer.biases(place)

        def step(x: Tensor, states: list[Tensor]) -> list[Tensor]:
            gate = x @ layer.weight[place].t() + bias_x + states[0] @ layer.recurrence[place].t() + bias_h
            return [functions[0](layer.clipped(gate))]

        return step

    chosen = _activations(activations, ("tanh",), alpha, beta, weight.shape[0])
    y, states = _loop(layer, [cell(place, functions) for place, functions in enumerate(chosen)])
    return _arranged(y, states, batch_first)


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
) -> tuple[Tensor, ...]:
    """Gated recurrent unit, gates in ONNX's order: update, reset, hidden. Returns all outputs and the last states.

    Cho et al., 2014; `reset_after` applies the reset gate behind the recurrence's product.
    """
    layer = _layer(x, weight, recurrence, bias, lengths, (hidden,), direction, clip, batch_first)
    if reset_after and lengths is None and clip is None and not activations:
        y, states = _fused(torch.gru, layer, (1, 0, 2))
        return _arranged(y, states, batch_first)

    def cell(place: int, functions: list[Activation]) -> Cell:
        bias_x, bias_h = layer.biases(place)
        width = layer.width
        gate, output = functions

        def step(x: Tensor, states: list[Tensor]) -> list[Tensor]:
            (before,) = states
            from_x = x @ layer.weight[place].t() + bias_x
            gates = layer.recurrence[place]
            from_h = before @ gates[: 2 * width].t() + bias_h[: 2 * width]
            update, reset = gate(layer.clipped(from_x[:, : 2 * width] + from_h)).chunk(2, 1)
            if reset_after:
                inner = reset * (before @ gates[2 * width :].t() + bias_h[2 * width :])
            else:
                inner = (reset * before) @ gates[2 * width :].t() + bias_h[2 * width :]
            new = output(layer.clipped(from_x[:, 2 * width :] + inner))
            return [(1 - update) * new + update * before]

        return step

    chosen = _activations(activations, ("sigmoid", "tanh"), alpha, beta, weight.shape[0])
    y, states = _loop(layer, [cell(place, functions) for place, functions in enumerate(chosen)])
    return _arranged(y, states, batch_first)


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
) -> tuple[Tensor, ...]:
    """Long short-term memory, gates in ONNX's order: input, output, forget, cell.

    `peepholes` [directions, 3 * h] let gates see the cell; `coupled` makes the forget gate 1 - the input gate. Returns
    all outputs, the last outputs and the last cells. Hochreiter and Schmidhuber, 1997; Gers et al., 2002.
    """
    layer = _layer(x, weight, recurrence, bias, lengths, (hidden, cell), direction, clip, batch_first)
    if lengths is None and clip is None and peepholes is None and not activations and not coupled:
        y, states = _fused(torch.lstm, layer, (0, 2, 3, 1))
        return _arranged(y, states, batch_first)

    def make(place: int, functions: list[Activation]) -> Cell:
        bias_x, bias_h = layer.biases(place)
        gate, inner, outer = functions
        sights = x.new_zeros(3, layer.width) if peepholes is None else peepholes[place].reshape(3, -1)

        def step(x: Tensor, states: list[Tensor]) -> list[Tensor]:
            output_before, cell_before = states
            gates = x @ layer.weight[place].t() + bias_x + output_before @ layer.recurrence[place].t() + bias_h
            enter, leave, keep, new = gates.chunk(4, 1)
            enter = gate(layer.clipped(enter + sights[0] * cell_before))
            keep = 1 - enter if coupled else gate(layer.clipped(keep + sights[2] * cell_before))
            after = keep * cell_before + enter * inner(layer.clipped(new))
            leave = gate(layer.clipped(leave + sights[1] * after))
            return [leave * outer(after), after]

        return step

    chosen = _activations(activations, ("sigmoid", "tanh", "tanh"), alpha, beta, weight.shape[0])
    y, states = _loop(layer, [make(place, functions) for place, functions in enumerate(chosen)])
    return _arranged(y, states, batch_first)
