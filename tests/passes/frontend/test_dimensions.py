"""Symbolic dimensions are bound by flags and by other dimensions, and a fixed batch is divided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.size_expressions import size_of, solve_symbol, symbols_of
from tests.passes.frontend.building import INT64, Shape, floats, integers, model, node, saved
from tests.passes.frontend.evaluated import emitted
from tests.passes.frontend.reference import assert_close, random_feeds, run, run_read


def chain(folder: Path, inputs: dict[str, Shape]) -> Path:
    """Return a file that sums its inputs of shape [batch, positions, 3] and multiplies the sum."""
    names = list(inputs)
    nodes = [node("Sum", " ".join(names), "s"), node("MatMul", "s w", "y")]
    return saved(model(nodes, inputs, "y", {"w": floats(3, 4)}), folder)  # type: ignore[arg-type]


def test_symbols_are_bound_by_name_and_the_batch_by_its_axis(tmp_path: Path) -> None:
    path = chain(tmp_path, {"a": ["s0", "seq", 3], "b": ["s7", "seq", 3]})
    read = read_model(path, dims={"seq": 5}, batch=4)
    assert [value.shape for value in read.graph.inputs] == [(4, 5, 3), (4, 5, 3)]
    assert read.graph.type_of("y").shape == (4, 5, 4)
    assert (read.batch, read.graph.batch_axes) == (4, (("a", 0), ("b", 0)))
    assert read_model(path, dims={"seq": 5}).batch == 1
    assert read_model(path, dims={"seq": 5, "s0": 6, "s7": 6}).batch == 6


@pytest.mark.parametrize(("mask", "length"), [("m", "cached + new"), ("attention_mask", "s53")])
def test_dimensions_that_follow_from_others_are_bound(
    tmp_path: Path, mask: str, length: str
) -> None:
    """A dimension follows from the expression that names it, and the length of a decoder's mask
    from the cache and the tokens.
    """
    nodes = [
        node("Concat", "past_0 input_ids", "present_0", axis=1),
        node("Add", f"present_0 {mask}", "y"),
    ]
    shapes: dict[str, Shape] = {
        "input_ids": ["b", "new"],
        "past_0": ["b", "cached"],
        mask: ["b", length],
    }
    path = saved(
        model(nodes, {name: (INT64, shape) for name, shape in shapes.items()}, "y present_0"),
        tmp_path,
    )
    assert read_model(path, dims={"new": 2, "cached": 4}).graph.type_of(mask).shape == (1, 6)
    with pytest.raises(ConfigurationError, match="symbolic"):
        read_model(path, dims={"new": 2})


def test_an_unbound_symbol_is_named_with_the_flag_to_add(tmp_path: Path) -> None:
    path = chain(tmp_path, {"a": ["batch", "seq", 3]})
    with pytest.raises(
        ConfigurationError, match=r"dimension 'seq' \(axis 1 of input 'a'\)"
    ) as caught:
        read_model(path)
    assert caught.value.hint == "add --dim seq=SIZE"
    with pytest.raises(ConfigurationError, match="unknown dimension") as caught:
        read_model(path, dims={"seq": 5, "sequence": 5})
    assert "'seq'" in caught.value.hint
    with pytest.raises(ConfigurationError, match="at least 0"):
        read_model(path, dims={"seq": -1})


def test_an_axis_that_may_count_samples_behind_a_fixed_one_is_named(tmp_path: Path) -> None:
    """Examples are a sequence whose axis 0 counts positions, and the state of a recurrent layer."""
    path = chain(tmp_path, {"a": [5, "N", 3], "b": [2, None, 3], "c": [2, 3]})
    with pytest.raises(ConfigurationError) as caught:
        read_model(path)
    flags = "--batch-axis a=1 --batch-axis b=1"
    assert (
        caught.value.hint
        == f"add --dim N=SIZE --dim b:1=SIZE, or {flags} if that axis is the batch axis"
    )


def test_unbound_dimensions_are_named_at_once(tmp_path: Path) -> None:
    path = chain(tmp_path, {"a": ["batch", "seq", 3], "b": ["batch", None, "2*w + 1"]})
    with pytest.raises(
        ConfigurationError, match=r"dimensions 'seq' .*, 'b:1' .*, .* are symbolic"
    ) as caught:
        read_model(path)
    assert caught.value.hint == "add --dim b:1=SIZE --dim seq=SIZE --dim w=SIZE"


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ({"a:1": 4, "b:1": 4}, (1, 4, 3)),
        ({"batch": 2, "seq": 4, "b:1": 4}, (2, 4, 3)),
        ({"s86": 4, "b:1": 4, "a:0": 3, "s11": 3}, (3, 4, 3)),
    ],
)
def test_dimensions_are_bound_by_position_and_meaning(
    dims: dict[str, int], shape: object, tmp_path: Path
) -> None:
    """Newer exporters name dimensions (s86); older files contain -1 or no name."""
    path = chain(tmp_path, {"a": ["s10", "s86", 3], "b": ["s11", -1, 3]})
    proto = onnx.load(path)
    proto.graph.node.append(node("Neg", "ids", "others"))
    proto.graph.input.append(onnx.helper.make_tensor_value_info("ids", INT64, ["s10", "s86"]))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("others", INT64, None))
    path.write_bytes(proto.SerializeToString())
    read = read_model(path, dims=dims)
    assert [value.shape for value in read.graph.inputs] == [shape, shape, shape[:2]]  # type: ignore[index]


def test_sizes_follow_from_expressions_both_ways(tmp_path: Path) -> None:
    nodes = [node("Neg", "x", "y"), node("Neg", "z", "u")]
    path = saved(
        model(nodes, {"x": ["b", "frames"], "z": ["b", "floor(2*frames - 1)"]}, "y u"), tmp_path
    )
    for dims in ({"frames": 4}, {"z:1": 7}, {"floor(2*frames - 1)": 7}):
        assert [value.shape for value in read_model(path, dims=dims).graph.inputs] == [
            (1, 4),
            (1, 7),
        ]
    with pytest.raises(ConfigurationError, match="sets 'frames' to 4"):
        read_model(path, dims={"x:1": 4, "frames": 5})
    with pytest.raises(ConfigurationError, match="which the model fixes to 3"):
        read_model(chain(tmp_path, {"a": ["batch", 4, 3]}), dims={"a:2": 4})


_ARITHMETIC = st.recursive(
    st.integers(0, 9).map(str) | st.sampled_from(["a", "b"]),
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(
            lambda each: f"({' '.join(each)})"
        )
        | st.tuples(st.sampled_from(["max", "min"]), inner, inner).map(
            lambda each: f"{each[0]}({each[1]}, {each[2]})"
        )
        | inner.map("-{}".format)
    ),
    max_leaves=8,
)


@given(_ARITHMETIC, st.integers(1, 50), st.integers(1, 50))
def test_arithmetic_is_pythons(text: str, a: int, b: int) -> None:
    try:
        expected = eval(text, {"__builtins__": {"max": max, "min": min}}, {"a": a, "b": b})
    except ZeroDivisionError:
        expected = None
    assert size_of(text, {"a": a, "b": b}) == expected
    if (
        symbols_of(text) == {"a"}
        and text != "a"
        and expected is not None
        and (found := solve_symbol(text, expected, {}))
    ):
        assert size_of(text, found) == expected


@pytest.mark.parametrize(
    "text", ["__import__('os')", "a.b()", "9**9**9", "(" * 300, "a if a else b", "f(a)", "1/3"]
)
def test_text_that_is_not_arithmetic_has_no_size(text: str) -> None:
    assert size_of(text, {"a": 2, "b": 3}) is None


def _message_passing(
    nodes: int | str, edges: int | str
) -> tuple[list[onnx.NodeProto], dict[str, Shape]]:
    """Return a message passing layer: each node of a graph sums the rows of its edges."""
    made = [
        node("Gather", "edges zero", "source", axis=0),
        node("Gather", "edges one", "target", axis=0),
        node("Gather", "x source", "sent", axis=0),
        node("Unsqueeze", "target last", "places"),
        node("ScatterND", "x places sent", "y", reduction="add"),
    ]
    return made, {"x": [nodes, 3], "edges": (INT64, [2, edges])}


def _attention(*positions: int | str) -> tuple[list[onnx.NodeProto], dict[str, Shape]]:
    """Return an attention whose input is a batch of sequences plus one table of positions."""
    made = [
        node("Add", "x positions", "q"),
        node("Attention", "q x x", "y", q_num_heads=1, kv_num_heads=1),
    ]
    return made, {"x": ["batch", "seq", 3], "positions": [*positions, 3]}


def _regions() -> tuple[list[onnx.NodeProto], dict[str, Shape]]:
    made = [node("RoiAlign", "x regions images", "y", output_height=2, output_width=2)]
    return made, {"x": [2, 3, 8, 8], "regions": [5, 4], "images": (INT64, [5])}


@pytest.mark.parametrize(
    ("made", "axes"),
    [
        (_message_passing(12, 40), ()),
        (_message_passing("nodes", "edges"), ()),
        (_attention(16), (("x", 0),)),
        (_attention("seq"), (("x", 0),)),
        (_regions(), (("regions", 0), ("images", 0))),
    ],
)
def test_inputs_without_samples_are_inferred_from_the_graph(
    made: tuple[list[onnx.NodeProto], dict[str, Shape]], axes: object, tmp_path: Path
) -> None:
    nodes, shapes = made
    held = {"zero": integers(0).reshape(()), "one": integers(1).reshape(()), "last": integers(-1)}
    used = {
        name: array for name, array in held.items() if any(name in each.input for each in nodes)
    }
    path = saved(model(nodes, shapes, "y", used, opset=23), tmp_path)
    dims = {"nodes": 12, "edges": 40, "seq": 16}
    stated = {
        each
        for shape in shapes.values()
        for each in (shape[1] if isinstance(shape, tuple) else shape)
    }
    assert (
        read_model(path, dims={name: dims[name] for name in stated & dims.keys()}).graph.batch_axes
        == axes
    )


def test_the_batch_axis_may_be_another_or_none(tmp_path: Path) -> None:
    path = chain(tmp_path, {"a": [5, "n", 3], "b": [5, 1, 3]})
    read = read_model(path, batch=2, batch_axes={"a": 1, "b": None})
    assert read.graph.batch_axes == (("a", 1),) and read.graph.type_of("y").shape == (5, 2, 4)
    with pytest.raises(ConfigurationError, match="sets axis 3"):
        read_model(path, batch_axes={"a": 3})
    with pytest.raises(ConfigurationError, match="names 'c', which is not an input"):
        read_model(path, batch_axes={"c": 0})


def test_an_input_of_extent_one_is_broadcast(tmp_path: Path) -> None:
    read = read_model(chain(tmp_path, {"a": ["batch", 5, 3], "positions": [1, 5, 3]}), batch=4)
    assert read.graph.batch_axes == (("a", 0),)


def test_inputs_that_disagree(tmp_path: Path) -> None:
    nodes = [node("Neg", "x", "y"), node("Neg", "z", "u")]
    path = saved(model(nodes, {"x": [6, 4], "z": [4, 3]}, "y u"), tmp_path)
    with pytest.raises(
        ModelError, match="'z' has the batch size 4, and other inputs have the batch size 6"
    ) as caught:
        read_model(path)
    assert "model.batch_axes: {z: AXIS}" in caught.value.hint
    assert read_model(path, batch_axes={"z": None}).batch == 6


def test_a_scalar_input_carries_no_samples(tmp_path: Path) -> None:
    read = read_model(
        saved(model([node("Mul", "x t", "y")], {"x": ["n", 3], "t": []}, "y"), tmp_path), batch=2
    )
    assert read.graph.batch_axes == (("x", 0),)


def baked(folder: Path, mask: np.ndarray) -> Path:
    """Return a file with a fixed batch of 6 that is merged with positions, and occurs in a mask and in
    the targets of Reshapes.
    """
    nodes = [
        node("Reshape", "x flat", "rows"), node("MatMul", "rows w", "hidden"), node("Reshape", "hidden apart", "parts"),
        node("Transpose", "parts", "turned", perm=[1, 0, 2]), node("Reshape", "turned flat2", "mixed"),
        node("Relu", "mixed", "bent"), node("Reshape", "bent turnedshape", "again"),
        node("Transpose", "again", "back", perm=[1, 0, 2]), node("Add", "back val_3", "y"),
    ]  # fmt: skip
    held = {
        "w": floats(3, 4), "flat": integers(30, 3), "apart": integers(6, 5, 4), "flat2": integers(30, 4),
        "turnedshape": integers(5, 6, 4), "val_3": mask,
    }  # fmt: skip
    return saved(model(nodes, {"x": [6, 5, 3]}, "y", held), folder)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_baked_batch_shrinks(size: int, tmp_path: Path) -> None:
    path = baked(tmp_path, np.broadcast_to(floats(1, 5, 4), (6, 5, 4)).copy())
    whole = read_model(path)
    part = read_model(path, batch=size)
    assert (whole.batch, part.batch) == (6, size)
    feeds = random_feeds(whole.graph)
    expected = run_read(whole, feeds)["y"]
    for start in range(0, 6, size):
        found = run_read(part, {"x": feeds["x"][start : start + size]})
        assert_close(found, {"y": expected[start : start + size]})


def test_a_baked_batch_that_cannot_shrink(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="micro-batches of 4 samples do not divide the batch of 6"
    ):
        read_model(baked(tmp_path, np.zeros((6, 5, 4), dtype=np.float32)), batch=4)
    with pytest.raises(ModelError, match="'val_3' differs from sample to sample"):
        read_model(baked(tmp_path, np.arange(120, dtype=np.float32).reshape(6, 5, 4)), batch=2)


def test_a_parameter_an_entry_a_sample(tmp_path: Path) -> None:
    path = saved(
        model([node("Add", "x w", "y")], {"x": [6, 3]}, "y", {"w": floats(6, 3)}), tmp_path
    )
    with pytest.raises(ModelError, match="'w' has one entry for each of the 6 samples"):
        read_model(path, batch=2)


@pytest.mark.parametrize(
    ("nodes", "held", "name"),
    [
        (
            [node("SoftmaxCrossEntropyLoss", "x labels", "loss", ignore_index=-1)],
            {},
            "softmaxcrossentropyloss_loss",
        ),
        (
            [
                node("BatchNormalization", "x s s s s", "a b c", training_mode=1),
                node("SoftmaxCrossEntropyLoss", "a labels", "loss"),
            ],
            {"s": floats(5)},
            "batchnormalization_a",
        ),
        (
            [
                node("Transpose", "x", "t", perm=[1, 0]),
                node("MatMul", "x t", "scores"),
                node("SoftmaxCrossEntropyLoss", "scores labels", "loss"),
            ],
            {},
            "matmul_scores",
        ),
    ],
)
def test_nodes_that_mix_samples_are_warned_of(
    nodes: list[object], held: dict[str, np.ndarray], name: str, tmp_path: Path
) -> None:
    inputs: dict[str, Shape | tuple[int, Shape]] = {"x": [4, 5], "labels": (INT64, [4])}
    read = read_model(saved(model(nodes, inputs, "loss", held), tmp_path))  # type: ignore[arg-type]
    (warning,) = read.warnings
    only_labels = "loss.normalize: tokens" in warning
    assert repr(name) in warning and ("mixes the samples" in warning) != only_labels
    assert only_labels == (len(nodes) == 1), (
        "a loss alone mixes samples only by the labels that it leaves out"
    )


@pytest.mark.parametrize(("labels", "ignored"), [(INT64, None), (onnx.TensorProto.UINT8, -100)])
def test_a_loss_that_leaves_no_label_out_mixes_nothing(
    labels: int, ignored: int | None, tmp_path: Path
) -> None:
    attributes = {} if ignored is None else {"ignore_index": ignored}
    nodes = [
        node("Cast", "labels", "whole", to=INT64),
        node("SoftmaxCrossEntropyLoss", "x whole", "loss", **attributes),
    ]
    inputs: dict[str, Shape | tuple[int, Shape]] = {"x": [4, 5], "labels": (labels, [4])}
    assert read_model(saved(model(nodes, inputs, "loss"), tmp_path)).warnings == ()


def test_a_cache_of_no_tokens(tmp_path: Path) -> None:
    nodes = [
        node("Concat", "past x", "k", axis=1),
        node("MatMul", "k w", "m"),
        node("ReduceSum", "m axis", "y"),
    ]
    held = {"w": floats(6, 6), "axis": integers(1)}
    path = saved(model(nodes, {"x": ["N", 3, 6], "past": ["N", "P", 6]}, "y", held), tmp_path)
    read = read_model(path, dims={"P": 0}, batch=2)
    assert read.graph.type_of("past").shape == (2, 0, 6)
    feeds = {"x": floats(2, 3, 6), "past": floats(2, 0, 6)}
    assert_close(emitted(read, feeds), run(path, feeds))


@pytest.mark.parametrize("shape", [[0, 4], ["N", 4]])
def test_a_batch_of_no_samples(tmp_path: Path, shape: Shape) -> None:
    path = saved(model([node("Relu", "x", "y")], {"x": shape}, "y"), tmp_path)
    dims = {} if shape[0] == 0 else {"N": 0}
    with pytest.raises(ModelError, match="the inputs 'x' has 0 samples"):
        read_model(path, dims=dims)
    assert read_model(path, dims=dims, batch_axes={"x": None}).graph.type_of("y").shape == (0, 4)


def test_a_weight_of_no_elements_is_not_drawn(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "p"), node("Concat", "x p", "y", axis=1)]
    read = read_model(saved(model(nodes, {"x": [2, 6]}, "y", {"w": floats(6, 0)}), tmp_path))
    assert read.warnings == ()
    x = floats(2, 6)
    np.testing.assert_array_equal(emitted(read, {"x": x})["y"], x)


@pytest.mark.parametrize("name", ["?", "None", "-1", "*"])
def test_dimensions_without_a_name_of_their_own_are_distinct(tmp_path: Path, name: str) -> None:
    shape: Shape = [name, 3, name, name]
    path = saved(model([node("Relu", "x", "y")], {"x": shape}, "y"), tmp_path)
    read = read_model(path, dims={"x:2": 8, "x:3": 24}, batch=2)
    assert read.graph.type_of("y").shape == (2, 3, 8, 24)
    with pytest.raises(ConfigurationError) as caught:
        read_model(path)
    assert caught.value.hint == "add --dim x:2=SIZE --dim x:3=SIZE"


def test_a_state_whose_first_axis_counts_directions(tmp_path: Path) -> None:
    """Axis 0 of the state has a fixed size, and axis 1 is a batch of one sample."""
    nodes = [
        node("Unsqueeze", "x axis", "s"),
        node("LSTM", "s w r _ _ state cell", "_ last", hidden_size=5, direction="bidirectional"),
        node("ReduceSum", "last axis", "y", keepdims=0),
    ]
    held = {
        "w": floats(2, 20, 6),
        "r": floats(2, 20, 5),
        "cell": floats(2, 1, 5),
        "axis": integers(0),
    }
    path = saved(model(nodes, {"x": [None, 6], "state": [2, None, 5]}, "y", held), tmp_path)
    read = read_model(path, dims={"state:1": 1}, batch=1)
    assert read.graph.batch_axes == (("x", 0),)
    assert read.graph.type_of("state").shape == (2, 1, 5)


@pytest.mark.parametrize("target", [[2, 5, 8], [80], [2, 4, 8, 2]])
def test_a_shape_of_another_number_of_elements(tmp_path: Path, target: list[int]) -> None:
    nodes = [node("Reshape", "x shape", "y")]
    path = saved(model(nodes, {"x": [2, 32]}, "y", {"shape": integers(*target)}), tmp_path)
    with pytest.raises(ModelError, match=r"which has another number of elements|do not fit"):
        read_model(path)


@pytest.mark.parametrize(
    ("kind", "shape", "says"),
    [
        (
            onnx.TensorProto.FLOAT,
            [2, 5],
            ("output 'y' is float32[2, 4], the file states float32[2, 5]",),
        ),
        (
            onnx.TensorProto.FLOAT,
            [2, 4, 1],
            ("output 'y' is float32[2, 4], the file states float32[2, 4, 1]",),
        ),
        (
            onnx.TensorProto.FLOAT,
            ["n", 5],
            ("output 'y' is float32[2, 4], the file states float32[?, 5]",),
        ),
        (
            onnx.TensorProto.DOUBLE,
            [2, 4],
            ("output 'y' is float32[2, 4], the file states float64[2, 4]",),
        ),
        (onnx.TensorProto.FLOAT, ["n", 4], ()),
        (onnx.TensorProto.FLOAT, None, ()),
    ],
)
def test_outputs_are_compared_with_what_the_file_states(
    tmp_path: Path, kind: int, shape: Shape | None, says: tuple[str, ...]
) -> None:
    proto = model([node("MatMul", "x w", "y")], {"x": [2, 3]}, "y", {"w": floats(3, 4)})
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", kind, shape))
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    assert read_model(path, mode=Mode.INFER).warnings == says
