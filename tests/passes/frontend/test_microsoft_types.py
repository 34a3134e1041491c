"""Type inference of com.microsoft operators: the shapes are those of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import onnx.helper as oh
import pytest

from autopipe.ir.errors import ModelError
from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import floats, model
from tests.passes.frontend.reference import random_feeds, run

DOMAIN = "com.microsoft"


def path_of(operator: str, inputs: list[str], folder: Path, **attributes: object) -> Path:
    nodes = [oh.make_node(operator, inputs, ["y"], name="node", domain=DOMAIN, **attributes)]
    held = {"s": floats(6), "b": floats(6), "w": floats(2, 6, 5), "v": floats(2, 5, 6)}
    proto = model(
        nodes,
        {"x": [2, 3, 6]},
        "",
        {name: held[name] for name in inputs if name in held},
        domains=[DOMAIN],
    )
    proto.graph.output.append(oh.make_tensor_value_info("y", 1, [None, None, None]))
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    [
        ("Gelu", ["x"], {}),
        ("QuickGelu", ["x"], {}),
        ("FastGelu", ["x", "b"], {}),
        ("BiasGelu", ["x", "b"], {}),
        ("SkipLayerNormalization", ["x", "x", "s", "b"], {}),
        ("FusedMatMul", ["x", "w"], {"alpha": 0.5}),
        ("FusedMatMul", ["x", "v"], {"transB": 1}),
    ],
)
def test_shapes_are_those_of_onnxruntime(
    operator: str, inputs: list[str], attributes: dict[str, object], tmp_path: Path
) -> None:
    path = path_of(operator, inputs, tmp_path, **attributes)
    graph = read_model(path).graph
    assert graph.type_of("y").shape == run(path, random_feeds(graph))["y"].shape


def test_a_product_of_shapes_that_do_not_fit_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"\(2, 3, 6\), \(2, 5, 6\) do not fit"):
        read_model(path_of("FusedMatMul", ["x", "v"], tmp_path))


def test_too_many_results_are_rejected(tmp_path: Path) -> None:
    nodes = [oh.make_node("Gelu", ["x"], ["y", "z"], name="node", domain=DOMAIN)]
    path = tmp_path / "model.onnx"
    path.write_bytes(model(nodes, {"x": [2, 3]}, "y z", domains=[DOMAIN]).SerializeToString())
    with pytest.raises(ModelError, match="shape of the result 'z' is unknown"):
        read_model(path)
