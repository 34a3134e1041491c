"""Running statistics of a BatchNormalization that a model calls several times move by every call in
order, under every placement, and verify compares them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.backends.torch.runtime.modes.records import record_file
from autopipe.backends.torch.verification import tensor_differences
from autopipe.ir.batch import batch_axes_of
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Optimizer
from tests.distributed.support.builder import Builder
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import (
    drawn_parameters,
    forwards_first,
    one_device,
    schedule_of,
    write,
)

pytestmark = pytest.mark.distributed

SAMPLES = 4
MICRO_BATCHES = 4
CHANNELS = 6
MOMENTA = 0.5, 0.75, 0.5
"""What the calls leave of the old statistics."""
MEAN = 2
VARIANCE = 3
"""Indices of the running statistics among the parameters."""


def model() -> tuple[Graph, str]:
    """A network with three calls: of an input, of another input, and of the second call's
    result.
    """
    builder = Builder()
    scale = builder.parameter((CHANNELS,))
    bias = builder.parameter((CHANNELS,))
    mean, variance = (builder.parameter((CHANNELS,), trainable=False) for _ in range(2))
    first, second = (builder.input((SAMPLES, CHANNELS)) for _ in range(2))

    def call(x: str, momentum: float) -> str:
        settings = {"training_mode": 1, "momentum": momentum}
        return builder.node(
            "BatchNormalization", x, scale, bias, mean, variance, outputs=3, **settings
        )

    one = call(first, MOMENTA[0])
    two = call(second, MOMENTA[1])
    three = call(builder.node("Tanh", two), MOMENTA[2])
    loss = builder.mean_square(builder.node("Sub", builder.node("Tanh", one), three))
    return builder.graph(loss), loss


def placements(graph: Graph) -> dict[str, Placement]:
    axes = batch_axes_of(graph)
    every = tuple(range(len(graph.nodes)))
    by_sample = tuple(
        (node, (Split(str(axes.axis(node)), 2),)) for node in every if axes.axis(node)
    )
    by_channel = tuple(
        (node, (Split("c", 2),)) for node in every if graph.nodes[node].op == "BatchNormalization"
    )
    apart = tuple(node for node in every if node != 1)
    return {
        "replicas": Placement((Stage(every, (0, 1), SAMPLES, by_sample),)),
        "channels": Placement((Stage(every, (0, 1), SAMPLES, by_channel),)),
        "stages": Placement((Stage(every[:2], (0,), SAMPLES), Stage(every[2:], (1,), SAMPLES))),
        "stages on one rank": Placement(
            (Stage(every[:2], (0,), SAMPLES), Stage(every[2:], (0,), SAMPLES))
        ),
        "the middle call apart": Placement(
            (Stage((1,), (0,), SAMPLES), Stage(apart, (1,), SAMPLES))
        ),
        "stages of replicas": Placement(
            (
                Stage(every[:2], (0, 1), SAMPLES, tuple(each for each in by_sample if each[0] < 2)),
                Stage(
                    every[2:], (2, 3), SAMPLES, tuple(each for each in by_sample if each[0] >= 2)
                ),
            )
        ),
        "stages that share a rank": Placement(
            (
                Stage(every[:2], (0, 1), SAMPLES, tuple(each for each in by_sample if each[0] < 2)),
                Stage(
                    every[2:], (1, 2), SAMPLES, tuple(each for each in by_sample if each[0] >= 2)
                ),
            )
        ),
        "pipelines": Placement(
            (Stage(every, (0,), SAMPLES), Stage(every, (1,), SAMPLES, (), False, 1))
        ),
        "pipelines of stages": Placement(
            (
                Stage(every[:2], (0,), SAMPLES),
                Stage(every[2:], (1,), SAMPLES),
                Stage(every[:2], (2,), SAMPLES, (), False, 1),
                Stage(every[2:], (3,), SAMPLES, (), False, 1),
            )
        ),
    }


def data() -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(0)
    shape = SAMPLES * MICRO_BATCHES, CHANNELS
    return {"in0": 3 + drawn.normal(size=shape), "in1": 2 * drawn.normal(size=shape) - 1}


def expected_statistics(parameters: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the running statistics after a step, each moved by one call after the other."""
    scale, bias, mean, variance = parameters.values()
    for first, second in zip(
        *(np.split(each, MICRO_BATCHES) for each in data().values()), strict=True
    ):
        normal = (second - second.mean(0)) / np.sqrt(second.var(0) + 1e-5) * scale + bias
        for momentum, x in zip(MOMENTA, (first, second, np.tanh(normal)), strict=True):
            mean = momentum * mean + (1 - momentum) * x.mean(0)
            variance = momentum * variance + (1 - momentum) * x.var(0)
    return mean, variance


