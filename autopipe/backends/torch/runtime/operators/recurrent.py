"""Recurrent layers as ONNX defines them: by torch's fused kernels where they compute the same, else
step by step.

`x` is [s, b, i], weights are [directions, gates * h, i] and [directions, gates * h, h], biases
[directions, 2 * gates * h] (input's, then recurrence's), states [directions, b, h]; with
`batch_first` b is the first axis of x and of the states. With `group` each rank has some of the
hidden units, in every gate and direction: it holds the weights whole and uses the rows of its own
units, whose results it gives, and all units' outputs are gathered before each step but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.communication.collectives import Group
from autopipe.backends.torch.runtime.operators.misc import reverse_sequence

Activation = Callable[[Tensor], Tensor]
Cell = Callable[[Tensor, list[Tensor], Tensor], list[Tensor]]
"""From a step's input, as all gates have it, the states before it and all units' outputs before it,
to the states after it, the output first.
"""
CellFactory = Callable[[int, list[Activation]], Cell]  # By direction, with its activations.


@dataclass(slots=True)
class Layer:
    """A layer, batch second; weights and states are those of own units, but for `start`: all units'
    first outputs.
    """

    x: Tensor
    weight: Tensor
    recurrence: Tensor
    bias: Tensor | None = None
    lengths: Tensor | None = None
    hidden: Tensor | None = None
    direction: str = "forward"
    activations: tuple[str, ...] = ()
    alpha: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()
    clip: float | None = None
    batch_first: bool = False
    group: Group | None = None
    start: Tensor = field(init=False)
    states: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        if self.batch_first:
            self.x = self.x.transpose(0, 1)
            self.hidden = None if self.hidden is None else self.hidden.transpose(0, 1)
        directions, rows, units = self.recurrence.shape
        gates = rows // units
        self.start = (
            self.x.new_zeros(directions, self.x.shape[1], units)
            if self.hidden is None
            else self.hidden
        )
        self.states = [self.own_units(self.start, 1, 2)]
        self.weight, self.recurrence = (
            self.own_units(each, gates, 1) for each in (self.weight, self.recurrence)
        )
        self.bias = None if self.bias is None else self.own_units(self.bias, 2 * gates, 1)

    @property
    def width(self) -> int:
        """Own units: the size of the state."""
        return self.states[0].shape[2]

    @property
    def fits_kernels(self) -> bool:
        """True if torch's kernels may do it, as far as the layer's kind does not matter."""
        return self.group is None and self.lengths is None and self.clip is None

    def own_units(self, tensor: Tensor, gates: int, dim: int) -> Tensor:
        """Of a dimension that counts units in each gate, those of this rank."""
        if self.group is None:
            return tensor
        apart: Tensor = tensor.unflatten(dim, (gates, self.group.size, -1))
        return apart.select(dim + 1, self.group.position).flatten(dim, dim + 1)

    def biases(self, direction: int) -> tuple[Tensor, Tensor]:
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
        return (
            own if self.group is None else self.group.all_gather(own.to(self.recurrence.dtype), 1)
        )

    def loop(self, make: CellFactory, usual: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Every direction's cell over the steps; samples shorter than the longest keep their state
        and give 0 after. Parameters of activations are consumed in order by those that take them;
        `usual` are the activations of one direction where none are named.
        """
        names = self.activations or usual * self.weight.shape[0]
        alphas = iter(self.alpha)
        betas = iter(self.beta)
        functions = [_activation(name, alphas, betas) for name in names]
        outputs = []
        finals = []
        for direction in range(self.weight.shape[0]):
            cell = make(direction, functions[direction * len(usual) :][: len(usual)])
            backward = direction == 1 or self.direction == "reverse"
            x = _reversed(self.x, self.lengths) if backward else self.x
            from_x = x @ self.weight[direction].t() + self.biases(direction)[0]
            states = [state[direction] for state in self.states]
            found = []
            for step in range(len(x)):
                after = cell(
                    from_x[step],
                    states,
                    self.gathered(states[0]) if step else self.start[direction],
                )
                output = after[0]
                if self.lengths is not None:
                    alive = (step < self.lengths).unsqueeze(-1)
                    after = [
                        torch.where(alive, new, old) for new, old in zip(after, states, strict=True)
                    ]
                    output = torch.where(alive, output, torch.zeros_like(output))
                states = after
                found.append(output)
            y = torch.stack(found)
            outputs.append(_reversed(y, self.lengths) if backward else y)
            finals.append(states)
        return self._arranged(
            torch.stack(outputs, 1), [torch.stack(each) for each in zip(*finals, strict=True)]
        )

    def fused(
        self, kernel: Callable[..., tuple[Tensor, ...]], order: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """The whole layer by one of torch's kernels, which wants the gates in this order."""
        backward = self.direction == "reverse"
        # Kernels want contiguous tensors of the weights' type, which under autocast the operands
        # may not have.
        x = (self.x.flip(0) if backward else self.x).to(self.weight.dtype).contiguous()
        states = tuple(state.to(self.weight.dtype).contiguous() for state in self.states)
        start = states if len(states) > 1 else states[0]
        weights = []
        directions = len(self.weight)
        for direction in range(directions):
            tensors = [self.weight[direction], self.recurrence[direction]]
            if self.bias is not None:
                tensors += self.bias[direction].chunk(2)
            if order != tuple(range(len(order))):
                tensors = [
                    torch.cat([each.chunk(len(order))[gate] for gate in order]) for each in tensors
                ]
            weights += tensors
        # One layer, no dropout; training, both directions, batch first.
        settings = (self.bias is not None, 1, 0.0, torch.is_grad_enabled(), directions == 2, False)
        y, *finals = kernel(x, start, weights, *settings)
        y = y.unflatten(2, (directions, self.width)).transpose(1, 2)
        return self._arranged(y.flip(0) if backward else y, finals)

    def _arranged(self, y: Tensor, states: list[Tensor]) -> tuple[Tensor, ...]:
        """[s, directions, b, h] and the last states as the layout asks."""
        if self.batch_first:
            return y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in states)
        return y, *states


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Steps back to front, of each sample only its own."""
    return x.flip(0) if lengths is None else reverse_sequence(x, lengths, 0, 1)


_ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], tuple[float, ...]]] = {
    "relu": (torch.relu, ()),
    "tanh": (torch.tanh, ()),
    "sigmoid": (torch.sigmoid, ()),
    "softsign": (F.softsign, ()),
    "softplus": (F.softplus, ()),
    "affine": (lambda x, alpha, beta: alpha * x + beta, (1.0, 0.0)),
    "leakyrelu": (F.leaky_relu, (0.01,)),
    "thresholdedrelu": (lambda x, alpha: torch.where(x > alpha, x, torch.zeros_like(x)), (1.0,)),
    "scaledtanh": (lambda x, alpha, beta: alpha * torch.tanh(beta * x), (1.0, 1.0)),
    "hardsigmoid": (lambda x, alpha, beta: torch.clamp(alpha * x + beta, 0, 1), (0.2, 0.5)),
    "elu": (F.elu, (1.0,)),
}
"""By name in lower case the function, and its alpha and beta, as far as it has them, where none are
given.
"""


def _activation(name: str, alphas: Iterator[float], betas: Iterator[float]) -> Activation:
    """Takes the next of `alphas` and `betas`, if it has such. Raises ValueError for a name that
    ONNX does not have.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"no activation is called {name!r}")
    function, defaults = _ACTIVATIONS[name]
    parameters = [
        next(given, default) for given, default in zip((alphas, betas), defaults, strict=False)
    ]
    return lambda x: function(x, *parameters)


