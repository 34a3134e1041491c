"""Exported models under strategies found, by an expert, and at random, on four and eight ranks
against one device.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopipe.ir.graph import Graph
from autopipe.passes.analysis.input_ranges import input_ranges
from autopipe.passes.frontend import CrossEntropy, read_model
from tests.distributed.support.pool import Pools
from tests.distributed.support.random_checks import check_random, micro_batches_of
from tests.distributed.support.trained import Trained, check, problem_of, trained
from tests.distributed.test_strategies_of_the_zoo import CHOOSING
from tests.exports.architectures import SEQUENCE
from tests.exports.export import Export, all_exports, onnx_file
from tests.exports.journey import symbols
from tests.exports.light import LIGHT
from tests.exports.small_light import drawn_small

DRAWN_STRATEGIES = 50
FIXED = 2
"""Samples that an export with fixed shapes has, but where each device is to have one."""
DATA = {"densenet121": 1, "inception_v2": 3, "resnet50": 6, "vgg19": 3}
"""Seeds of data with which no ReLU and no maximum of the first samples turns within rounding, if
not 0.
"""
FAST = ("gpt2-dynamo-dynamic-loss", "lstm-torchscript-dynamic-loss", "dlrm-dynamo-dynamic-loss")

EXPORTS = {export.name: export for export in all_exports() if export.loss}


@pytest.mark.distributed
@pytest.mark.parametrize("name", FAST)
def test_a_random_strategy(name: str, pools: Pools, tmp_path: Path) -> None:
    check_random(
        pools, trained_export(pools, EXPORTS[name], 4, 2, tmp_path), 4, 0, tmp_path / "random"
    )


@pytest.mark.sweep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_every_export(export: Export, devices: int, pools: Pools, tmp_path: Path) -> None:
    model = trained_export(pools, export, devices, 1 if export.model in LIGHT else 2, tmp_path)
    for name, strategy in CHOOSING.items():
        check(pools, model, strategy.run(problem_of(model, devices)), tmp_path / name)
    samples = devices if export.dynamic else FIXED
    models = {count: trained_export(pools, export, samples, count, tmp_path) for count in (1, 2)}
    for seed in range(DRAWN_STRATEGIES):
        check_random(pools, models[micro_batches_of(seed)], devices, seed, tmp_path / str(seed))


def trained_export(
    pools: Pools, export: Export, samples: int, micro_batches: int, folder: Path
) -> Trained:
    """The export on so many samples a micro-batch; a network that ships with onnx is a small copy
    of it.
    """
    loss = None
    if export.model in LIGHT:
        path = drawn_small(export.model, folder, samples)
        loss = CrossEntropy(LIGHT[export.model])
    else:
        path = onnx_file(export if export.dynamic else replace(export, batch=samples), folder)
    dims = dict.fromkeys(symbols(path), SEQUENCE)
    model = read_model(path, dims=dims, batch=samples if export.dynamic else None, loss=loss)
    batch = batch_for(model.graph, micro_batches, DATA.get(export.model, 0))
    return trained(pools, export.name, model.graph, model.loss, path, batch, micro_batches)


def batch_for(graph: Graph, micro_batches: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random data of which a mask leaves the first positions of every sentence.

    Of a row that is masked as a whole, torch's fused kernel and the same attention in several calls
    make different gradients.
    """
    generator = np.random.default_rng(seed)
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
