"""What became of the nodes of a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.model import owners_of
from tests.passes.annotations.models import feed_forward
from tests.passes.frontend.building import model, node, saved


def test_each_node_of_the_graph_has_one_of_the_file(tmp_path: Path) -> None:
    read = read_model(feed_forward(tmp_path))
    names = [each.title for each in read.origins]
    owners = dict(zip(names, owners_of(read.origins), strict=True))
    writers = {each.writes for each in read.origins} - {None}
    assert writers == set(range(len(read.graph.nodes)))
    gelu = next(index for index, each in enumerate(read.graph.nodes) if each.op == "Gelu")
    assert owners["Erf 'erf_b'"] == owners["Mul 'mul_bent'"] == gelu, (
        "an operator that was spelt out"
    )
    assert owners["Identity 'identity_y'"] == owners["Softmax 'softmax_soft'"], (
        "another name for an output"
    )
    (dropped,) = (each for each in read.origins if each.title.startswith("Dropout"))
    assert dropped.values == (("up", "up"), ("dropped", "up"))
    assert (dropped.writes, dropped.renames) == (None, owners["MatMul ''"])


def test_a_node_made_of_others_takes_the_place_of_one(tmp_path: Path) -> None:
    nodes = [
        node("Transpose", "k", "kt", perm=[0, 2, 3, 1]), node("MatMul", "q kt", "scores"),
        node("Mul", "scores scale", "scaled"), node("Softmax", "scaled", "p", axis=-1), node("MatMul", "p v", "y"),
    ]  # fmt: skip
    inputs = {"q": [2, 4, 5, 8], "k": [2, 5, 4, 8], "v": [2, 4, 5, 8]}
    read = read_model(
        saved(model(nodes, inputs, "y", {"scale": np.array(0.5, dtype=np.float32)}), tmp_path)
    )
    assert [each.name for each in read.graph.nodes] == ["matmul_y/key_0", "matmul_y"]
    assert [each.writes for each in read.origins] == [0, None, None, None, 1]
    assert owners_of(read.origins) == (0, 1, 1, 1, 1)
