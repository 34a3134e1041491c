"""Inference that computes an output from several samples: micro-batches would change the output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from autopipe.passes.analysis.joined_samples import first_joining_node
from autopipe.passes.frontend import read_model
from tests.cli.command_line import CommandLine
from tests.passes.frontend.building import FLOAT, INT64, floats, integers, model, node, saved

MAXIMA = node("MaxPool", "i", "v y", kernel_shape=[2], strides=[2])
"""Its indices count the elements of the whole batch."""
UNPOOLING = node("MaxUnpool", "v p", "y", kernel_shape=[2], strides=[2])
AXIS = {"axis": integers(0)}
"""An operand that names the samples' axis."""
JOINING: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray]]] = {
    "ArgMax": ([node("ArgMax", "x", "y", axis=0)], {}),
    "ArgMin": ([node("ArgMin", "x", "y", axis=0, keepdims=0)], {}),
    "TopK": ([node("TopK", "x k", "y places", axis=0)], {"k": integers(1)}),
    "sort": (
        [node("Shape", "x", "count", start=0, end=1), node("TopK", "x count", "y places", axis=0)],
        {},
    ),
    "Softmax": ([node("Softmax", "x", "y", axis=0)], {}),
    "LogSoftmax": ([node("LogSoftmax", "x", "y", axis=0)], {}),
    "Hardmax": ([node("Hardmax", "x", "y", axis=0)], {}),
    "CumSum": ([node("CumSum", "x axis", "y")], {"axis": np.array(0)}),
    "ReduceL2": ([node("ReduceL2", "x axis", "y", keepdims=0)], AXIS),
    "LpNormalization": ([node("LpNormalization", "x", "y", axis=0)], {}),
    "MeanVarianceNormalization": ([node("MeanVarianceNormalization", "x", "y", axes=[0, 1])], {}),
    "ReduceMax": ([node("ReduceMax", "x axis", "y")], AXIS),
    "ReduceMax of integers": (
        [node("Cast", "x", "n", to=INT64), node("ReduceMax", "n axis", "y")],
        AXIS,
    ),
    "ReduceSum": ([node("ReduceSum", "x axis", "y")], AXIS),
    "ReduceProd": ([node("ReduceProd", "x axis", "y")], AXIS),
    "ReduceLogSumExp of all": ([node("ReduceLogSumExp", "x", "y")], {}),
    "square of a mean": ([node("ReduceMean", "x axis", "m"), node("Mul", "m m", "y")], AXIS),
    "einsum of a mean with itself": (
        [node("ReduceMean", "x axis", "m"), node("Einsum", "m m", "y", equation="ab,cb->ac")],
        AXIS,
    ),
    "exponential of a mean": ([node("ReduceMean", "x", "m"), node("Exp", "m", "y")], {}),
    "deviation": (
        [node("Mul", "x x", "s"), node("ReduceMean", "s axis", "m"), node("Sqrt", "m", "y")],
        AXIS,
    ),
    "product over samples": ([node("Transpose", "x", "t"), node("MatMul", "t x", "y")], {}),
    "product of samples": ([node("Transpose", "x", "t"), node("MatMul", "x t", "y")], {}),
    "first sample": ([node("Gather", "x first", "y", axis=0)], {"first": np.array(0)}),
    "reversed samples": (
        [node("Slice", "x last before axis step", "y")],
        {"last": integers(-1), "before": integers(-9), "axis": integers(0), "step": integers(-1)},
    ),
    "padding behind the samples": ([node("Pad", "x pads", "y")], {"pads": integers(0, 0, 1, 0)}),
    "a row before the samples": ([node("Concat", "row x", "y", axis=0)], {"row": floats(1, 6)}),
    "samples behind samples": ([node("Neg", "x", "n"), node("Concat", "x n", "y", axis=0)], {}),
    "samples twice": ([node("Tile", "x counts", "y")], {"counts": integers(2, 1)}),
    "first sample replaced": (
        [node("ScatterND", "x place row", "y")],
        {"place": integers(0).reshape(1, 1), "row": floats(1, 6)},
    ),
    "element of the first sample replaced": (
        [node("ScatterElements", "x place element", "y", axis=0)],
        {"place": integers(0).reshape(1, 1), "element": floats(1, 1)},
    ),
    "second sample": ([node("GatherND", "x place", "y")], {"place": integers(1).reshape(1, 1)}),
    "indices of maxima": ([node("Reshape", "x image", "i"), MAXIMA], {"image": integers(-1, 1, 6)}),
    "samples by computed indices": (
        [node("ArgMax", "x", "i", axis=1, keepdims=0), node("Gather", "x i", "y")],
        {},
    ),
    "samples along axis 1": ([node("Transpose", "x", "t"), node("ArgMax", "t", "y", axis=1)], {}),
}
APART: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray]]] = {
    "ArgMax": ([node("ArgMax", "x", "y", axis=1)], {}),
    "Softmax": ([node("Softmax", "x", "y", axis=1)], {}),
    "TopK": ([node("TopK", "x k", "y places", axis=1)], {"k": integers(2)}),
    "ReduceL2": ([node("ReduceL2", "x axis", "y")], {"axis": integers(1)}),
    "mean": ([node("ReduceMean", "x axis", "y")], AXIS),
    "linear function of a mean": (
        [node("ReduceMean", "x axis", "m"), node("Mul", "m w", "p"), node("Neg", "p", "y")],
        AXIS | {"w": floats(6)},
    ),
    "padding of a mean": (
        [node("ReduceMean", "x axis", "m"), node("Pad", "m pads one", "y")],
        AXIS | {"pads": integers(0, 1, 0, 1), "one": np.array(1, np.float32)},
    ),
    "choice between a mean and a constant": (
        [node("ReduceMean", "x axis", "m"), node("Where", "mask m w", "y")],
        AXIS | {"mask": np.arange(6) % 2 == 0, "w": floats(6)},
    ),
    "mean of a mean and a constant": (
        [node("ReduceMean", "x axis", "m"), node("Mean", "m w", "y")],
        AXIS | {"w": floats(6)},
    ),
    "einsum of a mean and a constant": (
        [node("ReduceMean", "x axis", "m"), node("Einsum", "m w", "y", equation="ab,bc->ac")],
        AXIS | {"w": floats(6, 2)},
    ),
    "product": ([node("MatMul", "x w", "y")], {"w": floats(6, 2)}),
    "padding of each sample": ([node("Pad", "x pads", "y")], {"pads": integers(0, 0, 0, 1)}),
    "a column before each sample": ([node("Concat", "x x", "y", axis=1)], {}),
    "nothing before the samples": ([node("Concat", "none x", "y", axis=0)], {"none": floats(0, 6)}),
    "an element of each sample replaced": (
        [node("ScatterND", "x places elements", "y")],
        {"places": integers(0, 1, 1, 1, 2, 1).reshape(3, 2), "elements": floats(3)},
    ),
    "unpooling": (
        [
            node("Reshape", "x image", "i"),
            node("MaxPool", "i", "v p", kernel_shape=[2], strides=[2]),
            UNPOOLING,
        ],
        {"image": integers(-1, 1, 6)},
    ),
    "reshaped by the number of samples": (
        [
            node("Shape", "x", "rows", start=0, end=1),
            node("Concat", "rows two three", "shape", axis=0),
            node("Reshape", "x shape", "y"),
        ],
        {"two": integers(2), "three": integers(3)},
    ),
}

