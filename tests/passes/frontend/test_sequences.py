"""Sequences of tensors are replaced while a file is read: the numbers equal those of ONNX Runtime
on the file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.backends.onnxruntime import ReferenceModel
from autopipe.ir.errors import ModelError
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.sequences import MAX_TENSORS
from tests.passes.frontend.building import FLOAT, integers, model, node, saved
from tests.passes.frontend.reference import as_onnx, random_feeds, run

HELD = {
    "zero": np.asarray(0),
    "one": np.asarray(1),
    "last": np.asarray(-1),
    "far": np.asarray(7),
    "three": np.asarray(3),
    "sizes": integers(1, 4, 2),
}
THIRDS = node("SplitToSequence", "x three", "s", axis=1)
READ = {
    "a part": [THIRDS, node("SequenceAt", "s one", "y")],
    "the last part, which is smaller": [THIRDS, node("SequenceAt", "s last", "y")],
    "parts of given sizes": [
        node("SplitToSequence", "x sizes", "s", axis=-1),
        node("SequenceAt", "s one", "y"),
    ],
    "rows": [
        node("SplitToSequence", "x", "s", axis=0, keepdims=0),
        node("SequenceAt", "s one", "y"),
    ],
    "rows that keep their axis": [
        node("SplitToSequence", "x", "s"),
        node("SequenceAt", "s one", "y"),
    ],
    "joined again": [THIRDS, node("ConcatFromSequence", "s", "y", axis=1)],
    "stacked": [
        node("Relu", "x", "r"),
        node("SequenceConstruct", "x r", "s"),
        node("ConcatFromSequence", "s", "y", axis=-1, new_axis=1),
    ],
    "erased and inserted": [
        node("Relu", "x", "r"),
        node("SequenceEmpty", "", "none"),
        node("SequenceInsert", "none x", "a"),
        node("SequenceInsert", "a r zero", "b"),
        node("SequenceInsert", "b x last", "c"),
        node("SequenceErase", "c one", "d"),
        node("SequenceErase", "d", "e"),
        node("ConcatFromSequence", "e", "y", axis=0),
    ],
    "handed on": [THIRDS, node("Identity", "s", "t"), node("ConcatFromSequence", "t", "y", axis=1)],
    "counted": [
        THIRDS,
        node("SequenceLength", "s", "n"),
        node("Cast", "n", "wide", to=onnx.TensorProto.FLOAT),
        node("Mul", "x wide", "y"),
    ],
}
REFUSED = {
    "position 7 is out of range for a sequence of length 3": [
        THIRDS,
        node("SequenceAt", "s far", "y"),
    ],
    "the sizes .1, 4, 2. do not add up to 3, the size of axis 0": [
        node("SplitToSequence", "x sizes", "s", axis=0)
    ],
    "axis 4 is out of range": [node("SplitToSequence", "x three", "s", axis=4)],
    "the position in a sequence depends on data": [
        THIRDS,
        node("Cast", "p", "q", to=onnx.TensorProto.INT64),
        node("SequenceAt", "s q", "y"),
    ],
    "an operand is a sequence, expected a tensor": [THIRDS, node("Relu", "s", "y")],
    "the operand is an empty Optional": [
        onnx.helper.make_node(
            "Optional", [], ["o"], type=onnx.helper.make_tensor_type_proto(FLOAT, [3, 7])
        ),
        node("OptionalGetElement", "o", "y"),
    ],
}


@pytest.mark.parametrize(
    ("case", "opset"),
    [(case, opset) for case in READ for opset in (11, 20) if (case, opset) != ("handed on", 11)],
)
def test_numbers_equal_onnxruntime(case: str, opset: int, tmp_path: Path) -> None:
    path = saved(model(READ[case], {"x": [3, 7]}, "y", HELD, opset=opset), tmp_path)
    graph = read_model(path).graph
    assert not any("Sequence" in each.op for each in graph.nodes)
    feeds = random_feeds(graph)
    np.testing.assert_array_equal(run(as_onnx(graph, {}), feeds)["y"], run(path, feeds)["y"])


@pytest.mark.parametrize(("message", "nodes"), REFUSED.items(), ids=REFUSED.keys())
def test_rejected_sequences(message: str, nodes: list[onnx.NodeProto], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(model(nodes, {"x": [3, 7], "p": []}, "y", HELD).SerializeToString())
    with pytest.raises(ModelError, match=message):
        read_model(path)


def test_a_split_into_too_many_tensors_is_rejected(tmp_path: Path) -> None:
    nodes = [node("SplitToSequence", "x", "s"), node("SequenceAt", "s zero", "y")]
    path = tmp_path / "model.onnx"
    path.write_bytes(model(nodes, {"x": [10**9, 7]}, "y", HELD).SerializeToString())
    with pytest.raises(ModelError, match=f"more than {MAX_TENSORS:,} tensors"):
        read_model(path)


def test_a_sequence_output_becomes_its_tensors(tmp_path: Path) -> None:
    """The outputs have the names that `verify` gives ONNX Runtime's. A tensor that is an output
    itself, too, is both.
    """
    nodes = [
        THIRDS,
        node("SequenceAt", "s one", "y"),
        node("SequenceInsert", "s x", "t"),
        node("Optional", "t", "o"),
    ]
    proto = model(nodes, {"x": [3, 7]}, "y o", HELD)
    kind = onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(FLOAT, None))
    proto.graph.output[1].type.CopyFrom(onnx.helper.make_optional_type_proto(kind))
    path = saved(proto, tmp_path)
    graph = read_model(path).graph
    assert graph.outputs == ("y", "o/0", "o/1", "o/2", "o/3")
    feeds = random_feeds(graph)
    found = run(as_onnx(graph, {}), feeds)
    for name, array in ReferenceModel(path, {}).run(feeds).items():
        np.testing.assert_array_equal(found[name], array)
