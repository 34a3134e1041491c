"""If, Loop and Scan are replaced while a file is read: the numbers equal those of ONNX Runtime on
the file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper as onh
import onnx.parser
import pytest

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import floats
from tests.passes.frontend.reference import assert_close, random_feeds, run, run_read

WEIGHTS = {"w": floats(4, 4), "v": floats(4, 4, seed=1)}
READ = {
    "a branch chosen by a shape": """
        shape = Shape (x)
        one = Constant <value_ints = [1]> ()
        rows = Gather (shape, one)
        four = Constant <value_ints = [4]> ()
        c = Equal (rows, four)
        y = If (c) <then_branch = t () => (float[3,4] a) { a = MatMul (x, w) },
                    else_branch = e () => (float[3,4] a) { a = Neg (x) }>
    """,
    "a branch in a branch": """
        yes = Constant <value = bool {1}> ()
        no = Constant <value = bool {0}> ()
        y = If (yes) <then_branch = t () => (float[3,4] a) {
              b = MatMul (x, v)
              a = If (no) <then_branch = tt () => (float[3,4] c) { c = Neg (b) },
                           else_branch = ee () => (float[3,4] c) { c = MatMul (b, w) }>
            }, else_branch = e () => (float[3,4] b) { b = Neg (x) }>
    """,
    "a branch that data choose": """
        sum = ReduceSum <keepdims = 0> (x)
        zero = Constant <value_float = 0.0> ()
        c = Greater (sum, zero)
        y = If (c) <then_branch = t () => (float[3,4] a) { a = MatMul (x, w) },
                    else_branch = e () => (float[3,4] a) { a = Neg (x) }>
    """,
    "as often as there are columns": """
        shape = Shape (x)
        one = Constant <value = int64 {1}> ()
        columns = Gather (shape, one)
        yes = Constant <value = bool {1}> ()
        last, y = Loop (columns, yes, x) <body = b (int64 i, bool going, float[3,4] h)
                                                     => (bool still, float[3,4] g, float[3] s) {
            still = Identity (going)
            m = MatMul (h, w)
            g = Tanh (m)
            s = Gather <axis = 1> (g, i)
        }>
    """,
    "never, and what it gathers is empty": """
        nil = Constant <value = int64 {0}> ()
        yes = Constant <value = bool {1}> ()
        last, rows = Loop (nil, yes, x) <body = b (int64 i, bool going, float[3,4] h)
                                                   => (bool still, float[3,4] g, float[3] s) {
            still = Identity (going)
            g = MatMul (h, w)
            s = Gather <axis = 1> (g, i)
        }>
        columns = Transpose (rows)
        y = Concat <axis = 1> (last, columns, last)
    """,
    "until a number is reached": """
        yes = Constant <value = bool {1}> ()
        nil = Constant <value_float = 0.0> ()
        limit = Constant <value_float = 2.5> ()
        step = Constant <value_float = 1.0> ()
        y, count = Loop (, yes, x, nil) <body = b (int64 i, bool going, float[3,4] h, float n)
                                                    => (bool still, float[3,4] g, float m) {
            g = MatMul (h, w)
            m = Add (n, step)
            still = Less (m, limit)
        }>
    """,
    "until data say so": """
        most = Constant <value = int64 {6}> ()
        yes = Constant <value = bool {1}> ()
        limit = Constant <value_float = 9.0> ()
        y = Loop (most, yes, x) <body = b (int64 i, bool going, float[3,4] h) => (bool still, float[3,4] g) {
            g = Add (h, h)
            a = Abs (g)
            m = ReduceMax <keepdims = 0> (a)
            still = Less (m, limit)
        }>
    """,
    "until data say so, at most five times": """
        limit = Constant <value_float = 9.0> ()
        nil = Constant <value = int64 {0}> ()
        one = Constant <value = int64 {1}> ()
        five = Constant <value = int64 {5}> ()
        first = Abs (x)
        largest = ReduceMax <keepdims = 0> (first)
        c = Less (largest, limit)
        z, n = Loop (, c, x, nil) <body = b (int64 i, bool going, float[3,4] h, int64 k)
                                           => (bool still, float[3,4] g, int64 l) {
            g = Add (h, h)
            a = Abs (g)
            m = ReduceMax <keepdims = 0> (a)
            s = Less (m, limit)
            l = Add (k, one)
            f = Less (l, five)
            still = If (s) <then_branch = t () => (bool o) { o = Identity (f) },
                            else_branch = e () => (bool o) { o = Constant <value = bool {0}> () }>
        }>
        times = Cast <to = 1> (n)
        y = Mul (z, times)
    """,
    "a value that grows": """
        two = Constant <value = int64 {2}> ()
        y = Loop (two, , x) <body = b (int64 i, bool going, float[n,4] h) => (bool going, float[k,4] g) {
            g = Concat <axis = 0> (h, h)
        }>
    """,
    "over a sequence": """
        s = SplitToSequence <axis = 0> (x)
        t = SequenceMap (s, x) <body = b (float[1,4] p, float[3,4] q) => (float[3,4] o) {
            r = MatMul (q, w)
            o = Add (r, p)
        }>
        y = ConcatFromSequence <axis = 1> (t)
    """,
    "a sequence that data choose": """
        sum = ReduceSum <keepdims = 0> (x)
        zero = Constant <value_float = 0.0> ()
        c = Greater (sum, zero)
        s = If (c) <then_branch = t () => (seq(float[3,4]) a) {
                b = MatMul (x, w)
                a = SequenceConstruct (b, x)
            }, else_branch = e () => (seq(float[3,4]) a) {
                b = Neg (x)
                a = SequenceConstruct (x, b)
            }>
        y = ConcatFromSequence <axis = 1> (s)
    """,
    "over rows and back": """
        z = Constant <value = float[4] {0, 0, 0, 0}> ()
        end, y = Scan (z, x, x) <num_scan_inputs = 2, scan_input_directions = [1, 0], scan_output_directions = [1],
                                 scan_output_axes = [-1],
            body = b (float[4] s, float[4] p, float[4] q) => (float[4] t, float[4] o) {
            t = Add (s, p)
            u = Mul (t, q)
            o = MatMul (u, w)
        }>
    """,
    "over columns": """
        y = Scan (x) <num_scan_inputs = 1, scan_input_axes = [1], body = b (float[3] p) => (float[3] o) { o = Exp (p) }>
    """,
}
REFUSED = {
    "so the type of 'y' is unknown": """
        sum = ReduceSum <keepdims = 0> (x)
        c = Cast <to = 9> (sum)
        y = If (c) <then_branch = t () => (float[6,4] a) { a = Concat <axis = 0> (x, x) },
                    else_branch = e () => (float[3,4] a) { a = Neg (x) }>
    """,
    "the iteration count depends on data": """
        sum = ReduceSum <keepdims = 0> (x)
        most = Cast <to = 7> (sum)
        y = Loop (most, , x) <body = b (int64 i, bool going, float[3,4] h) => (bool going, float[3,4] g) {
            g = Neg (h)
        }>
    """,
    "the loop has no iterations, and the body declares no static shape for scan output 'y'": """
        nil = Constant <value = int64 {0}> ()
        yes = Constant <value = bool {1}> ()
        y = Loop (nil, yes) <body = b (int64 i, bool going) => (bool going, float[n] s) { s = ReduceSum (x) }>
    """,
    "the end of the loop depends on data, and the loop has scan outputs": """
        yes = Constant <value = bool {1}> ()
        y = Loop (, yes, x) <body = b (int64 i, bool going, float[3,4] h) => (bool still, float[3,4] g) {
            g = Neg (h)
            m = ReduceMax <keepdims = 0> (g)
            still = Cast <to = 9> (m)
        }>
    """,
    "of the unrolled loop, whose body has 1 node": """
        most = Constant <value = int64 {9223372036854775807}> ()
        y = Loop (most, , x) <body = b (int64 i, bool going, float[3,4] h) => (bool going, float[3,4] g) {
            g = Neg (h)
        }>
    """,
}


def written(text: str, folder: Path, inputs: str = "") -> Path:
    """Write the model y = f(x) of these nodes. Weights are initializers of the graph or, if a body
    has one of the name, of the body.
    """
    proto = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 18]> g (float[3,4] x{inputs}) => (float y) {{{text}}}'
    )
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    bodies = [each.g for node in proto.graph.node for each in node.attribute if each.HasField("g")]
    for name, array in WEIGHTS.items():
        if f"{name})" in text:
            holders = [
                body for body in bodies if any(name in node.input for node in body.node)
            ] or [proto.graph]
            for graph in holders:
                graph.initializer.append(onh.from_array(array, name))
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.parametrize("text", READ.values(), ids=READ)
def test_numbers_equal_onnxruntime(text: str, tmp_path: Path) -> None:
    path = written(text, tmp_path)
    read = read_model(path)
    for seed in range(4):
        feeds = random_feeds(read.graph, seed)
        assert_close(run_read(read, feeds), run(path, feeds))


@pytest.mark.parametrize(("reason", "text"), REFUSED.items())
def test_rejected_control_flow(reason: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        read_model(written(text, tmp_path))


MERGED = """
    y = If (c) <then_branch = t () => (float[3,4] a) { a = MatMul (x, w) },
                else_branch = e () => (float[3,4] a) { b = MatMul (x, v)
                                                       a = Relu (b) }>
