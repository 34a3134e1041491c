"""What an exporter folded operators into is trained in the module's own form; copies of a parameter
are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.passes.export import write_trained
from autopipe.passes.frontend import Model, read_model
from autopipe.passes.weight_files import module_layouts
from tests.passes.export.test_write import trained as numbers
from tests.passes.frontend.building import INT64, floats, node, saved
from tests.passes.frontend.reference import (
    assert_close,
    parameter_array,
    random_feeds,
    run,
    run_read,
)
from tests.passes.frontend.test_apart import torch_export, weights

PLACES = np.array([[0, 1, 2], [3, 0, 1], [4, 3, 0]])


def checked(proto: onnx.ModelProto, folder: Path, parameters: Mapping[str, np.ndarray]) -> Model:
    """The model, which computes what the file does from these parameters, and so does what is
    exported of others.
    """
    path = saved(proto, folder)
    read = read_model(path)
    found = {
        each.value.name: parameter_array(each, path)
        for each in read.graph.parameters
        if each.trainable
    }
    assert found.keys() == parameters.keys()
    for name, array in parameters.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-6)
    feeds = random_feeds(read.graph)
    assert_close(run_read(read, feeds), run(path, feeds))
    write_trained(path, folder / "out.onnx", numbers(found))
    assert_close(run(folder / "out.onnx", feeds), run(path, feeds))
    assert weights(read_model(folder / "out.onnx").graph) == weights(read.graph)
    return read


@pytest.mark.parametrize("sign", [1, -1])
def test_an_exponential_is_computed_from_its_logarithm(sign: int, tmp_path: Path) -> None:
    parameter = floats(4, 5)
    held = {"exp": (sign * np.exp(parameter)).reshape(1, 4, 5)}
    folded = {"exp": ["a.log", *(["neg"] if sign < 0 else [])]}
    proto = torch_export(
        [node("Mul", "x exp", "y")], {"x": [1, 4, 5]}, held, ("a.log",), folded=folded
    )
    checked(proto, tmp_path, {"a.log": parameter.reshape(1, 4, 5)})


@pytest.mark.parametrize("signed", [True, False])
def test_rows_that_are_looked_up_at_fixed_places_are_one_each(signed: bool, tmp_path: Path) -> None:
    table = floats(5, 2)
    held = {"onnx::Add_7": np.ascontiguousarray(table[PLACES].transpose(2, 0, 1)[None])}
    named = (
        {"parameters": ("bias",), "folded": {"onnx::Add_7": ["bias", "embedding"]}}
        if signed
        else {}
    )
    proto = torch_export([node("Add", "x onnx::Add_7", "y")], {"x": [1, 2, 3, 3]}, held, **named)  # type: ignore[arg-type]
    checked(proto, tmp_path, {"onnx::Add_7/rows": table})


def test_rows_of_a_new_layer_are_not_taken_for_one(tmp_path: Path) -> None:
    """Mamba's logarithms begin as the same row for each channel."""
    parameter = np.repeat(np.log(np.arange(1, 5, dtype=np.float32))[None], 3, axis=0)
    nodes = [node("Exp", "onnx::Exp_7", "e"), node("Mul", "x e", "y")]
    checked(
        torch_export(nodes, {"x": [3, 4]}, {"onnx::Exp_7": parameter}),
        tmp_path,
        {"onnx::Exp_7": parameter},
    )


def test_copies_of_one_parameter_are_tied_whatever_they_are_called(tmp_path: Path) -> None:
    weight = floats(5, 5)
    offset = floats(5, seed=1)
    nodes = [
        node("MatMul", "x val_1", "a"), node("Add", "a c", "b"), node("MatMul", "b val_2", "d"),
        node("Add", "d wide", "y"),
    ]  # fmt: skip
    held = {
        "val_1": weight.T.copy(),
        "val_2": weight.T.copy(),
        "c": offset,
        "wide": np.tile(offset, (4, 1)),
    }
    folded = {"val_1": ["w"], "val_2": ["w"], "wide": ["c", "expand"]}
    calls = {"a": "%x, %p_w", "d": "%b, %p_w"}
    proto = torch_export(
        nodes, {"x": [4, 5]}, held, ("w", "c"), folded=folded, calls=calls, target="linear"
    )
    checked(proto, tmp_path, {"w": weight.T, "c": offset})


