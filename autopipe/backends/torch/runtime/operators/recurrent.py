"""Recurrent layers with the semantics of ONNX. They use torch's fused kernels if these have the
required semantics, and otherwise compute step by step.

Shapes, with s steps, b samples, i input features and h hidden units:

- `x`: [s, b, i]
- weights: [directions, gates * h, i] and [directions, gates * h, h]
- biases: [directions, 2 * gates * h] (of the input, then of the recurrence)
- states: [directions, b, h]

With `batch_first`, b is the first axis of x and of the states.

With `group`, each rank has a shard of the hidden units, in each gate and direction. The weights are
replicated, but a rank uses only the rows of its own units and returns the results of these units.
Before each step except the first, an all-gather collects the outputs of all units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch import torch_interfaces
from autopipe.backends.torch.runtime.communication.collectives import Group
from autopipe.backends.torch.runtime.operators.misc import reverse_sequence

Activation = Callable[[Tensor], Tensor]
Cell = Callable[[Tensor, list[Tensor], Tensor], list[Tensor]]
"""Function that computes one step of a layer.

Arguments: the contribution of the step's input to all gates, the states before the step, and the
outputs of all units before the step. Result: the states after the step; the first state is the
output.
"""
# Arguments of a factory: the direction and its activations.
CellFactory = Callable[[int, list[Activation]], Cell]


@dataclass(slots=True)
class RecurrentLayer:
    """A layer with the batch as second axis. After initialization, weights and states have only
    this rank's hidden units; `start` has the initial outputs of all units.
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
        """Number of this rank's hidden units: the size of its state."""
        return self.states[0].shape[2]

    @property
    def fits_kernels(self) -> bool:
        """True if torch's kernels support the settings that all kinds of layers share: no sharding,
        no lengths, no clipping.
        """
        return self.group is None and self.lengths is None and self.clip is None

    def own_units(self, tensor: Tensor, gates: int, dim: int) -> Tensor:
        """Return this rank's units of dimension `dim`, which contains all units of each gate."""
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
        """Return a gate before its activation, clamped to [-clip, clip]."""
        return gate if self.clip is None else torch.clamp(gate, -self.clip, self.clip)

    def gathered(self, own: Tensor) -> Tensor:
        """Return the values of all units from the values of this rank's units."""
        return (
            own if self.group is None else self.group.all_gather(own.to(self.recurrence.dtype), 1)
        )

    def loop(self, make: CellFactory, usual: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Run the cell of each direction over the steps. Return the outputs, then the final states.

        A sample that is shorter than the longest sample keeps its state after its end, and its
        further outputs are 0. Activations with parameters take the values of `alpha` and `beta` in
        order. `usual` contains the default activations of one direction.
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
            x = _reverse_steps(self.x, self.lengths) if backward else self.x
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
            outputs.append(_reverse_steps(y, self.lengths) if backward else y)
            finals.append(states)
        return self._arrange_results(
            torch.stack(outputs, 1), [torch.stack(each) for each in zip(*finals, strict=True)]
        )

    def fused(
        self, kernel: Callable[..., tuple[Tensor, ...]], order: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """Run the layer by a kernel of torch. `order` contains the index of the ONNX gate for each
        gate of the kernel.
        """
        backward = self.direction == "reverse"
        # Kernels require contiguous tensors of the weights' type. Under autocast, the operands may
        # have another type.
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
        # Has biases, number of layers, dropout, training, bidirectional, batch first.
        settings = (self.bias is not None, 1, 0.0, torch.is_grad_enabled(), directions == 2, False)
        with _without_unsupported_bfloat16(x):
            y, *finals = kernel(x, start, weights, *settings)
        y = y.unflatten(2, (directions, self.width)).transpose(1, 2)
        return self._arrange_results(y.flip(0) if backward else y, finals)

    def _arrange_results(self, y: Tensor, states: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs [s, directions, b, h] and the final states in the layout of
        `batch_first`.
        """
        if self.batch_first:
            return y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in states)
        return y, *states


def _without_unsupported_bfloat16(x: Tensor) -> AbstractContextManager[object]:
    """Return a context without autocast if autocast is enabled and `x` is on a CPU that has no
    bfloat16 instructions, otherwise a context that does nothing.

    Autocast converts the operands of a recurrent layer to bfloat16 for a kernel of oneDNN that does
    not exist on such a CPU.
    """
    if (
        x.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and not torch_interfaces.cpu_supports_bfloat16_kernels()
    ):
        return torch.autocast("cpu", enabled=False)
    return nullcontext()


def _reverse_steps(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return x with its steps reversed. With `lengths`, only the valid steps of each sample are
    reversed.
    """
    return x.flip(0) if lengths is None else reverse_sequence(x, lengths, 0, 1)


_ACTIVATIONS_BY_NAME: dict[str, tuple[Callable[..., Tensor], tuple[float, ...]]] = {
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
"""Function and default parameters (alpha, then beta, if the function has them) by activation name
in lower case.
"""


def _activation(name: str, alphas: Iterator[float], betas: Iterator[float]) -> Activation:
    """Return the activation called `name`. It takes its parameters from `alphas` and `betas`. Raise
    ValueError if ONNX does not define the name.
    """
    if name not in _ACTIVATIONS_BY_NAME:
        raise ValueError(f"activation {name!r} is not defined by ONNX")
    function, defaults = _ACTIVATIONS_BY_NAME[name]
    parameters = [
        next(given, default) for given, default in zip((alphas, betas), defaults, strict=False)
    ]
    return lambda x: function(x, *parameters)


def rnn(x: Tensor, weight: Tensor, recurrence: Tensor, **settings: Any) -> tuple[Tensor, ...]:
    """Elman network: `h' = f(W x + R h + b)`. Return all outputs and the final states."""
    layer = RecurrentLayer(x, weight, recurrence, **settings)
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
    """Gated recurrent unit (Cho et al., 2014) with the gates in ONNX's order: update, reset,
    hidden. Return all outputs and the final states.

    `reset_after` applies the reset gate after the matmul with the recurrence weights, instead of
    before.
    """
    layer = RecurrentLayer(x, weight, recurrence, **settings)
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
    """Long short-term memory (Hochreiter and Schmidhuber, 1997; Gers et al., 2002) with the gates
    in ONNX's order: input, output, forget, cell. Return all outputs, the final outputs and the
    final cells.

    `cell` is the initial cell. `peepholes` [directions, 3 * h] are weights by which the gates read
    the cell. `coupled` makes the forget gate 1 - input gate.
    """
    layer = RecurrentLayer(x, weight, recurrence, **settings)
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
