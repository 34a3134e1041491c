"""The loss: found, named, or put behind logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import CrossEntropy, read_model
from tests.passes.frontend.building import INT64, floats, model, node, saved
from tests.passes.frontend.reference import random_feeds, run_read


def scores(folder: Path, *shape: int) -> Path:
    """Logits of `shape`, labelled by nobody."""
    nodes = [node("MatMul", "x w", "logits"), node("Relu", "logits", "y")]
    return saved(model(nodes, {"x": [*shape[:-1], 3]}, "y", {"w": floats(3, shape[-1])}), folder)


@pytest.mark.parametrize("shape", [(4, 5), (4, 2, 5), (4, 2, 3, 5)])
def test_cross_entropy_is_the_mean_over_all_positions(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    read = read_model(scores(tmp_path, *shape), loss=CrossEntropy("logits", "target"))
    assert (read.mode, read.loss, read.graph.outputs) == (Mode.TRAIN, "loss", ("y", "loss"))
    assert read.graph.inputs[-1].shape == shape[:-1]
    assert read.graph.batch_axes == (("x", 0), ("target", 0))
    feeds = random_feeds(read.graph, top=5)
    logits = (feeds["x"] @ floats(3, 5)).reshape(-1, 5).astype(np.float64)
    chosen = np.take_along_axis(logits, feeds["target"].reshape(-1, 1), axis=1)[:, 0]
    expected = (np.log(np.exp(logits).sum(axis=1)) - chosen).mean()
    assert run_read(read, feeds)["loss"] == pytest.approx(expected, rel=1e-5)


def test_labels_that_the_model_has_are_used(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "logits"), node("Cast", "labels", "y", to=1)]
    proto = model(nodes, {"x": [4, 3], "labels": (INT64, [4])}, "logits y", {"w": floats(3, 5)})
    read = read_model(saved(proto, tmp_path), loss=CrossEntropy("logits", "labels"))
    assert [value.name for value in read.graph.inputs] == ["x", "labels"]
    with pytest.raises(ConfigurationError, match=r"labels 'x' of type float32\[4, 3\]"):
        read_model(saved(proto, tmp_path), loss=CrossEntropy("logits", "x"))


def test_losses_that_cannot_be(tmp_path: Path) -> None:
    path = scores(tmp_path, 4, 5)
    with pytest.raises(ConfigurationError, match="logits 'logit', which are not a value") as caught:
        read_model(path, loss=CrossEntropy("logit"))
    assert "'logits'" in caught.value.hint
    with pytest.raises(ConfigurationError, match="loss names 'z'"):
        read_model(path, loss="z")
    with pytest.raises(ConfigurationError, match=r"'y' of type float32\[4, 5\], expected one"):
        read_model(path, loss="y")


def test_the_models_own_loss_is_found_and_mode_can_be_said(tmp_path: Path) -> None:
    nodes = [node("ReduceMean", "x", "loss", keepdims=0)]
    path = saved(model(nodes, {"x": [4, 3]}, "loss"), tmp_path)
    assert (read_model(path).loss, read_model(path).mode) == ("loss", Mode.TRAIN)
    assert read_model(path, mode=Mode.INFER).mode is Mode.INFER
    assert read_model(scores(tmp_path, 4, 5)).mode is Mode.INFER


def two_scalars(*nodes: onnx.NodeProto, outputs: str) -> onnx.ModelProto:
    """Mean and maximum of logits, and further nodes."""
    own = [node("MatMul", "x w", "logits"), node("ReduceMean", "logits", "mean", keepdims=0)]
    return model([*own, *nodes], {"x": [4, 3]}, outputs, {"w": floats(3, 5)})


def test_the_only_scalar_that_trains_is_the_loss(tmp_path: Path) -> None:
    of_data = node("ReduceMax", "x", "largest", keepdims=0)
    read = read_model(saved(two_scalars(of_data, outputs="logits largest mean"), tmp_path))
    assert (read.loss, read.mode, read.loss_choices) == ("mean", Mode.TRAIN, ())


def test_several_scalars_leave_the_loss_open(tmp_path: Path) -> None:
    largest = node("ReduceMax", "logits", "largest", keepdims=0)
    path = saved(two_scalars(largest, outputs="largest mean logits"), tmp_path)
    read = read_model(path)
    assert (read.loss, read.mode, read.loss_choices) == ("", Mode.INFER, ("largest", "mean"))
    named = read_model(path, loss="mean")
    assert (named.loss, named.mode, named.loss_choices) == ("mean", Mode.TRAIN, ())


def test_the_score_of_one_sample_is_no_loss(tmp_path: Path) -> None:
    proto = model([node("MatMul", "x w", "y")], {"x": [1, 3]}, "y", {"w": floats(3, 1)})
    assert read_model(saved(proto, tmp_path)).loss == ""


def test_an_output_of_a_loss_operator_does_not_hide_another_scalar(tmp_path: Path) -> None:
    labels = np.zeros(4, dtype=np.int64)
    nodes = [
        node("MatMul", "x w", "logits"),
        node("SoftmaxCrossEntropyLoss", "logits labels", "first"),
        node("ReduceMean", "logits", "second", keepdims=0),
        node("Add", "first second", "total"),
    ]
    proto = model(nodes, {"x": [4, 3]}, "first total", {"w": floats(3, 5), "labels": labels})
    assert read_model(saved(proto, tmp_path)).loss_choices == ("first", "total")