def test_equal_numbers_of_two_parameters_are_two(tmp_path: Path) -> None:
    """Layers that were copied begin equal."""
    nodes = [node("MatMul", "x val_1", "a"), node("MatMul", "a val_2", "y")]
    held = {"val_1": floats(5, 5), "val_2": floats(5, 5)}
    calls = {"a": "%x, %p_w", "y": "%a, %p_v"}
    folded = {"val_1": ["w"], "val_2": ["v"]}
    proto = torch_export(
        nodes, {"x": [4, 5]}, held, ("w", "v"), folded=folded, calls=calls, target="linear"
    )
    checked(proto, tmp_path, {"w": floats(5, 5), "v": floats(5, 5)})


def test_a_lookup_of_a_batch_is_expanded_for_any(tmp_path: Path) -> None:
    rows = floats(3, 4)
    held = {"embedding": np.tile(rows[None], (2, 1, 1))}
    proto = torch_export(
        [node("Add", "x embedding", "y")],
        {"x": [2, 3, 4]},
        held,
        ("p",),
        folded={"embedding": ["p", "expand"]},
    )
    read = checked(proto, tmp_path, {"embedding/row": rows[None]})
    assert [each.op for each in read.graph.nodes] == ["Expand", "Add"]


def test_a_lookup_of_a_batch_of_equal_rows_is_expanded_for_any(tmp_path: Path) -> None:
    row = floats(1, 4)
    held = {"embedding": np.tile(row[None], (2, 3, 1))}
    proto = torch_export(
        [node("Add", "x embedding", "y")],
        {"x": [2, 3, 4]},
        held,
        ("p",),
        folded={"embedding": ["p", "expand"]},
    )
    read = checked(proto, tmp_path, {"embedding/row/rows": row})
    assert [each.op for each in read.graph.nodes] == ["Gather", "Expand", "Add"]


def test_tables_that_a_signature_does_not_name_are_not_trained(tmp_path: Path) -> None:
    held = {
        "cos": np.cos(np.arange(8)[:, None] * np.array([1.0, 0.1])).astype(np.float32),
        "b": floats(2),
        "m": floats(2),
    }
    nodes = [node("Mul", "x cos", "a"), node("Add", "a b", "c"), node("Mul", "c m", "y")]
    proto = torch_export(
        nodes, {"x": [8, 2]}, held, ("b",), ("m",), folded={"cos": ["inv_freq", "arange"]}
    )
    read = checked(proto, tmp_path, {"b": floats(2)})
    assert {each.value.name: each.why for each in read.tensors if not each.trained} == {
        "cos": "no parameter, as the signature says", "m": "a buffer, as the signature says",
    }  # fmt: skip


def test_an_embedding_of_waves_is_not_trained(tmp_path: Path) -> None:
    """Marian's positions: a parameter that needs no gradient, which the signature does not say."""
    angles = np.arange(128)[:, None] / 10000 ** (np.arange(3) / 3)
    held = {
        "p": np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32),
        "w": floats(6, 2),
    }
    nodes = [node("Gather", "p x", "e"), node("MatMul", "e w", "y")]
    checked(
        torch_export(nodes, {"x": (INT64, [2, 3])}, held, ("p", "w")), tmp_path, {"w": floats(6, 2)}
    )


@pytest.mark.parametrize("signed", [True, False])
def test_what_is_1_minus_a_parameter_is_computed_from_it(signed: bool, tmp_path: Path) -> None:
    """RWKV's mixes of a position and the one before."""
    held = {"mix": floats(1, 1, 5)}
    held["onnx::Mul_7"] = 1 - held["mix"]
    nodes = [node("Mul", "x mix", "a"), node("Mul", "x onnx::Mul_7", "b"), node("Mul", "a b", "y")]
    named = {"parameters": ("mix",), "folded": {"onnx::Mul_7": ["mix", "sub"]}} if signed else {}
    proto = torch_export(nodes, {"x": [2, 3, 5]}, held, **named)  # type: ignore[arg-type]
    checked(proto, tmp_path, {"mix": held["mix"]})


