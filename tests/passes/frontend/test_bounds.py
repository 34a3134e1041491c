"""Small files that spell huge work are read in little memory and few operations, or refused in one
line.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnx.helper as oh
import pytest

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Graph, Node, Value
from autopipe.passes.frontend import inference as known
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.cleanup import drop_output_identities, merge_equal_nodes
from autopipe.passes.frontend.fusion.rules import View, fuse_operators
from autopipe.passes.frontend.inference import MOST_OPERATIONS, Budget, bound_operations
from autopipe.passes.frontend.interpret import _ReaderState, _unique_name
from autopipe.passes.frontend.load import DEEPEST, inline_functions
from tests.passes.frontend.building import floats, integers, model, node, saved

ROOM = 1 << 29
"""Bytes of memory that reading a small file may take besides the modules that are loaded anyway."""
READ = """
import resource, sys
from pathlib import Path
import numpy, onnx.reference, onnx.inliner, onnx.shape_inference
from autopipe.passes.frontend import inference, read_model
before = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (before + int(sys.argv[1]),) * 2)
for path in sys.argv[2:]:
    print(Path(path).stem, len(read_model(Path(path)).graph.nodes))
"""


def constant(name: str, array: np.ndarray) -> onnx.NodeProto:
    """A node that is a number."""
    return oh.make_node(
        "Constant", [], [name], name=name, value=onnx.numpy_helper.from_array(array)
    )


def last_token() -> onnx.ModelProto:
    """The head of a classifier: 2³⁰ elements, of which one in 4,096 is read."""
    nodes = [node("Gather", "hidden first", "taken", axis=1), node("Relu", "taken", "y")]
    return model(nodes, {"hidden": [64, 4096, 4096]}, "y", {"first": np.asarray(0)})


def window(op: str) -> onnx.ModelProto:
    """A pooling of one number with a window of 30,001 by 30,001."""
    pool = node(op, "c", "p", kernel_shape=[30_001] * 2, pads=[15_000] * 4)
    return model(
        [constant("c", floats(1, 1, 1, 1)), pool, node("Add", "x p", "y")], {"x": [1, 1, 1, 1]}, "y"
    )


def dilated() -> onnx.ModelProto:
    """A convolution of one number with four, far apart."""
    nodes = [constant("c", floats(1, 1, 1, 1)), constant("w", floats(1, 1, 2, 2))]
    nodes += [
        node("Conv", "c w", "p", dilations=[30_000] * 2, pads=[15_000] * 4),
        node("Add", "x p", "y"),
    ]
    return model(nodes, {"x": [1, 1, 1, 1]}, "y")


def test_small_files_take_little_memory(tmp_path: Path) -> None:
    protos = {
        "last_token": last_token(),
        "max_pool": window("MaxPool"),
        "average_pool": window("AveragePool"),
        "dilated": dilated(),
    }
    paths = [saved(proto, tmp_path, f"{name}.onnx") for name, proto in protos.items()]
    assert all(path.stat().st_size < 4096 for path in paths)
    command = [sys.executable, "-c", READ, str(ROOM), *map(str, paths)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(protos)


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tables of 128 KB, which the file spells by a shape, until there are too many."""
    monkeypatch.setattr(known, "MOST_BYTES", 1 << 20)
    held = {"shape": integers(128, 128)}
    nodes = []
    for number in range(24):
        held[f"one{number}"] = integers(number)
        nodes += [
            node("Expand", f"one{number} shape", f"table{number}"),
            node("Add", f"x table{number}", f"y{number}"),
        ]
    outputs = " ".join(f"y{number}" for number in range(24))
    graph = read_model(
        saved(model(nodes, {"x": (onnx.TensorProto.INT64, [1])}, outputs, held), tmp_path)
    ).graph
    values = known.ConstantFolder(graph)
    found = [values.array(each.outputs[0]) for each in graph.nodes if each.op == "Expand"]
    assert [array is not None for array in found] == [True] * 8 + [False] * 16