"""


@pytest.mark.parametrize("chosen", [True, False])
def test_a_condition_that_is_given_selects_a_branch(chosen: bool, tmp_path: Path) -> None:
    """Merged decoder files have one branch with a cache and one without."""
    path = written(MERGED, tmp_path, ", bool[1] c")
    read = read_model(path, fixed_inputs={"c": chosen})
    assert [each.name for each in read.graph.inputs] == ["x"]
    assert [each.value.name for each in read.graph.parameters] == ["w" if chosen else "v"]
    feeds = random_feeds(read.graph)
    assert_close(run_read(read, feeds), run(path, feeds | {"c": np.full(1, chosen)}))
    with pytest.raises(ConfigurationError, match="'d', which is not an input"):
        read_model(path, fixed_inputs={"d": True})


RATES = """
    low = Constant <value = int64 {8000}> ()
    c = Equal (rate, low)
    y = If (c) <then_branch = t () => (float[n,4] a) { a = Concat <axis = 0> (x, x) },
                else_branch = e () => (float[n,4] a) { a = Neg (x) }>
"""
"""Two voices in one file: the shape of the result depends on an input of one number."""
ASKED = {
    "a branch": (
        RATES,
        (
            "both branches are read, since input 'rate' can be any number: --set "
            "model.inputs.rate=NUMBER"
        ),
    ),
    "a branch inside another": (
        """
        sum = ReduceSum <keepdims = 0> (x)
        d = Cast <to = 9> (sum)
        low = Constant <value = int64 {8000}> ()
        c = Equal (rate, low)
        y = If (c) <then_branch = t () => (float[n,4] a) {
                a = If (d) <then_branch = u () => (float[n,4] b) { b = Concat <axis = 0> (x, x) },
                            else_branch = v () => (float[n,4] b) { b = Neg (x) }>
            }, else_branch = e () => (float[n,4] a) { a = Neg (x) }>
        """,
        (
            "both branches are read, since input 'rate' can be any number: --set "
            "model.inputs.rate=NUMBER"
        ),
    ),
    "iterations": (
        """
        most = Identity (rate)
        y = Loop (most, , x) <body = b (int64 i, bool going, float[3,4] h) => (bool going, float[3,4] g) {
            g = Neg (h)
        }>
        """,
        (
            "the number of iterations is unknown, since input 'rate' can be any number: --set "
            "model.inputs.rate=NUMBER"
        ),
    ),
    "a shape": (
        """
        rest = Constant <value = int64[1] {-1}> ()
        axis = Constant <value = int64[1] {0}> ()
        rows = Unsqueeze (rate, axis)
        shape = Concat <axis = 0> (rows, rest)
        y = Reshape (x, shape)
        """,
        "or set the inputs that determine it: --set model.inputs.rate=NUMBER",
    ),
}


@pytest.mark.parametrize(("text", "expected"), ASKED.values(), ids=ASKED)
def test_the_hint_names_the_input_that_decides(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read_model(written(text, tmp_path, ", int64 rate"))
    assert expected in caught.value.hint


def test_the_input_that_decides_can_be_given(tmp_path: Path) -> None:
    path = written(RATES, tmp_path, ", int64 rate")
    for rate, rows in ((8000, 6), (16000, 3)):
        read = read_model(path, fixed_inputs={"rate": rate})
        assert next(each.shape for each in read.graph.values if each.name == "y") == (rows, 4)


def test_the_hint_names_no_input_if_samples_decide(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read_model(written(REFUSED["so the type of 'y' is unknown"], tmp_path))
    assert "model.inputs" not in caught.value.hint


def test_weights_of_bodies_are_parameters(tmp_path: Path) -> None:
    """The weights of a loop body become one parameter each. Of branches with weights of one name,
    the branch that is taken counts.
    """
    read = read_model(written(READ["as often as there are columns"], tmp_path))
    assert [(each.value.name, each.trainable) for each in read.graph.parameters] == [("w", True)]
    branch = "{ a = MatMul (x, w) }"
    text = f"""
        no = Constant <value = bool {{0}}> ()
        y = If (no) <then_branch = t () => (float[3,4] a) {branch}, else_branch = e () => (float[3,4] a) {branch}>
    """
    path = written(text, tmp_path)
    proto = onnx.load(path)
    other = proto.graph.node[1].attribute[1].g.initializer[0]
    other.CopyFrom(onh.from_array(WEIGHTS["v"], "w"))
    path.write_bytes(proto.SerializeToString())
    read = read_model(path)
    assert len(read.graph.parameters) == 1
    feeds = {"x": np.ones((3, 4), np.float32)}
    assert_close(run_read(read, feeds), {"y": feeds["x"] @ WEIGHTS["v"]})
    assert_close(run_read(read, feeds), run(path, feeds))


def test_a_condition_on_the_whole_batch_warns(tmp_path: Path) -> None:
    """Each micro-batch would have a condition of its own, and compute something else."""
    for text, warned in (
        ("a branch that data choose", True),
        ("until data say so", True),
        ("over columns", False),
    ):
        warnings = read_model(written(READ[text], tmp_path), batch_axes={"x": 0}).warnings
        assert [
            each for each in warnings if "Where" in each and "mixes the samples" in each
        ] == warned * [*warnings]


def test_a_scan_of_opset_8(tmp_path: Path) -> None:
    text = (
        "y = Scan <num_scan_inputs = 1, body = b (float[4] p) => (float[4] o) { o = Exp (p) }> (x)"
    )
    proto = onnx.load(written(text, tmp_path))
    proto.opset_import[0].version = 8
    proto.graph.node[0].input[:] = ["", "x"]
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"a Scan of opset 8 has a batch dimension.*opset 9"):
        read_model(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("kind", "said"), [("seq(float[3,4])", "a sequence"), ("optional(float[3,4])", "an Optional")]
)
def test_sequence_inputs_are_rejected(kind: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError,
        match=f"input 's': the input is {said}, expected a tensor .*make each contained tensor",
    ):
        read_model(written("y = Identity (x)", tmp_path, f", {kind} s"))
