"""A schedule that was found, in a form that processes exchange and that is kept between runs."""

from __future__ import annotations

from autopipe.ir.codec import JsonRecord
from autopipe.ir.schedule import Schedule, Task
from autopipe.ir.schedule_file import proof_form, proof_of, repetend_of, repetends_form


def schedule_form(found: Schedule) -> dict[str, object]:
    """The schedule as lists, dicts and scalars: the orders that differ, and which of them each device follows."""
    orders = {order: index for index, order in enumerate(dict.fromkeys(found.tasks))}
    return {
        "micro_batches": found.micro_batches,
        "orders": [" ".join(map(str, order)) for order in orders],
        "devices": [orders[order] for order in found.tasks],
        "repetends": repetends_form(found.repetends),
        "period": found.period,
        "proof": proof_form(found.proof),
    }


def schedule_of(record: JsonRecord) -> Schedule:
    """The schedule that `schedule_form` gave.

    Raises ConfigurationError, and Python's own errors for tasks that are none.
    """
    orders = [tuple(map(Task.parse, each.text().split())) for each in record.at("orders").items()]
    devices = record.at("devices").integers()
    if max(devices, default=0) >= len(orders):
        record.refuse("an order for each device")
    period = record.at("period")
    return Schedule(
        record.at("micro_batches").integer(1),
        tuple(orders[index] for index in devices),
        tuple(map(repetend_of, record.at("repetends").items())) or None,
        None if period.value is None else period.number(),
        proof_of(record.at("proof")),
    )