def rnn(x: Tensor, weight: Tensor, recurrence: Tensor, **settings: Any) -> tuple[Tensor, ...]:
    """Elman's network: `h' = f(W x + R h + b)`. Returns all outputs and the last states."""
    layer = Layer(x, weight, recurrence, **settings)
    kinds = set(layer.activations or ("tanh",))
    if layer.fits_kernels and kinds in ({"tanh"}, {"relu"}):
        return layer.fused(torch.rnn_tanh if kinds == {"tanh"} else torch.rnn_relu, (0,))

    def make(direction: int, functions: list[Activation]) -> Cell:
        weight = layer.recurrence[direction].t()
        bias = layer.biases(direction)[1]
        return lambda x, states, outputs: [functions[0](layer.clipped(x + outputs @ weight + bias))]

    return layer.loop(make, ("tanh",))


def gru(
    x: Tensor, weight: Tensor, recurrence: Tensor, *, reset_after: bool = False, **settings: Any
) -> tuple[Tensor, ...]:
    """Gated recurrent unit, gates in ONNX's order: update, reset, hidden. Returns all outputs and
    the last states. Cho et al., 2014; `reset_after` applies the reset gate behind the recurrence's
    product.
    """
    layer = Layer(x, weight, recurrence, **settings)
    if layer.fits_kernels and reset_after and not layer.activations:
        return layer.fused(torch.gru, (1, 0, 2))

    def make(direction: int, functions: list[Activation]) -> Cell:
        both = 2 * layer.width
        gate, output = functions
        bias = layer.biases(direction)[1]

        def step(x: Tensor, states: list[Tensor], outputs: Tensor) -> list[Tensor]:
            (before,) = states
            gates = layer.recurrence[direction]
            from_h = outputs @ gates[:both].t() + bias[:both]
            update, reset = gate(layer.clipped(x[:, :both] + from_h)).chunk(2, 1)
            if reset_after:
                inner = reset * (outputs @ gates[both:].t() + bias[both:])
            else:
                inner = layer.gathered(reset * before) @ gates[both:].t() + bias[both:]
            new = output(layer.clipped(x[:, both:] + inner))
            return [(1 - update) * new + update * before]

        return step

    return layer.loop(make, ("sigmoid", "tanh"))


