"""Graphs with a Range whose limit is computed while running: results are those of onnxruntime,
followed by zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.backends.onnxruntime import ReferenceModel
from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import Graph
from autopipe.passes.frontend import read_model
from tests.conformance.adapter import forward_of, stage_of, to_tensor
from tests.passes.frontend.building import FLOAT, INT64, floats, integers, model, node, saved
from tests.passes.frontend.reference import parameter_array, run

WIDTH = 4
MOST = 12
WEIGHT = floats(WIDTH, WIDTH, 3, seed=1)
NARROW = floats(WIDTH, WIDTH, 1, seed=2)
ROWS = [
    node("ReduceMax", "n", "most", keepdims=0),
    node("Range", "zero most one", "range"),
    node("Unsqueeze", "n last", "ends"),
    node("Less", "range ends", "inside"),
    node("Cast", "inside", "mask", to=FLOAT),
    node("Unsqueeze", "mask middle", "masks"),
    node("Cast", "range", "steps", to=FLOAT),
    node("Mul", "x steps", "ramp"),
    node("Sin", "ramp", "waves"),
    node("Add", "waves masks", "rows"),  # [2, WIDTH, maximum of n]
]
AGAIN = [
    node("Shape", "rows", "shape"),
    node("Gather", "shape last", "count", axis=0),
    node("Cast", "count", "float", to=FLOAT),
    node("Squeeze", "float", "floats"),
    node("Range", "zero_f floats one_f", "again"),
]
HELD: dict[str, np.ndarray] = {
    "zero": np.array(0), "one": np.array(1), "two": np.array(2), "last": integers(-1), "middle": integers(1),
    "zero_f": np.array(0, np.float32), "one_f": np.array(1, np.float32), "weight": WEIGHT, "narrow": NARROW,
    "bias": floats(WIDTH, seed=3), "around": integers(0, 0, 2, 0, 0, 0), "both": integers(0, 0, 1, 0, 0, 1),
    "table": floats(MOST + 3, WIDTH, seed=4), "from_two": integers(2), "but_one": integers(-1),
    "end": integers(1 << 62), "from_0": integers(0), "nothing": np.array(0, np.float32),
    "least": np.array(-1e9, np.float32),
}  # fmt: skip
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CASES: dict[str, tuple[list[onnx.NodeProto], Function]] = {
    "the rows": ([node("Identity", "rows", "y")], lambda x, w: x),
    "a sum of rows": ([node("ReduceSum", "rows last", "y")], lambda x, w: x.sum(-1, keepdim=True)),
    "a product along rows": (
        [node("Transpose", "rows", "t", perm=[0, 2, 1]), node("MatMul", "rows t", "y")],
        lambda x, w: x @ x.mT,
    ),
    "a convolution": ([node("Conv", "rows weight bias", "y", pads=[1, 1])], lambda x, w: F.conv1d(x, w, _bias, 1, 1)),
    "of one row": ([node("Conv", "rows narrow", "y")], lambda x, w: F.conv1d(x, torch.from_numpy(NARROW))),
    "within": ([node("Conv", "rows weight", "y")], F.conv1d),
    "wide": (
        [node("Conv", "rows weight", "c", auto_pad="SAME_UPPER"),
         node("Conv", "c weight", "d", dilations=[2], pads=[2, 2]), node("Add", "c d", "y")],
        lambda x, w: (c := F.conv1d(x, w, padding=1)) + F.conv1d(c, w, padding=2, dilation=2),
    ),
    "of every other": (
        [node("Conv", "rows weight", "c", strides=[2], pads=[1, 0]), node("Conv", "c weight", "y", pads=[2, 2])],
        lambda x, w: F.conv1d(F.conv1d(F.pad(x, (1, 0)), w, stride=2), w, padding=2),
    ),
    "halved and doubled": (
        [node("Cast", "most", "f", to=FLOAT), node("Div", "f two_f", "half"), node("Ceil", "half", "c"),
         node("Mul", "c two_f", "double"), node("Range", "zero_f double one_f", "even"),
         node("Unsqueeze", "even halves", "e"), node("Sin", "e", "s"),
         node("Conv", "s taps", "d", strides=[2], pads=[1, 1]),
         node("ConvTranspose", "d taps", "u", strides=[2], pads=[1, 0]), node("Add", "u s", "y")],
        lambda x, w: up_and_down((torch.arange((x.shape[-1] + 1) // 2 * 2)[None, None]).sin()),
    ),
    "transposed": (
        [node("ConvTranspose", "rows weight bias", "c", strides=[3], pads=[1, 0], output_padding=[1]),
         node("Relu", "c", "r"), node("Conv", "r weight", "d", pads=[1, 1]), node("Add", "c d", "y")],
        lambda x, w: (c := F.conv_transpose1d(x, w, _bias, 3, output_padding=1)[..., 1:])
        + F.conv1d(c.relu(), w, padding=1),
    ),
    "padded first": (
        [node("Pad", "rows both one_f", "p"), node("Conv", "p weight", "c"), node("Mul", "c rows", "y")],
        lambda x, w: F.conv1d(F.pad(x, (1, 1), value=1), w) * x,
    ),
    "mirrored in front": (
        [node("Pad", "rows around _", "y", mode="reflect")],
        lambda x, w: F.pad(x, (2, 0), "reflect"),
    ),
    "the largest of neighbours": (
        [node("MaxPool", "rows", "y", kernel_shape=[3], pads=[1, 1])],
        lambda x, w: F.max_pool1d(x, 3, 1, 1),
    ),
    "differences": (
        [node("Slice", "rows from_0 but_one last", "a"), node("Slice", "rows one_row end last", "b"),
         node("Sub", "b a", "y")],
        lambda x, w: x.diff(dim=-1),
    ),
    "every third": (
        [node("Slice", "rows one_row end last three", "s"), node("Conv", "s narrow", "y")],
        lambda x, w: F.conv1d(x[..., 1::3], torch.from_numpy(NARROW)),
    ),
    "a second range": ([*AGAIN, node("Mul", "rows again", "y")], lambda x, w: x * torch.arange(x.shape[-1])),
    "twice as many": (
        [*AGAIN[:2], node("Squeeze", "count", "c"), node("Mul", "c two", "twice"), node("Range", "zero twice one", "r"),
         node("Cast", "r", "f", to=FLOAT), node("ConvTranspose", "rows pair", "t", strides=[2]),
         node("Mul", "t f", "y")],
        lambda x, w: F.conv_transpose1d(x, w[..., :2], stride=2) * torch.arange(2 * x.shape[-1]),
    ),
    "zeros of as many": (
        [AGAIN[0], node("ConstantOfShape", "shape", "z"), node("Sub", "z rows", "y")],
        lambda x, w: -x,
    ),
    "of a table": (
        [node("Gather", "table range", "g"), node("Transpose", "g", "t", perm=[1, 0]), node("Mul", "rows t", "y")],
        lambda x, w: x * torch.from_numpy(HELD["table"])[: x.shape[-1]].T,
    ),
    "attention": (
        [node("Transpose", "rows", "t", perm=[0, 2, 1]), node("MatMul", "t rows", "s"),
         node("Less", "range two", "i"), node("Where", "i s least", "w"), node("Softmax", "w", "p", axis=-1),
         node("MatMul", "p t", "a"), node("Transpose", "a", "b", perm=[0, 2, 1]), node("Conv", "b weight", "y")],
        lambda x, w: F.conv1d(((x.mT @ x)[..., :2].softmax(-1) @ x.mT[:, :2]).mT, w),
    ),
    "scores of all rows": (
        [node("Transpose", "rows", "t", perm=[0, 2, 1]), node("MatMul", "t rows", "s"), node("Exp", "s", "y")],
        lambda x, w: (x.mT @ x).exp(),
    ),
    "distances": (
        [node("Unsqueeze", "range from_0", "r"), node("Unsqueeze", "range last", "c"), node("Sub", "r c", "d"),
         node("Abs", "d", "a"), node("Cast", "a", "f", to=FLOAT), node("Sqrt", "f", "s"), node("MatMul", "rows s", "m"),
         node("ReduceMax", "s last", "largest"), node("Squeeze", "largest last", "l"), node("Mul", "m l", "y")],
        lambda x, w: x @ (apart := distances(x.shape[-1])) * apart.amax(-1),
    ),
    "noise of no scale": (
        [node("RandomNormalLike", "rows", "r"), node("Mul", "r nothing", "z"), node("Add", "rows z", "y")],
        lambda x, w: x,
    ),
    "of no batch": (
        [node("Cast", "range", "f", to=FLOAT), node("Unsqueeze", "f halves", "r"), node("Conv", "r one_tap", "y")],
        lambda x, w: 0.5 * torch.arange(x.shape[-1], dtype=torch.float32)[None, None],
    ),
}  # fmt: skip
HELD |= {
    "pair": WEIGHT[..., :2].copy(),
    "one_row": integers(1),
    "three": integers(3),
    "halves": integers(0, 1),
}
HELD |= {"taps": floats(1, 1, 3, seed=5), "two_f": np.array(2, np.float32)}
HELD["one_tap"] = np.full((1, 1, 1), 0.5, np.float32)
_bias = torch.from_numpy(HELD["bias"])


def up_and_down(waves: torch.Tensor) -> torch.Tensor:
    taps = torch.from_numpy(HELD["taps"])
    return (
        waves
        + F.conv_transpose1d(F.conv1d(waves, taps, stride=2, padding=1), taps, stride=2)[..., 1:]
    )


def distances(count: int) -> torch.Tensor:
    steps = torch.arange(count)
    return (steps - steps[:, None]).abs().float().sqrt()


def rows_of(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    steps = torch.arange(max(lengths))
    inside = (steps < torch.tensor(lengths)[:, None]).float()
    return (x * steps).sin() + inside[:, None]


def proto_of(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    nodes = [*ROWS, *nodes]
    read = {name for each in nodes for name in each.input}
    held = {name: array for name, array in HELD.items() if name in read}
    return model(nodes, {"x": [2, WIDTH, 1], "n": (INT64, [2])}, "y", held)


def compiled(path: Path, graph: Graph) -> Callable[..., torch.Tensor]:
    """Return the forward function of the graph on one device."""

    class Noise:
        def draw(self, shape: tuple[int, ...], made: object, dtype: torch.dtype) -> torch.Tensor:
            return torch.ones(shape, dtype=dtype)

    held: dict[str, Any] = {
        f"c{index}": to_tensor(each.array) for index, each in enumerate(graph.constants)
    }
    held |= {
        f"w{index}": to_tensor(parameter_array(each, path))
        for index, each in enumerate(graph.parameters)
    }
    place = SimpleNamespace(device=torch.device("cpu"), random=lambda *_: Noise(), **held)
    forward = forward_of(emit_forward(stage_of(graph)).text)
    return lambda *inputs: forward(place, *inputs)[0]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Graph]]:
    folder = tmp_path_factory.mktemp("first")
    found = dict[str, tuple[Path, Graph]]()

    def of(name: str) -> tuple[Path, Graph]:
        if name not in found:
            path = saved(proto_of(CASES[name][0]), folder, f"{len(found)}.onnx")
            dims = dict.fromkeys(("range:0", "even:0") if "halved" in name else ("range:0",), MOST)
            found[name] = path, read_model(path, dims=dims, batch_axes={"x": None, "n": None}).graph
        return found[name]

    return of


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=10)
@given(lengths=st.lists(st.integers(3, MOST), min_size=2, max_size=2))
def test_any_number_of_rows(
    read: Callable[[str], tuple[Path, Graph]], name: str, lengths: list[int]
) -> None:
    """Results are those of the file, followed by zeros. Gradients are those of the rows of the file."""
    path, graph = read(name)
    weight = torch.from_numpy(WEIGHT)
    x = torch.from_numpy(floats(2, WIDTH, 1)).requires_grad_()
    found = compiled(path, graph)(x, torch.tensor(lengths))
    (expected,) = run(path, {"x": x.detach().numpy(), "n": np.array(lengths)}).values()
    wanted = CASES[name][1](rows_of(x, lengths), weight)
    there = found[tuple(map(slice, expected.shape))]
    np.testing.assert_allclose(there.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(wanted, torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    assert found.count_nonzero() == there.count_nonzero()
    if wanted.requires_grad:
        ours, theirs = (torch.autograd.grad(each.square().sum(), x)[0] for each in (found, wanted))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_more_rows_than_the_maximum_stop_the_program(
    read: Callable[[str], tuple[Path, Graph]],
) -> None:
    run_graph = compiled(*read("a convolution"))
    x = torch.zeros(2, WIDTH, 1)
    run_graph(x, torch.tensor([1, MOST]))
    with pytest.raises(
        RuntimeError,
        match="data tell more than 12 rows of 'range:0': plan with a larger --dim 'range:0'=",
    ):
        run_graph(x, torch.tensor([1, MOST + 1]))


def test_noise_with_scale_0_is_not_random(
    read: Callable[[str], tuple[Path, Graph]],
) -> None:
    assert ReferenceModel(read("noise of no scale")[0], {}).random == ()


def test_a_missing_maximum_is_reported_with_its_flag(tmp_path: Path) -> None:
    path = saved(proto_of(CASES["the rows"][0]), tmp_path)
    with pytest.raises(ModelError, match=r"range_range.*'range'") as refused:
        read_model(path)
    assert refused.value.hint == "set the maximum size with --dim range:0=SIZE"
    known = model(
        [node("Range", "zero two one", "y")],
        {"x": [2]},
        "y",
        {each: HELD[each] for each in ("zero", "two", "one")},
    )
    with pytest.raises(ConfigurationError, match="the size is 2 and does not depend on data"):
        read_model(saved(known, tmp_path), dims={"y:0": 3})


@pytest.mark.parametrize(
    "last",
    [
        node("Pad", "rows both _", "y", mode="reflect"),
        node("AveragePool", "rows", "y", kernel_shape=[3], pads=[1, 1]),
        node("Conv", "rows weight", "y", strides=[2], auto_pad="SAME_UPPER"),
    ],
)
def test_an_operator_that_reads_behind_the_last_row_is_rejected(
    last: onnx.NodeProto, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="combines rows that Range"):
        read_model(
            saved(proto_of([last]), tmp_path),
            dims={"range:0": MOST},
            batch_axes={"x": None, "n": None},
        )
