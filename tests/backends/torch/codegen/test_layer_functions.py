"""Stages with one function per layer: they compute what the flat form computes, statement for
statement, by symbolic evaluation of both sources.
"""

from __future__ import annotations

import ast
import keyword
import textwrap
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.backends.torch.codegen.identifiers import identifier
from autopipe.backends.torch.codegen.layer_functions import fold_layers
from autopipe.backends.torch.codegen.layered_forward import ModelNames, layered_forward
from autopipe.backends.torch.codegen.segment_functions import SegmentBody, segment_calls
from autopipe.backends.torch.codegen.stage import ForwardSource, emit_forward
from autopipe.backends.torch.codegen.statement import Statement, wrapped_call
from autopipe.backends.torch.codegen.value_names import NameHint
from autopipe.passes.lower.lower import one_device_program
from tests.backends.torch.codegen.symbolic import assert_same_results
from tests.distributed.support.zoo import SIZES, small_graph


@pytest.mark.parametrize("name", sorted(SIZES))
def test_models_of_the_zoo(name: str) -> None:
    graph, loss = small_graph(name)
    (stage,) = one_device_program(graph, 2, 12, loss).stages
    for is_training in (False, True):
        assert_same_results(emit_forward(stage), emit_forward(stage, "layers", is_training))


@pytest.mark.parametrize("name", ["gpt", "llama", "mmt"])
def test_repeated_layers_become_a_function(name: str) -> None:
    graph, loss = small_graph(name)
    (stage,) = one_device_program(graph, 2, 12, loss).stages
    flat = emit_forward(stage).text.count("\n")
    folded = emit_forward(stage, "layers").text
    assert folded.count("\n") < flat
    assert "def layer_forward(" in folded or "def branch" in folded


def flat_source(statements: Sequence[Statement], result: str) -> ForwardSource:
    lines = [line for each in statements for line in each.lines()]
    text = "\n".join(["def forward(p, x0, x1):", *lines, f"    return ({result},)", ""])
    count = sum(each.code.count("p.w") for each in statements)
    attributes = tuple((f"w{index}", f"w{index}") for index in range(count))
    return ForwardSource(text, ("x0", "x1"), (result,), (), {}, attributes)


def layered_source(
    statements: Sequence[Statement],
    result: str,
    names: ModelNames,
    moves_arguments: bool = False,
) -> ForwardSource:
    items = fold_layers(statements, [result], names.parameters, set())
    arguments = {"x0": "tokens", "x1": "hidden"}
    found = layered_forward(items, arguments, {result: ""}, names, moves_arguments)
    return ForwardSource(found.text, found.arguments, found.results, (), {}, found.attributes)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[list[Statement], str]:
    """A body with a repeated part, random operands, and a `del` after the last use of a value."""
    part = draw(
        st.lists(st.sampled_from(["F.linear", "torch.add", "torch.split"]), min_size=2, max_size=6)
    )
    count = draw(st.integers(2, 4))
    operators = [
        *draw(st.lists(st.sampled_from(["F.linear", "torch.add"]), max_size=2)),
        *part * count,
    ]
    offsets = [draw(st.integers(1, 4)) for _ in part]
    known = ["x0", "x1"]
    parameters = 0
    drafts: list[tuple[tuple[str, ...], str, list[str]]] = []
    for index, operator in enumerate(operators):
        offset = offsets[index % len(part)] if draw(st.booleans()) else draw(st.integers(1, 4))
        operands = [known[-1], known[max(0, len(known) - offset)]]
        if operator == "F.linear":
            code = f"F.linear({operands[0]}, p.w{parameters})"
            operands = operands[:1]
            parameters += 1
        else:
            code = f"{operator}({operands[0]}, {operands[1]})"
        targets = [f"x{len(known)}"]
        if operator == "torch.split":
            targets.append(f"x{len(known) + 1}")
        drafts.append((tuple(targets), code, operands))
        known += targets
    result = known[-1]
    last: dict[str, int] = {}
    for index, (_, _, operands) in enumerate(drafts):
        last |= dict.fromkeys(operands, index)
    statements = [
        Statement(
            targets,
            code,
            tuple(
                each for each in dict.fromkeys(operands) if last[each] == index and each != result
            ),
        )
        for index, (targets, code, operands) in enumerate(drafts)
    ]
    return statements, result


