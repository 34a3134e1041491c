"""Measured costs of devices: seconds by operator and local shapes, by exchange and size, and of
tasks besides operators. `autopipe profile` writes a file of them, `plan --costs` uses it: JSON, an
operation or an exchange a line.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from autopipe.ir.codec import (
    Amount,
    AtLeast,
    AtMost,
    Coded,
    Count,
    Filled,
    Fits,
    Index,
    Inline,
    KeyPath,
    OmitDefault,
    decode,
    encode,
)
from autopipe.ir.files import read_record
from autopipe.ir.graph import Attribute, Constant, DType, Value
from autopipe.ir.ops import qualified_name
from autopipe.ir.ops.operator import Signature
from autopipe.ir.placement import Split
from autopipe.ir.words import plural

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MESSAGES = ("send", "post", "follow")
"""Measurements of messages between ranks: on their way, the CPU time of one end, and of each
further message along with it.
"""
EXCHANGES = (*MESSAGES, *COLLECTIVES)
FORMAT = "autopipe.costs/1"
_TYPE = re.compile(
    rf"(?:(?:{'|'.join(each.value for each in DType)})\[(?:\d{{1,15}}(?:,\d{{1,15}})*)?\])?"
)
Attributes = tuple[tuple[str, Attribute], ...]
_SORTED = Coded(dict, lambda record: tuple(sorted(decode(record, Attributes))))
TypeText = Annotated[str, Fits(_TYPE.fullmatch, 'a type such as "float32[8,64]"')]


@dataclass(frozen=True, slots=True)
class Affine:
    """`fixed_s + per_byte_s * bytes` seconds."""

    fixed_s: Amount
    per_byte_s: Amount

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.fixed_s + other.fixed_s, self.per_byte_s + other.per_byte_s)

    def __mul__(self, factor: float) -> Affine:
        return Affine(self.fixed_s * factor, self.per_byte_s * factor)

    def seconds(self, size_bytes: float) -> float:
        return self.fixed_s + self.per_byte_s * size_bytes


@dataclass(frozen=True, slots=True)
class Timing:
    """The median of several runs."""

    seconds: Annotated[float, KeyPath("s"), AtLeast(0)]
    spread: Amount
    """Distance between the quartiles, as a share of the median."""
    repetitions: Count

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        median = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (median,) * 3
        return Timing(median, (high - low) / median if median else 0.0, len(seconds))


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator on one device: what its time depends on, as far as is known while planning.
    `operands` and `results` are local types such as `float32[8,64]`, "" where absent; `attributes`
    those that the file states. `gradients` are the places of the operands whose gradients backward
    gives.
    """

    operator: str
    attributes: Annotated[Attributes, _SORTED]
    operands: tuple[TypeText, ...]
    results: tuple[TypeText, ...]
    gradients: tuple[Index, ...]
    precision: str


def operation_of(signature: Signature, gradients: Iterable[int], precision: str) -> Operation:
    """The operation that one use of an operator is; `gradients` are places of operands."""
    operands, results = (
        tuple(
            "" if value is None else f"{value.dtype.value}[{','.join(map(str, value.shape))}]"
            for value in side
        )
        for side in (signature.operands, signature.results)
    )
    node = signature.node
    body: Attributes = () if node.body is None else (("body", node.body.digest()),)
    return Operation(
        qualified_name(node),
        (*body, *node.attributes),
        operands,
        results,
        tuple(gradients),
        precision,
    )


@dataclass(frozen=True, slots=True)
class OperationCost:
    """Measured time of an operator (of backward None for inference), with the roofline's figures,
    by which other operators are judged: its `Operator.kind`, and of forward and of backward
    operations and bytes read and written.
    """

    operation: Annotated[Operation, Inline()]
    kind: str
    flops: tuple[Amount, Amount]
    moved_bytes: Annotated[tuple[Amount, Amount], KeyPath("bytes")]
    forward: Timing
    backward: Timing | None


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation to measure: a node as one device sees it, whole or its share under `splits`.
    `signatures` are those of the operator and of what is computed along with it, with local shapes.
    Gradients flow through the values `wanted`; those of `parameters` stay.
    """

    operation: Operation
    signatures: tuple[Signature, ...]
    splits: tuple[Split, ...]
    below: tuple[tuple[str, int], ...]
    """For each operand that indexes something, how many there are to choose from."""
    wanted: tuple[str, ...]
    parameters: tuple[str, ...]
    kind: str
    flops: tuple[float, float]
    moved_bytes: tuple[float, float]

    def cost(self, forward: Timing, backward: Timing | None) -> OperationCost:
        return OperationCost(
            self.operation, self.kind, self.flops, self.moved_bytes, forward, backward
        )

    def operands(self) -> tuple[dict[str, Constant], dict[str, Value]]:
        """Operands whose numbers are known, and those that are fed, by name."""
        known: dict[str, Constant] = {}
        fed: dict[str, Value] = {}
        written = {
            value.name for each in self.signatures for value in each.results if value is not None
        }
        for signature in self.signatures:
            for value, array in zip(signature.operands, signature.constants, strict=True):
                if value is not None and array is not None:
                    known[value.name] = Constant(value, array)
                elif value is not None and value.name not in written:
                    fed[value.name] = value
        return known, fed

    def drawn(self, value: Value, generator: np.random.Generator) -> np.ndarray:
        """Numbers for an operand that is fed: indices below their limit, else such as every
        operator is defined for.
        """
        below = dict(self.below).get(value.name)
        if below is not None:
            return np.asarray(generator.integers(below, size=value.shape))
        if value.dtype.is_floating:
            return np.asarray(generator.random(value.shape, np.float32) + 0.5)
        return np.ones(value.shape)


@dataclass(frozen=True, slots=True)
class TensorCosts:
    """Cost of an operation on tensors one by one: a time for each and a time for each byte."""

    per_tensor_s: Amount
    per_byte_s: Amount

    def seconds(self, tensors: int, size_bytes: float) -> float:
        return self.per_tensor_s * tensors + self.per_byte_s * size_bytes


_UPDATES = Fits(
    lambda updates: len(updates) == 3, "3 entries: an optimizer without states, with one, with two"
)


@dataclass(frozen=True, slots=True)
class TaskCosts:
    """Cost of a rank's step besides its operators. `forward_s` and `backward_s` are of one stage
    and micro-batch: finding arguments, starting autograd, handing over.
    """

    forward_s: Amount
    backward_s: Amount
    waiting_s: Amount
    """Of an operator whose parameters' gradients wait for the second half of a split backward: how
    much longer it takes for that, in the forward and both halves together.
    """
    update_s: Amount
    """Of an optimizer's update, besides what it does to tensors."""
    accumulate: TensorCosts
    """Adding a micro-batch's gradients to those before, by bytes of gradients."""
    bucket: TensorCosts
    """Putting gradients into a bucket that several ranks sum, and having the sums back, besides the
    exchange.
    """
    updates: Annotated[tuple[TensorCosts, ...], _UPDATES]
    """An optimizer's update, by bytes of parameters: without states, with one (momentum), with two
    (AdamW).
    """