@pytest.mark.parametrize("name", ["one device", *placements(model()[0])])
def test_every_call_moves_them_in_order(name: str, pools: Pools, tmp_path: Path) -> None:
    graph, loss = model()
    if name == "one device":
        placement, schedule = one_device(graph, MICRO_BATCHES, True, SAMPLES)
    else:
        placement = placements(graph)[name]
        order = forwards_first if "pipelines" in name else schedule_of
        schedule = order(graph, placement, MICRO_BATCHES)
    program = tmp_path / "program"
    write(graph, placement, schedule, loss, program, optimizer=Optimizer("sgd", lr=0.1))
    np.savez(tmp_path / "batch.npz", **data())  # type: ignore[arg-type]
    found = recorded(pools, program, tmp_path / "record", tmp_path / "batch.npz")
    drawn = {key: each.numpy() for key, each in drawn_parameters(graph, program).items()}
    expected = dict(zip((MEAN, VARIANCE), expected_statistics(drawn), strict=True))
    manifest = read_manifest(program)
    for rank, shards in enumerate(manifest.shards):
        for shard in (each for each in shards if each.parameter in expected):
            wanted = expected[shard.parameter][shard.box.slices]
            np.testing.assert_allclose(
                found[rank][shard.parameter], wanted, rtol=1e-10, err_msg=f"rank {rank}"
            )


def recorded(pools: Pools, program: Path, folder: Path, batch: Path) -> list[dict[int, np.ndarray]]:
    """Return the parameters of each rank after a step, by index."""
    folder.mkdir()
    ranks = read_manifest(program).world_size
    pools.of(ranks).run(
        program,
        "--device",
        "cpu",
        "--data",
        batch,
        "--record",
        folder,
        "--report",
        folder / "report",
    )
    found = []
    for rank in range(ranks):
        with np.load(record_file(folder, "parameters", 0, rank)) as stored:
            found.append({int(key): stored[key] for key in stored.files})
    return found


def test_verify_compares_them(pools: Pools, tmp_path: Path) -> None:
    graph, loss = model()
    np.savez(tmp_path / "batch.npz", **data())  # type: ignore[arg-type]
    placement = placements(graph)["stages"]
    write(graph, placement, schedule_of(graph, placement, MICRO_BATCHES), loss, tmp_path / "ranks")
    write(graph, *one_device(graph, MICRO_BATCHES, True, SAMPLES), loss, tmp_path / "one")
    for name in ("ranks", "one"):
        recorded(pools, tmp_path / name, tmp_path / f"{name} recorded", tmp_path / "batch.npz")
    folders = tmp_path / "ranks recorded", tmp_path / "one recorded"

    def worst() -> float:
        manifest = read_manifest(tmp_path / "ranks")
        found = list(tensor_differences(manifest, *folders, "parameters", trainable=False))
        assert len(found) == 2
        return max(each.relative for each in found)

    assert worst() < 1e-10
    path = record_file(folders[0], "parameters", 0, 1)
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    arrays[str(MEAN)] = arrays[str(MEAN)] + 0.01
    np.savez(path, **arrays)  # type: ignore[arg-type]
    assert worst() > 1e-4