def lstm(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    *,
    cell: Tensor | None = None,
    peepholes: Tensor | None = None,
    coupled: bool = False,
    **settings: Any,
) -> tuple[Tensor, ...]:
    """Long short-term memory, gates in ONNX's order: input, output, forget, cell. `peepholes`
    [directions, 3 * h] let gates see the cell, whose first state is `cell`; `coupled` makes the
    forget gate 1 - the input gate. Returns all outputs, the last outputs and the last cells.
    Hochreiter and Schmidhuber, 1997; Gers et al., 2002.
    """
    layer = Layer(x, weight, recurrence, **settings)
    if cell is None:
        layer.states.append(torch.zeros_like(layer.states[0]))
    else:
        layer.states.append(cell.transpose(0, 1) if layer.batch_first else cell)
    if layer.fits_kernels and peepholes is None and not layer.activations and not coupled:
        return layer.fused(torch.lstm, (0, 2, 3, 1))

    def make(direction: int, functions: list[Activation]) -> Cell:
        gate, inner, outer = functions
        bias = layer.biases(direction)[1]
        if peepholes is None:
            sights = x.new_zeros(3, layer.width)
        else:
            sights = layer.own_units(peepholes[direction], 3, 0).reshape(3, -1)

        def step(x: Tensor, states: list[Tensor], outputs: Tensor) -> list[Tensor]:
            before = states[1]
            gates = x + outputs @ layer.recurrence[direction].t() + bias
            enter, leave, keep, new = gates.chunk(4, 1)
            enter = gate(layer.clipped(enter + sights[0] * before))
            keep = 1 - enter if coupled else gate(layer.clipped(keep + sights[2] * before))
            after = keep * before + enter * inner(layer.clipped(new))
            leave = gate(layer.clipped(leave + sights[1] * after))
            return [leave * outer(after), after]

        return step

    return layer.loop(make, ("sigmoid", "tanh", "tanh"))
