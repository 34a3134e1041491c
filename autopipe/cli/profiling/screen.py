"""Measured costs, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.figures import bytes_text, seconds_text
from autopipe.ir.measured_costs import Costs, DeviceCosts, OperationCost

_ROWS = 12


def costs_screen(costs: Costs, refused: Sequence[str], target: Path) -> Iterator[RenderableType]:
    """Measured costs of each device, refused operators, the file and the next command."""
    for device in costs.devices:
        yield device.device
        yield from (f"  {line}" for line in device.measured)
        yield f"  {len(device.operations)} operations measured"
        if device.operations:
            yield _slowest(device.operations)
        yield from (f"  {line}" for line in _lines(device))
    if refused:
        yield f"{len(refused)} operators could not be measured; plans judge them by the roofline: {refused[0]}"
    yield f"costs in {target}"
    yield f"next: autopipe plan MODEL --costs {target}"


def _slowest(operations: Sequence[OperationCost]) -> Table:
    """The operations that take longest, backward included."""
    table = Table("operator", "operands", "forward", "backward", "spread", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for each in sorted(operations, key=_total, reverse=True)[:_ROWS]:
        operands = " ".join(text for text in each.operation.operands if text)
        backward = "-" if each.backward is None else seconds_text(each.backward.seconds)
        spread = max(each.forward.spread, each.backward.spread if each.backward else 0.0)
        table.add_row(each.operation.operator, operands, seconds_text(each.forward.seconds), backward, f"{spread:.0%}")
    if len(operations) > _ROWS:
        table.add_row(f"... {len(operations) - _ROWS} more")
    return table


def _total(cost: OperationCost) -> float:
    return cost.forward.seconds + (cost.backward.seconds if cost.backward else 0.0)


def _lines(device: DeviceCosts) -> Iterator[str]:
    """A line for what tasks take, and one for each kind of exchange."""
    if device.tasks is not None:
        tasks = device.tasks
        yield (
            f"besides its operators a forward takes {seconds_text(tasks.forward_s)}, a backward"
            f" {seconds_text(tasks.backward_s)}; an operator whose gradients wait {seconds_text(tasks.waiting_s)} more"
        )
    for each in device.exchanges:
        rate = f", then {bytes_text(round(1 / each.fit.per_byte_s))}/s" if each.fit.per_byte_s else ""
        yield f"{each.kind.replace('_', '-')} of {each.ranks} ranks: {seconds_text(each.fit.fixed_s)}{rate}"