def functions(count: int, calls: int) -> onnx.ModelProto:
    """A model that calls the last of `count` functions, each of which calls the one before it
    `calls` times.
    """
    opsets = [oh.make_opsetid("", 20), oh.make_opsetid("local", 1)]
    proto = model(
        [oh.make_node(f"F{count - 1}", ["x"], ["y"], "call", domain="local")],
        {"x": [2]},
        "y",
        domains=["local"],
    )
    for number in range(count):
        names = [f"v{call}" for call in range(calls + 1)]
        op, domain = (f"F{number - 1}", "local") if number else ("Relu", "")
        body = [
            oh.make_node(op, [one], [two], domain=domain) for one, two in itertools.pairwise(names)
        ]
        proto.functions.append(
            oh.make_function("local", f"F{number}", names[:1], names[-1:], body, opsets)
        )
    return proto


@pytest.mark.parametrize(
    ("count", "calls", "words"), [(22, 2, "100000 nodes"), (500, 1, "nested more than 64 deep")]
)
def test_functions_that_grow(count: int, calls: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(functions(count, calls).SerializeToString())
    with pytest.raises(ModelError, match=words) as caught:
        read_model(path)
    assert "'call'" in caught.value.where and caught.value.exit_code == 3


def test_functions_within_the_bounds_are_inlined() -> None:
    assert len(inline_functions(functions(8, 2)).graph.node) == 2**8
    assert len(inline_functions(functions(DEEPEST, 1)).graph.node) == 1
    with pytest.raises(ModelError, match="256 MiB"):
        heavy = functions(14, 2)
        heavy.functions[0].node[0].name = "n" * (1 << 16)
        inline_functions(heavy)


def many_dimensions(where: str) -> onnx.ModelProto:
    """A tensor of 4,000 dimensions as an input, a weight, a number, a result, a stated type."""
    ones = [1] * 4000
    match where:
        case "input":
            return model([node("Relu", "x", "y")], {"x": ones}, "y")
        case "initializer":
            proto = model([node("Add", "x w", "y")], {"x": [1]}, "y")
            proto.graph.initializer.add(name="w", data_type=1, dims=ones, raw_data=bytes(4))
            return proto
        case "constant":
            tensor = onnx.TensorProto(data_type=1, dims=ones, raw_data=bytes(4))
            number = oh.make_node("Constant", [], ["c"], value=tensor)
            return model([number, node("Add", "x c", "y")], {"x": [1]}, "y")
        case "chain":
            names = ["x", *(f"v{index}" for index in range(100))]
            nodes = [
                node("Unsqueeze", f"{one} axis", two) for one, two in itertools.pairwise(names)
            ]
            return model(nodes, {"x": [1]}, names[-1], {"axis": integers(0)})
        case _:
            return model(
                [node("Reshape", "x shape", "y")], {"x": [1]}, "y", {"shape": integers(*ones)}
            )


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("input", "input 'x'"),
        ("initializer", "initializer 'w'"),
        ("constant", "constant 'c'"),
        ("chain", "'unsqueeze_v63'"),
        ("result", "'reshape_y'"),
    ],
)
def test_tensors_of_many_dimensions(where: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(many_dimensions(where).SerializeToString())
    with pytest.raises(ModelError, match=r"dimensions, expected at most 64") as caught:
        read_model(path)
    assert named in caught.value.where


def test_tensors_of_more_elements_than_bytes_can_be_counted(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(
        model([node("Relu", "x", "y")], {"x": [1 << 40, 1 << 40]}, "y").SerializeToString()
    )
    with pytest.raises(ModelError, match=r"expected at most .* elements") as caught:
        read_model(path)
    assert "input 'x'" in caught.value.where


def test_too_many_operator_sets(tmp_path: Path) -> None:
    proto = model(
        [node("Relu", "x", "y")], {"x": [2]}, "y", domains=[f"d{number}" for number in range(2000)]
    )
    with pytest.raises(ModelError, match=r"imports 2001 operator sets"):
        read_model(saved(proto, tmp_path))


def test_an_absent_weight_behind_many_transpositions(tmp_path: Path) -> None:
    names = [f"w{index}" for index in range(3001)]
    nodes = [node("Transpose", one, two) for one, two in itertools.pairwise(names)]
    proto = model([*nodes, node("MatMul", "x w3000", "y")], {"x": [2, 3]}, "y", types={"y": [2, 4]})
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="'w0', which no node writes"):
        read_model(path)


class Counted(set[str]):
    """A set that counts how often it is asked for a member."""

    asked = 0

    def __contains__(self, member: object) -> bool:
        self.asked += 1
        return super().__contains__(member)


def test_names_are_told_apart_in_linear_time() -> None:
    sweep = _ReaderState(*cast("Any", (None, None, None, None, None, None, {})), names=Counted())
    names = [_unique_name(sweep, each) for each in ("Relu_2", *["Relu"] * 1000)]
    assert names[:5] == ["Relu_2", "Relu", "Relu_1", "Relu_3", "Relu_4"] and len(set(names)) == 1001
    assert cast("Counted", sweep.names).asked < 3000


class Asked(tuple[str, ...]):
    """A tuple that may not be searched."""

    def __contains__(self, member: object) -> bool:
        raise AssertionError("outputs are searched one by one")


@pytest.mark.parametrize("step", [drop_output_identities, merge_equal_nodes])
def test_outputs_are_not_searched_for_each_node(step: Callable[[Graph], Graph]) -> None:
    names = [f"v{index}" for index in range(10)]
    nodes = tuple(Node(name, "Identity", ("x",), (name,)) for name in names)
    values = tuple(Value(name, DType.FLOAT32, (2,)) for name in names)
    graph = Graph(
        "test", 20, (Value("x", DType.FLOAT32, (2,)),), (), (), nodes, Asked(names), values
    )
    assert len(step(graph).nodes) == 10


@pytest.mark.parametrize("factor", ["c", "x"])
def test_chains_of_products_are_looked_at_in_linear_time(
    factor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["x", *(f"v{index}" for index in range(600))]
    nodes = [node("Mul", f"{one} {factor}", two) for one, two in itertools.pairwise(names)]
    proto = model(
        [constant("c", np.float32(1.5)), *nodes, node("Relu", names[-1], "y")], {"x": [2]}, "y"
    )
    graph = read_model(saved(proto, tmp_path)).graph
    looks = 0
    producer_of = View.producer_of

    def counted(view: View, name: str, *operators: str) -> Node | None:
        nonlocal looks
        looks += 1
        return producer_of(view, name, *operators)

    monkeypatch.setattr(View, "producer_of", counted)
    assert len(fuse_operators(graph).nodes) == 601
    assert looks < 600 * 100


def test_operations_of_what_a_node_computes() -> None:
    def counted(
        proto: onnx.NodeProto, *operands: np.ndarray, result: tuple[int, ...] | None
    ) -> int:
        found = None if result is None else Value("", DType.FLOAT32, result)
        return bound_operations(proto, operands, (found,))

    assert counted(node("Add", "a b", "y"), floats(4, 1), floats(4), result=(4, 4)) == 24
    assert (
        counted(node("MatMul", "a b", "y"), floats(2, 3), floats(3, 5), result=(2, 5)) >= 2 * 3 * 5
    )
    wide = node("MaxPool", "c", "y", kernel_shape=[30_001] * 2, pads=[15_000] * 4)
    assert counted(wide, floats(1, 1, 1, 1), result=(1, 1, 1, 1)) > MOST_OPERATIONS
    einsum = node("Einsum", "a b c d", "y", equation="a,b,c,d->")
    assert counted(einsum, *[floats(4000)] * 4, result=()) > MOST_OPERATIONS
    unknown = node("Range", "a b c", "y")
    assert (
        counted(unknown, *(np.asarray(each) for each in (0.0, 1e30, 1.0)), result=None)
        >= MOST_OPERATIONS
    )
    assert counted(unknown, *(np.asarray(each) for each in (0.0, 8.0, 2.0)), result=None) < 16
    assert (
        counted(node("Expand", "a b", "y"), floats(1), integers(1 << 40), result=None)
        > MOST_OPERATIONS
    )


def test_a_budget_is_spent_once() -> None:
    budget = Budget(10)
    assert [budget.spend(amount) for amount in (6, 6, 4, 1)] == [True, False, True, False]
