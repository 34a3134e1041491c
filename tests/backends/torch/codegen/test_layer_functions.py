"""Stages with one function per layer: they compute what the flat form computes, statement for
statement, by symbolic evaluation of both sources.
"""

from __future__ import annotations

import ast
import keyword
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.backends.torch.codegen.block import identifier
from autopipe.backends.torch.codegen.layer_functions import fold_layers
from autopipe.backends.torch.codegen.segment_functions import SegmentBody, fold_segments
from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.backends.torch.codegen.statement import Statement, wrapped_call
from autopipe.passes.lower.lower import one_device_program
from tests.distributed.support.zoo import SIZES, small_graph

RANDOM_KEY = 2**32
"""Integers from this one on are keys of random operators, which a call may pass."""


@dataclass
class Evaluation(ast.NodeTransformer):
    """Symbolic evaluation of `forward`: equal expressions of equal symbols get one number."""

    source: str
    symbols: dict[str, int]
    """Number of each expression; shared by the evaluations that are compared."""
    environment: dict[str, int | list[int]] = field(default_factory=dict)

    def symbol(self, text: str) -> int:
        return self.symbols.setdefault(text, len(self.symbols))

    def __post_init__(self) -> None:
        tree = ast.parse(self.source)
        self.functions = {
            each.name: each
            for each in tree.body
            if isinstance(each, ast.FunctionDef) and not each.name.startswith(("loop_", "segment_"))
        }

    def results(self) -> list[int]:
        """Return the symbols of the results of `forward`."""
        names = [each.arg for each in self.functions["forward"].args.args[1:]]
        return self.call("forward", [self.symbol(f"input {index}") for index in range(len(names))])

    def call(self, name: str, arguments: Sequence[int]) -> list[int]:
        outer = self.environment
        function = self.functions[name]
        names = [each.arg for each in function.args.args[1:]]
        self.environment = dict(zip(names, arguments, strict=True))
        found: list[int] = []
        for statement in function.body:
            if isinstance(statement, ast.Return):
                assert statement.value is not None
                found = self.values(statement.value)
            else:
                self.run(statement)
        self.environment = outer
        return found

    def values(self, expression: ast.expr) -> list[int]:
        elements = expression.elts if isinstance(expression, ast.Tuple) else [expression]
        return [self.value(each) for each in elements]

    def value(self, expression: ast.expr) -> int:
        if isinstance(expression, ast.Name) and expression.id in self.environment:
            found = self.environment[expression.id]
            assert isinstance(found, int)
            return found
        if self.is_token(expression):
            return self.symbol(ast.unparse(expression))
        copied = ast.parse(ast.unparse(expression), mode="eval").body
        return self.symbol(ast.unparse(self.visit(copied)))

    def is_token(self, node: ast.AST) -> bool:
        """True for a parameter, a constant and the key of a random operator."""
        if isinstance(node, ast.Attribute):
            is_held = isinstance(node.value, ast.Name) and node.value.id == "p"
            return is_held and node.attr[:1] in "wc" and node.attr[1:].isdigit()
        return (
            isinstance(node, ast.Constant) and type(node.value) is int and node.value >= RANDOM_KEY
        )

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if self.is_token(node) or (isinstance(node, ast.Name) and node.id in self.environment):
            return ast.Name(f"symbol_{self.value(node)}")  # type: ignore[arg-type]
        return super().generic_visit(node)

    def run(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Expr):
            assert isinstance(statement.value, ast.Constant), "only a docstring has no target"
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                assert isinstance(target, ast.Name)
                del self.environment[target.id]
        elif isinstance(statement, ast.For):
            assert isinstance(statement.iter, ast.Tuple)
            assert isinstance(statement.target, ast.Name)
            for row in statement.iter.elts:
                self.environment[statement.target.id] = self.values(row)
                for each in statement.body:
                    self.run(each)
        else:
            assert isinstance(statement, ast.Assign)
            self.assign(statement)

    def assign(self, statement: ast.Assign) -> None:
        (target,) = statement.targets
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        value = statement.value
        if (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Name)
            and value.func.id in self.functions
        ):
            arguments: list[int] = []
            for each in value.args[1:]:
                if isinstance(each, ast.Starred):
                    assert isinstance(each.value, ast.Name)
                    weights = self.environment[each.value.id]
                    assert isinstance(weights, list)
                    arguments += weights
                else:
                    arguments.append(self.value(each))
            found = self.call(value.func.id, arguments)
        else:
            symbol = self.value(value)
            found = [symbol]
            if isinstance(target, ast.Tuple):
                found = [self.symbol(f"{symbol}[{index}]") for index in range(len(targets))]
        for each, result in zip(targets, found, strict=True):
            assert isinstance(each, ast.Name)
            self.environment[each.id] = result


def assert_same_results(flat: str, folded: str) -> None:
    symbols: dict[str, int] = {}
    expected = Evaluation(flat, symbols).results()
    assert Evaluation(folded, symbols).results() == expected


@pytest.mark.parametrize("name", sorted(SIZES))
def test_models_of_the_zoo(name: str) -> None:
    graph, loss = small_graph(name)
    (stage,) = one_device_program(graph, 2, 12, loss).stages
    assert_same_results(emit_forward(stage).text, emit_forward(stage, "layers").text)


@pytest.mark.parametrize("name", ["gpt", "llama", "mmt"])
def test_repeated_layers_become_a_function(name: str) -> None:
    graph, loss = small_graph(name)
    (stage,) = one_device_program(graph, 2, 12, loss).stages
    flat = emit_forward(stage).text.count("\n")
    folded = emit_forward(stage, "layers").text
    assert folded.count("\n") < 0.8 * flat
    assert "def layer(" in folded or "def branch" in folded


def source(statements: Sequence[Statement], arguments: Sequence[str], results: str) -> str:
    lines = [line for each in statements for line in each.lines()]
    head = f"def forward({', '.join(['p', *arguments])}):"
    return "\n".join([head, *lines, f"    return ({results},)", ""])


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


@settings(deadline=None, max_examples=400)
@given(bodies())
def test_any_body(case: tuple[list[Statement], str]) -> None:
    statements, result = case
    folded = fold_layers(statements, [result], {})
    head = "def forward(p, x0, x1):"
    returned = folded.renamed.get(result, result)
    text = "\n".join([*folded.functions, head, *folded.lines, f"    return ({returned},)", ""])
    assert_same_results(source(statements, ["x0", "x1"], result), text)


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
    (function,) = fold_layers(statements, ["x18"], HOSTILE).functions
    tree = ast.parse(function)
    assert [type(each) for each in tree.body] == [ast.FunctionDef]
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
    (found,) = fold_segments(bodies, names)
    assert found.weights == {0: ("p.w0",), 2: ("p.w2",), 3: ("p.w3",)}
    assert found.text == (
        "@recompute\n"
        "def layer(p, weights, v0):\n"
        '    """One of 3 equal layers."""\n'
        "    (up_weight,) = weights\n"
        "    v1 = F.linear(v0, up_weight)\n"
        "    v2 = torch.tanh(v1)\n"
        "    return (v2,), ()\n"
    )


def test_long_calls_are_wrapped_inside_of_parentheses() -> None:
    names = [f"p.w{index}" for index in range(60)]
    text = "\n".join(wrapped_call(f"    x1, x2 = layer({', '.join(names)})", "    "))
    assert max(map(len, text.splitlines())) <= 120
    (statement,) = ast.parse(textwrap.dedent(text)).body
    assert isinstance(statement, ast.Assign)
