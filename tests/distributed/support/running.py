"""Writing the program of a graph, running it on a pool, and computing the same in the test."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from autopipe.backends.torch.codegen.program import ProgramFiles, Provenance, write_program
from autopipe.backends.torch.codegen.stage import Style
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.backends.torch.runtime.modes.records import record_file
from autopipe.backends.torch.runtime.state.parameters import init_shard
from autopipe.backends.torch.verification import (
    Difference,
    array_difference,
    read_losses,
    read_outputs,
)
from autopipe.ir.graph import Graph
from autopipe.ir.layout import full_slice
from autopipe.ir.placement import Placement, Stage, stage_edges
from autopipe.ir.problem import Optimizer
from autopipe.ir.program import Program
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task, micro_batch_ratios, pipelines_of
from autopipe.ir.training import LRScheduler, Training
from autopipe.passes.analysis.training import matrix_parameters
from autopipe.passes.lower.lower import lower
from autopipe.passes.schedule.published.base import order_gpipe
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb
from tests.distributed.support.builder import evaluate
from tests.distributed.support.pool import Pools

SEED = 5
PLAIN = Optimizer()
CONSTANT = LRScheduler()
UNCHANGED = Training()


def write(
    graph: Graph,
    placement: Placement,
    schedule: Schedule,
    loss: str | None,
    folder: Path,
    precision: str = "fp32",
    optimizer: Optimizer = PLAIN,
    model: Path = Path("model.onnx"),
    lr_scheduler: LRScheduler = CONSTANT,
    training: Training = UNCHANGED,
    style: Style = "layers",
) -> Program:
    """Write the program into `folder`; stored parameters are read from `model`."""
    program = lower(graph, placement, schedule, loss, optimizer.shard, precision=precision)
    titles = tuple("A stage." for _ in program.stages), tuple("A rank." for _ in program.ranks)
    provenance = Provenance(str(model), "", "", optimizer, precision, SEED, 0.1, 0.2)
    own = matrix_parameters(graph) if optimizer.name == "muon" else frozenset[str]()
    provenance = replace(provenance, lr_scheduler=lr_scheduler, training=training, matrices=own)
    write_program([ProgramFiles("", program, *titles, style=style)], provenance, folder)
    return program


def schedule_of(
    graph: Graph, placement: Placement, micro_batches: int, name: str = "1f1b", train: bool = True
) -> Schedule:
    """1F1B or GPipe for a placement, all tasks of one length."""
    order = order_kfkb if name == "1f1b" else order_gpipe
    return order(stage_graph(graph, placement), micro_batches, train, lambda task: 1)


def stage_graph(graph: Graph, placement: Placement) -> StageGraph:
    """The stage graph of a placement on as many devices as it uses."""
    groups = tuple(stage.devices for stage in placement.stages)
    samples = next(graph.type_of(name).shape[axis] for name, axis in graph.batch_axes)
    turns = micro_batch_ratios(placement, samples)
    return StageGraph(
        placement.devices, groups, stage_edges(graph, placement), pipelines_of(placement), turns
    )


def forwards_first(graph: Graph, placement: Placement, micro_batches: int) -> Schedule:
    """All forwards, then all backwards, micro-batch by micro-batch, for a placement of several
    pipelines.
    """
    stages = stage_graph(graph, placement)
    rows: list[list[Task]] = [[] for _ in range(stages.devices)]
    for phase, step in ((Phase.FORWARD, 1), (Phase.BACKWARD, -1)):
        for micro_batch in range(micro_batches):
            for stage in range(len(stages.stage_devices))[::step]:
                if micro_batch in stages.micro_batches_of(stage, micro_batches):
                    for device in stages.stage_devices[stage]:
                        rows[device].append(Task(stage, phase, micro_batch))
    schedule = Schedule(micro_batches, tuple(map(tuple, rows)))
    schedule.verify(stages, train=True)
    return schedule


def one_device(
    graph: Graph, micro_batches: int, train: bool, size: int
) -> tuple[Placement, Schedule]:
    """All nodes in one stage on one device."""
    phases = (Phase.FORWARD, Phase.BACKWARD) if train else (Phase.FORWARD,)
    order = tuple(Task(0, phase, index) for index in range(micro_batches) for phase in phases)
    return Placement((Stage(tuple(range(len(graph.nodes))), (0,), size),)), Schedule(
        micro_batches, (order,)
    )


def batch_of(
    graph: Graph, micro_batches: int, seed: int = 0, below: int = 6
) -> dict[str, np.ndarray]:
    """A whole step's inputs: normal numbers, whole numbers below `below`."""
    generator = np.random.default_rng(seed)
    axes = dict(graph.batch_axes)
    found = {}
    for value in graph.inputs:
        shape = list(value.shape)
        if value.name in axes:
            shape[axes[value.name]] *= micro_batches
        drawn = (
            generator.normal(size=shape)
            if value.dtype.is_floating
            else generator.integers(0, below, shape)
        )
        found[value.name] = drawn.astype(value.dtype.value)
    return found


