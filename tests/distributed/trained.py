"""Models whose training step is known from one device, and the check that a placement computes the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from autopipe.ir.cluster import Cluster, Level, Link
from autopipe.ir.dtype import DType
from autopipe.ir.graph import FileSlice, Graph, Initializer, Parameter, Storage, Value
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Mode, Problem
from autopipe.ir.schedule import Schedule
from autopipe.passes.cost.work import annotate
from autopipe.passes.lower.traffic import communication_bytes
from tests.distributed.pool import Pools
from tests.distributed.running import Step, assert_equal_steps, one_device, run_step, schedule_of, write
from tests.passes.cost.graphs import device

Batch = Mapping[str, np.ndarray]

TOLERANCE = 1e-5
MICRO_BATCHES = 2
DRAWN = ("--seed", "6")
"""Parameters and data with which rounding decides nowhere, or in few places, which side of zero a unit is on."""
_TURNING = frozenset({"Relu", "MaxPool"})
"""Operators whose gradient jumps: where rounding decides on which side a unit is, gradients differ, whoever computes
them. Double precision, where units are never so near, tells that from a mistake."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Training of a model: the graph of one micro-batch, its loss, and what one device computes in a step.

    Parameters are drawn, but for those that `file` stores; so is the data where `batch` is None.
    """

    name: str
    graph: Graph
    loss: str
    step: Step
    file: Path
    batch: Batch | None

    @property
    def samples(self) -> int:
        """Samples of a micro-batch."""
        return next(self.graph.type_of(name).shape[axis] for name, axis in self.graph.batch_axes)


def trained(
    pools: Pools, name: str, graph: Graph, loss: str, file: Path = Path("model.onnx"), batch: Batch | None = None
) -> Trained:
    """The model with its step on one device."""
    samples = next(graph.type_of(value).shape[axis] for value, axis in graph.batch_axes)
    with TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        write(graph, *one_device(graph, MICRO_BATCHES, True, samples), loss, program, model=file)
        return Trained(name, graph, loss, run_step(pools, program, batch, *DRAWN), file, batch)


def problem_of(model: Trained, devices: int) -> Problem:
    """Its training on a cluster of so many devices, four in a node.

    Nothing has a latency there: with one, splits of so small a model in more than one way are never worth it.
    """
    inside = min(devices, 4)
    levels = (Level("node", inside, Link(0.0, 1e10)), Level("cluster", -(-devices // inside), Link(0.0, 1e9)))
    links = Cluster("toy", (device(memory=10**11, latency=0.0),) * devices, levels)
    batch = model.samples * MICRO_BATCHES
    return Problem(model.graph, annotate(model.graph), links, batch, MICRO_BATCHES, Mode.TRAIN, model.loss)


def check(pools: Pools, model: Trained, placement: Placement, folder: Path, schedule: Schedule | None = None) -> Step:
    """Run a step of the placement, by 1F1B where no schedule is given.

    Loss and gradients are one device's, and the bytes exchanged those predicted.
    """
    placement.verify(model.graph)
    schedule = schedule or schedule_of(model.graph, placement, MICRO_BATCHES)
    folder.mkdir(exist_ok=True)
    write(model.graph, placement, schedule, model.loss, folder / "program", model=model.file)
    found = run_step(pools, folder / "program", model.batch, *DRAWN)
    assert found.moved == communication_bytes(model.graph, placement, MICRO_BATCHES, schedule.devices, model.loss)
    try:
        assert_equal_steps(found, model.step, TOLERANCE)
    except AssertionError:
        if _TURNING.isdisjoint(node.op for node in model.graph.nodes):
            raise
        _check_in_double(pools, model, placement, folder, schedule)
    return found


def _check_in_double(pools: Pools, model: Trained, placement: Placement, folder: Path, schedule: Schedule) -> None:
    """The same placement of the same model in double precision, on numbers that are drawn."""
    graph = in_double(model.graph)
    write(graph, placement, schedule, model.loss, folder / "double")
    found = run_step(pools, folder / "double", None, *DRAWN)
    assert_equal_steps(found, trained(pools, model.name, graph, model.loss).step, 1e-9)


def in_double(graph: Graph) -> Graph:
    """The graph in double precision; the numbers of parameters that a file stores are drawn."""
    return replace(
        graph,
        inputs=tuple(map(_wide, graph.inputs)),
        values=tuple(map(_wide, graph.values)),
        parameters=tuple(replace(each, value=_wide(each.value), storage=_drawn(each)) for each in graph.parameters),
        constants=tuple(
            replace(each, value=_wide(each.value), array=each.array.astype(_wide(each.value).dtype.value))
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
    return Initializer("normal", math.prod(shape[1:]) ** -0.5) if len(shape) > 1 else Initializer("ones")
