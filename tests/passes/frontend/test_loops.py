"""Loops that are kept as one operator: results and gradients equal those of the unrolled loop."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper as onh
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.batch import resize_batch
from autopipe.ir.errors import ModelError
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.frontend import Model, control_flow, read_model
from tests.ir.ops.splitting import Use, check
from tests.passes.frontend.building import floats
from tests.passes.frontend.fusion.test_programs import trained
from tests.passes.frontend.reference import assert_close, parameter_array, random_feeds, run
from tests.passes.frontend.test_control_flow import READ, written

SHAPE = (3, 4, 2)
WEIGHTS = {"w": floats(2, 2), "k": floats(5, 2, seed=1), "c": np.float32([[[0.5]]])}
STEPS = {
    "square": "{0} = Mul ({1}, {1})",
    "tanh": "{0} = Tanh ({1})",
    "state": "{0} = Add ({1}, h)",
    "slice": "{0} = Mul ({1}, s)",
    "product": "{0} = MatMul ({1}, w)",
    "mean": "{0}m = ReduceMean <axes = [0]> ({1})\n{0} = Sub ({1}, {0}m)",
    "softmax": "{0} = Softmax <axis = 0> ({1})",
    "number": "{0}i = Cast <to = 1> (i)\n{0}j = Add ({0}i, one)\n{0} = Div ({1}, {0}j)",
    "row": "{0}r = Gather (k, i)\n{0} = Add ({1}, {0}r)",
    "same": "{0}t = Transpose <perm = [1, 0]> (w)\n{0}u = MatMul ({0}t, w)\n{0} = MatMul ({1}, {0}u)",
    "constant": "{0} = Add ({1}, half)",
}
"""Steps that an iteration may take with the values so far."""


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    """Return the model y = f(x) of these nodes."""
    extents = ",".join(map(str, SHAPE))
    head = f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[{extents}] x) => (float y)'
    proto = onnx.parser.parse_model(f"{head} {{{text}}}")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    constants = {
        "one": np.float32(1),
        "half": np.float32([0.5, -0.5]),
        "flat": np.int64([-1]),
        "rows": np.int64([3, 8]),
    }
    for name, array in (WEIGHTS | constants).items():
        if re.search(rf"\b{name}\b", text):
            proto.graph.initializer.append(onh.from_array(array, name))
    return proto


@st.composite
def loops(draw: st.DrawFn) -> onnx.ModelProto:
    """Strategy for a Loop or Scan along any axis with a body of a few random steps. All outputs are
    concatenated to one vector.
    """
    axis = draw(st.integers(0, 2))
    backwards = draw(st.booleans())
    outwards = draw(st.booleans())
    count = SHAPE[axis]
    out = draw(st.integers(0, 2))
    is_loop = draw(st.booleans())
    allowed = [each for each in STEPS if is_loop or each not in ("number", "row")]
    # A slice along the last axis lacks the dimension of size 2 that the weight needs.
    allowed = [
        each for each in allowed if axis < 2 or each not in ("product", "row", "same", "constant")
    ]
    names = ["s"]
    lines = list[str]()
    for number, step in enumerate(draw(st.lists(st.sampled_from(allowed), min_size=1, max_size=6))):
        lines.append(
            STEPS[step].format(f"v{number}", draw(st.sampled_from([names[-1], "h", *names])))
        )
        names.append(f"v{number}")
    after = draw(st.sampled_from([*names, "h"]))
    found = draw(st.sampled_from([*names, "h"]))
    body = "\n".join(lines)
    first = f"first = ReduceMean <axes = [{axis}], keepdims = 0> (x)"
    end = "a = Reshape (last, flat)\nb = Reshape (all, flat)\ny = Concat <axis = 0> (a, b)"
    if not is_loop:
        return model(f"""{first}
            last, all = Scan (first, x) <num_scan_inputs = 1, scan_input_axes = [{axis}],
                scan_input_directions = [{int(backwards)}], scan_output_axes = [{out}],
                scan_output_directions = [{int(outwards)}],
                body = b (float[p,q] h, float[p,q] s) => (float[p,q] g, float[p,q] o) {{
                    {body}
                    g = Identity ({after})
                    o = Neg ({found})
                }}>
            {end}""")
    if draw(st.booleans()):
        return model(f"""{first}
            count = Constant <value = int64 {{{count}}}> ()
            yes = Constant <value = bool {{1}}> ()
            last, all = Loop (count, yes, first) <
                body = b (int64 i, bool going, float[p,q] h) => (bool still, float[p,q] g, float[p,q] o) {{
                    still = Identity (going)
                    s = Gather <axis = {axis}> (x, i)
                    {body}
                    g = Identity ({after})
                    o = Neg ({found})
                }}>
            {end}""")
    return model(f"""{first}
        count = Constant <value = int64 {{{count}}}> ()
        none = SequenceEmpty ()
        last, list = Loop (count, , first, none) <
            body = b (int64 i, bool going, float[p,q] h, seq(float[p,q]) l)
                => (bool going, float[p,q] g, seq(float[p,q]) m) {{
                s = Gather <axis = {axis}> (x, i)
                {body}
                g = Identity ({after})
                o = Neg ({found})
                m = SequenceInsert (l, o)
            }}>
        all = ConcatFromSequence <axis = {out if outwards else out % 2}, new_axis = {int(outwards)}> (list)
        {end}""")


def both(path: Path, **settings: object) -> tuple[Model, Model]:
    """Return the model with its loops kept, and with its loops unrolled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_flow, "MAX_UNROLLED_NODES", 0)
        kept = read_model(path, **settings)  # type: ignore[arg-type]
        patch.setattr(control_flow, "MAX_UNROLLED_NODES", 10**9)
        return kept, read_model(path, **settings)  # type: ignore[arg-type]


