"""Reading changes nothing that is computed: exports of both of torch's exporters, and the models
onnx ships.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.ir.batch import batch_axes_of
from autopipe.ir.graph import Fill
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import Model, read_model
from tests.passes.frontend.exports import BATCH, CASES
from tests.passes.frontend.reference import assert_close, random_feeds, run, run_read

Exported = Callable[[str, str, bool], Path]
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
LIGHT_MODELS = sorted(path.name for path in LIGHT.glob("*.onnx"))
FUSED = {
    "gpt2": {"Attention": 2, "LayerNormalization": 5, "Gelu": 2},
    "llama": {"Attention": 2, "RMSNormalization": 5, "Rotary": 4, "SwiGLU": 2},
    "bert": {"Attention": 2, "LayerNormalization": 6, "Gelu": 3},
    "t5": {"Attention": 6, "RMSNormalization": 12},
    "vit": {"Attention": 2, "LayerNormalization": 5, "Gelu": 2},
    "resnet": {},
}
SPELT_OUT = {
    "Softmax",
    "IsNaN",
    "Erf",
    "Tanh",
    "ReduceMean",
    "Sqrt",
    "Identity",
    "Shape",
    "Range",
    "ConstantOfShape",
}


BY_DYNAMO = {
    ("gpt2", False), ("gpt2", True), ("llama", True), ("t5", True), ("vit", True),
}  # fmt: skip
"""Models that torch.export writes in each run, with the choice of dynamic shapes. It writes the
others in sweeps, since an export takes several seconds of processor time.
"""
EXPORTS = [
    pytest.param(
        *(name, exporter, dynamic),
        marks=(
            [pytest.mark.sweep] if exporter == "dynamo" and (name, dynamic) not in BY_DYNAMO else []
        ),
    )
    for name, exporter, dynamic in CASES
]


def feeds_of(model: Model, name: str) -> dict[str, np.ndarray]:
    feeds = random_feeds(model.graph)
    if name in ("gpt2", "llama", "bert"):  # the second input masks padding on the right
        mask = feeds[model.graph.inputs[1].name]
        mask[:] = (
            np.arange(mask.shape[1]) < np.array([[mask.shape[1]], [mask.shape[1] - 5]])[: len(mask)]
        )
    return feeds


@pytest.mark.parametrize(("name", "exporter", "dynamic"), EXPORTS)
def test_an_export_computes_the_same_after_reading(
    exported: Exported, name: str, exporter: str, dynamic: bool
) -> None:
    path = exported(name, exporter, dynamic)
    model = read_model(path, batch=BATCH)
    feeds = feeds_of(model, name)
    assert_close(run_read(model, feeds), run(path, feeds))
    counts = Counter(node.op for node in model.graph.nodes)
    assert {op: counts[op] for op in FUSED[name]} == FUSED[name]
    # ResNet's pooling is a mean over the image in the newer export.
    assert not (SPELT_OUT - ({"ReduceMean"} if name == "resnet" else set())) & set(counts)
    expected = (Mode.TRAIN, True) if name in ("gpt2", "llama", "t5") else (Mode.INFER, False)
    assert (model.mode, bool(model.loss)) == expected


@pytest.mark.parametrize(("name", "exporter", "dynamic"), EXPORTS)
def test_a_smaller_batch_computes_its_samples(
    exported: Exported, name: str, exporter: str, dynamic: bool
) -> None:
    path = exported(name, exporter, dynamic)
    whole = read_model(path, batch=BATCH)
    part = read_model(path, batch=1)
    feeds = feeds_of(whole, name)
    first = run_read(part, {key: array[:1] for key, array in feeds.items()})
    logits = {key: array for key, array in run_read(whole, feeds).items() if array.ndim}
    assert_close(
        {key: first[key] for key in logits}, {key: array[:1] for key, array in logits.items()}
    )


@pytest.mark.parametrize(
    ("name", "exporter"), [("gpt2", "dynamo"), ("llama", "script"), ("vit", "dynamo")]
)
def test_samples_are_where_the_graph_says(exported: Exported, name: str, exporter: str) -> None:
    """Changing one sample changes no value of another, wherever samples are followed to."""
    model = read_model(exported(name, exporter, True), batch=3)
    axes = batch_axes_of(model.graph)
    graph = model.graph
    watched = [
        value.name
        for value in graph.values
        if value.name in axes.values and value.dtype.is_floating
    ]
    assert len(watched) > len(graph.nodes) / 2
    probed = dataclasses.replace(model, graph=dataclasses.replace(graph, outputs=tuple(watched)))
    feeds = random_feeds(graph)
    changed = {key: array.copy() for key, array in random_feeds(graph, seed=1).items()}
    for key in feeds:
        changed[key][[0, 2]] = feeds[key][[0, 2]]
    before = run_read(probed, feeds)
    after = run_read(probed, changed)
    moved = 0
    for value in watched:
        (place,) = axes.values[value]
        shape = before[value].shape
        split = (
            *shape[: place.dimension],
            place.outer,
            3,
            place.inner,
            *shape[place.dimension + 1 :],
        )
        differs = np.moveaxis(
            (before[value] != after[value]).reshape(split), place.dimension + 1, 0
        )
        assert not differs[[0, 2]].any(), value
        moved += differs[1].any()
    # what is expanded from a weight does not depend on the sample
    assert moved > len(watched) * 0.9


@pytest.mark.parametrize("name", LIGHT_MODELS)
def test_a_network_that_onnx_ships_is_read(name: str) -> None:
    model = read_model(LIGHT / name)
    file = onnx.load(LIGHT / name)
    initializers = {tensor.name for tensor in file.graph.initializer}
    assert [value.name for value in model.graph.inputs] == [
        value.name for value in file.graph.input if value.name not in initializers
    ]
    filled = [each for each in model.graph.parameters if isinstance(each.storage, Fill)]
    # Inception v1 reshapes one of them; each is a weight of its own and none is merged with its
    # equals.
    assert len(filled) == sum(node.op_type == "ConstantOfShape" for node in file.graph.node)
    statistics = [each for each in model.graph.parameters if not each.trainable]
    assert len(statistics) == 2 * sum(
        node.op_type == "BatchNormalization" for node in file.graph.node
    )
    assert not any(
        node.op in ("Dropout", "ConstantOfShape", "Constant") for node in model.graph.nodes
    )


@pytest.mark.parametrize(
    "name", ["light_squeezenet.onnx", "light_shufflenet.onnx", "light_densenet121.onnx"]
)
def test_a_network_that_onnx_ships_computes_the_same_after_reading(name: str) -> None:
    model = read_model(LIGHT / name)
    feeds = random_feeds(model.graph)
    assert_close(run_read(model, feeds), run(LIGHT / name, feeds))