ONE_OF_EACH = (
    [
        node("ArgMax", "x", "i", axis=1, keepdims=0),
        node("Shape", "x", "rows", start=0, end=1),
        node("Squeeze", "rows", "count"),
        node("Range", "zero count one", "numbers"),
        node("Mul", "numbers six", "starts"),
        node("Add", "i starts", "places"),
        node("Reshape", "x all", "flat"),
        node("Gather", "flat places", "y"),
    ],
    {"zero": np.array(0), "one": np.array(1), "six": np.array(6), "all": integers(-1)},
)
"""`x[arange(samples), x.argmax(1)]`, as torch's TorchScript exporter writes it."""


COUNTED = [
    node("Shape", "x", "rows", start=0, end=1),
    node("Squeeze", "rows", "count"),
    node("Range", "zero count one", "places"),
    node("Cast", "places", "numbers", to=FLOAT),
    node("Unsqueeze", "numbers axis", "column"),
    node("Add", "x column", "y"),
]
DIVIDED: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray]]] = {
    "convolution over samples": (
        [
            node("Transpose", "x", "t"),
            node("Unsqueeze", "t axis", "u"),
            node("Conv", "u w", "c", pads=[1, 1]),
            node("Squeeze", "c axis", "s"),
            node("Transpose", "s", "y"),
        ],
        {"axis": integers(1), "w": floats(1, 1, 3)},
    ),
    "samples by number": (COUNTED, {"zero": np.array(0), "one": np.array(1), "axis": integers(1)}),
    "times the number of samples": (
        [
            node("Shape", "x", "rows", start=0, end=1),
            node("Cast", "rows", "count", to=FLOAT),
            node("Mul", "x count", "y"),
        ],
        {},
    ),
    "difference from a mean": ([node("ReduceMean", "x axis", "m"), node("Sub", "x m", "y")], AXIS),
}
"""Models of which micro-batches change the output, and of which the analysis of single nodes does
not tell it.
"""


def _path(folder: Path, nodes: list[onnx.NodeProto], held: dict[str, np.ndarray]) -> Path:
    return saved(model(nodes, {"x": ["samples", 6]}, "y", held), folder)


