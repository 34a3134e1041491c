"""Stages as they are written down: what a person reads and edits of a placement."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopipe.ir.errors import ConfigurationError
from autopipe.passes.placement.given.nodes import NodeEntry

SAMPLES = "samples"
"""In a split: the axis that counts samples, whatever it is called in a node's iteration space."""

_RUN = re.compile(r"(\d{1,9})-(\d{1,9})")
_LEAST_RUN = 3
"""Devices that are written as a run; fewer are written one by one."""


@dataclass(frozen=True, slots=True)
class GivenSplits:
    """Nodes of a stage that are split alike."""

    split: tuple[tuple[str, int], ...]
    """Degrees by axis of the iteration space, outer to inner over the stage's devices; `samples` is the axis that
    counts samples, whatever an operator calls it. A node is split along those that it has; `{}` splits nothing."""

    nodes: tuple[NodeEntry, ...]
    """The nodes, written as those of a stage. Of several entries that mean a node the last one counts."""


@dataclass(frozen=True, slots=True)
class GivenStage:
    """One stage."""

    devices: tuple[int | str, ...]
    """Its devices in order; `0-3` is four of them."""

    nodes: tuple[NodeEntry, ...]
    """Its nodes: names, globs over names, indices into the graph's nodes (for nodes whose names are alike or empty), or
    `[first, last]` for a range in the order of the graph."""

    micro_batch_size: int | None = None
    """Samples of one of its micro-batches; those of the step's where it is not given."""

    recompute: bool = False
    """Run its forward again for its backward."""

    pipeline: int = 0
    """Which of several pipelines it belongs to; each holds all nodes."""

    splits: tuple[GivenSplits, ...] = ()
    """How its nodes are split over its devices; every device computes the others whole."""


def devices_of(written: Sequence[int | str]) -> tuple[int, ...]:
    """The devices that are written down as numbers and runs. Raises ConfigurationError for what is neither."""
    return tuple(device for entry in written for device in _devices(entry))


def written_devices(devices: Sequence[int]) -> tuple[int | str, ...]:
    """Devices in the form that `devices_of` reads, in this order."""
    return tuple(entry for run in _runs(devices) for entry in _written(run))


def _devices(entry: int | str) -> range:
    if isinstance(entry, int):
        first = last = entry
    else:
        match = _RUN.fullmatch(entry)
        if match is None:
            raise ConfigurationError(f"{entry!r} is no device", "write numbers, or 0-3 for four of them")
        first, last = int(match[1]), int(match[2])
    if not 0 <= first <= last < 2**20:
        raise ConfigurationError(f"{entry!r} is no device", "write numbers, or 0-3 for four of them")
    return range(first, last + 1)


def _runs(devices: Sequence[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for device in devices:
        if run and device != run[-1] + 1:
            yield run
            run = []
        run.append(device)
    yield run


def _written(run: list[int]) -> tuple[int | str, ...]:
    return (f"{run[0]}-{run[-1]}",) if len(run) >= _LEAST_RUN else tuple(run)
