"""Random graphs with data-dependent selections compute the results of onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from autopipe.ir.errors import ModelError
from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import BOOL, floats, integers, model, node, saved
from tests.passes.frontend.reference import assert_close, run, run_read

ROWS = 6
WIDTH = 4
HELD = {
    "axis0": integers(0), "axis1": integers(1), "zero": np.array(0), "last": integers(-1), "front": integers(1),
    "end": integers(1 << 62), "but_one": integers(-1), "pairs": integers(-1, 2), "fours": integers(-1, WIDTH),
    "weight": floats(WIDTH, WIDTH, seed=1), "bias": floats(WIDTH, seed=2), "more": floats(3, WIDTH, seed=3),
    "table": floats(ROWS, WIDTH, seed=4), "half": np.array(0.5, np.float32), "ends": integers(0, -1),
    "column0": integers(0),
}  # fmt: skip
SELECTIONS = {
    "compress": [
        node("Compress", "x keep", "r0", axis=0), node("NonZero", "keep", "n"), node("Squeeze", "n axis0", "token"),
    ],
    "nonzero": [
        node("NonZero", "keep", "n"), node("Squeeze", "n axis0", "token"), node("Gather", "x token", "r0"),
    ],
    "greater": [
        node("ReduceMax", "x axis1", "most", keepdims=0), node("Greater", "most half", "flags"),
        node("NonZero", "flags", "n"), node("Squeeze", "n axis0", "token"), node("Compress", "x flags", "r0", axis=0),
    ],
    "elements": [
        node("Greater", "x half", "flags"), node("NonZero", "flags", "n"), node("Transpose", "n", "at", perm=[1, 0]),
        node("Gather", "at column0", "tokens", axis=1), node("Squeeze", "tokens axis1", "token"),
        node("Gather", "x token", "r0"),
    ],
}  # fmt: skip
"""Nodes that compute rows `r0` and, for each of them, its row `token` of the table."""
STEPS = {
    "relu": "Relu {0}:{1}",
    "matmul": "MatMul {0} weight:{1}",
    "bias": "Add {0} bias:{1}",
    "softmax of a row": "Softmax {0}:{1}:axis=-1",
    "softmax along rows": "Softmax {0}:{1}:axis=0",
    "running sum": "CumSum {0} zero:{1}",
    "joined": "Concat more {0}:{1}:axis=0",
    "doubled": "Concat {0} {0}:{1}:axis=0",
    "all but the first": "Slice {0} front end axis0:{1}",
    "all but the last": "Slice {0} axis0 but_one axis0:{1}",
    "flattened": "Reshape {0} pairs:{1}p;Exp {1}p:{1}e;Reshape {1}e fours:{1}",
    "sorted": "Shape {0}:{1}s;Gather {1}s axis0:{1}c;TopK {0} {1}c:{1} {1}i:axis=0",
    "mean subtracted": "ReduceMean {0} axis0:{1}m;Sub {0} {1}m:{1}",
    "where": "Greater {0} half:{1}g;Neg {0}:{1}n;Where {1}g {0} {1}n:{1}",
    "size added": "Shape {0}:{1}s;Gather {1}s axis0:{1}c;Cast {1}c:{1}f:to=1;Add {0} {1}f:{1}",
    "numbered": "Shape {0}:{1}s;Gather {1}s zero:{1}c;Range zero {1}c one:{1}r;Cast {1}r:{1}f:to=1;"
    "Unsqueeze {1}f axis1:{1}u;Mul {0} {1}u:{1}",
}
ENDS = {
    "sum": "ReduceSum {0} axis0:y",
    "largest": "ReduceMax {0} axis0:y",
    "mean": "ReduceMean {0} axis0:y",
    "first and last": "Gather {0} ends:y",
    "product": "Transpose {0}:t:perm=1,0;MatMul t {0}:y",
    "scattered": "Shape {0}:zs;Gather zs zero:zc;Range zero zc one:zr;Unsqueeze zr axis1:zu;"
    "ScatterND table2 zu {0}:y",
    "added where selected": "Unsqueeze token axis1:zp;ScatterND table zp {0}:y:reduction=add",
    "maximum where selected": "Unsqueeze token axis1:zp;ScatterND table zp {0}:y:reduction=max",
}
HELD |= {"one": np.array(1), "table2": floats(3 * ROWS * WIDTH, WIDTH, seed=5)}


WITHOUT_ROWS = {"sum", "added where selected", "maximum where selected"}
"""Ends that are defined for no selected rows."""
ROW_BY_ROW = {"relu", "matmul", "bias", "softmax of a row", "running sum", "where", "size added"}
"""Steps that are defined for no rows."""


def written(text: str, source: str, result: str) -> list[onnx.NodeProto]:
    """Return the nodes of `OPERATOR OPERANDS:RESULTS:ATTRIBUTE=VALUE; ...`."""
    nodes = []
    for each in text.format(source, result).split(";"):
        call, results, *stated = each.split(":")
        operator, _, operands = call.partition(" ")
        attributes: dict[str, object] = {}
        for pair in stated:
            name, _, value = pair.partition("=")
            if value.isalpha():
                attributes[name] = value
                continue
            numbers = [int(number) for number in value.split(",")]
            attributes[name] = numbers if len(numbers) > 1 else numbers[0]
        nodes.append(node(operator, operands, results, **attributes))
    return nodes


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(SELECTIONS)),
    st.lists(st.sampled_from(sorted(STEPS)), max_size=3),
    st.sampled_from(sorted(ENDS)),
    st.lists(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS), min_size=2, max_size=2),
    st.integers(0, 99),
)
def test_any_graph(
    tmp_path_factory: pytest.TempPathFactory,
    selection: str,
    steps: list[str],
    end: str,
    masks: list[list[bool]],
    seed: int,
) -> None:
    nodes = list(SELECTIONS[selection])
    for place, step in enumerate(steps):
        nodes += written(STEPS[step], f"r{place}", f"r{place + 1}")
    nodes += written(ENDS[end], f"r{len(steps)}", "y")
    read = {operand for each in nodes for operand in each.input}
    inputs = {"x": [ROWS, WIDTH], "keep": (BOOL, [ROWS])}
    path = saved(
        model(
            nodes,
            {name: each for name, each in inputs.items() if name in read},
            "y",
            {name: each for name, each in HELD.items() if name in read},
        ),
        tmp_path_factory.mktemp("random"),
    )
    try:
        found = read_model(path, batch_axes=dict.fromkeys(inputs.keys() & read))
    except ModelError as error:
        assert "combines rows" in error.message
        event("rejected")
        return
    for mask in masks:
        feeds = {"x": floats(ROWS, WIDTH, seed=seed), "keep": np.array(mask)}
        # Three slices leave one of four rows.
        selected = [(seed + each) % ROWS for each in range(4)]
        feeds["keep"][selected] = True
        feeds["x"][selected] = np.abs(feeds["x"][selected]) + 1
        if end in WITHOUT_ROWS and ROW_BY_ROW.issuperset(steps) and not any(mask):
            event("no row is selected")
            feeds["keep"][:] = False
            feeds["x"] = -np.abs(feeds["x"])
        expected = run(path, feeds)
        assume(np.isfinite(expected["y"]).all())
        assert_close(run_read(found, feeds), expected, 1e-4)