@pytest.mark.parametrize("name", JOINING)
def test_a_node_that_joins_samples_is_found(tmp_path: Path, name: str) -> None:
    assert (
        first_joining_node(read_model(_path(tmp_path, *JOINING[name]), batch=3).graph) is not None
    )


@pytest.mark.parametrize("name", APART)
def test_samples_that_are_kept_apart_or_averaged(tmp_path: Path, name: str) -> None:
    assert first_joining_node(read_model(_path(tmp_path, *APART[name]), batch=3).graph) is None


def test_elements_of_each_sample_by_computed_indices_do_not_join_samples(
    command_line: CommandLine,
) -> None:
    path = _path(command_line.folder, *ONE_OF_EACH)
    assert first_joining_node(read_model(path, batch=3).graph) is None
    words = ("plan", path, "--gpus", 2, "--strategy", "pipedream", "-q", "--batch-size", 4)
    told = command_line.done(*words, "--micro-batches", 2, "-o", "p").err
    assert "micro-batches may change outputs" in told
    command_line.done("codegen", "p", "-q")
    command_line.done("verify", "p/program", "--device", "cpu", "-q")


@pytest.mark.parametrize(
    "name", ["ArgMax", "CumSum", "deviation", "indices of maxima", "first sample replaced"]
)
def test_a_step_of_inference_evaluates_the_whole_batch(
    command_line: CommandLine, name: str
) -> None:
    path = _path(command_line.folder, *JOINING[name])
    words = ("plan", path, "--gpus", 2, "--strategy", "pipedream", "-q", "--batch-size", 4)
    command_line.refuses(
        2, (*words, "--micro-batches", 2, "-o", "no"), "from several samples", "--micro-batches 1"
    )
    command_line.done(*words, "-o", "p")
    command_line.done("codegen", "p", "-q")
    command_line.done("verify", "p/program", "--device", "cpu", "-q")


@pytest.mark.parametrize("name", DIVIDED)
def test_an_output_that_micro_batches_change_is_told(command_line: CommandLine, name: str) -> None:
    path = _path(command_line.folder, *DIVIDED[name])
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    (whole,), *parts = (session.run(None, {"x": part}) for part in (x, x[:4], x[4:]))
    together = np.concatenate([part for (part,) in parts])
    assert together.shape != whole.shape or not np.allclose(together, whole)
    words = ("plan", path, "--gpus", 1, "--strategy", "pipedream", "-q", "--batch-size", 8)
    told = command_line.done(*words, "--micro-batches", 2, "-o", "p").err
    assert (
        "micro-batches may change outputs" in told
        or "micro-batches change what is computed" in told
    )
    assert "micro-batches may" not in command_line.done(*words, "--micro-batches", 1, "-o", "q").err


@pytest.mark.parametrize("name", APART)
def test_an_output_that_micro_batches_do_not_change_is_not_told_of(
    command_line: CommandLine, name: str
) -> None:
    path = _path(command_line.folder, *APART[name])
    words = ("plan", path, "--gpus", 1, "--strategy", "pipedream", "-q", "--batch-size", 8)
    assert "micro-batches" not in command_line.done(*words, "--micro-batches", 2, "-o", "p").err


@pytest.mark.parametrize(("start", "told"), [(0, True), (1, False)])
def test_an_output_that_is_the_shape_of_the_batch_is_told(
    command_line: CommandLine, start: int, told: bool
) -> None:
    nodes = [node("Neg", "x", "y"), node("Shape", "x", "shape", start=start)]
    path = saved(model(nodes, {"x": ["samples", 6]}, "y shape", {}), command_line.folder)
    words = (
        "plan",
        path,
        "--gpus",
        1,
        "--strategy",
        "pipedream",
        "-q",
        "--batch-size",
        8,
        "--micro-batches",
        2,
    )
    text = (
        "output 'shape' depends on the number of samples in a batch: micro-batches may change "
        "outputs"
    )
    assert (text in command_line.done(*words, "-o", "p").err) == told


def test_the_search_evaluates_the_whole_batch(command_line: CommandLine) -> None:
    path = _path(command_line.folder, *JOINING["ArgMax"])
    shown = command_line.done("plan", path, "--gpus", 2, "-o", "p", "--json")
    assert '"micro_batches": 1' in shown.out


def test_a_fixed_batch_is_the_whole_batch(command_line: CommandLine) -> None:
    path = saved(model(JOINING["ArgMax"][0], {"x": [4, 6]}, "y"), command_line.folder)
    words = ("plan", path, "--gpus", 1, "--strategy", "pipedream", "--batch-size", 8)
    command_line.refuses(
        2,
        (*words, "--micro-batches", 8, "-o", "no"),
        "from several samples",
        "--micro-batch-size 4",
    )
    assert '"micro_batches": 2' in command_line.done(*words, "-o", "p", "--json").out
