"""What is a parameter, what a buffer, what a constant; none lost, merged, untied or read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import FileSlice, Fill, Graph, Initializer
from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import INT64, floats, integers, model, node, saved
from tests.passes.frontend.reference import parameter_array


def trained(graph: Graph) -> dict[str, bool]:
    return {each.value.name: each.trainable for each in graph.parameters}


def test_numbers_lie_where_the_slices_say(tmp_path: Path) -> None:
    """Raw and packed numbers, large ones that are skipped when parsing and small ones that are
    not.
    """
    large = floats(64, 64)
    small = floats(64, seed=1)
    packed = floats(64, 8, seed=2)
    nodes = [node("Gemm", "x large small", "h"), node("MatMul", "h packed", "y")]
    proto = model(nodes, {"x": [2, 64]}, "y", {"large": large, "small": small})
    proto.graph.initializer.append(
        onnx.helper.make_tensor("packed", 1, packed.shape, packed.reshape(-1))
    )
    read = read_model(saved(proto, tmp_path))
    assert all(isinstance(each.storage, FileSlice) for each in read.graph.parameters)
    found = {each.value.name: parameter_array(each, read.path) for each in read.graph.parameters}
    for name, expected in {"large": large, "small": small, "packed": packed}.items():
        assert np.array_equal(found[name], expected), name


def test_a_tied_weight_stays_one_and_equal_weights_stay_two(tmp_path: Path) -> None:
    nodes = [
        node("Gather", "table x", "e"), node("MatMul", "e one", "a"), node("MatMul", "a two", "b"),
        node("Transpose", "table", "head", perm=[1, 0]), node("MatMul", "b head", "y"),
    ]  # fmt: skip
    held = {"table": floats(9, 4), "one": floats(4, 4), "two": floats(4, 4)}
    read = read_model(saved(model(nodes, {"x": (INT64, [2, 3])}, "y", held), tmp_path))
    assert trained(read.graph) == {"table": True, "one": True, "two": True}
    assert len(read.graph.consumers()["table"]) == 2


def test_an_identity_ties(tmp_path: Path) -> None:
    nodes = [node("Identity", "w", "v"), node("MatMul", "x w", "h"), node("MatMul", "h v", "y")]
    read = read_model(saved(model(nodes, {"x": [2, 4]}, "y", {"w": floats(4, 4)}), tmp_path))
    assert [each.inputs for each in read.graph.nodes] == [("x", "w"), ("h", "w")]


def test_filled_weights_are_weights_of_their_own(tmp_path: Path) -> None:
    value = onnx.helper.make_tensor("value", 1, [1], [0.25])
    nodes = [
        node("ConstantOfShape", "shape", "one", value=value), node("ConstantOfShape", "shape", "two", value=value),
        node("MatMul", "x one", "h"), node("MatMul", "h two", "m"),
        node("ConstantOfShape", "shape", "zeros"), node("Add", "m zeros", "y"),
    ]  # fmt: skip
    read = read_model(saved(model(nodes, {"x": [4, 4]}, "y", {"shape": integers(4, 4)}), tmp_path))
    assert [(each.value.name, each.storage) for each in read.graph.parameters] == [
        ("one", Fill(0.25)),
        ("two", Fill(0.25)),
    ]
    assert [each.value.name for each in read.graph.constants] == ["zeros"]


def test_buffers_are_not_trained(tmp_path: Path) -> None:
    nodes = [
        node("BatchNormalization", "x scale offset mean variance", "h"), node("MatMul", "positions frequency", "angle"),
        node("Cos", "angle", "c"), node("Mul", "h c", "y"),
    ]  # fmt: skip
    held = {name: np.abs(floats(3)) for name in ("scale", "offset", "mean", "variance")} | {
        "frequency": floats(1, 3)
    }
    inputs: dict[str, list[int]] = {"x": [4, 3], "positions": [4, 1]}
    read = read_model(saved(model(nodes, inputs, "y", held), tmp_path))  # type: ignore[arg-type]
    expected = {"scale": True, "offset": True, "mean": False, "variance": False, "frequency": False}
    assert trained(read.graph) == expected


@pytest.mark.parametrize("pattern", ["enc.*", "re:enc\\..*"])
def test_frozen_parameters_are_not_trained(pattern: str, tmp_path: Path) -> None:
    nodes = [node("MatMul", "x enc.w", "h"), node("MatMul", "h dec.w", "y")]
    path = saved(
        model(nodes, {"x": [2, 3]}, "y", {"enc.w": floats(3, 3), "dec.w": floats(3, 3)}), tmp_path
    )
    assert trained(read_model(path, frozen=(pattern,)).graph) == {"enc.w": False, "dec.w": True}


def test_scalars_are_constants_and_what_exporters_folded_is_trained(tmp_path: Path) -> None:
    nodes = [node("Mul", "x s", "a"), node("Add", "a val_7", "b"), node("MatMul", "b val_8", "y")]
    held = {"s": np.float32(2).reshape(()), "val_7": floats(3), "val_8": floats(3, 4)}
    read = read_model(saved(model(nodes, {"x": [2, 3]}, "y", held), tmp_path))
    assert trained(read.graph) == {"val_7": True, "val_8": True}
    assert {each.value.name for each in read.graph.constants} == {"s"}


@pytest.mark.parametrize("size", [3, 20, 200])
def test_weights_in_constant_nodes_are_trained_whatever_their_size(
    size: int, tmp_path: Path
) -> None:
    weight = floats(size, size)
    nodes = [
        onnx.helper.make_node("Constant", [], ["w"], value=onnx.numpy_helper.from_array(weight)),
        node("MatMul", "x w", "y"),
    ]
    read = read_model(saved(model(nodes, {"x": [2, size]}, "y"), tmp_path))
    (parameter,) = read.graph.parameters
    assert parameter.trainable and np.array_equal(parameter_array(parameter, read.path), weight)


def test_a_bias_of_one_element_is_a_parameter(tmp_path: Path) -> None:
    proto = model(
        [node("Gemm", "x w b", "y")], {"x": [2, 3]}, "y", {"w": floats(3, 1), "b": floats(1)}
    )
    read = read_model(saved(proto, tmp_path))
    assert trained(read.graph) == {"w": True, "b": True}


def test_weights_that_are_absent_have_types_and_schemes(tmp_path: Path) -> None:
    nodes = [
        node("Gather", "table x", "e"), node("LayerNormalization", "e scale offset", "n"),
        node("Transpose", "kernel", "k", perm=[1, 0]), node("MatMul", "n k", "y"),
    ]  # fmt: skip
    types: dict[str, list[int]] = {"table": [11, 4], "scale": [4], "offset": [4], "kernel": [7, 4]}
    proto = model(nodes, {"x": (INT64, [2, 3])}, "y", types=types)  # type: ignore[arg-type]
    read = read_model(saved(proto, tmp_path))
    schemes = {each.value.name: each.storage for each in read.graph.parameters}
    assert schemes == {
        "table": Initializer("normal", 0.02),
        "scale": Initializer("ones"),
        "offset": Initializer("zeros"),
        "kernel": Initializer("normal", math.sqrt(2 / 11)),
    }
    assert "'table' and 3 more" in read.warnings[0]


def test_types_of_absent_weights_follow_from_their_uses(tmp_path: Path) -> None:
    """An export without weights types activations alone."""
    nodes = [
        node("Gather", "table x", "e"), node("Mul", "scale e", "n"), node("Transpose", "kernel", "k", perm=[1, 0]),
        node("MatMul", "n k", "h"), node("Reshape", "h rows", "r"), node("Gemm", "r w b", "g", transB=1),
        node("Conv", "image filter", "c", kernel_shape=[3, 3]), node("MatMul", "h head", "y"),
    ]  # fmt: skip
    types: dict[str, list[int]] = {
        "e": [2, 3, 4],
        "n": [2, 3, 4],
        "h": [2, 3, 5],
        "g": [6, 8],
        "c": [2, 6, 4, 4],
    }
    proto = model(
        nodes, {"x": (INT64, [2, 3]), "image": [2, 3, 6, 6]}, "y g c", {"rows": integers(6, 5)},
        types=types,  # type: ignore[arg-type]
    )  # fmt: skip
    path = saved(proto, tmp_path)
    for info in proto.graph.output:
        if info.name == "y":
            info.CopyFrom(onnx.helper.make_tensor_value_info("y", 1, [2, 3, 13]))
    path.write_bytes(proto.SerializeToString())
    read = read_model(path)
    assert {each.value.name: each.value.shape for each in read.graph.parameters} == {
        "table": (13, 4), "scale": (4,), "kernel": (5, 4), "w": (8, 5), "b": (8,), "filter": (6, 3, 3, 3),
        "head": (5, 13),
    }  # fmt: skip


def test_an_absent_weight_whose_shape_nothing_tells(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="reads 'w', which no node writes and whose shape is unknown"
    ):
        read_model(saved(model([node("MatMul", "x w", "y")], {"x": [2, 3]}, "y"), tmp_path))


def test_the_file_may_say_which_are_parameters_and_how_they_start(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "h"), node("Add", "h table", "y")]
    types: dict[str, list[int]] = {"w": [3, 4]}
    proto = model(nodes, {"x": [2, 3]}, "y", {"table": floats(2, 4)}, types=types)  # type: ignore[arg-type]
    stated = {
        "autopipe.parameters": ["w"],
        "autopipe.init": {"w": {"scheme": "uniform", "bound": 0.5}},
    }
    onnx.helper.set_model_props(proto, {key: json.dumps(value) for key, value in stated.items()})
    read = read_model(saved(proto, tmp_path))
    assert [(each.value.name, each.storage) for each in read.graph.parameters] == [
        ("w", Initializer("uniform", 0.5))
    ]
    for key, text in (
        ("autopipe.parameters", "{"),
        ("autopipe.init", '{"w": {"scheme": "magic"}}'),
    ):
        onnx.helper.set_model_props(proto, {key: text})
        with pytest.raises(ModelError, match=key):
            read_model(saved(proto, tmp_path))


def test_initializers_among_the_inputs_are_no_inputs(tmp_path: Path) -> None:
    proto = model(
        [node("MatMul", "x w", "y")], {"x": [2, 3], "w": [3, 4]}, "y", {"w": floats(3, 4)}
    )
    read = read_model(saved(proto, tmp_path))
    assert [value.name for value in read.graph.inputs] == ["x"] and trained(read.graph) == {
        "w": True
    }


def test_the_digest_tells_structures_apart_and_not_weights(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "y")]
    digests = [
        read_model(
            saved(model(nodes, {"x": [2, 32]}, "y", {"w": floats(32, extent, seed=seed)}), tmp_path)
        ).digest
        for extent, seed in ((32, 0), (32, 1), (64, 0))
    ]
    assert digests[0] == digests[1] != digests[2]


def layers(folder: Path) -> Path:
    nodes = [
        node("MatMul", "x enc.0.w", "h"),
        node("MatMul", "h enc.1.w", "m"),
        node("MatMul", "m head.w", "y"),
    ]
    held = {"enc.0.w": floats(4, 4), "enc.1.w": floats(4, 4), "head.w": floats(4, 4)}
    return saved(model(nodes, {"x": [2, 4]}, "y", held), folder)


@pytest.mark.parametrize(
    "pattern", ["re:^(?!head).*", "re:(?!head\\.).*", "re:.*(?<!head\\.w)", "re:(?!.*head).*$"]
)
def test_all_parameters_but_some_are_frozen_by_a_negative_expression(
    pattern: str, tmp_path: Path
) -> None:
    read = read_model(layers(tmp_path), frozen=(pattern,))
    assert trained(read.graph) == {"enc.0.w": False, "enc.1.w": False, "head.w": True}


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("re:^(?!head)", "'re:^(?!head).*' matches 'enc.0.w' and 1 more"),
        ("re:0", "'re:.*0.*' matches 'enc.0.w'"),
        ("re:w$", "'re:.*w$' matches 'enc.0.w' and 2 more"),
        ("enc", "'enc*' matches 'enc.0.w' and 1 more"),
        ("haed.w", "did you mean 'head.w'?"),
        ("decoder", "list the names with autopipe inspect -v"),
    ],
)
def test_a_pattern_that_matches_no_whole_name_is_refused_with_one_that_does(
    pattern: str, hint: str, tmp_path: Path
) -> None:
    for key in ("frozen", "trainable"):
        with pytest.raises(ConfigurationError) as caught:
            read_model(layers(tmp_path), **{key: (pattern,)})  # type: ignore[arg-type]
        message = (
            f"model.{key}: pattern {pattern!r} matches the full name of no floating-point tensor"
        )
        assert (caught.value.message, caught.value.hint) == (message, hint)


def from_torch(
    nodes: list[onnx.NodeProto], held: dict[str, np.ndarray], columns: int
) -> onnx.ModelProto:
    """A file of torch's older exporter, which does not say which tensors are parameters."""
    proto = model(nodes, {"x": [4, columns]}, "y", held)
    proto.producer_name = "pytorch"
    return proto