@given(loops())
@settings(max_examples=60, deadline=None)
def test_kept_and_unrolled_loops_agree(
    tmp_path_factory: pytest.TempPathFactory, proto: onnx.ModelProto
) -> None:
    path = tmp_path_factory.mktemp("loop") / "model.onnx"
    onnx.save(proto, path)
    kept, apart = both(path)
    assert [any(node.body for node in each.graph.nodes) for each in (kept, apart)] == [True, False]
    feeds = random_feeds(kept.graph)
    found = trained(kept, feeds)
    assert_close(found, trained(apart, feeds))
    assert_close({"y": found["y"]}, run(path, feeds))
    for node in (node for node in kept.graph.nodes if node.body is not None):
        arrays = {each.value.name: each.array for each in kept.graph.constants}
        arrays |= {
            each.value.name: parameter_array(each, path) for each in kept.graph.parameters
        } | feeds
        random = np.random.default_rng(0)
        for name in node.inputs:
            arrays.setdefault(
                name, random.standard_normal(kept.graph.type_of(name).shape).astype(np.float32)
            )
        check(Use(kept.graph, node, {name: arrays[name] for name in node.inputs}), 1e-4, 1e-5)


KEPT = {
    "as often as there are columns": 1,
    "over rows and back": 1,
    "over columns": 1,
    "a value that grows": 0,
}


@pytest.mark.parametrize("case", READ)
def test_loops_that_cannot_be_kept_are_unrolled(case: str, tmp_path: Path) -> None:
    kept, apart = both(written(READ[case], tmp_path))
    assert sum(node.body is not None for node in kept.graph.nodes) == KEPT.get(case, 0)
    feeds = random_feeds(kept.graph)
    assert_close(trained(kept, feeds), trained(apart, feeds))


CELL = """
    first = ReduceMean <axes = [1], keepdims = 0> (x)
    last, all = Scan (first, x) <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
        body = b (float[p,2] h, float[p,2] s) => (float[p,2] g, float[p,2] o) {
            a = MatMul (s, w)
            c = Add (a, h)
            g = Tanh (c)
            o = Mul (g, s)
        }>
    y = Reshape (all, rows)
"""
ACROSS = (
    "y = Scan (x) <num_scan_inputs = 1, body = b (float[4,2] p) => (float[4,2] o) { o = Exp (p) }>"
)


def test_the_batch_of_a_loop_is_reduced(tmp_path: Path) -> None:
    """A batch size that is fixed in the file is reduced, also in the body. If the iterations are
    the samples, that is an error.
    """
    path = tmp_path / "model.onnx"
    onnx.save(model(CELL), path)
    kept, apart = (resize_batch(each.graph, 1) for each in both(path))
    bodies = [node.body for node in kept.nodes if node.body is not None]
    assert [{value.shape for value in body.values} for body in bodies] == [{(1, 2)}]
    assert kept.type_of("y").shape == apart.type_of("y").shape == (1, 8)
    onnx.save(model(ACROSS), path)
    with pytest.raises(
        ModelError, match="Loop does not keep the samples of 'x' apart, so the batch cannot shrink"
    ):
        resize_batch(both(path)[0].graph, 1)


def test_the_work_of_a_loop_is_that_of_all_iterations(tmp_path: Path) -> None:
    onnx.save(model(CELL), tmp_path / "model.onnx")
    found = []
    for each in both(tmp_path / "model.onnx"):
        work = roofline_costs(each.graph)
        found.append(
            (sum(one.forward_flops for one in work), sum(one.backward_flops for one in work))
        )
    assert found[0] == pytest.approx(found[1])
