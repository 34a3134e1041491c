"""Graphs that are read from files with data-dependent shapes compute the results of onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.ir.errors import ModelError
from autopipe.passes.frontend import read_model
from tests.conformance.adapter import forward_of, stage_of, to_tensor
from tests.passes.frontend.building import BOOL, FLOAT, INT64, floats, integers, model, node, saved
from tests.passes.frontend.reference import assert_close, run, run_read

TOKENS = 6
WIDTH = 4
EXPERTS = 3


def experts(scatter: str, reduction: str) -> onnx.ModelProto:
    """Return a mixture of experts as exporters write it: each expert gathers its tokens, computes
    them, multiplies them with their weights, and scatters them back.
    """
    nodes = [node("Reshape", "weights column", "scores")]
    total = "zeros"
    for expert in range(EXPERTS):
        at = [
            f"{name}{expert}" for name in ("m", "z", "t", "k", "ki", "x", "h", "y", "w", "v", "sum")
        ]
        mask, found, token, rank, pair, taken, hidden, result, weight, value, after = at
        nodes += [
            node("Equal", f"chosen expert{expert}", mask),
            node("NonZero", mask, found),
            node("Split", f"{found} ones", f"{token}/1 {rank}/1", axis=0),
            node("Transpose", f"{token}/1", token, perm=[1, 0]),
            node("Squeeze", f"{rank}/1 axis0", rank),
            node("Squeeze", f"{token}/1 axis0", f"{token}/flat"),
            node("Mul", f"{token}/flat two", f"{pair}/0"),
            node("Add", f"{pair}/0 {rank}", pair),
            node("GatherND", f"x {token}", taken),
            node("MatMul", f"{taken} up{expert}", hidden),
            node("Relu", hidden, f"{hidden}/relu"),
            node("MatMul", f"{hidden}/relu down{expert}", result),
            node("Gather", f"scores {pair}", weight, axis=0),
            node("Mul", f"{result} {weight}", value),
        ]
        if scatter == "ScatterND":
            nodes.append(node("ScatterND", f"{total} {token} {value}", after, reduction=reduction))
        else:
            nodes += [
                node("Shape", value, f"{after}/shape"),
                node("Expand", f"{token} {after}/shape", f"{after}/places"),
                node(
                    "ScatterElements",
                    f"{total} {after}/places {value}",
                    after,
                    axis=0,
                    reduction=reduction,
                ),
            ]
        total = after
    held = {f"up{each}": floats(WIDTH, 5, seed=each) for each in range(EXPERTS)}
    held |= {f"down{each}": floats(5, WIDTH, seed=9 + each) for each in range(EXPERTS)}
    held |= {f"expert{each}": np.array(each) for each in range(EXPERTS)}
    held |= {
        "ones": integers(1, 1),
        "axis0": integers(0),
        "two": np.array(2),
        "column": integers(-1, 1),
    }
    held |= {"zeros": np.zeros((TOKENS, WIDTH), np.float32)}
    inputs = {"x": [TOKENS, WIDTH], "chosen": (INT64, [TOKENS, 2]), "weights": [TOKENS, 2]}
    return model(nodes, inputs, total, held)


def images() -> onnx.ModelProto:
    """Return a `masked_scatter` of image features into a text, as torch exports it."""
    nodes = [
        node("Equal", "ids token", "is"),
        node("Unsqueeze", "is last", "column"),
        node("Expand", "column wide", "mask"),
        node("NonZero", "mask", "found"),
        node("Transpose", "found", "places", perm=[1, 0]),
        node("Reshape", "image flat", "features"),
        node("Shape", "places", "shape"),
        node("Gather", "shape first", "count", axis=0),
        node("Slice", "features first count first", "taken"),
        node("ScatterND", "text places taken", "y"),
    ]
    held = {
        "token": np.array(9),
        "last": integers(-1),
        "wide": integers(2, TOKENS, WIDTH),
        "flat": integers(-1),
    }
    held |= {"first": integers(0)}
    inputs = {"ids": (INT64, [2, TOKENS]), "text": [2, TOKENS, WIDTH], "image": [2, 5, WIDTH]}
    return model(nodes, inputs, "y", held)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("chosen")
    protos = {
        "nd": experts("ScatterND", "add"),
        "elements": experts("ScatterElements", "add"),
        "images": images(),
    }
    return {name: saved(proto, folder, f"{name}.onnx") for name, proto in protos.items()}


def agrees(path: Path, *feeds: dict[str, np.ndarray]) -> None:
    """Check that the graph of a file has no operator of a data-dependent shape, and that its
    outputs are equal to onnxruntime's.
    """
    read = read_model(path)
    assert {each.op for each in read.graph.nodes}.isdisjoint(
        {"NonZero", "Compress", "Unique", "GatherND", "ScatterND"}
    )
    for each in feeds:
        assert_close(run_read(read, each), run(path, each))


@given(
    st.lists(st.permutations(range(EXPERTS + 1)), min_size=TOKENS, max_size=TOKENS),
    st.integers(0, 99),
)
def test_experts_of_any_routing(
    files: dict[str, Path], routing: list[list[int]], seed: int
) -> None:
    """The examples include experts without tokens, and tokens without an expert: the expert number
    `EXPERTS`.
    """
    chosen = np.array([each[:2] for each in routing])
    feeds = {
        "x": floats(TOKENS, WIDTH, seed=seed),
        "chosen": chosen,
        "weights": floats(TOKENS, 2, seed=seed + 1),
    }
    agrees(files["nd"], feeds)
    agrees(files["elements"], feeds)


@given(st.sets(st.integers(0, 2 * TOKENS - 1), max_size=10))
def test_images_at_any_positions(files: dict[str, Path], places: set[int]) -> None:
    """The number of selected positions is at most the number of features; 0 is included."""
    ids = np.zeros(2 * TOKENS, np.int64)
    ids[list(places)] = 9
    feeds = {
        "ids": ids.reshape(2, TOKENS),
        "text": floats(2, TOKENS, WIDTH),
        "image": floats(2, 5, WIDTH, seed=1),
    }
    agrees(files["images"], feeds)


KEPT = node("Compress", "x keep", "kept", axis=0)
TOTAL = node("ReduceSum", "z axis0", "y", keepdims=0)
SMALL = {
    "a loss over chosen rows": (
        [KEPT, node("Compress", "labels keep", "t"), node("SoftmaxCrossEntropyLoss", "kept t", "y")],
    ),
    "a mean": ([KEPT, node("Log", "kept", "l"), node("ReduceMean", "l", "y", keepdims=0, axes=[0, 1])], 13),
    "the largest": ([KEPT, node("ReduceMax", "kept axis0", "y", keepdims=1)],),
    "a product along the rows": (
        [KEPT, node("Transpose", "kept", "t", perm=[1, 0]), node("MatMul", "t kept", "y")],
    ),
    "a running sum": ([KEPT, node("CumSum", "kept first", "s"), node("Mul", "s kept", "z"), TOTAL],),
    "how many": (
        [KEPT, node("Shape", "kept", "s"), node("Cast", "s", "f", to=FLOAT), node("Mul", "f two", "y")],
    ),
    "of all elements": ([node("Compress", "x keep", "c"), node("Exp", "c", "z"), TOTAL],),
    "rows by a flag put behind": (
        [KEPT, node("NonZero", "keep", "n"), node("Transpose", "n", "p", perm=[1, 0]),
         node("ScatterND", "x p first_rows", "y")],
    ),
    "places as numbers": (
        [node("NonZero", "x", "n"), node("Cast", "n", "f", to=FLOAT), node("ReduceSum", "f last", "y", keepdims=0)],
    ),
    "distinct numbers": (
        [node("Unique", "labels", "u i v c"), node("Mul", "u c", "p"), node("Add", "p i", "s"),
         node("ReduceSum", "s axis0", "a", keepdims=1), node("Add", "a v", "y")],
    ),
    "a column of each row, which is read by its number": (
        [KEPT, node("Shape", "kept", "s", end=1), node("Squeeze", "s", "d"), node("Range", "first d one", "r"),
         node("Unsqueeze", "r last", "n"), node("Shape", "n", "ns"), node("Expand", "two_columns ns", "e"),
         node("Concat", "n e", "p", axis=1), node("GatherND", "kept p", "g"), node("Cast", "r", "f", to=FLOAT),
         node("Mul", "g f", "z"), TOTAL],
    ),
    "in another order, and its places": (
        [KEPT, node("Shape", "kept", "s", end=1), node("TopK", "kept s", "v i", axis=0, largest=0),
         node("Cast", "i", "f", to=FLOAT), node("Mul", "v f", "z"), TOTAL],
    ),
    "the two largest": ([KEPT, node("TopK", "kept axis2", "y i", axis=0)],),
    "shares along the rows": ([KEPT, node("Softmax", "kept", "s", axis=0), node("Mul", "s kept", "z"), TOTAL],),
    "where the largest is": ([KEPT, node("ArgMax", "kept", "y", axis=0, keepdims=0)],),
    "read by number": ([KEPT, node("Gather", "kept backwards", "y")],),
    "the last but one": ([KEPT, node("Slice", "kept back end axis0", "s"), node("ReduceSum", "s axis0", "y")],),
    "written by number": (
        [KEPT, node("ScatterND", "kept one_place first_row", "w"), node("Mul", "w kept", "z"), TOTAL],
    ),
    "with others behind": (
        [KEPT, node("Concat", "kept first_rows", "c", axis=0), node("Shape", "c", "s"),
         node("ConstantOfShape", "s", "o"), node("CumSum", "c first", "r"), node("Add", "r o", "q"),
         node("Exp", "q", "z"), TOTAL],
    ),
    "twice": ([KEPT, node("Concat", "first_rows kept kept", "c", axis=0), node("CumSum", "c first", "z"), TOTAL],),
    "the largest of those put there": (
        [node("Compress", "labels keep", "l"), KEPT, node("Unsqueeze", "l last", "p"),
         node("ScatterND", "table p kept", "y", reduction="max")],
    ),
    "flattened and taken apart": (
        [KEPT, node("Reshape", "kept last", "f"), node("Exp", "f", "e"), node("Reshape", "e pairs", "p"),
         node("CumSum", "p first", "z"), TOTAL],
    ),
    "as many as a mask has": (
        [node("Cast", "keep", "k", to=INT64), node("ReduceSum", "k", "n", keepdims=0),
         node("Unsqueeze", "n axis0", "s"), node("Slice", "x axis0 s", "c"), node("CumSum", "c first", "z"), TOTAL],
    ),
    "in two runs, the lengths told by another tensor": (
        [KEPT, node("Reshape", "keep halves", "h"), node("Cast", "h", "k", to=INT64),
         node("ReduceSum", "k last", "n", keepdims=0), node("Split", "kept n", "a b", axis=0), node("Exp", "a", "e"),
         node("Concat", "b e", "c", axis=0), node("CumSum", "c first", "z"), TOTAL],
    ),
    "chosen of the chosen": (
        [KEPT, node("Gather", "kept one", "g", axis=1), node("Greater", "g middle", "b"), node("NonZero", "b", "n"),
         node("Squeeze", "n axis0", "i"), node("Gather", "kept i", "c"), node("CumSum", "c first", "z"), TOTAL],
    ),
    "the first two": ([KEPT, node("Slice", "kept axis0 axis2 axis0", "s"), node("CumSum", "s first", "z"), TOTAL],),
    "of one column the largest, at most four, and their rows": (
        [KEPT, node("Gather", "kept one", "g", axis=1), node("Shape", "g", "s"), node("Concat", "four s", "b", axis=0),
         node("ReduceMin", "b", "k", keepdims=1), node("TopK", "g k", "v i", axis=0), node("Gather", "kept i", "r"),
         node("Unsqueeze", "v last", "c"), node("Mul", "r c", "m"), node("CumSum", "m first", "z"), TOTAL],
    ),
    "of one column the largest, at most two": (
        [KEPT, node("Gather", "kept one", "g", axis=1), node("Shape", "g", "s"), node("Min", "s axis2", "k"),
         node("TopK", "g k", "v i", axis=0), node("CumSum", "v first", "z"), TOTAL],
    ),
    "put into chosen rows where another number chooses them": (
        [KEPT, node("Gather", "kept one", "g", axis=1), node("Greater", "g middle", "b"), node("NonZero", "b", "n"),
         node("Squeeze", "n axis0", "i"), node("Gather", "kept i", "c"), node("Shape", "c", "s"),
         node("Unsqueeze", "i last", "j"), node("Expand", "j s", "e"), node("Shape", "kept", "t"),
         node("ConstantOfShape", "t", "o"), node("ScatterElements", "o e c", "w", axis=0),
         node("CumSum", "w first", "z"), TOTAL],
    ),
    "flattened in part and read by number": (
        [KEPT, node("Reshape", "kept squares", "q"), node("Flatten", "q", "f", axis=2),
         node("Gather", "f backwards", "y")],
    ),
    "indices and their number added": (
        [node("NonZero", "keep", "n"), node("Shape", "n", "s"), node("Gather", "s one", "c"), node("Add", "n c", "m"),
         node("Cast", "m", "f", to=FLOAT), node("ReduceSum", "f last", "y", keepdims=0)],
    ),
    "all but the last row by their number": (
        [KEPT, node("Shape", "kept", "s", end=1), node("Sub", "s one", "e"), node("Slice", "kept axis0 e axis0", "r"),
         node("ReduceSum", "r axis0", "y")],
    ),
    "the square of a size": (
        [KEPT, node("Size", "kept", "s"), node("Mul", "s s", "q"), node("Cast", "q", "y", to=FLOAT)],
    ),
    "half of the number of rows": (
        [KEPT, node("Shape", "kept", "s", end=1), node("Div", "s axis2", "h"), node("Cast", "h", "y", to=FLOAT)],
    ),
    "put where another tensor says": (
        [node("Compress", "labels keep", "l"), node("Unsqueeze", "l last", "p"), KEPT,
         node("ScatterND", "table p kept", "y", reduction="add")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_small_graphs(name: str, tmp_path: Path) -> None:
    nodes, *opset = SMALL[name]
    held = {
        "axis0": integers(0),
        "last": integers(-1),
        "first": np.array(0),
        "two": floats(2, seed=3),
    }
    held |= {
        "one": np.array(1),
        "two_columns": integers(2),
        "axis2": integers(2),
        "backwards": integers(-1, 0, 1),
    }
    held |= {
        "back": integers(-2),
        "end": integers(-1),
        "pairs": integers(-1, 2),
        "halves": integers(2, 3),
        "four": integers(4),
        "squares": integers(-1, 2, 2),
        "one_place": integers(1).reshape(1, 1),
    }
    held |= {"middle": np.array(0.9, np.float32)}
    held |= {"first_row": floats(1, 4, seed=6)}
    held |= {"table": floats(5, 4, seed=4), "first_rows": floats(3, 4, seed=5)}
    read = {operand for each in nodes for operand in each.input}
    inputs = {"x": [6, 4], "labels": (INT64, [6]), "keep": (BOOL, [6])}
    path = saved(
        model(
            nodes,
            {each: shape for each, shape in inputs.items() if each in read},
            "y",
            {each: array for each, array in held.items() if each in read},
            *opset,
        ),
        tmp_path,
    )
    labels = np.array([3, 1, 3, 0, 1, 1])
    x = np.abs(floats(6, 4)) + 0.1
    keep = np.array([True, False, True, False, True, False])
    x[1] = 0  # The logarithm of this row, which is not selected, is infinite.
    model_read = read_model(path, batch_axes=dict.fromkeys(inputs.keys() & read))
    feeds = {"x": x, "labels": labels, "keep": keep}
    assert not {each.op for each in model_read.graph.nodes} & {"NonZero", "Compress", "Unique"}
    assert_close(run_read(model_read, feeds), run(path, feeds))


FUNCTIONS: dict[str, tuple[list[onnx.NodeProto], Callable[[torch.Tensor], torch.Tensor]]] = {
    "quotient": ([node("Div", "two kept", "z")], lambda x: 2 / x),
    "logarithm": ([node("Log", "kept", "z")], torch.log),
    "exponential": ([node("Exp", "kept", "z")], torch.exp),
    "power": ([node("Pow", "two kept", "z")], lambda x: 2**x),
    "logarithm of a sum": ([node("ReduceLogSum", "kept last", "z")], lambda x: x.sum(-1).log()),
    "norm": (
        [node("LpNormalization", "kept", "z", axis=-1, p=2)],
        lambda x: x / x.norm(dim=-1, keepdim=True),
    ),
    "softmax": ([node("Softmax", "kept", "z", axis=-1)], lambda x: x.softmax(-1)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_that_are_not_selected_have_no_gradient(name: str, tmp_path: Path) -> None:
    """This also holds if the function of such a row is not finite."""
    nodes, function = FUNCTIONS[name]
    held = {"two": np.array(2, np.float32), "last": integers(-1), "axes": integers(0, 1)}
    read = {operand for each in nodes for operand in each.input} | {"axes"}
    square = node("Mul", "z z", "s")
    end = node("ReduceSum", "s axes", "y", keepdims=0)
    held = {each: array for each, array in held.items() if each in read}
    proto = model([KEPT, *nodes, square, end], {"x": [6, 4], "keep": (BOOL, [6])}, "y", held)
    graph = read_model(saved(proto, tmp_path), batch_axes={"x": None, "keep": None}).graph
    x = torch.from_numpy(np.abs(floats(6, 4)) + 0.1)
    keep = torch.tensor([True, False, True, False, True, False])
    x[1], x[3], x[5] = 0.0, -1.0, torch.tensor(-torch.inf if name == "softmax" else 1e4)
    x.requires_grad_()
    place = SimpleNamespace(
        device=x.device,
        **{f"c{index}": to_tensor(each.array) for index, each in enumerate(graph.constants)},
    )
    forward_of(emit_forward(stage_of(graph)).text)(place, x, keep)[0].backward()
    (wanted,) = torch.autograd.grad(function(x[keep]).square().sum(), x)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize(
    ("nodes", "outputs", "message"),
    [
        ([KEPT, node("Hardmax", "kept", "y", axis=0)], "y", "combines rows that Compress"),
        (
            [KEPT, node("Compress", "x other", "b", axis=0), node("Add", "kept b", "y")],
            "y",
            "combines rows",
        ),
    ],
)
def test_an_unsupported_combination_of_rows_is_rejected(
    nodes: Sequence[onnx.NodeProto], outputs: str, message: str, tmp_path: Path
) -> None:
    inputs = {"x": [6, 4], "keep": (BOOL, [6]), "other": (BOOL, [6])}
    with pytest.raises(ModelError, match=message):
        read_model(saved(model(nodes, inputs, outputs), tmp_path))