def test_a_table_under_a_mask_is_its_rows(tmp_path: Path) -> None:
    """Swin's biases of shifted windows, one of which hides nothing."""
    table = floats(5, 2)
    mask = np.zeros((4, 1, 3, 3), np.float32)
    mask[2, 0, 0, 1:], mask[3, 0, 2, 2] = -100, -100
    held = {"add_6": table[PLACES].transpose(2, 0, 1)[None] + mask}
    folded = {"add_6": ["bias", "index", "masked_fill"]}
    proto = torch_export(
        [node("Add", "x add_6", "y")], {"x": [4, 2, 3, 3]}, held, ("bias",), folded=folded
    )
    checked(proto, tmp_path, {"add_6/row/rows": table})


def test_scalars_folded_from_one_parameter_are_trained_as_they_are(tmp_path: Path) -> None:
    """A contrastive loss exports the weights of its two directions as two selected elements."""
    held = {"select": np.float32(0.75).reshape(()), "select_1": np.float32(1.5).reshape(())}
    folded = {"select": ["weight"], "select_1": ["weight"]}
    nodes = [node("Mul", "x select", "h"), node("Mul", "h select_1", "y")]
    proto = torch_export(nodes, {"x": [4, 5]}, held, ("weight",), folded=folded)
    read = read_model(saved(proto, tmp_path))
    assert weights(read.graph).keys() == {"select", "select_1"}, (
        "elements that differ are two parameters"
    )
    feeds = random_feeds(read.graph)
    assert_close(run_read(read, feeds), run(tmp_path / "model.onnx", feeds))


def test_elements_of_a_parameter_are_told_from_the_parameter(tmp_path: Path) -> None:
    """The file does not tell in which order the parameter has the elements."""
    held = {"index": np.tile(floats(3)[None], (2, 1)), "w": floats(3)}
    nodes = [node("Add", "x index", "a"), node("Mul", "a w", "y")]
    folded = {"index": ["p", "index", "arange"]}
    proto = torch_export(nodes, {"x": [2, 3]}, held, ("p", "w"), folded=folded)
    (other,) = {each.value.name for each in read_model(saved(proto, tmp_path)).graph.parameters} - {
        "w"
    }
    assert other != "p"
    assert {each.value.name: each.why for each in read_model(saved(proto, tmp_path)).tensors} == {
        other: "elements of 'p', in a layout that the file does not tell", "w": "a parameter, as the signature says",
    }  # fmt: skip


def test_elements_of_a_parameter_may_be_negated(tmp_path: Path) -> None:
    """The logarithm of exp(-s) is -s."""
    held = {"select": np.float32(0.75).reshape(()), "select_1": np.float32(1.5).reshape(())}
    folded = {name: ["s", "neg", "exp", name] for name in held}
    nodes = [node("Mul", "x select", "h"), node("Mul", "h select_1", "y")]
    read = read_model(
        saved(torch_export(nodes, {"x": [4, 5]}, held, ("s",), folded=folded), tmp_path)
    )
    assert {each.why for each in read.tensors} == {
        "elements of 's', perhaps negated, in a layout that the file does not tell"
    }


def test_equal_scalars_folded_from_one_parameter_may_be_two(tmp_path: Path) -> None:
    """Nothing in the file says whether they are one element, or two elements of a new vector."""
    held = {"select": np.float32(0.75).reshape(()), "select_1": np.float32(0.75).reshape((1,))}
    folded = {"select": ["weight"], "select_1": ["weight"]}
    nodes = [node("Mul", "x select", "h"), node("Mul", "h select_1", "y")]
    proto = torch_export(nodes, {"x": [4, 5]}, held, ("weight",), folded=folded)
    read = read_model(saved(proto, tmp_path))
    assert weights(read.graph) == {"select": True, "select_1": False}
    assert {each.value.name: each.why for each in read.tensors if not each.trained} == {
        "select_1": "computed from 'weight'; export with optimize=False to train it"
    }
    feeds = random_feeds(read.graph)
    assert_close(run_read(read, feeds), run(tmp_path / "model.onnx", feeds))