@st.composite
def names(draw: st.DrawFn) -> ModelNames:
    """Names of parameters, and hints and sizes of variables, that often collide."""
    words = st.sampled_from(
        ["layers", "0", "1", "norm", "weight", "p", "del", "weight_2", "hidden"]
    )
    paths = st.lists(words, max_size=4).map(".".join)
    stems = st.sampled_from(["hidden", "query", "hidden_2", "norm"])
    follows = st.none() | st.integers(0, 40).map("x{}".format)
    hints = st.builds(NameHint, stems, follows)
    return ModelNames(
        {f"p.w{index}": draw(paths) for index in range(12)},
        {},
        {f"x{index}": draw(hints) for index in range(2, 20)},
        {f"x{index}": draw(st.sampled_from([1, 10**6])) for index in range(20)},
    )


@settings(deadline=None, max_examples=400)
@given(bodies(), names(), st.booleans())
def test_any_body(
    case: tuple[list[Statement], str], known: ModelNames, moves_arguments: bool
) -> None:
    statements, result = case
    layered = layered_source(statements, result, known, moves_arguments)
    assert_same_results(flat_source(statements, result), layered)


@given(st.text(max_size=60))
@settings(max_examples=1000)
def test_identifiers_of_any_text(text: str) -> None:
    found = identifier(text)
    assert found.isidentifier() and found.isascii()
    assert not keyword.iskeyword(found)
    assert found not in {"p", "torch", "F", "operators", "forward", "weights", "sum", "exec"}


HOSTILE: Mapping[str, str] = {
    "p.w0": 'layers.0."""\nimport os; os.system("touch /tmp/x")\n"""',
    "p.w1": 'layers.1."""\nimport os; os.system("touch /tmp/x")\n"""',
}


def test_names_of_parameters_add_no_code() -> None:
    statements = [
        Statement(("x1",), "F.linear(x0, p.w0)"),
        *(Statement((f"x{index + 1}",), f"torch.tanh(x{index})") for index in range(1, 9)),
        Statement(("x10",), "F.linear(x9, p.w1)"),
        *(Statement((f"x{index + 1}",), f"torch.tanh(x{index})") for index in range(10, 18)),
    ]
    text = layered_source(statements, "x18", ModelNames(HOSTILE, {}, {}, {})).text
    tree = ast.parse(text)
    assert [type(each) for each in tree.body] == [ast.FunctionDef, ast.FunctionDef]
    assert not [each for each in ast.walk(tree) if isinstance(each, ast.Import)]


def test_equal_segments_share_a_function() -> None:
    bodies = [
        SegmentBody(
            number,
            (
                Statement((f"x{2 * number + 1}",), f"F.linear(x{2 * number}, p.w{number})"),
                Statement((f"x{2 * number + 2}",), f"{function}(x{2 * number + 1})"),
            ),
            (f"x{2 * number}",),
            (f"x{2 * number + 2}",),
            (),
        )
        for number, function in enumerate(("torch.tanh", "torch.relu", "torch.tanh", "torch.tanh"))
    ]
    names = {f"p.w{number}": f"layers.{number}.up.weight" for number in range(4)}
    calls = segment_calls(bodies, names, set())
    assert [each.instance for each in calls] == [0, 0, 1, 2]
    assert [each.function.name for each in calls] == [
        "layer_forward",
        "segment_1",
        "layer_forward",
        "layer_forward",
    ]
    found = layered_forward(calls, {"x0": "x"}, {"x8": ""}, ModelNames(names, {}, {}, {}))
    assert dict(found.attributes) == {
        "layers.0.up.weight": "w0",
        "layers.1.up.weight": "w2",
        "layers.2.up.weight": "w3",
        "layers_1.up.weight": "w1",
    }
    assert found.text.startswith(
        "@recompute\n"
        "def layer_forward(p, hidden):\n"
        '    """One of the 3 layers `p.layers`."""\n'
        "    hidden = F.linear(hidden, p.up.weight)\n"
        "    hidden = torch.tanh(hidden)\n"
        "    return (hidden,), ()\n"
    )


def test_long_calls_are_wrapped_inside_of_parentheses() -> None:
    names = [f"p.w{index}" for index in range(60)]
    text = "\n".join(wrapped_call(f"    x1, x2 = layer({', '.join(names)})", "    "))
    assert max(map(len, text.splitlines())) <= 120
    (statement,) = ast.parse(textwrap.dedent(text)).body
    assert isinstance(statement, ast.Assign)
