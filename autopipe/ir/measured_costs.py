"""Measured costs of devices: times of operators by their local shapes, times of communication by
size, and times of the rest of a task.

`autopipe profile` writes the costs to a JSON file, with one operator or collective per line; `plan
--costs` reads the file.
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
    Count,
    CustomCodec,
    Index,
    Inline,
    KeyPath,
    NonEmpty,
    OmitDefault,
    Predicate,
    decode,
    encode,
)
from autopipe.ir.files import read_json_record
from autopipe.ir.graph import Attribute, Constant, DType, Value
from autopipe.ir.ops import qualified_name
from autopipe.ir.ops.operator import Signature
from autopipe.ir.placement import Split
from autopipe.ir.words import plural

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
P2P_MEASUREMENTS = ("send", "post", "follow")
"""Kinds of measurements of P2P messages: `send`, the transfer; `post`, the CPU time of one send or
receive, the first of a task; `follow`, the CPU time of each further send or receive of the task.
"""
MEASURED_COMMUNICATION = (*P2P_MEASUREMENTS, *COLLECTIVES)
FORMAT = "autopipe.costs/1"
_TENSOR_TYPE_PATTERN = re.compile(
    rf"(?:(?:{'|'.join(each.value for each in DType)})\[(?:\d{{1,15}}(?:,\d{{1,15}})*)?\])?"
)
Attributes = tuple[tuple[str, Attribute], ...]
_SORTED_ATTRIBUTES = CustomCodec(dict, lambda record: tuple(sorted(decode(record, Attributes))))
TypeText = Annotated[
    str, Predicate(_TENSOR_TYPE_PATTERN.fullmatch, 'a type such as "float32[8,64]"')
]


@dataclass(frozen=True, slots=True)
class AffineTime:
    """A time that depends on a number of bytes: `fixed_s + per_byte_s * bytes` seconds."""

    fixed_s: Amount
    per_byte_s: Amount

    def __add__(self, other: AffineTime) -> AffineTime:
        return AffineTime(self.fixed_s + other.fixed_s, self.per_byte_s + other.per_byte_s)

    def __mul__(self, factor: float) -> AffineTime:
        return AffineTime(self.fixed_s * factor, self.per_byte_s * factor)

    def seconds(self, size_bytes: float) -> float:
        """Return the time in seconds for `size_bytes` bytes."""
        return self.fixed_s + self.per_byte_s * size_bytes


@dataclass(frozen=True, slots=True)
class Timing:
    """Median time of several runs in seconds, their spread, and their number."""

    seconds: Annotated[float, KeyPath("s"), AtLeast(0)]
    spread: Amount
    """Interquartile range of the times, as a fraction of the median."""
    repetitions: Count

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        """Return the timing of runs that took the given seconds."""
        median = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (median,) * 3
        return Timing(median, (high - low) / median if median else 0.0, len(seconds))


@dataclass(frozen=True, slots=True)
class Operation:
    """The properties of an operator on one device that determine its time. All of them are known at
    planning time. Two uses of an operator with equal properties are one operation.

    `operands` and `results` are local types such as `float32[8,64]`; "" stands for an absent
    tensor. `attributes` are those of the node, and `body` with the digest of its body if it has
    one. `gradients` are the indices of the operands whose gradients backward computes.
    """

    operator: str
    attributes: Annotated[Attributes, _SORTED_ATTRIBUTES]
    operands: tuple[TypeText, ...]
    results: tuple[TypeText, ...]
    gradients: tuple[Index, ...]
    precision: str


def operation_of(signature: Signature, gradients: Iterable[int], precision: str) -> Operation:
    """Return the operation of one use of an operator. `gradients` are the indices of the operands
    whose gradients backward computes.
    """
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
    """Measured times of an operation, and the data for extrapolation to other operations: its
    `Operator.kind`, and pairs (forward, backward) of FLOPs and of moved bytes. `backward` is None
    for inference.
    """

    operation: Annotated[Operation, Inline()]
    kind: str
    flops: tuple[Amount, Amount]
    moved_bytes: Annotated[tuple[Amount, Amount], KeyPath("bytes")]
    forward: Timing
    backward: Timing | None


@dataclass(frozen=True, slots=True)
class OperationSample:
    """An operation to measure: a node, or its shard on one device if it is split by `splits`.

    `signatures` are those of the operator and of the operators that are fused with it, with local
    shapes. `wanted` names the values with gradients. `parameters` names the operands that are
    parameters; each use has its own copy of a parameter.
    """

    operation: Operation
    signatures: tuple[Signature, ...]
    splits: tuple[Split, ...]
    below: tuple[tuple[str, int], ...]
    """Pairs (operand, exclusive upper bound of its elements) for the operands that are indices."""
    wanted: tuple[str, ...]
    parameters: tuple[str, ...]
    kind: str
    flops: tuple[float, float]
    moved_bytes: tuple[float, float]

    def cost(self, forward: Timing, backward: Timing | None) -> OperationCost:
        """Return the cost of the operation with the measured times."""
        return OperationCost(
            self.operation, self.kind, self.flops, self.moved_bytes, forward, backward
        )

    def operands(self) -> tuple[dict[str, Constant], dict[str, Value]]:
        """Return (known, fed): the operands with known data and the operands that the measurement
        must generate, both by name.
        """
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

    def random_data(self, value: Value, generator: np.random.Generator) -> np.ndarray:
        """Return random data for the operand `value`: integers from 0 to below its bound if it has
        one, otherwise floating-point numbers in [0.5, 1.5) or, for other types, ones.
        """
        below = dict(self.below).get(value.name)
        if below is not None:
            return np.asarray(generator.integers(below, size=value.shape))
        if value.dtype.is_floating:
            return np.asarray(generator.random(value.shape, np.float32) + 0.5)
        return np.ones(value.shape)


@dataclass(frozen=True, slots=True)
class TensorCosts:
    """Time of work on several tensors: a time per tensor and a time per byte of them."""

    per_tensor_s: Amount
    per_byte_s: Amount

    def seconds(self, tensors: int, size_bytes: float) -> float:
        """Return the time in seconds for `tensors` tensors with `size_bytes` bytes in total."""
        return self.per_tensor_s * tensors + self.per_byte_s * size_bytes


_THREE_UPDATE_COSTS = Predicate(
    lambda updates: len(updates) == 3, "3 entries: an optimizer without states, with one, with two"
)


@dataclass(frozen=True, slots=True)
class TaskCosts:
    """Times, in seconds, of a step on a rank except its operators. `forward_s` and `backward_s` are
    per task; they include looking up arguments and starting autograd.
    """

    forward_s: Amount
    backward_s: Amount
    waiting_s: Amount
    """Additional time, over forward and backward, for each operator whose parameter gradients are
    computed in the second half of a split backward.
    """
    update_s: Amount
    """Part of the time of an optimizer update that does not depend on the parameters."""
    accumulate: TensorCosts
    """Time to add the gradients of a micro-batch to the accumulated gradients; bytes are those of
    the gradients.
    """
    bucket: TensorCosts
    """Time to copy gradients into a bucket and back, without the collective; bytes are those of the
    gradients.
    """
    updates: Annotated[tuple[TensorCosts, ...], _THREE_UPDATE_COSTS]
    """Part of the time of an optimizer update that depends on the parameters, for an optimizer
    without a state, with one state (momentum) and with two states (AdamW); bytes are those of the
    parameters.
    """


@dataclass(frozen=True, slots=True)
class TimedBytes:
    """Measured time of a communication of `bytes` bytes."""

    bytes: Index
    timing: Annotated[Timing, Inline()]


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """Measured times of messages or of one kind of collective, of `ranks` ranks in one node, and
    their affine fit.

    Bytes are counted as in `passes/cost/communication.py`: those of one message; of a rank's input
    for all-reduce, reduce-scatter and all-to-all; of a rank's output for all-gather.
    """

    kind: Annotated[
        str, Predicate(MEASURED_COMMUNICATION.__contains__, " or ".join(MEASURED_COMMUNICATION))
    ]
    ranks: Annotated[int, AtLeast(2), AtMost(2**20)]
    fit: Annotated[AffineTime, Inline()]
    samples: tuple[TimedBytes, ...]


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Measured costs of the device type called `device`."""

    written: ClassVar = ("device", "measured", "host_launch_s", "tasks", "exchanges", "operations")
    device: str
    measured: tuple[str, ...]
    """Descriptions of the runs of the profiler that measured the costs, one line each."""
    operations: tuple[OperationCost, ...] = ()
    tasks: Annotated[TaskCosts | None, OmitDefault()] = None
    exchanges: tuple[ExchangeCost, ...] = ()
    host_launch_s: Annotated[Amount | None, OmitDefault()] = None
    """Host time in seconds per operator, as in `Device.host_launch_s`; 0 if the device is the host,
    and None if it is not known.
    """


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs of one or more device types, whose names are distinct."""

    devices: Annotated[tuple[DeviceCosts, ...], NonEmpty]

    def of(self, device: str) -> DeviceCosts | None:
        """Return the costs of the device type called `device`, or None if there are none. If there
        is only one device type, return its costs whatever its name is.
        """
        if len(self.devices) == 1:
            return self.devices[0]
        return next((each for each in self.devices if each.device == device), None)


def merge_costs(parts: Iterable[Costs]) -> Costs:
    """Return the union of several costs. Of several measurements of one operation, the last one is
    kept.
    """
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
    """Return the text of a file with these costs."""

    def entry_text(key: str, value: object) -> str:
        """Return a member of the JSON object of a device, with one operation or collective per
        line.
        """
        if isinstance(value, list) and key in ("exchanges", "operations") and value:
            lines = ",\n  ".join(json.dumps(each, allow_nan=False) for each in value)
            return f'"{key}": [\n  {lines}]'
        return f'"{key}": {json.dumps(value, allow_nan=False)}'

    texts = (
        "{" + ",\n ".join(itertools.starmap(entry_text, encode(each).items())) + "}"
        for each in costs.devices
    )
    devices = ",\n".join(texts)
    return f'{{"format": {json.dumps(FORMAT)},\n "devices": [\n{devices}\n]}}\n'


def read_costs(path: Path) -> Costs:
    """Return the costs in the file `path`. Raise ConfigurationError, with file and key, if the file
    is invalid.
    """
    record = read_json_record(path, FORMAT)
    costs: Costs = decode(record, Costs)
    if len({each.device for each in costs.devices}) < len(costs.devices):
        record.at("devices").reject("a list of devices with different names")
    for device, found in zip(record.at("devices").items(), costs.devices, strict=True):
        for place, each in zip(device.at("operations").items(), found.operations, strict=True):
            if any(index >= len(each.operation.operands) for index in each.operation.gradients):
                place.at("gradients").reject(
                    f"indices of the {len(each.operation.operands)} "
                    f"{plural(len(each.operation.operands), 'operand')}"
                )
    return costs
