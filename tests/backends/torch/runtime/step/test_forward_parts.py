"""A `forward` that is divided into parts computes what the undivided one computes."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.backends.torch.runtime.step.forward_parts import divide_forward
from autopipe.passes.lower.lower import one_device_program
from tests.distributed.support.zoo import small_graph

NAMES = ("a", "b", "c")


@st.composite
def sources(draw: st.DrawFn) -> str:
    """A `forward` with calls of `layer`, loops over them, reused names and `del`."""
    lines = []
    known = ["x", "y"]
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["add", "call", "loop", "del"]))
        operand = draw(st.sampled_from(known))
        target = draw(st.sampled_from(NAMES))
        if kind == "del" and len(known) > 1:
            lines.append(f"    del {operand}")
            known.remove(operand)
            continue
        if kind == "loop":
            lines += [
                f"    {target} = {operand}",
                "    for each in p:",
                f"        {target} = layer(each, {target})",
            ]
        elif kind == "call":
            lines.append(f"    {target} = layer(p[0], {operand})")
        else:
            lines.append(f"    {target} = 2 * {operand} + {draw(st.sampled_from(known))}")
        known = [*dict.fromkeys((*known, target))]
    returned = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
    return "\n".join(["def forward(p, x, y):", *lines, f"    return ({', '.join(returned)},)"])


def counting(calls: list[object]) -> Callable[[int, int], int]:
    """Return a layer that records its calls."""

    def layer(weight: int, value: int) -> int:
        calls.append((weight, value))
        return 3 * value - weight

    return layer


@settings(deadline=None, max_examples=150)
@given(sources())
def test_any_source(source: str) -> None:
    calls: list[object] = []
    scope: dict[str, Any] = {"layer": counting(calls)}
    exec(source, scope)
    expected = scope["forward"]([1, 2, 3], 5, 7)
    expected_calls = list(calls)
    calls.clear()
    divided = divide_forward(source, {"layer"})
    forward = divided.define(scope)
    assert forward([1, 2, 3], 5, 7) == expected
    assert calls == expected_calls
    # Every statement that computes something is in a part or calls the layer.
    (tree,) = (
        each
        for each in ast.parse(divided.source).body
        if isinstance(each, ast.FunctionDef) and each.name == "forward"
    )
    called = {"layer", *divided.parts}
    for statement in tree.body[:-1]:
        assert isinstance(statement, ast.Delete) or called & {
            each.id for each in ast.walk(statement) if isinstance(each, ast.Name)
        }


@pytest.mark.parametrize("is_training", [True, False])
def test_parts_of_a_model(is_training: bool) -> None:
    graph, loss = small_graph("gpt")
    (stage,) = one_device_program(graph, 2, 12, loss).stages
    source = emit_forward(stage, "layers", is_training).text
    divided = divide_forward(source, {"layer_forward"})
    assert len(divided.parts) == 2
    assert "F.embedding" in divided.source and "F.cross_entropy" in divided.source
