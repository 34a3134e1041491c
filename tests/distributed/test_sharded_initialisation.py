"""Whatever the plan, ranks begin with the parameters that one device would, bit for bit. No rank
runs.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import torch

from autopipe.backends.torch.runtime.manifest import Manifest, read_manifest
from autopipe.backends.torch.runtime.state.parameters import load_parameters
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.schedule import Schedule
from tests.distributed.support.running import one_device, schedule_of, write
from tests.distributed.support.strategies import random_placement
from tests.distributed.support.zoo import SAMPLES, SIZES, small_graph

SEED = 11
PLACEMENTS = 10
DEVICES = (2, 3, 4, 6, 8, 12)
QUICK = ("gpt", "rnnlm", "dlrm")

Parameters = dict[str, torch.Tensor]


@pytest.mark.parametrize("name", QUICK)
def test_ranks_begin_as_one_device_would(tmp_path: Path, name: str) -> None:
    for number in range(2):
        check_placement(name, number, tmp_path / str(number))


@pytest.mark.sweep
@pytest.mark.parametrize("number", range(PLACEMENTS))
@pytest.mark.parametrize("name", SIZES)
def test_every_model_under_many_placements(tmp_path: Path, name: str, number: int) -> None:
    check_placement(name, number, tmp_path)


def check_placement(name: str, number: int, folder: Path) -> None:
    """Every block of every rank is the same block of what one device draws; together they are all
    of it.
    """
    graph, loss = small_graph(name)
    random = Random(f"{name} {number}")
    placement = random_placement(random, graph, random.choice(DEVICES), SAMPLES)
    manifest = written(graph, placement, schedule_of(graph, placement, 1), loss, folder)
    expected = of_one_device(name)
    left = {each: torch.ones_like(tensor, dtype=torch.bool) for each, tensor in expected.items()}
    for rank, shards in enumerate(manifest.shards):
        blocks = load_parameters(manifest, rank, torch.device("cpu"), SEED)
        for shard in shards:
            parameter = manifest.parameters[shard.parameter].value.name
            region = tuple(map(slice, shard.box.starts, shard.box.stops))
            assert torch.equal(blocks[shard.parameter], expected[parameter][region]), (
                rank,
                parameter,
            )
            left[parameter][region] = False
    read = {parameter.value.name for parameter in manifest.parameters}
    assert read == expected.keys()
    assert not any(mask.any() for mask in left.values())


@lru_cache(maxsize=1)
def of_one_device(name: str) -> Parameters:
    """What one device draws for a model's parameters, by name."""
    graph, loss = small_graph(name)
    with TemporaryDirectory() as folder:
        manifest = written(
            graph, *one_device(graph, 1, True, SAMPLES), loss, Path(folder) / "program"
        )
    return by_name(manifest)


def written(
    graph: Graph, placement: Placement, schedule: Schedule, loss: str | None, folder: Path
) -> Manifest:
    """The manifest of the program of a placement."""
    write(graph, placement, schedule, loss, folder)
    return read_manifest(folder)


def by_name(manifest: Manifest) -> Parameters:
    """The parameters of rank 0, gradients off."""
    found = load_parameters(manifest, 0, torch.device("cpu"), SEED)
    return {
        manifest.parameters[index].value.name: tensor.detach() for index, tensor in found.items()
    }
