"""Recurrent layers as ONNX defines them.

`x` is [s, b, i], weights are [directions, gates * h, i] and [directions, gates * h, h], biases [directions,
2 * gates * h] (input's, then recurrence's), states [directions, b, h]; with `batch_first` b is the first axis of x and
of the states. Torch's fused layers do the work where they compute the same, else a loop over the steps does. With
`group` the cell and all results are those of this rank's hidden units; everything else is whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopipe.backends.torch.runtime.operators.gates import Activation, activation_named
from autopipe.backends.torch.runtime.operators.joint import ShardedAxis
from autopipe.backends.torch.runtime.operators.recurrent_layer import Cell, arranged, fused, layer_of, loop, own_units


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
