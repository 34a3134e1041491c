"""The zoo as a whole: every model can be built, named and sized, and says what is wrong with a
setting.
"""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest

from autopipe.configs import zoo
from autopipe.configs.zoo import parse_words
from autopipe.ir.errors import ConfigurationError

SIZES = {
    # Exact counts, known from the published models (those of the CNNs include their running
    # statistics).
    ("gpt", "gpt2"): 124_439_808,
    ("gpt", "gpt2-xl"): 1_557_611_200,
    ("bert", "base"): 109_514_298,
    ("llama", "7b"): 6_738_415_616,
    ("llama", "13b"): 13_015_864_320,
    ("llama", "70b"): 68_976_648_192,
    ("llama", "3-8b"): 8_030_261_248,
    ("llama", "3-70b"): 70_553_706_496,
    ("llama", "3-405b"): 405_853_388_800,
    ("vgg19", "imagenet"): 143_667_240,
    ("inceptionv3", "paper"): 23_834_568 + 2 * 17_216,
    ("wide-resnet", "resnet50"): 25_557_032 + 2 * 26_560,
    ("wide-resnet", "resnet101"): 44_549_160 + 2 * 52_672,
}
NAMED = {
    # What the name of a preset promises, with how far the count may be from it.
    ("gpt", "125m"): (125e6, 0.01),
    ("gpt", "350m"): (350e6, 0.02),
    ("gpt", "760m"): (760e6, 0.01),
    ("gpt", "1.3b"): (1.3e9, 0.02),
    ("gpt", "2.7b"): (2.7e9, 0.02),
    ("gpt", "6.7b"): (6.7e9, 0.01),
    ("gpt", "13b"): (13e9, 0.02),
    ("gpt", "175b"): (175e9, 0.01),
    ("gpt", "11b"): (11e9, 0.05),
    ("gpt", "24b"): (24e9, 0.02),
    ("gpt", "47b"): (47e9, 0.01),
    ("gpt", "77b"): (77e9, 0.01),
    ("mt5", "1.8b"): (1.8e9, 0.03),
    ("mt5", "9.5b"): (9.5e9, 0.01),
    ("mt5", "43b"): (43e9, 0.01),
    ("mt5", "88b"): (88e9, 0.01),
    ("bert", "large"): (335e6, 0.01),
    ("moe", "380m"): (380e6, 0.03),
    ("moe", "690m"): (690e6, 0.03),
    ("moe", "1.3b"): (1.3e9, 0.01),
    ("moe", "2.4b"): (2.4e9, 0.06),
    ("moe", "10b"): (10e9, 0.01),
    ("moe", "27b"): (27e9, 0.04),
    ("moe", "70b"): (70e9, 0.01),
    ("wide-resnet", "250m"): (250e6, 0.02),
    ("wide-resnet", "500m"): (500e6, 0.02),
    ("wide-resnet", "1b"): (1e9, 0.01),
    ("wide-resnet", "2b"): (2e9, 0.02),
    ("wide-resnet", "4b"): (4e9, 0.01),
    ("wide-resnet", "6.8b"): (6.8e9, 0.02),
    ("wide-resnet", "13b"): (13e9, 0.03),
    ("unet", "paper"): (31e6, 0.01),
}


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_default_runs_at_any_batch(name: str, loss: bool) -> None:
    model = zoo.build(zoo.configure(name, {"loss": loss})).to_proto()
    onnx.checker.check_model(model, full_check=True)
    for batch in (1, 3):
        results = run(model, batch)
        if loss:
            assert [result.shape for result in results] == [()]
        else:
            assert [result.shape[0] for result in results] == [batch]
        assert all(np.isfinite(result).all() for result in results)


@pytest.mark.parametrize("opset", [21, 22, 23])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_later_operator_sets_mean_the_same(name: str, opset: int) -> None:
    expected = run(zoo.build(zoo.configure(name)).to_proto(), 2)
    model = zoo.build(zoo.configure(name, {"opset": opset})).to_proto()
    assert model.opset_import[0].version == opset
    for found, wanted in zip(run(model, 2), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", ["null", "4"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_value_has_a_type_and_a_shape(name: str, batch: str) -> None:
    built = zoo.build(zoo.configure(name, {"loss": "true", "weights": "none", "batch": batch}))
    graph = built.to_proto().graph
    known = {value.name: value for value in [*graph.input, *graph.value_info, *graph.output]}
    for node in graph.node:
        for value in [*node.input, *node.output]:
            tensor = known[value].type.tensor_type
            assert tensor.elem_type != onnx.TensorProto.UNDEFINED and tensor.HasField("shape"), (
                value
            )
            extents = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
            assert all(extents), f"{value} {extents}"
            assert batch == "null" or all(isinstance(extent, int) for extent in extents), (
                f"{value} {extents}"
            )


@pytest.mark.parametrize("name", zoo.MODELS)
def test_without_weights_parameters_dangle_and_are_listed(name: str) -> None:
    with_weights = zoo.build(zoo.configure(name)).to_proto()
    without = zoo.build(zoo.configure(name, {"weights": "none"})).to_proto()
    shapes = {tensor.name: list(tensor.dims) for tensor in with_weights.graph.initializer}
    assert not without.graph.initializer
    assert shapes.keys().isdisjoint(value.name for value in with_weights.graph.value_info)
    properties = {entry.key: entry.value for entry in without.metadata_props}
    assert json.loads(properties["autopipe.parameters"]) == list(shapes)
    assert json.loads(properties["autopipe.init"]).keys() == shapes.keys()
    declared = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in without.graph.value_info
    }
    assert {name: declared[name] for name in shapes} == shapes
    assert [node.name for node in without.graph.node] == [
        node.name for node in with_weights.graph.node
    ]


