"""Common parts of every `schedule.json`, a plan's and one of blocks given by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

FORMAT = "autopipe.schedule/1"


def block_form(
    name: str, devices: Sequence[int], time: float, memory: int, after: Sequence[int], delays: Sequence[float] = ()
) -> dict[str, object]:
    """A block; `after` are indices into the list of blocks, `delays` stands there only where there are any."""
    form: dict[str, object] = {
        "name": name,
        "devices": list(devices),
        "time": time,
        "memory": memory,
        "after": list(after),
    }
    return {**form, "delays": list(delays)} if any(delays) else form


def order_form(tasks: Iterable[tuple[int, int, float]]) -> list[dict[str, object]]:
    """A device's order, from the block, the unit and the start of each of its tasks."""
    return [{"block": block, "unit": unit, "start": start} for block, unit, start in tasks]
