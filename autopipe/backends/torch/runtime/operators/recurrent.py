"""Recurrent layers with the semantics of ONNX. They use torch's fused kernels if the kernels have
the required semantics; otherwise they compute step by step.

Shapes, with s steps, b samples, i input features and h hidden units:

- `x`: [s, b, i]
- weights: [directions, gates * h, i] and [directions, gates * h, h]
- biases: [directions, 2 * gates * h] (of the input, then of the recurrence)
- states: [directions, b, h]

With `batch_first`, b is the first dimension of x and of the states.

With `group`, each rank computes a shard of the hidden units, in each gate and direction. All ranks
have the full weights, but a rank uses only the rows of its own units, and returns the results of
these units. Before each step except the first, an all-gather collects the outputs of all units.
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
from autopipe.backends.torch.runtime.operators.onnx_operators import reverse_sequence

Activation = Callable[[Tensor], Tensor]
Cell = Callable[[Tensor, list[Tensor], Tensor], list[Tensor]]
"""Function that computes one step of one direction.

Arguments: the contribution of the step's input to all gates, the states before the step, and the
outputs of all units before the step. Result: the states after the step, of which the first is the
output.
"""
# Function that returns the cell of a direction. A cell computes one time step. Arguments: index of
# the direction, its activations.
CellFactory = Callable[[int, list[Activation]], Cell]


@dataclass(slots=True)
class RecurrentLayer:
    """The operands and attributes of a recurrent layer. After initialization, the batch is the
    second dimension of x and states, and weights and states contain only this rank's hidden units.
    `start` has the initial outputs of all units.
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
        """Number of this rank's hidden units, the last dimension of its states."""
        return self.states[0].shape[2]

    @property
    def fits_kernels(self) -> bool:
        """True if the layer has none of the features that no kernel of torch supports: sharding,
        lengths per sample, and clipping. A layer may have further features that its kernel does not
        support.
        """
        return self.group is None and self.lengths is None and self.clip is None

    def own_units(self, tensor: Tensor, gates: int, dim: int) -> Tensor:
        """Return the entries of this rank's units along dimension `dim`, which contains all units
        of `gates` gates.
        """
        if self.group is None:
            return tensor
        apart: Tensor = tensor.unflatten(dim, (gates, self.group.size, -1))
        return apart.select(dim + 1, self.group.position).flatten(dim, dim + 1)

    def biases(self, direction: int) -> tuple[Tensor, Tensor]:
        """Return (bias of the input, bias of the recurrence) of a direction, zeros if the layer has
        none.
        """
        if self.bias is None:
            zeros = self.x.new_zeros(self.weight.shape[1])
            return zeros, zeros
        first, second = self.bias[direction].chunk(2)
        return first, second

    def clip_gate(self, gate: Tensor) -> Tensor:
        """Return `gate`, the value of a gate before its activation, clamped to [-clip, clip]."""
        return gate if self.clip is None else torch.clamp(gate, -self.clip, self.clip)

    def gather_units(self, own: Tensor) -> Tensor:
        """Return the values of all units, [b, h]; `own` are the values of this rank's units."""
        return (
            own if self.group is None else self.group.all_gather(own.to(self.recurrence.dtype), 1)
        )

    def run_stepwise(self, make: CellFactory, usual: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Run the layer step by step. Return the outputs of all steps, then the final states.
        `make` returns the cell of a direction, the function that computes one step.

        A sample that is shorter than the longest sample keeps its state after its end; its further
        outputs are 0. Activations with parameters take the values of `alpha` and `beta` in order.
        `usual` are the default activations of one direction.
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
                    self.gather_units(states[0]) if step else self.start[direction],
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

    def run_fused(
        self, kernel: Callable[..., tuple[Tensor, ...]], order: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """Run the layer by a kernel of torch. Return the outputs of all steps, then the final
        states. `order` has, for each gate in the order of the kernel, the gate's index in ONNX's
        order.
        """
        backward = self.direction == "reverse"
        # Torch's kernels require contiguous tensors of one type. Under autocast, the operands may
        # have another type than the weights, so they are converted to the weights' type.
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
        # `settings` are arguments of the kernel: has biases, number of layers, dropout, is
        # training, is bidirectional, has the batch first.
        settings = (self.bias is not None, 1, 0.0, torch.is_grad_enabled(), directions == 2, False)
        with _disable_unsupported_autocast(x):
            y, *finals = kernel(x, start, weights, *settings)
        y = y.unflatten(2, (directions, self.width)).transpose(1, 2)
        return self._arrange_results(y.flip(0) if backward else y, finals)

    def _arrange_results(self, y: Tensor, states: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs y [s, directions, b, h], then the final states, with the batch first
        if the layer has it first.
        """
        if self.batch_first:
            return y.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in states)
        return y, *states


def _disable_unsupported_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context manager that disables autocast if autocast is on and x is on a CPU without
    bfloat16 instructions, otherwise one without effect. Autocast would convert the operands of a
    recurrent layer to bfloat16, for which oneDNN has no kernel on such a CPU.
    """
    if (
        x.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and not torch_interfaces.cpu_supports_bfloat16_kernels()
    ):
        return torch.autocast("cpu", enabled=False)
    return nullcontext()


def _reverse_steps(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return x with its steps (dimension 0) in reversed order. If `lengths` is given, only the
    first `lengths[i]` steps of sample i are reversed.
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
"""(function, default parameters) by ONNX's name of an activation in lower case. The parameters are
alpha, then beta, as far as the function has them.
"""


def _activation(name: str, alphas: Iterator[float], betas: Iterator[float]) -> Activation:
    """Return the activation `name` as a function of one tensor. Its parameters are the next values
    of `alphas` and `betas`, as far as it has them. Raise ValueError if ONNX does not define the
    name.
    """
    if name not in _ACTIVATIONS_BY_NAME:
        raise ValueError(f"activation {name!r} is not defined by ONNX")
    function, defaults = _ACTIVATIONS_BY_NAME[name]
    parameters = [
        next(given, default) for given, default in zip((alphas, betas), defaults, strict=False)
    ]
    return lambda x: function(x, *parameters)


def rnn(x: Tensor, weight: Tensor, recurrence: Tensor, **settings: Any) -> tuple[Tensor, ...]:
    """Elman network, h' = f(W x + R h + b). Return (outputs of all steps, final states)."""
    layer = RecurrentLayer(x, weight, recurrence, **settings)
    kinds = set(layer.activations or ("tanh",))
    if layer.fits_kernels and kinds in ({"tanh"}, {"relu"}):
        return layer.run_fused(torch.rnn_tanh if kinds == {"tanh"} else torch.rnn_relu, (0,))

    def make(direction: int, functions: list[Activation]) -> Cell:
        """Return the cell of a direction, the function that computes one step."""
        weight = layer.recurrence[direction].t()
        bias = layer.biases(direction)[1]
        return lambda x, states, outputs: [
            functions[0](layer.clip_gate(x + outputs @ weight + bias))
        ]

    return layer.run_stepwise(make, ("tanh",))


def gru(
    x: Tensor, weight: Tensor, recurrence: Tensor, *, reset_after: bool = False, **settings: Any
) -> tuple[Tensor, ...]:
    """Gated recurrent unit (Cho et al., 2014) with the gates in ONNX's order: update, reset,
    hidden. Return (outputs of all steps, final states).

    If `reset_after`, the reset gate applies after the matmul with the recurrence weights, otherwise
    before it.
    """
    layer = RecurrentLayer(x, weight, recurrence, **settings)
    if layer.fits_kernels and reset_after and not layer.activations:
        return layer.run_fused(torch.gru, (1, 0, 2))

    def make(direction: int, functions: list[Activation]) -> Cell:
        """Return the cell of a direction, the function that computes one step."""
        both = 2 * layer.width
        gate, output = functions
        bias = layer.biases(direction)[1]

        def step(x: Tensor, states: list[Tensor], outputs: Tensor) -> list[Tensor]:
            (before,) = states
            gates = layer.recurrence[direction]
            from_h = outputs @ gates[:both].t() + bias[:both]
            update, reset = gate(layer.clip_gate(x[:, :both] + from_h)).chunk(2, 1)
            if reset_after:
                inner = reset * (outputs @ gates[both:].t() + bias[both:])
            else:
                inner = layer.gather_units(reset * before) @ gates[both:].t() + bias[both:]
            new = output(layer.clip_gate(x[:, both:] + inner))
            return [(1 - update) * new + update * before]

        return step

    return layer.run_stepwise(make, ("sigmoid", "tanh"))


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
    in ONNX's order: input, output, forget, cell. Return (outputs of all steps, final outputs, final
    cell states).

    `cell` is the initial cell state. `peepholes` [directions, 3 * h] are weights by which gates
    read the cell state. If `coupled`, the forget gate is 1 minus the input gate.
    """
    layer = RecurrentLayer(x, weight, recurrence, **settings)
    if cell is None:
        layer.states.append(torch.zeros_like(layer.states[0]))
    else:
        layer.states.append(cell.transpose(0, 1) if layer.batch_first else cell)
    if layer.fits_kernels and peepholes is None and not layer.activations and not coupled:
        return layer.run_fused(torch.lstm, (0, 2, 3, 1))

    def make(direction: int, functions: list[Activation]) -> Cell:
        """Return the cell of a direction, the function that computes one step."""
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
            enter = gate(layer.clip_gate(enter + sights[0] * before))
            keep = 1 - enter if coupled else gate(layer.clip_gate(keep + sights[2] * before))
            after = keep * before + enter * inner(layer.clip_gate(new))
            leave = gate(layer.clip_gate(leave + sights[1] * after))
            return [leave * outer(after), after]

        return step

    return layer.run_stepwise(make, ("sigmoid", "tanh", "tanh"))
