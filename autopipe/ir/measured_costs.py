"""Measured costs of devices: seconds by operator and local shapes, by exchange and size, and of tasks besides
operators. `autopipe profile` makes it, `plan --costs` uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from autopipe.ir.graph import Attribute, Value
from autopipe.ir.ops import qualified_name
from autopipe.ir.ops.operator import Signature
from autopipe.ir.placement import Split

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


MESSAGES = ("send", "post", "follow")
"""Measurements of messages between ranks: on their way, the CPU time of one end, and of each further message along with
it.
"""
EXCHANGES = (*MESSAGES, *COLLECTIVES)
"""Measurements between ranks: messages, and collectives by the size of their group."""


@dataclass(frozen=True, slots=True)
class Affine:
    """`fixed_s + per_byte_s * bytes` seconds."""

    fixed_s: float
    per_byte_s: float

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.fixed_s + other.fixed_s, self.per_byte_s + other.per_byte_s)

    def __mul__(self, factor: float) -> Affine:
        return Affine(self.fixed_s * factor, self.per_byte_s * factor)

    def seconds(self, size_bytes: float) -> float:
        """Seconds for `size_bytes` bytes."""
        return self.fixed_s + self.per_byte_s * size_bytes


@dataclass(frozen=True, slots=True)
class Timing:
    """The median of several runs."""

    seconds: float
    spread: float
    """Distance between the quartiles, as a share of the median."""
    repetitions: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator on one device: what its time depends on, as far as is known while planning.

    `operands` and `results` are local types such as `float32[8,64]`, "" where absent; `attributes` those that the file
    states. `gradients` are the places of the operands whose gradients backward gives.
    """

    operator: str
    attributes: tuple[tuple[str, Attribute], ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    gradients: tuple[int, ...]
    precision: str


def operation_of(signature: Signature, gradients: Iterable[int], precision: str) -> Operation:
    """The operation that one use of an operator is; `gradients` are places of operands."""
    return Operation(
        operator=qualified_name(signature.node),
        attributes=signature.node.attributes,
        operands=tuple(map(_type_text, signature.operands)),
        results=tuple(map(_type_text, signature.results)),
        gradients=tuple(gradients),
        precision=precision,
    )


def _type_text(value: Value | None) -> str:
    return "" if value is None else f"{value.dtype.value}[{','.join(map(str, value.shape))}]"


@dataclass(frozen=True, slots=True)
class OperationCost:
    """Measured time of an operator, with the roofline's figures, by which other operators are judged."""

    operation: Operation
    kind: str
    """Class of the operator, as `ir.ops.row.Operator.kind`."""
    flops: tuple[float, float]
    """Of forward and of backward."""
    moved_bytes: tuple[float, float]
    """Read and written by forward and by backward."""
    forward: Timing
    backward: Timing | None
    """None where it was not measured, as for inference."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation to measure: a node as one device sees it, whole or its share under `splits`."""

    operation: Operation
    signatures: tuple[Signature, ...]
    """With local shapes: the operator, and what is computed along with it."""
    splits: tuple[Split, ...]
    below: tuple[tuple[str, int], ...]
    """For each operand that indexes something, how many there are to choose from."""
    wanted: tuple[str, ...]
    """Values that gradients flow through."""
    parameters: tuple[str, ...]
    """Operands that are parameters: their gradients stay."""
    kind: str
    flops: tuple[float, float]
    moved_bytes: tuple[float, float]

    def cost(self, forward: Timing, backward: Timing | None) -> OperationCost:
        """Cost with these measured times."""
        return OperationCost(self.operation, self.kind, self.flops, self.moved_bytes, forward, backward)


@dataclass(frozen=True, slots=True)
class TensorCosts:
    """Cost of an operation on tensors one by one: a time for each and a time for each byte."""

    per_tensor_s: float
    per_byte_s: float

    def seconds(self, tensors: int, size_bytes: float) -> float:
        """Seconds for `tensors` tensors of `size_bytes` bytes together."""
        return self.per_tensor_s * tensors + self.per_byte_s * size_bytes


@dataclass(frozen=True, slots=True)
class TaskCosts:
    """Cost of a rank's step besides its operators."""

    forward_s: float
    """Of one stage's forward of one micro-batch: finding the arguments, handing over the results."""
    backward_s: float
    """Of its backward: starting autograd, handing back the gradients."""
    waiting_s: float
    """Of an operator whose parameters' gradients wait for the second half of a split backward: how much longer it takes
    for that, in the forward and both halves together."""
    update_s: float
    """Of an optimizer's update, besides what it does to tensors."""
    accumulate: TensorCosts
    """Adding a micro-batch's gradients to those before, by bytes of gradients."""
    bucket: TensorCosts
    """Putting gradients into a bucket whose sums other ranks take part in, and having those back, besides the
    exchange."""
    updates: tuple[TensorCosts, ...]
    """An optimizer's update, by bytes of parameters: without states, with one (momentum), with two (AdamW)."""


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """Messages or collectives of a group of ranks on one machine, and the line through what they took.

    Bytes are those of `passes/cost/communication.py`: of one message; of what each rank holds before an all-reduce,
    a reduce-scatter, an all-to-all; of what each holds after an all-gather.
    """

    kind: str
    """One of `EXCHANGES`."""
    ranks: int
    fit: Affine
    samples: tuple[tuple[int, Timing], ...]
    """Measured times by bytes."""


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """All that was measured on one kind of device."""

    device: str
    measured: tuple[str, ...]
    """How, a line for each run of the profiler: what ran where."""
    operations: tuple[OperationCost, ...] = ()
    tasks: TaskCosts | None = None
    exchanges: tuple[ExchangeCost, ...] = ()


@dataclass(frozen=True, slots=True)
class Costs:
    """The measured costs of several kinds of devices, each with a name of its own."""

    devices: tuple[DeviceCosts, ...]

    def of(self, device: str) -> DeviceCosts | None:
        """Costs measured on the device called `device`; on the only one where there is but one."""
        if len(self.devices) == 1:
            return self.devices[0]
        return next((each for each in self.devices if each.device == device), None)


_Entry = TypeVar("_Entry")


def merged(parts: Iterable[Costs]) -> Costs:
    """All that the parts hold; where two measured the same, the later one counts."""
    found: dict[str, DeviceCosts] = {}
    for part in parts:
        for each in part.devices:
            found[each.device] = _joined(found[each.device], each) if each.device in found else each
    return Costs(tuple(found.values()))


def _joined(first: DeviceCosts, second: DeviceCosts) -> DeviceCosts:
    return DeviceCosts(
        device=first.device,
        measured=tuple(dict.fromkeys((*first.measured, *second.measured))),
        operations=_latest((*first.operations, *second.operations), lambda each: each.operation),
        tasks=second.tasks or first.tasks,
        exchanges=_latest((*first.exchanges, *second.exchanges), lambda each: (each.kind, each.ranks)),
    )


def _latest(entries: tuple[_Entry, ...], key: Callable[[_Entry], object]) -> tuple[_Entry, ...]:
    return tuple({key(each): each for each in entries}.values())