def test_matrices_in_a_sine_are_trained(tmp_path: Path) -> None:
    """Layers of SIREN have no bias, or one that the file adds behind the product."""
    nodes = [
        node("MatMul", "x net.w", "a"), node("Sin", "a", "b"), node("MatMul", "b onnx::MatMul_9", "c"),
        node("Sin", "c", "d"), node("Mul", "d rope.frequencies", "e"), node("Cos", "e", "y"),
    ]  # fmt: skip
    held = {"net.w": floats(5, 6), "onnx::MatMul_9": floats(6, 4, seed=1)}
    held["rope.frequencies"] = (10.0 ** -np.arange(4)).astype(np.float32)
    read = read_model(saved(from_torch(nodes, held, 5), tmp_path))
    assert trained(read.graph)["net.w"]
    told = {each.value.name: each.why for each in read.tensors}
    assert told["net.w"] == "by its use"
    assert told["rope.frequencies"] == "frequencies of sines and cosines"


def test_a_weight_that_begins_as_the_identity_is_trained(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x rnn.w", "a"), node("Mul", "a keep", "y")]
    held = {"rnn.w": np.eye(5, dtype=np.float32), "keep": np.eye(5, dtype=np.float32)[:1]}
    read = read_model(saved(from_torch(nodes, held, 5), tmp_path))
    found = {each.value.name: (each.trained, each.doubtful) for each in read.tensors}
    assert found == {"rnn.w": (True, True), "keep": (False, False)}


def test_the_vectors_of_spectral_normalization_are_not_trained(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "w_orig w_v", "a"), node("Mul", "a w_u", "b"), node("ReduceSum", "b", "norm"),
        node("Div", "w_orig norm", "w"), node("MatMul", "x w", "y"),
    ]  # fmt: skip
    held = {"w_orig": floats(5, 5), "w_u": floats(5, seed=1), "w_v": floats(5, seed=2)}
    read = read_model(saved(from_torch(nodes, held, 5), tmp_path))
    assert {each.value.name: each.trained for each in read.tensors} == {
        "w_orig": True,
        "w_u": False,
        "w_v": False,
    }