def test_a_function_of_a_scalar_is_not_trained_as_the_scalar(tmp_path: Path) -> None:
    held = {"sigmoid": np.float32(0.75).reshape(())}
    proto = torch_export(
        [node("Mul", "x sigmoid", "y")], {"x": [4, 5]}, held, ("p",), folded={"sigmoid": ["p"]}
    )
    read = read_model(saved(proto, tmp_path))
    assert weights(read.graph) == {"sigmoid": False}
    assert [each.why for each in read.tensors] == [
        "computed from 'p'; export with optimize=False to train it"
    ]


@pytest.mark.parametrize("factor", [0.5, -2.0])
def test_a_sum_of_elements_that_are_used_one_by_one_is_computed_from_them(
    factor: float, tmp_path: Path
) -> None:
    """Weights of several losses, each the exponential of a parameter whose sum is added to the
    loss.
    """
    elements = np.array([0.3, -1.1], np.float32)
    held = {
        "select": np.exp(elements[0]),
        "select_1": np.exp(elements[1]),
        "mul_3": np.float32(factor * elements.sum()),
    }
    held = {name: np.asarray(number, np.float32) for name, number in held.items()}
    folded = {"select": ["s", "exp"], "select_1": ["s", "exp"], "mul_3": ["s", "sum_1"]}
    nodes = [
        node("Mul", "x select", "a"),
        node("Mul", "a select_1", "b"),
        node("Add", "b mul_3", "y"),
    ]
    proto = torch_export(nodes, {"x": [4, 5]}, held, ("s",), folded=folded)
    checked(proto, tmp_path, {"select/log": elements[0], "select_1/log": elements[1]})
    held["mul_3"] = np.asarray(factor * elements.sum() + 0.0123, np.float32)
    proto = torch_export(nodes, {"x": [4, 5]}, held, ("s",), folded=folded)
    assert weights(read_model(saved(proto, tmp_path)).graph)["mul_3"] is False


def test_a_new_table_that_is_looked_up_is_not_trained_in_its_place(tmp_path: Path) -> None:
    """Its elements are equal, so that nothing tells which of them are one."""
    held = {"index": np.zeros((3, 3), np.float32)}
    proto = torch_export(
        [node("Add", "x index", "y")],
        {"x": [3, 3]},
        held,
        ("p",),
        folded={"index": ["p", "arange", "sub"]},
    )
    assert weights(read_model(saved(proto, tmp_path)).graph) == {"index": False}


@pytest.mark.parametrize(
    ("target", "operators"),
    [("group_norm", ("Mul", "Add")), ("native_group_norm", ("Mul", "Add"))],
)
def test_scales_and_offsets_of_groups_of_channels_are_parameters(
    target: str, operators: tuple[str, str], tmp_path: Path
) -> None:
    scale = floats(5)
    offset = floats(5, seed=1)
    nodes = [node(operators[0], "x val_3", "a"), node(operators[1], "a val_4", "y")]
    held = {"val_3": scale.reshape(5, 1, 1), "val_4": offset.reshape(5, 1, 1)}
    folded = {"val_3": ["n.weight", "val_1"], "val_4": ["n.bias", "val_2"]}
    calls = dict.fromkeys("ay", "%x, 1, %p_n_weight, %p_n_bias")
    parameters = ("n.weight", "n.bias")
    proto = torch_export(
        nodes, {"x": [2, 5, 3, 3]}, held, parameters, folded=folded, calls=calls, target=target
    )
    checked(proto, tmp_path, {"n.weight": held["val_3"], "n.bias": held["val_4"]})
    layouts = module_layouts(tmp_path / "model.onnx")
    assert {name: each.shape for name, each in layouts.items()} == {
        "n.weight": (5,),
        "n.bias": (5,),
    }


