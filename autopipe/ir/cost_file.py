"""Files of measured costs: JSON, an operation or an exchange a line. They come from elsewhere and are read strictly."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from autopipe.ir.codec import JsonRecord, read_record
from autopipe.ir.graph import Attribute, DType
from autopipe.ir.measured_costs import (
    EXCHANGES,
    Affine,
    Costs,
    DeviceCosts,
    ExchangeCost,
    Operation,
    OperationCost,
    TaskCosts,
    TensorCosts,
    Timing,
)

FORMAT = "autopipe.costs/1"
_TYPE = re.compile(rf"(?:(?:{'|'.join(each.value for each in DType)})\[(?:\d{{1,15}}(?:,\d{{1,15}})*)?\])?")
_MOST_RANKS = 2**20
_STATES = 3


def costs_text(costs: Costs) -> str:
    """The file's text."""
    devices = ",\n".join(_device_text(each) for each in costs.devices)
    return f'{{"format": {json.dumps(FORMAT)},\n "devices": [\n{devices}\n]}}\n'


def read_costs(path: Path) -> Costs:
    """The costs in `path`. Raises ConfigurationError with file and key for what is no such file."""
    record = read_record(path, FORMAT)
    devices = tuple(_device_of(each) for each in record.at("devices").items())
    if not devices:
        record.at("devices").refuse("at least one device")
    if len({each.device for each in devices}) < len(devices):
        record.at("devices").refuse("devices of different names")
    return Costs(devices)


def _device_text(costs: DeviceCosts) -> str:
    head: dict[str, object] = {"device": costs.device, "measured": list(costs.measured)}
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    if costs.tasks is not None:
        parts.append(f'"tasks": {json.dumps(_tasks_form(costs.tasks), allow_nan=False)}')
    lists = {
        "exchanges": [_exchange_form(each) for each in costs.exchanges],
        "operations": [_operation_form(each) for each in costs.operations],
    }
    for key, forms in lists.items():
        lines = ",\n  ".join(json.dumps(form, allow_nan=False) for form in forms)
        parts.append(f'"{key}": [\n  {lines}]' if forms else f'"{key}": []')
    return "{" + ",\n ".join(parts) + "}"


def _device_of(record: JsonRecord) -> DeviceCosts:
    return DeviceCosts(
        device=record.at("device").text(),
        measured=tuple(each.text() for each in record.at("measured").items()),
        operations=tuple(_operation_of(each) for each in record.at("operations").items()),
        tasks=_tasks_of(record.at("tasks")) if record.has("tasks") else None,
        exchanges=tuple(_exchange_of(each) for each in record.at("exchanges").items()),
    )


def _operation_form(cost: OperationCost) -> dict[str, object]:
    operation = cost.operation
    return {
        "operator": operation.operator,
        "attributes": dict(operation.attributes),
        "operands": operation.operands,
        "results": operation.results,
        "gradients": operation.gradients,
        "precision": operation.precision,
        "kind": cost.kind,
        "flops": cost.flops,
        "bytes": cost.moved_bytes,
        "forward": _timing_form(cost.forward),
        "backward": None if cost.backward is None else _timing_form(cost.backward),
    }


def _operation_of(record: JsonRecord) -> OperationCost:
    operands, results = (tuple(map(_type_of, record.at(key).items())) for key in ("operands", "results"))
    gradients = record.at("gradients").integers()
    if any(place >= len(operands) for place in gradients):
        record.at("gradients").refuse(f"places of {len(operands)} operands")
    backward = record.at("backward")
    return OperationCost(
        operation=Operation(
            operator=record.at("operator").text(),
            attributes=tuple(sorted((name, _attribute_of(each)) for name, each in record.at("attributes").members())),
            operands=operands,
            results=results,
            gradients=gradients,
            precision=record.at("precision").text(),
        ),
        kind=record.at("kind").text(),
        flops=_pair_of(record.at("flops")),
        moved_bytes=_pair_of(record.at("bytes")),
        forward=_timing_of(record.at("forward")),
        backward=None if backward.value is None else _timing_of(backward),
    )


