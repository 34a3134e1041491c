"""Samples with ignored labels may pad the last batch if they change neither loss nor gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.ir.errors import ConfigurationError
from autopipe.passes.analysis.training import check_padding
from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import INT64, floats, integers, model, node, saved

X: list[int | str | None] = ["samples", 6]
LABELS: tuple[int, list[str]] = (INT64, ["samples"])
LOSS = node("SoftmaxCrossEntropyLoss", "scores labels", "loss", ignore_index=-100)


@pytest.mark.parametrize(
    ("operator", "attributes"),
    [("Flatten", {"axis": 0}), ("Reshape", {}), ("Unsqueeze", {}), ("Exp", {})],
)
def test_operators_that_keep_the_elements_may_follow_the_loss(
    operator: str, attributes: dict[str, int], tmp_path: Path
) -> None:
    operands = "loss one" if operator in ("Reshape", "Unsqueeze") else "loss"
    one = integers(1) if operator == "Reshape" else integers(0)
    nodes = [
        node("MatMul", "x weight", "scores"),
        LOSS,
        node(operator, operands, "result", **attributes),
    ]
    held = {"weight": floats(6, 4)} | ({"one": one} if "one" in operands else {})
    result = model(nodes, {"x": X, "labels": LABELS}, "result", held)
    graph = read_model(saved(result, tmp_path)).graph
    if operator == "Exp":
        with pytest.raises(ConfigurationError, match="the loss is computed by Exp"):
            check_padding(graph, "result")
    else:
        check_padding(graph, "result")