def test_slopes_of_channels_are_a_parameter(tmp_path: Path) -> None:
    held = {"val_3": floats(1, 5, 1, 1)}
    proto = torch_export(
        [node("PRelu", "x val_3", "y")], {"x": [2, 5, 3, 3]}, held, ("slope",),
        folded={"val_3": ["slope"]}, calls={"y": "%x, %p_slope"}, target="prelu",
    )  # fmt: skip
    checked(proto, tmp_path, {"slope": held["val_3"]})
    assert module_layouts(tmp_path / "model.onnx")["slope"].shape == (5,)


def test_a_computed_scale_of_groups_of_channels_is_none_of_the_parameters(tmp_path: Path) -> None:
    held = {"val_3": floats(5, 1, 1)}
    proto = torch_export(
        [node("Mul", "x val_3", "y")], {"x": [2, 5, 3, 3]}, held, ("w",),
        folded={"val_3": ["w", "exp"]}, calls={"y": "%x, 1, %exp"}, target="group_norm",
    )  # fmt: skip
    assert weights(read_model(saved(proto, tmp_path)).graph) == {"val_3": False}


@pytest.mark.parametrize(
    ("path", "shape", "is_trained"),
    [
        ("/mixer", (5, 1), True),  # A vector with an axis added, as in Mamba.
        ("/mixer", (1, 5, 5), True),  # A table with an axis added, as in DeBERTa.
        ("/norm", (5,), False),  # Perhaps 1 + a scale, as in Gemma.
        ("", (5, 1), False),
    ],
)
def test_an_added_axis_explains_a_folded_tensor(
    path: str, shape: tuple[int, ...], is_trained: bool, tmp_path: Path
) -> None:
    held = {"onnx::Mul_5": floats(*shape)}
    mul = node("Mul", "x onnx::Mul_5", "y")
    mul.name = f"{path}/Mul"
    read = read_model(saved(torch_export([mul], {"x": [2, 5, 5]}, held), tmp_path))
    assert weights(read.graph) == {"onnx::Mul_5": is_trained}
    (tensor,) = read.tensors
    assert tensor.doubtful == is_trained
    if not is_trained:
        assert tensor.why == (
            "perhaps computed from parameters; export with do_constant_folding=False to train them"
        )


@pytest.mark.parametrize(
    ("bias", "is_trained"),
    [
        (
            "mixer.conv1d.bias",
            True,
        ),  # The module calls a function with its submodule's parameters, as in Mamba.
        ("mixer.bias", False),  # The module computes its weight, as weight normalization does.
        ("onnx::Conv_6", False),  # Batch normalization is folded into both.
    ],
)
def test_a_folded_weight_of_a_convolution_is_a_parameter_beside_the_bias_of_a_submodule(
    bias: str, is_trained: bool, tmp_path: Path
) -> None:
    held = {"onnx::Conv_5": floats(4, 1, 3), bias: floats(4, seed=1)}
    conv = node("Conv", f"x onnx::Conv_5 {bias}", "y", group=4)
    conv.name = "/mixer/Conv"
    read = read_model(saved(torch_export([conv], {"x": [2, 4, 8]}, held), tmp_path))
    assert weights(read.graph)["onnx::Conv_5"] is is_trained


