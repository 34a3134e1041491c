"""Copies of an embedding that an exporter transposed are tied again; what only looks like one is
not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import INT64, floats, model, node, saved
from tests.passes.frontend.reference import assert_close, random_feeds, run, run_read


def language_model(folder: Path, head: np.ndarray, name: str = "onnx::MatMul_12") -> Path:
    nodes = [
        node("Gather", "table x", "e"),
        node("Relu", "e", "h"),
        node("MatMul", f"h {name}", "y"),
    ]
    return saved(
        model(nodes, {"x": (INT64, [2, 3])}, "y", {"table": floats(2000, 8), name: head}), folder
    )


@pytest.mark.parametrize("name", ["onnx::MatMul_12", "val_7"])
def test_a_transposed_copy_is_tied(name: str, tmp_path: Path) -> None:
    path = language_model(tmp_path, np.ascontiguousarray(floats(2000, 8).T), name)
    read = read_model(path)
    assert [each.value.name for each in read.graph.parameters] == ["table"]
    feeds = random_feeds(read.graph)
    assert_close(run_read(read, feeds), run(path, feeds))


def test_a_copy_that_differs_in_its_last_number_is_not(tmp_path: Path) -> None:
    head = np.ascontiguousarray(floats(2000, 8).T)
    head[-1, -1] += 1
    assert len(read_model(language_model(tmp_path, head)).graph.parameters) == 2


def test_a_weight_with_a_name_of_its_own_is_not(tmp_path: Path) -> None:
    head = np.ascontiguousarray(floats(2000, 8).T)
    assert len(read_model(language_model(tmp_path, head, "head.weight")).graph.parameters) == 2


@pytest.mark.parametrize("exporter", ["dynamo", "script"])
def test_gpt2_has_as_many_weights_as_the_module_it_came_from(
    exported: Callable[[str, str, bool], Path], exporter: str
) -> None:
    """The head is tied, so its weight counts once."""
    read = read_model(exported("gpt2", exporter, True))
    layer = (32 * 96 + 96) + (32 * 32 + 32) + (32 * 128 + 128) + (128 * 32 + 32) + 4 * 32
    used = 64 if any(each.value.shape == (64, 32) for each in read.graph.parameters) else 16
    trained = [each.value.elements for each in read.graph.parameters if each.trainable]
    assert sum(trained) == 99 * 32 + used * 32 + 2 * layer + 2 * 32