def micro_batches_of(
    graph: Graph, batch: Mapping[str, np.ndarray], count: int
) -> list[dict[str, torch.Tensor]]:
    """The inputs of every micro-batch."""
    axes = dict(graph.batch_axes)
    return [
        {
            name: torch.from_numpy(
                np.split(array, count, axes[name])[index] if name in axes else array
            )
            for name, array in batch.items()
        }
        for index in range(count)
    ]


def drawn_parameters(graph: Graph, folder: Path) -> dict[str, torch.Tensor]:
    """The numbers that the program draws for the graph's parameters, whole."""
    parameters = read_manifest(folder).parameters
    return {
        each.value.name: init_shard(each, full_slice(each.value.shape), SEED) for each in parameters
    }


@dataclass(frozen=True, slots=True)
class Step:
    """What a training step computed: its loss, and the gradient of each parameter, whole, by index.

    `moved` are the bytes that its exchanges moved, by kind, where it ran on ranks.
    """

    loss: float
    gradients: dict[int, np.ndarray]
    moved: dict[str, int] | None = None


def expected_step(
    graph: Graph, loss: str, folder: Path, batch: Mapping[str, np.ndarray], count: int
) -> Step:
    """The step as torch computes it without the product: the mean loss over the micro-batches and
    its gradients.
    """
    parameters = drawn_parameters(graph, folder)
    trained = {each.value.name for each in graph.parameters if each.trainable}
    for name, tensor in parameters.items():
        tensor.requires_grad_(name in trained)
    losses = [
        evaluate(graph, parameters | inputs)[loss].reshape(())
        for inputs in micro_batches_of(graph, batch, count)
    ]
    total = torch.stack(losses).mean()
    if total.requires_grad:
        total.backward()
    gradients = {
        index: (torch.zeros_like(tensor) if tensor.grad is None else tensor.grad).numpy()
        for index, tensor in enumerate(parameters.values())
        if tensor.requires_grad
    }
    return Step(total.item(), gradients)


def run_step(
    pools: Pools, folder: Path, batch: Mapping[str, np.ndarray] | None, *options: str
) -> Step:
    """One training step on the pool, of random data where `batch` is None.

    Fails where ranks disagree on a block that several hold.
    """
    manifest = read_manifest(folder)
    record = folder.with_name(folder.name + ".record")
    report = record / "report.jsonl"
    report.unlink(missing_ok=True)
    record.mkdir(exist_ok=True)
    arguments: list[object] = ["--device", "cpu", "--record", record, "--report", report, *options]
    if batch is not None:
        data = folder.with_name("batch.npz")
        np.savez(data, **{f"{name}": array for name, array in batch.items()})
        arguments += ["--data", data]
    pools.of(manifest.world_size).run(folder, *arguments)
    gradients: dict[int, np.ndarray] = {}
    for rank, shards in enumerate(manifest.shards):
        with np.load(record_file(record, "gradients", 0, rank), allow_pickle=False) as stored:
            for shard in shards:
                entry = manifest.parameters[shard.parameter]
                if not entry.trainable:
                    continue
                known = gradients.setdefault(shard.parameter, np.full(entry.value.shape, np.nan))
                region = tuple(map(slice, shard.box.starts, shard.box.stops))
                block = stored[str(shard.parameter)]
                there = ~np.isnan(known[region])
                np.testing.assert_allclose(known[region][there], block[there], rtol=1e-12)
                known[region] = block
    (line,) = report_lines(report)
    return Step(
        read_losses(report)[0], gradients, cast(dict[str, int], line["communication_bytes"])
    )


def assert_equal_steps(found: Step, expected: Step, tolerance: float) -> None:
    """Loss and every gradient equal, in units of the gradient's norm (of all gradients' where it is
    all but zero).
    """
    worst = largest_difference(found, expected)
    assert worst.relative <= tolerance, f"{worst.tensor} is off by {worst.relative:.2e}"


def largest_difference(found: Step, expected: Step) -> Difference:
    """Of the loss and all gradients the one that is furthest off; infinitely where no rank holds
    what is not zero.
    """
    differences = [
        Difference("the loss", abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-12))
    ]
    scale = float(np.sqrt(sum(float((each**2).sum()) for each in expected.gradients.values())))
    for index, gradient in expected.gradients.items():
        name = f"the gradient of parameter {index}"
        if index in found.gradients:
            differences.append(array_difference(name, found.gradients[index], gradient, scale))
        elif gradient.any():
            differences.append(Difference(name, math.inf))
    return max(differences, key=lambda each: each.relative)


def run_forward(
    pools: Pools, folder: Path, batch: Mapping[str, np.ndarray], *options: object
) -> dict[str, np.ndarray]:
    """The outputs of one step of inference on the pool."""
    data = folder.with_name("batch.npz")
    outputs = folder.with_name("outputs.npz")
    np.savez(data, **{f"{name}": array for name, array in batch.items()})
    manifest = read_manifest(folder)
    pools.of(manifest.world_size).run(
        folder, "--device", "cpu", "--data", data, "--outputs", outputs, *options
    )
    return read_outputs(outputs, manifest)


def report_lines(path: Path) -> list[dict[str, object]]:
    """The lines of a run's report that are about its steps: others are messages and validations."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "loss" in line]