def test_the_older_exporters_layers_that_add_axes_are_known(tmp_path: Path) -> None:
    held = {
        "onnx::PRelu_5": floats(4, 1, 1), "ones": np.ones(2, np.float32), "zeros": np.zeros(2, np.float32),
        "shape": np.array([0, 2, -1]), "onnx::Mul_6": floats(4, 1, 1, seed=1), "onnx::Add_7": floats(4, 1, 1, seed=2),
    }  # fmt: skip
    nodes = [
        node("PRelu", "x onnx::PRelu_5", "a"), node("Reshape", "a shape", "b"),
        node("InstanceNormalization", "b ones zeros", "c"), node("Shape", "a", "d"), node("Reshape", "c d", "e"),
        node("Mul", "e onnx::Mul_6", "f"), node("Add", "f onnx::Add_7", "y"),
    ]  # fmt: skip
    for each in nodes:
        each.name = (
            f"/{'act' if each.op_type == 'PRelu' else 'norm'}/{each.op_type}_{each.output[0]}"
        )
    read = read_model(saved(torch_export(nodes, {"x": [2, 4, 3, 3]}, held), tmp_path))
    known = {
        each.value.name: (each.trained, each.doubtful)
        for each in read.tensors
        if "::" in each.value.name
    }
    assert known == {name: (True, False) for name in held if "::" in name}


def test_a_function_that_has_the_data_of_its_parameter_is_not_the_parameter(tmp_path: Path) -> None:
    """p / 2 + p.detach() / 2 is p, but the gradient is not; the exporter writes one tensor for
    both.
    """
    nodes = [
        node("MatMul", "x p", "a"),
        node("Mul", "a p", "b"),
        node("ReduceMean", "b", "y", keepdims=0),
    ]
    calls = {"a": "%x, %add", "b": "%a, %p_p"}
    proto = torch_export(
        nodes, {"x": [5, 5]}, {"p": floats(5, 5)}, ("p",), calls=calls, target="matmul"
    )
    read = read_model(saved(proto, tmp_path))
    assert {each.value.name: each.trained for each in read.tensors} == {"p": True, "add": False}
    assert [each.value.name for each in read.tensors if each.refused] == ["add"]


def test_a_tensor_computed_under_the_name_of_a_parameter_gets_another(tmp_path: Path) -> None:
    """Exporters fold a normalization into the weight of the layer before it, and keep the weight's
    name.
    """
    nodes = [node("Gemm", "x c.weight c.bias", "a"), node("ReduceMean", "a", "y", keepdims=0)]
    held = {"c.weight": floats(5, 5), "c.bias": floats(5)}
    calls = {"a": "%gemm, %p_n_weight, %p_n_bias, %b_mean, %b_var"}
    parameters = ("c.weight", "c.bias", "n.weight", "n.bias")
    proto = torch_export(
        nodes, {"x": [5, 5]}, held, parameters, ("mean", "var"), calls=calls, target="batch_norm"
    )
    read = read_model(saved(proto, tmp_path))
    found = {each.value.name: each.why for each in read.tensors if each.refused}
    assert found.keys() == {"c.weight/computed", "c.bias/computed"}
    assert found["c.weight/computed"].startswith("computed from 'c.weight', 'n.weight', 'n.bias'")
    chosen = read_model(read.path, trainable=("c.*",))
    assert {each.value.name: each.trainable for each in chosen.graph.parameters} == dict.fromkeys(
        found, True
    )


def test_a_multiple_of_a_parameter_that_the_file_holds_is_no_weight_of_a_layer(
    tmp_path: Path,
) -> None:
    """Files of torch's older exporter have no metadata, and folded shapes hide how many operators
    were folded.
    """
    nodes = [
        node("Shape", "x", "shape"), node("Reshape", "x shape", "a"),
        onnx.helper.make_node("MatMul", ["a", "onnx::MatMul_90"], ["b"], name="/m/MatMul"),
        onnx.helper.make_node("Add", ["m.bias", "b"], ["c"], name="/m/Add"), node("Mul", "c m.original", "y"),
    ]  # fmt: skip
    held = {
        "onnx::MatMul_90": (2 * floats(5, 5)).T.copy(),
        "m.bias": floats(5, seed=1),
        "m.original": floats(5, 5),
    }
    read = checked(
        torch_export(nodes, {"x": [5, 5]}, held),
        tmp_path,
        {"m.bias": held["m.bias"], "m.original": floats(5, 5)},
    )
    assert "Transpose" in [each.op for each in read.graph.nodes]
