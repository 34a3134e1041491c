"""Models whose training step is known from one device, and the check that a placement computes the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from autopipe.ir.cluster import Cluster, Level, Link
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Mode, Problem
from autopipe.passes.cost.work import annotate
from autopipe.passes.lower.traffic import communication_bytes
from tests.distributed.pool import Pools
from tests.distributed.running import Step, assert_equal_steps, one_device, run_step, schedule_of, write
from tests.passes.cost.graphs import device

TOLERANCE = 1e-5
MICRO_BATCHES = 2
DRAWN = ("--seed", "6")
"""Parameters and data with which no unit of any model lies so near to where a ReLU or a maximum turns that rounding
in single precision decides which side it is on: there gradients jump, whoever computes them."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Training of a model: the graph of one micro-batch, its loss, and what one device computes in a step.

    Parameters are drawn, but for those that `file` stores.
    """

    name: str
    graph: Graph
    loss: str
    step: Step
    file: Path

    @property
    def samples(self) -> int:
        """Samples of a micro-batch."""
        return next(self.graph.type_of(name).shape[axis] for name, axis in self.graph.batch_axes)


def trained(pools: Pools, name: str, graph: Graph, loss: str, file: Path = Path("model.onnx")) -> Trained:
    """The model with its step on one device."""
    samples = next(graph.type_of(value).shape[axis] for value, axis in graph.batch_axes)
    with TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        write(graph, *one_device(graph, MICRO_BATCHES, True, samples), loss, program, model=file)
        return Trained(name, graph, loss, run_step(pools, program, None, *DRAWN), file)


def problem_of(model: Trained, devices: int) -> Problem:
    """Its training on a cluster of so many devices, four in a node.

    Nothing has a latency there: with one, splits of so small a model in more than one way are never worth it.
    """
    inside = min(devices, 4)
    levels = (Level("node", inside, Link(0.0, 1e10)), Level("cluster", -(-devices // inside), Link(0.0, 1e9)))
    links = Cluster("toy", (device(memory=10**11, latency=0.0),) * devices, levels)
    batch = model.samples * MICRO_BATCHES
    return Problem(model.graph, annotate(model.graph), links, batch, MICRO_BATCHES, Mode.TRAIN, model.loss)


def check(pools: Pools, model: Trained, placement: Placement, folder: Path) -> Step:
    """Run a step of the placement: loss and gradients are one device's, and the bytes exchanged those predicted."""
    placement.verify(model.graph)
    schedule = schedule_of(model.graph, placement, MICRO_BATCHES)
    folder.mkdir(exist_ok=True)
    write(model.graph, placement, schedule, model.loss, folder / "program", model=model.file)
    found = run_step(pools, folder / "program", None, *DRAWN)
    assert_equal_steps(found, model.step, TOLERANCE)
    assert found.moved == communication_bytes(model.graph, placement, MICRO_BATCHES, schedule.devices, model.loss)
    return found
