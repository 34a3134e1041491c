"""Any model takes any numbers: exported with new ones and read again, it is the same graph with
those.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autopipe.configs.zoo import build, configure
from autopipe.ir.graph import Graph, Parameter
from autopipe.passes.export import TensorData, write_trained
from autopipe.passes.frontend import Model, read_model
from tests.distributed.support.zoo import SIZES
from tests.exports.architectures import SEQUENCE
from tests.exports.export import all_exports, onnx_file
from tests.exports.journey import symbols
from tests.passes.frontend.reference import parameter_array

EXPORTS = {each.name: each for each in all_exports()}
FAST = (
    "vit-dynamo-static-loss",
    "gpt2-torchscript-dynamic-forward",
    "lstm-torchscript-static-loss",
)


@pytest.mark.parametrize("weights", ["none", "random"])
@pytest.mark.parametrize("name", ["gpt", "rnnlm", "unet"])
def test_models_of_the_zoo(tmp_path: Path, name: str, weights: str) -> None:
    check_zoo(tmp_path, name, weights)


@pytest.mark.sweep
@pytest.mark.parametrize("weights", ["none", "random"])
@pytest.mark.parametrize("name", SIZES)
def test_every_model_of_the_zoo(tmp_path: Path, name: str, weights: str) -> None:
    check_zoo(tmp_path, name, weights)


@pytest.mark.parametrize("name", FAST)
def test_exported_models(tmp_path: Path, name: str) -> None:
    check(onnx_file(EXPORTS[name], tmp_path), tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("name", EXPORTS)
def test_every_exported_model(tmp_path: Path, name: str) -> None:
    check(onnx_file(EXPORTS[name], tmp_path), tmp_path)


def check_zoo(folder: Path, name: str, weights: str) -> None:
    path = folder / "model.onnx"
    build(configure(name, {**SIZES[name], "loss": "true", "weights": weights})).save(path)
    check(path, folder)


def check(path: Path, folder: Path) -> None:
    """The file at `path` with other numbers, inside it and beside it."""
    read = opened(path)
    generator = np.random.default_rng(0)
    new = {each.value.name: drawn(each, generator) for each in read.graph.parameters}
    trained = {
        each.value.name: numbers(each, new[each.value.name]) for each in read.graph.parameters
    }
    for limit in (1 << 30, 0):
        target = folder / f"trained-{limit}.onnx"
        write_trained(path, target, trained, inline_limit=limit)
        again = opened(target)
        assert structure(again.graph) == structure(read.graph)
        for each in again.graph.parameters:
            assert np.array_equal(parameter_array(each, target), new[each.value.name]), (
                each.value.name
            )


def opened(path: Path) -> Model:
    return read_model(path, dims=dict.fromkeys(symbols(path), SEQUENCE))


def drawn(parameter: Parameter, generator: np.random.Generator) -> np.ndarray:
    """New numbers for a weight; what is no number of a floating-point type stays as it is in shape
    and type.
    """
    value = parameter.value
    return np.asarray(
        generator.integers(0, 2, value.shape) + generator.normal(size=value.shape)
    ).astype(value.dtype.value)


def numbers(parameter: Parameter, array: np.ndarray) -> TensorData:
    return TensorData(parameter.value, lambda box: array[tuple(map(slice, box.starts, box.stops))])


def structure(graph: Graph) -> object:
    """All of a graph but its parameters' numbers, and what is trained of them by name."""
    trained = {each.value.name: (each.value, each.trainable) for each in graph.parameters}
    nodes = [(node.op, node.inputs, node.outputs, node.attributes) for node in graph.nodes]
    return graph.inputs, graph.outputs, trained, nodes, set(graph.values)
