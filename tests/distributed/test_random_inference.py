"""Any executable strategy of every model of the zoo gives the outputs that one device gives."""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.backends.torch.verification import array_difference, read_outputs
from autopipe.configs.zoo import build, configure
from autopipe.ir.graph import Graph
from autopipe.passes.frontend import read_model
from autopipe.passes.lower.traffic import communication_bytes
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import one_device, report_lines, schedule_of, write
from tests.distributed.support.strategies import random_placement
from tests.distributed.support.trained import DRAWN, MICRO_BATCHES, TOLERANCE
from tests.distributed.support.zoo import SAMPLES, SIZES

FAST = ("gpt", "mt5", "unet")


@pytest.mark.distributed
@pytest.mark.parametrize("name", FAST)
def test_outputs_on_four_ranks(pools: Pools, tmp_path: Path, name: str) -> None:
    check(pools, name, 1, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("name", SIZES)
def test_many_outputs(pools: Pools, tmp_path: Path, name: str) -> None:
    check(pools, name, 5, tmp_path)


def check(pools: Pools, name: str, count: int, folder: Path) -> None:
    """Compare the outputs of random strategies with those of one device."""
    graph = inference_graph(name)
    write(graph, *one_device(graph, MICRO_BATCHES, False, SAMPLES), None, folder / "one")
    expected = outputs(pools, folder / "one", 1)
    for seed in range(count):
        placement = random_placement(Random(f"{name} {seed}"), graph, 4, SAMPLES)
        schedule = schedule_of(graph, placement, MICRO_BATCHES, train=False)
        ranks = folder / str(seed)
        write(graph, placement, schedule, None, ranks)
        found = outputs(pools, ranks, 4)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert array_difference(key, found[key], value).relative <= TOLERANCE
        moved = communication_bytes(graph, placement, MICRO_BATCHES, 4, None)
        assert report_lines(ranks.with_suffix(".jsonl"))[0]["communication_bytes"] == moved


def inference_graph(name: str) -> Graph:
    """A small model without a loss."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        build(configure(name, {**SIZES[name], "weights": "none"})).save(path)
        return read_model(path, batch=SAMPLES).graph


def outputs(pools: Pools, program: Path, ranks: int) -> dict[str, np.ndarray]:
    """What a step of inference gives."""
    target = program.with_suffix(".npz")
    report = program.with_suffix(".jsonl")
    pools.of(ranks).run(program, "--device", "cpu", *DRAWN, "--outputs", target, "--report", report)
    return read_outputs(target, read_manifest(program))