@pytest.mark.parametrize("name", zoo.MODELS)
def test_names_are_unique(name: str) -> None:
    graph = zoo.build(zoo.configure(name, {"loss": True})).skeleton.graph
    nodes = [node.name for node in graph.node]
    values = [output for node in graph.node for output in node.output]
    assert len(set(nodes)) == len(nodes) and len(set(values)) == len(values)


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_published_model_has_its_parameters(name: str, size: str) -> None:
    built = zoo.build(zoo.configure(name, {"size": size, "weights": "none"}))
    assert built.parameter_count == SIZES[name, size]


@pytest.mark.parametrize(("name", "size"), NAMED)
def test_size_has_the_parameters_its_name_says(name: str, size: str) -> None:
    promised, tolerance = NAMED[name, size]
    built = zoo.build(zoo.configure(name, {"size": size, "weights": "none"}))
    assert built.parameter_count == pytest.approx(promised, rel=tolerance)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_size_builds(name: str) -> None:
    for size in zoo.model_class(name).presets:
        built = zoo.build(zoo.configure(name, {"size": size, "weights": "none", "loss": "true"}))
        assert built.skeleton.ByteSize() < 3_000_000


def test_sizes_of_pase() -> None:
    assert declared_inputs("alexnet", size="paper") == {"image": ["batch", 3, 227, 227]}
    assert declared_inputs("inceptionv3", size="paper") == {"image": ["batch", 3, 299, 299]}
    assert declared_inputs("rnnlm", size="paper", batch="64") == {"tokens": [64, 256]}
    assert declared_inputs("transformer", size="paper") == {
        "source": ["batch", 256],
        "target": ["batch", 256],
    }
    [features] = [
        tensor.shape
        for tensor in zoo.build(
            zoo.configure("alexnet", {"size": "paper", "weights": "none"})
        ).parameters
        if tensor.name == "fc6.weight"
    ]
    assert features == (4096, 9216)


def test_million_classes() -> None:
    built = zoo.build(zoo.configure("vgg19", {"size": "million", "weights": "none"}))
    assert built.parameters[-2].shape == (1_000_000, 4096)


def test_a_size_can_be_changed_by_other_settings() -> None:
    model = zoo.configure(
        "gpt", parse_words(["layers=12", "hidden=768", "heads=12", "sequence=256", "size=125m"])
    )
    assert {model.layers, model.hidden, model.sequence, model.vocabulary} == {12, 768, 256, 50257}


def test_tied_table_is_one_parameter() -> None:
    built = zoo.build(zoo.configure("mt5"))
    users = [node for node in built.skeleton.graph.node if "embedding.weight" in node.input]
    assert sorted(node.op_type for node in users) == ["Gather", "Gather", "Transpose"]


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("gtp", [], "did you mean 'gpt'"),
        ("gpt", ["hiden=3"], "did you mean 'hidden'"),
        ("gpt", ["size=11"], "did you mean '11b'"),
        ("gpt", ["heads=3"], "hidden = 64 is not a multiple of heads = 3"),
        ("gpt", ["layers=0"], "at least 1"),
        ("gpt", ["layers=1e3"], "layers is 1e3"),
        ("gpt", ["layers"], "expected KEY=VALUE"),
        ("gpt", ["loss=1"], "loss is 1"),
        ("gpt", ["weights=some"], "is none of random, none"),
        ("gpt", ["opset=19"], "at least 20"),
        ("gpt", ["opset=24"], "at most 23"),
        ("gpt", ["seed=-1"], "at least 0"),
        ("gpt", ["batch=0"], "at least 1"),
        ("gpt", ["layers=true"], "expected a whole number"),
        ("llama", ["key_value_heads=3"], "heads = 4 is not a multiple of key_value_heads = 3"),
        ("llama", ["hidden=60"], "head_size = 15 is not a multiple of halves = 2"),
        ("moe", ["choices=5"], "choices = 5 exceeds experts = 4"),
        ("inceptionv3", ["image=74"], "at least 75"),
        ("unet", ["depth=6"], "image = 32 is not a multiple of stride = 64"),
        ("wide-resnet", ["stages=1"], "a list of a whole number"),
        ("vgg19", ["size=1"], "known: imagenet, million"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(name: str, words: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        zoo.configure(name, parse_words(words))
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["alexnet", "inceptionv3", "vgg19"])
def test_smallest_image_still_works(name: str) -> None:
    least = {"alexnet": 67, "inceptionv3": 75, "vgg19": 32}[name]
    run(zoo.build(zoo.configure(name, {"image": least})).to_proto(), 1)
    with pytest.raises(ConfigurationError, match=f"at least {least}"):
        zoo.configure(name, {"image": least - 1})


def test_listing_needs_no_onnx() -> None:
    code = (
        "import sys; from autopipe.configs import zoo; "
        "assert not {'onnx', 'onnx_ir', 'numpy'} & set(sys.modules); assert len(zoo.MODELS) == 17"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def declared_inputs(name: str, **settings: str) -> dict[str, list[int | str]]:
    model = zoo.build(zoo.configure(name, {**settings, "weights": "none"})).skeleton
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }


def run(model: onnx.ModelProto, batch: int) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    generator = np.random.default_rng(0)
    inputs = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [dim.dim_value or batch for dim in tensor.shape.dim]
        if tensor.elem_type == onnx.TensorProto.INT64:
            inputs[value.name] = generator.integers(0, 2, shape)
        else:
            inputs[value.name] = generator.random(shape, dtype=np.float32)
    return [np.asarray(result) for result in session.run(None, inputs)]
