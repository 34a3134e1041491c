"""Models whose training step is known from one device, and the check that a placement computes the
same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from autopipe.ir.cluster import Cluster, Level, Link
from autopipe.ir.graph import DType, FileSlice, Graph, Initializer, Parameter, Storage, Value
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Mode, Optimizer, Problem
from autopipe.ir.schedule import Schedule
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.lower.traffic import communication_bytes
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import (
    Step,
    largest_difference,
    one_device,
    run_step,
    schedule_of,
    write,
)
from tests.passes.cost.graphs import device

Batch = Mapping[str, np.ndarray]

TOLERANCE = 1e-5
DOUBLE_TOLERANCE = 1e-9
MICRO_BATCHES = 2
DRAWN = ("--seed", "6")
"""Parameters and data with which rounding decides nowhere, or in few places, which side of zero a
unit is on.
"""
_TURNING = frozenset({"Relu", "MaxPool"})
"""Operators whose gradient jumps: where rounding decides on which side a unit is, gradients differ,
whoever computes them. Double precision, where units are never so near, tells that from a mistake.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Training of a model: the graph of one micro-batch, its loss, and what one device computes in
    a step.

    Parameters are drawn, but for those that `file` stores; so is the data where `batch` is None.
    """

    name: str
    graph: Graph
    loss: str
    step: Step
    file: Path
    batch: Batch | None
    micro_batches: int

    @property
    def samples(self) -> int:
        """Samples of a micro-batch."""
        return next(self.graph.type_of(name).shape[axis] for name, axis in self.graph.batch_axes)


@dataclass(frozen=True, slots=True)
class Checked:
    """How far a placement's step is from one device's, and the bytes that it exchanged."""

    difference: float
    moved: dict[str, int]
    in_double: float | None = None
    """The difference in double precision, where single precision did not decide."""


def trained(
    pools: Pools,
    name: str,
    graph: Graph,
    loss: str,
    file: Path = Path("model.onnx"),
    batch: Batch | None = None,
    micro_batches: int = MICRO_BATCHES,
) -> Trained:
    """The model with its step on one device."""
    samples = next(graph.type_of(value).shape[axis] for value, axis in graph.batch_axes)
    with TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        write(graph, *one_device(graph, micro_batches, True, samples), loss, program, model=file)
        step = run_step(pools, program, batch, *DRAWN)
        return Trained(name, graph, loss, step, file, batch, micro_batches)


def problem_of(model: Trained, devices: int) -> Problem:
    """Its training on a cluster of so many devices, four in a node.

    Nothing has a latency there: with one, splits of so small a model in more than one way are never
    worth it.
    """
    inside = min(devices, 4)
    levels = (
        Level("node", inside, Link(0.0, 1e10)),
        Level("cluster", -(-devices // inside), Link(0.0, 1e9)),
    )
    links = Cluster("toy", (device(memory=10**11, latency=0.0),) * devices, levels)
    count = model.micro_batches
    return Problem(
        model.graph,
        roofline_costs(model.graph),
        links,
        model.samples * count,
        count,
        Mode.TRAIN,
        model.loss,
    )


def check(
    pools: Pools,
    model: Trained,
    placement: Placement,
    folder: Path,
    schedule: Schedule | None = None,
    shard: bool = False,
) -> Checked:
    """Run a step of the placement, by 1F1B where no schedule is given; with the optimizer's state
    in shares or not.

    Loss and gradients are one device's, and the bytes exchanged those predicted.
    """
    placement.verify(model.graph)
    schedule = schedule or schedule_of(model.graph, placement, model.micro_batches)
    folder.mkdir(exist_ok=True)
    optimizer = Optimizer(shard=shard)
    write(
        model.graph,
        placement,
        schedule,
        model.loss,
        folder / "program",
        optimizer=optimizer,
        model=model.file,
    )
    found = run_step(pools, folder / "program", model.batch, *DRAWN)
    assert found.moved is not None
    count = model.micro_batches
    devices = schedule.devices
    assert found.moved == communication_bytes(
        model.graph, placement, count, devices, model.loss, shard=shard
    )
    worst = largest_difference(found, model.step)
    if worst.relative <= TOLERANCE:
        return Checked(worst.relative, found.moved)
    assert not _TURNING.isdisjoint(node.op for node in model.graph.nodes), (
        f"{worst.tensor}: {worst.relative:.2e}"
    )
    return Checked(
        worst.relative, found.moved, _checked_in_double(pools, model, placement, folder, schedule)
    )


def _checked_in_double(
    pools: Pools, model: Trained, placement: Placement, folder: Path, schedule: Schedule
) -> float:
    """The difference of the same placement of the same model in double precision, on numbers that
    are drawn.
    """
    wide = _doubled(pools, model)
    write(wide.graph, placement, schedule, wide.loss, folder / "double")
    worst = largest_difference(run_step(pools, folder / "double", None, *DRAWN), wide.step)
    assert worst.relative <= DOUBLE_TOLERANCE, (
        f"in double, {worst.tensor} is off by {worst.relative:.2e}"
    )
    return worst.relative


@lru_cache(maxsize=2)
def _doubled(pools: Pools, model: Trained) -> Trained:
    """The model in double precision, with what one device computes."""
    return trained(
        pools, model.name, in_double(model.graph), model.loss, micro_batches=model.micro_batches
    )


def in_double(graph: Graph) -> Graph:
    """The graph in double precision; the numbers of parameters that a file stores are drawn."""
    return replace(
        graph,
        inputs=tuple(map(_wide, graph.inputs)),
        values=tuple(map(_wide, graph.values)),
        parameters=tuple(
            replace(each, value=_wide(each.value), storage=_drawn(each))
            for each in graph.parameters
        ),
        constants=tuple(
            replace(
                each,
                value=_wide(each.value),
                array=each.array.astype(_wide(each.value).dtype.value),
            )
            for each in graph.constants
        ),
    )


def _wide(value: Value) -> Value:
    return replace(value, dtype=DType.FLOAT64) if value.dtype is DType.FLOAT32 else value


def _drawn(parameter: Parameter) -> Storage:
    """How to draw a parameter: vectors, which may be variances, are ones."""
    if not isinstance(parameter.storage, FileSlice):
        return parameter.storage
    shape = parameter.value.shape
    return (
        Initializer("normal", math.prod(shape[1:]) ** -0.5)
        if len(shape) > 1
        else Initializer("ones")
    )
