"""Exported models under strategies found, by an expert, and at random, on four and eight ranks against one device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autopipe.ir.graph import Graph
from autopipe.passes.frontend import CrossEntropy, read_model
from autopipe.passes.lower.inputs import input_ranges
from tests.distributed.pool import Pools
from tests.distributed.random_checks import check_random, micro_batches_of
from tests.distributed.test_strategies_of_the_zoo import CHOOSING
from tests.distributed.trained import Trained, check, problem_of, trained
from tests.exports.architectures import SEQUENCE
from tests.exports.export import Export, all_exports, onnx_file
from tests.exports.journey import symbols
from tests.exports.light import LIGHT

DRAWN_STRATEGIES = 50
FAST = ("gpt2-dynamo-dynamic-loss", "lstm-torchscript-dynamic-loss", "dlrm-dynamo-dynamic-loss")

EXPORTS = {export.name: export for export in all_exports() if export.loss}


@pytest.mark.distributed
@pytest.mark.parametrize("name", FAST)
def test_a_random_strategy(name: str, pools: Pools, tmp_path: Path) -> None:
    check_random(pools, trained_export(pools, EXPORTS[name], 4, 2, tmp_path), 4, 0, tmp_path / "random")


@pytest.mark.sweep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_every_export(export: Export, devices: int, pools: Pools, tmp_path: Path) -> None:
    models = {count: trained_export(pools, export, devices, count, tmp_path) for count in (1, 2)}
    for name, strategy in CHOOSING.items():
        check(pools, models[2], strategy.run(problem_of(models[2], devices)), tmp_path / name)
    for seed in range(DRAWN_STRATEGIES):
        check_random(pools, models[micro_batches_of(seed)], devices, seed, tmp_path / str(seed))


def trained_export(pools: Pools, export: Export, samples: int, micro_batches: int, folder: Path) -> Trained:
    """The export on so many samples a micro-batch, or on as many as it fixes."""
    path = onnx_file(export, folder)
    loss = CrossEntropy(LIGHT[export.model]) if export.model in LIGHT else None
    dims = dict.fromkeys(symbols(path), SEQUENCE)
    model = read_model(path, dims=dims, batch=samples if export.dynamic else None, loss=loss)
    batch = batch_for(model.graph, micro_batches)
    return trained(pools, export.name, model.graph, model.loss, path, batch, micro_batches)


def batch_for(graph: Graph, micro_batches: int) -> dict[str, np.ndarray]:
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
        shape[axes[value.name]] *= micro_batches
        if value.name == "attention_mask":
            drawn = np.arange(shape[1]) < generator.integers(2, shape[1] + 1, (shape[0], 1))
        elif each.below is None:
            drawn = generator.normal(size=shape)
        else:
            drawn = generator.integers(0, each.below, shape)
        found[value.name] = drawn.astype(value.dtype.value)
    return found
