"""Fusion rules: patterns that match become one operator with equal results; similar nodes that do
not match stay.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.passes.frontend import Model, read_model
from tests.passes.frontend.building import BOOL, INT64, floats, integers, model, node, saved
from tests.passes.frontend.reference import assert_close, random_feeds, run, run_read


def scalar(number: float) -> np.ndarray:
    return np.array(number, dtype=np.float32)


def read_and_compare(proto: onnx.ModelProto, folder: Path) -> Model:
    path = saved(proto, folder)
    read = read_model(path)
    feeds = random_feeds(read.graph)
    assert_close(run_read(read, feeds), run(path, feeds))
    return read


def operators(read: Model) -> list[str]:
    return [each.op for each in read.graph.nodes]


GELU = {
    "erf, half last": [
        node("Div", "x root", "a"), node("Erf", "a", "b"), node("Add", "b one", "c"), node("Mul", "x c", "d"),
        node("Mul", "d half", "y"),
    ],
    "erf, half first": [
        node("Mul", "x inverse", "a"), node("Erf", "a", "b"), node("Add", "one b", "c"), node("Mul", "half x", "d"),
        node("Mul", "d c", "y"),
    ],
    "erf, half on the gate": [
        node("Div", "x root", "a"), node("Erf", "a", "b"), node("Add", "b one", "c"), node("Mul", "c half", "d"),
        node("Mul", "x d", "y"),
    ],
    "tanh, cube by Pow": [
        node("Pow", "x three", "a"), node("Mul", "a cubic", "b"), node("Add", "x b", "c"), node("Mul", "c scale", "d"),
        node("Tanh", "d", "e"), node("Add", "e one", "f"), node("Mul", "x half", "g"), node("Mul", "g f", "y"),
    ],
    "tanh, cube by products": [
        node("Mul", "x x", "a"), node("Mul", "a x", "b"), node("Mul", "cubic b", "c"), node("Add", "c x", "d"),
        node("Mul", "scale d", "e"), node("Tanh", "e", "f"), node("Add", "one f", "g"), node("Mul", "x g", "h"),
        node("Mul", "half h", "y"),
    ],
    "tanh, factored": [
        node("Mul", "x x", "a"), node("Mul", "a cubic", "b"), node("Add", "b one", "c"), node("Mul", "x scale", "d"),
        node("Mul", "d c", "e"), node("Tanh", "e", "f"), node("Add", "f one", "g"), node("Mul", "g x", "h"),
        node("Mul", "h half", "y"),
    ],
}  # fmt: skip
GELU_CONSTANTS = {
    "root": scalar(math.sqrt(2)), "inverse": scalar(math.sqrt(0.5)), "one": scalar(1), "half": scalar(0.5),
    "three": scalar(3), "cubic": scalar(0.044715), "scale": scalar(math.sqrt(2 / math.pi)),
}  # fmt: skip


@pytest.mark.parametrize("form", GELU)
def test_gelu_with_factors_in_any_order(form: str, tmp_path: Path) -> None:
    read = read_and_compare(model(GELU[form], {"x": [2, 5]}, "y", GELU_CONSTANTS), tmp_path)
    (fused,) = read.graph.nodes
    assert (fused.op, fused.inputs, fused.outputs) == ("Gelu", ("x",), ("y",))
    assert fused.text("approximate") == ("none" if form.startswith("erf") else "tanh")


@pytest.mark.parametrize(("name", "number"), [("root", 1.5), ("half", 0.6), ("one", 2.0)])
def test_similar_patterns_are_not_gelu(name: str, number: float, tmp_path: Path) -> None:
    constants = GELU_CONSTANTS | {name: scalar(number)}
    read = read_and_compare(model(GELU["erf, half last"], {"x": [2, 5]}, "y", constants), tmp_path)
    assert "Erf" in operators(read)


def rms_nodes(division: str) -> list[onnx.NodeProto]:
    endings = {
        "reciprocal": [node("Reciprocal", "root", "r"), node("Mul", "x r", "n")],
        "one over": [node("Div", "one root", "r"), node("Mul", "r x", "n")],
        "quotient": [node("Div", "x root", "n")],
    }
    start = [
        node("Pow", "x two", "s"), node("ReduceMean", "s axes", "m"), node("Add", "m eps", "v"),
        node("Sqrt", "v", "root"),
    ]  # fmt: skip
    return [*start, *endings[division], node("Mul", "w n", "y")]


NORM_CONSTANTS = {"two": scalar(2), "axes": integers(-1), "eps": scalar(1e-5), "one": scalar(1)}


@pytest.mark.parametrize("division", ["reciprocal", "one over", "quotient"])
def test_rms_normalization(division: str, tmp_path: Path) -> None:
    held = NORM_CONSTANTS | {"w": floats(6)}
    (fused,) = read_and_compare(
        model(rms_nodes(division), {"x": [3, 6]}, "y", held), tmp_path
    ).graph.nodes
    assert (fused.op, fused.inputs) == ("RMSNormalization", ("x", "w"))
    assert fused.number("epsilon") == pytest.approx(1e-5)


def test_a_mean_over_another_axis_is_no_rms_normalization(tmp_path: Path) -> None:
    held = NORM_CONSTANTS | {"w": floats(6), "axes": integers(0)}
    read = read_and_compare(model(rms_nodes("quotient"), {"x": [3, 6]}, "y", held), tmp_path)
    assert "ReduceMean" in operators(read)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("axes", [(-1,), (1, 2)])
def test_layer_normalization(axes: tuple[int, ...], bias: bool, tmp_path: Path) -> None:
    nodes = [
        node("ReduceMean", "x axes", "m"), node("Sub", "x m", "d"), node("Mul", "d d", "s"),
        node("ReduceMean", "s axes", "v"), node("Add", "v eps", "e"), node("Sqrt", "e", "root"),
        node("Div", "d root", "n"), node("Mul", "n w", "scaled" if bias else "y"),
        *([node("Add", "scaled b", "y")] if bias else []),
    ]  # fmt: skip
    shape = (4, 6)[-len(axes) :]
    held = {
        "axes": integers(*axes),
        "eps": scalar(1e-5),
        "w": floats(*shape),
        "b": floats(*shape, seed=1),
    }
    (fused,) = read_and_compare(model(nodes, {"x": [3, 4, 6]}, "y", held), tmp_path).graph.nodes
    assert fused.op == "LayerNormalization"
    assert fused.inputs == (("x", "w", "b") if bias else ("x", "w"))
    assert fused.integer("axis") == -len(axes)


def attention_model(
    mask: np.ndarray | None = None,
    guarded: bool = False,
    axis: int = -1,
    heads: int = 4,
    softmaxed: str = "float",
) -> onnx.ModelProto:
    """Return a model of attention with four query heads, as exporters write it. With `heads` < 4,
    keys and values are shared by query heads.
    """
    nodes = [node("Mul", "q scale", "qs")]
    key = "k"
    value = "v"
    if heads < 4:
        for name in ("k", "v"):
            nodes += [
                node("Unsqueeze", f"{name} two", f"{name}1"), node("Expand", f"{name}1 five", f"{name}2"),
                node("Reshape", f"{name}2 four", f"{name}3"),
            ]  # fmt: skip
        key = "k3"
        value = "v3"
    nodes += [
        node("Reshape", f"{key} three", "kf"), node("Transpose", "kf", "kt", perm=[0, 2, 1]),
        node("Reshape", "kt back", "kr"), node("Mul", "kr scale", "ks"), node("MatMul", "qs ks", "scores"),
    ]  # fmt: skip
    scores = "scores"
    if mask is not None:
        nodes.append(node("Add", "scores val_9", "masked"))
        scores = "masked"
    nodes.append(node("Softmax", scores, "p", axis=axis))
    weights = "p"
    if guarded:
        nodes += [node("IsNaN", "p", "bad"), node("Where", "bad zero p", "safe")]
        weights = "safe"
    nodes.append(node("MatMul", f"{weights} {value}", "y"))
    held = {
        "scale": scalar(8**-0.25), "zero": scalar(0), "two": integers(2), "five": integers(2, heads, 4 // heads, 5, 8),
        "four": integers(2, 4, 5, 8), "three": integers(8, 5, 8), "back": integers(2, 4, 8, 5),
    } | ({} if mask is None else {"val_9": mask})  # fmt: skip
    inputs = {"q": [2, 4, 5, 8], "k": [2, heads, 5, 8], "v": [2, heads, 5, 8]}
    return model(nodes, inputs, "y", held)


CAUSAL = np.where(np.tri(5, dtype=bool), 0, -np.inf).astype(np.float32)


def test_attention_without_a_mask(tmp_path: Path) -> None:
    (fused,) = read_and_compare(attention_model(), tmp_path).graph.nodes
    assert (fused.op, fused.inputs) == ("Attention", ("q", "k", "v"))
    assert fused.number("scale") == pytest.approx(8**-0.5)


@pytest.mark.parametrize("shape", [(5, 5), (1, 1, 5, 5), (2, 1, 5, 5)])
def test_a_causal_mask_becomes_an_attribute(shape: tuple[int, ...], tmp_path: Path) -> None:
    mask = np.broadcast_to(CAUSAL, shape).copy()
    (fused,) = read_and_compare(attention_model(mask, guarded=True), tmp_path).graph.nodes
    assert fused.inputs == ("q", "k", "v") and fused.integer("is_causal") == 1


def test_a_mask_of_zeros_is_removed(tmp_path: Path) -> None:
    (fused,) = read_and_compare(
        attention_model(np.zeros((1, 1, 5, 5), dtype=np.float32)), tmp_path
    ).graph.nodes
    assert fused.inputs == ("q", "k", "v") and not fused.integer("is_causal")


def test_any_other_mask_stays_an_operand(tmp_path: Path) -> None:
    mask = CAUSAL.copy()
    mask[2, 1] = -np.inf
    (fused,) = read_and_compare(attention_model(mask.reshape(1, 1, 5, 5)), tmp_path).graph.nodes
    assert fused.inputs == ("q", "k", "v", "val_9")


@pytest.mark.parametrize("heads", [1, 2])
def test_repeated_heads_are_shared(heads: int, tmp_path: Path) -> None:
    (fused,) = read_and_compare(attention_model(CAUSAL, heads=heads), tmp_path).graph.nodes
    assert fused.inputs == ("q", "k", "v")


@pytest.mark.parametrize("causal", [False, True])
def test_masks_that_select_scores(causal: bool, tmp_path: Path) -> None:
    """GPT-2 writes causal masks so. Any other mask that selects scores becomes a mask that is
    added.
    """
    nodes = [
        node("Transpose", "k", "kt", perm=[0, 1, 3, 2]), node("MatMul", "q kt", "scores"),
        node("Div", "scores root", "s"), node("Where", "shown s low", "masked"), node("Softmax", "masked", "p"),
        node("MatMul", "p v", "y"),
    ]  # fmt: skip
    shown = np.tri(5, dtype=bool)
    shown[1, 4] = not causal
    held = {"root": scalar(8**0.5), "low": scalar(-1e9), "shown": shown.reshape(1, 1, 5, 5)}
    shapes = {"q": [2, 4, 5, 8], "k": [2, 4, 5, 8], "v": [2, 4, 5, 8]}
    read = read_and_compare(model(nodes, shapes, "y", held), tmp_path)
    assert operators(read) == (["Attention"] if causal else ["Where", "Attention"])
    assert read.graph.nodes[-1].integer("is_causal") == causal


@pytest.mark.parametrize(
    ("queries", "low", "is_fused"), [(1, -1e9, True), (5, -1e9, False), (5, -np.inf, True)]
)
def test_a_mask_that_may_hide_all_keys_is_not_fused(
    queries: int, low: float, is_fused: bool, tmp_path: Path
) -> None:
    """DeBERTa hides all keys from padding queries. Their scores get no gradient because a number
    replaces them, but they would get one if the number were added. A softmax of only infinities is
    NaN in both forms.
    """
    nodes = [
        node("Transpose", "k", "kt", perm=[0, 1, 3, 2]), node("MatMul", "q kt", "scores"),
        node("Where", "shown scores low", "masked"), node("Softmax", "masked", "p"), node("MatMul", "p v", "y"),
    ]  # fmt: skip
    shapes = {
        "q": [2, 4, 5, 8],
        "k": [2, 4, 5, 8],
        "v": [2, 4, 5, 8],
        "shown": (BOOL, [2, 1, queries, 5]),
    }
    read = read_model(saved(model(nodes, shapes, "y", {"low": scalar(low)}), tmp_path))
    assert ("Attention" in operators(read)) == is_fused


def test_a_softmax_over_queries_is_no_attention(tmp_path: Path) -> None:
    assert "Softmax" in operators(read_and_compare(attention_model(axis=2), tmp_path))


def test_a_bias_and_a_mask_are_added(tmp_path: Path) -> None:
    """T5 adds a bias that is a parameter, then a mask."""
    nodes = [
        node("Transpose", "k", "kt", perm=[0, 1, 3, 2]), node("MatMul", "q kt", "scores"),
        node("Add", "scores bias", "biased"), node("Add", "biased mask", "masked"), node("Softmax", "masked", "p"),
        node("MatMul", "p v", "y"),
    ]  # fmt: skip
    shapes = {"q": [2, 4, 5, 8], "k": [2, 4, 5, 8], "v": [2, 4, 5, 8]}
    held = {"bias": floats(1, 4, 5, 5), "mask": CAUSAL.reshape(1, 1, 5, 5)}
    read = read_and_compare(model(nodes, shapes, "y", held), tmp_path)
    assert operators(read) == ["Add", "Attention"]
    assert set(read.graph.nodes[0].inputs) == {"bias", "mask"}


def test_a_gather_of_every_mask_entry_is_an_expand(tmp_path: Path) -> None:
    """Masks are exported as `mask[batch_index, key_index]` with all indices listed."""
    samples, keys = np.meshgrid(np.arange(2), np.arange(5), indexing="ij")
    index = np.broadcast_to(np.stack([samples, keys], -1)[:, None, None], (2, 1, 5, 5, 2)).astype(
        np.int64
    )
    proto = model(
        [node("GatherND", "mask index", "y")], {"mask": (INT64, [2, 5])}, "y", {"index": index}
    )
    read = read_and_compare(proto, tmp_path)
    assert operators(read) == ["Reshape", "Expand"]


def test_a_gather_that_permutes_is_kept(tmp_path: Path) -> None:
    proto = model(
        [node("Gather", "x index", "y", axis=1)], {"x": [2, 3]}, "y", {"index": integers(1, 0, 2)}
    )
    assert operators(read_and_compare(proto, tmp_path)) == ["Gather"]