def _type_of(record: JsonRecord) -> str:
    text = record.text()
    if not _TYPE.fullmatch(text):
        record.refuse('a type such as "float32[8,64]"')
    return text


def _attribute_of(record: JsonRecord) -> Attribute:
    value = record.value
    if isinstance(value, list) and all(_is_scalar(each) for each in value) and len({*map(type, value)}) <= 1:
        return tuple(value)
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        record.refuse("a number, a text, or a list of either")
    return value


def _is_scalar(value: object) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def _pair_of(record: JsonRecord) -> tuple[float, float]:
    numbers = tuple(_at_least_zero(each) for each in record.items())
    if len(numbers) != 2:
        record.refuse("two numbers, of forward and of backward")
    return numbers[0], numbers[1]


def _timing_form(timing: Timing) -> dict[str, object]:
    return {"s": timing.seconds, "spread": timing.spread, "repetitions": timing.repetitions}


def _timing_of(record: JsonRecord) -> Timing:
    return Timing(
        _at_least_zero(record.at("s")), _at_least_zero(record.at("spread")), record.at("repetitions").integer(1)
    )


def _tasks_form(tasks: TaskCosts) -> dict[str, object]:
    return {
        "forward_s": tasks.forward_s,
        "backward_s": tasks.backward_s,
        "waiting_s": tasks.waiting_s,
        "update_s": tasks.update_s,
        "accumulate": asdict(tasks.accumulate),
        "bucket": asdict(tasks.bucket),
        "updates": [asdict(each) for each in tasks.updates],
    }


def _tasks_of(record: JsonRecord) -> TaskCosts:
    updates = tuple(map(_tensors_of, record.at("updates").items()))
    if len(updates) != _STATES:
        record.at("updates").refuse(f"{_STATES} entries: an optimizer without states, with one, with two")
    return TaskCosts(
        forward_s=_at_least_zero(record.at("forward_s")),
        backward_s=_at_least_zero(record.at("backward_s")),
        waiting_s=_at_least_zero(record.at("waiting_s")),
        update_s=_at_least_zero(record.at("update_s")),
        accumulate=_tensors_of(record.at("accumulate")),
        bucket=_tensors_of(record.at("bucket")),
        updates=updates,
    )


def _tensors_of(record: JsonRecord) -> TensorCosts:
    return TensorCosts(_at_least_zero(record.at("per_tensor_s")), _at_least_zero(record.at("per_byte_s")))


def _exchange_form(cost: ExchangeCost) -> dict[str, object]:
    samples = [{"bytes": size} | _timing_form(timing) for size, timing in cost.samples]
    return {"kind": cost.kind, "ranks": cost.ranks} | _affine_form(cost.fit) | {"samples": samples}


def _exchange_of(record: JsonRecord) -> ExchangeCost:
    kind, ranks = record.at("kind"), record.at("ranks").integer(2)
    if kind.text() not in EXCHANGES:
        kind.refuse(" or ".join(EXCHANGES))
    if ranks > _MOST_RANKS:
        record.at("ranks").refuse(f"at most {_MOST_RANKS} ranks")
    samples = tuple((each.at("bytes").integer(), _timing_of(each)) for each in record.at("samples").items())
    return ExchangeCost(kind.text(), ranks, _affine_of(record), samples)


def _affine_form(line: Affine) -> dict[str, object]:
    return {"fixed_s": line.fixed_s, "per_byte_s": line.per_byte_s}


def _affine_of(record: JsonRecord) -> Affine:
    return Affine(_at_least_zero(record.at("fixed_s")), _at_least_zero(record.at("per_byte_s")))


def _at_least_zero(record: JsonRecord) -> float:
    number = record.number()
    if number < 0:
        record.refuse("a number, at least 0")
    return number
