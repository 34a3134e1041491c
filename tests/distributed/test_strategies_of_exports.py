"""Exported models under strategies found, by an expert, and at random, on four and eight ranks against one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.passes.frontend import CrossEntropy, read_model
from autopipe.passes.lower.inputs import input_ranges
from autopipe.passes.placement.expert.strategy import Expert
from autopipe.passes.placement.pase.strategy import Pase
from tests.distributed.pool import Pools
from tests.distributed.strategies import random_placement
from tests.distributed.trained import MICRO_BATCHES, Trained, check, problem_of, trained
from tests.exports.architectures import SEQUENCE
from tests.exports.export import Export, all_exports, onnx_file
from tests.exports.journey import symbols
from tests.exports.light import LIGHT

DRAWN_STRATEGIES = {4: 5, 8: 2}
"""How many random strategies, by the number of ranks."""
FAST = ("gpt2-dynamo-dynamic-loss", "lstm-torchscript-dynamic-loss", "dlrm-dynamo-dynamic-loss")

EXPORTS = {export.name: export for export in all_exports() if export.loss}


@pytest.mark.distributed
@pytest.mark.parametrize("name", FAST)
def test_a_random_strategy(name: str, pools: Pools, tmp_path: Path) -> None:
    model = trained_export(pools, EXPORTS[name], 4, tmp_path)
    check(pools, model, random_placement(Random(name), model.graph, 4, model.samples), tmp_path / "random")


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("devices", DRAWN_STRATEGIES)
@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_every_export(export: Export, devices: int, pools: Pools, tmp_path: Path) -> None:
    model = trained_export(pools, export, devices, tmp_path)
    for index, placement in enumerate(placements(model, devices)):
        check(pools, model, placement, tmp_path / str(index))


def placements(model: Trained, devices: int) -> Iterator[Placement]:
    """What PaSE finds, what an expert chooses where devices can share the samples, and random strategies."""
    problem = problem_of(model, devices)
    yield Pase().run(problem)
    if model.samples % devices == 0:
        yield Expert().run(problem)
    for seed in range(DRAWN_STRATEGIES[devices]):
        yield random_placement(Random(f"{model.name} {seed}"), model.graph, devices, model.samples)


def trained_export(pools: Pools, export: Export, samples: int, folder: Path) -> Trained:
    """The export on so many samples, or on as many as it fixes."""
    path = onnx_file(export, folder)
    loss = CrossEntropy(LIGHT[export.model]) if export.model in LIGHT else None
    dims = dict.fromkeys(symbols(path), SEQUENCE)
    model = read_model(path, dims=dims, batch=samples if export.dynamic else None, loss=loss)
    return trained(pools, export.name, model.graph, model.loss, path, batch_for(model.graph))


def batch_for(graph: Graph) -> dict[str, np.ndarray]:
    """Random data of which a mask leaves the first positions of every sentence.

    Of a row that is masked as a whole, torch's fused kernel and the same attention in several calls make different
    gradients.
    """
    generator = np.random.default_rng(0)
    axes = dict(graph.batch_axes)
    found = {}
    for each in input_ranges(graph):
        value = each.value
        shape = list(value.shape)
        shape[axes[value.name]] *= MICRO_BATCHES
        if value.name == "attention_mask":
            drawn = np.arange(shape[1]) < generator.integers(2, shape[1] + 1, (shape[0], 1))
        elif each.below is None:
            drawn = generator.normal(size=shape)
        else:
            drawn = generator.integers(0, each.below, shape)
        found[value.name] = drawn.astype(value.dtype.value)
    return found