@dataclass(frozen=True, slots=True)
class TimedBytes:
    bytes: Index
    timing: Annotated[Timing, Inline()]


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """Messages or collectives of a group of ranks on one machine, and the line through what they
    took. Bytes are those of `passes/cost/communication.py`: of one message; of what each rank holds
    before an all-reduce, a reduce-scatter, an all-to-all; of what each holds after an all-gather.
    """

    kind: Annotated[str, Fits(EXCHANGES.__contains__, " or ".join(EXCHANGES))]
    ranks: Annotated[int, AtLeast(2), AtMost(2**20)]
    fit: Annotated[Affine, Inline()]
    samples: tuple[TimedBytes, ...]


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """All that was measured on one kind of device."""

    written: ClassVar = ("device", "measured", "host_launch_s", "tasks", "exchanges", "operations")
    device: str
    measured: tuple[str, ...]
    """How, a line for each run of the profiler: what ran where."""
    operations: tuple[OperationCost, ...] = ()
    tasks: Annotated[TaskCosts | None, OmitDefault()] = None
    exchanges: tuple[ExchangeCost, ...] = ()
    host_launch_s: Annotated[Amount | None, OmitDefault()] = None
    """Seconds of the host for one operator, as `Device.host_launch_s`: 0 if the device is the host;
    None if unknown.
    """


@dataclass(frozen=True, slots=True)
class Costs:
    """The measured costs of several kinds of devices, each with a name of its own."""

    devices: Annotated[tuple[DeviceCosts, ...], Filled]

    def of(self, device: str) -> DeviceCosts | None:
        """Costs measured on the device called `device`; on the only one where there is but one."""
        if len(self.devices) == 1:
            return self.devices[0]
        return next((each for each in self.devices if each.device == device), None)


def merged(parts: Iterable[Costs]) -> Costs:
    """All that the parts hold; where two measured the same, the later one counts."""
    found: dict[str, DeviceCosts] = {}
    for each in (device for part in parts for device in part.devices):
        first = found.setdefault(each.device, each)
        if first is each:
            continue
        operations = {cost.operation: cost for cost in (*first.operations, *each.operations)}
        exchanges = {(cost.kind, cost.ranks): cost for cost in (*first.exchanges, *each.exchanges)}
        found[each.device] = DeviceCosts(
            each.device,
            tuple(dict.fromkeys((*first.measured, *each.measured))),
            tuple(operations.values()),
            each.tasks or first.tasks,
            tuple(exchanges.values()),
            first.host_launch_s if each.host_launch_s is None else each.host_launch_s,
        )
    return Costs(tuple(found.values()))


def costs_text(costs: Costs) -> str:
    def entry(key: str, value: object) -> str:
        if isinstance(value, list) and key in ("exchanges", "operations") and value:
            lines = ",\n  ".join(json.dumps(each, allow_nan=False) for each in value)
            return f'"{key}": [\n  {lines}]'
        return f'"{key}": {json.dumps(value, allow_nan=False)}'

    texts = (
        "{" + ",\n ".join(itertools.starmap(entry, encode(each).items())) + "}"
        for each in costs.devices
    )
    devices = ",\n".join(texts)
    return f'{{"format": {json.dumps(FORMAT)},\n "devices": [\n{devices}\n]}}\n'


def read_costs(path: Path) -> Costs:
    """The costs in `path`. Raises ConfigurationError with file and key for what is no such file."""
    record = read_record(path, FORMAT)
    costs: Costs = decode(record, Costs)
    if len({each.device for each in costs.devices}) < len(costs.devices):
        record.at("devices").refuse("devices of different names")
    for device, found in zip(record.at("devices").items(), costs.devices, strict=True):
        for place, each in zip(device.at("operations").items(), found.operations, strict=True):
            if any(index >= len(each.operation.operands) for index in each.operation.gradients):
                place.at("gradients").refuse(
                    f"places of {len(each.operation.operands)} "
                    f"{plural(len(each.operation.operands), 'operand')}"
                )
    return costs
