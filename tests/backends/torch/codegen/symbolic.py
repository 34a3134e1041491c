"""Symbolic evaluation of the source of a stage: equal expressions of equal symbols get one number.
Two sources with equal numbers of results compute equal values.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopipe.backends.torch.codegen.stage import ForwardSource

RANDOM_KEY = 2**32
"""Integers from this one on are keys of random operators."""
_Value = int | str
"""A symbol, or the path of the object that `p` or a loop variable refers to."""


@dataclass
class Evaluation(ast.NodeTransformer):
    """One evaluation of `forward`."""

    source: str
    attributes: Mapping[str, str | int]
    """Content of each attribute of `p`, as in `StageAttributes`."""
    symbols: dict[str, int]
    """Number of each expression; shared by the evaluations that are compared."""
    environment: dict[str, _Value] = field(default_factory=dict)

    def symbol(self, text: str) -> int:
        return self.symbols.setdefault(text, len(self.symbols))

    def __post_init__(self) -> None:
        self.functions = {
            each.name: each
            for each in ast.parse(self.source).body
            if isinstance(each, ast.FunctionDef)
        }

    def results(self) -> list[int]:
        """Return the symbols of the results of `forward`."""
        names = [each.arg for each in self.functions["forward"].args.args[1:]]
        arguments = [self.symbol(f"input {index}") for index in range(len(names))]
        return self.call("forward", "", arguments)

    def call(self, name: str, layer: str, arguments: Sequence[int]) -> list[int]:
        """Return the results of a function. `layer` is the path of the object that it gets as
        `p`.
        """
        outer = self.environment
        function = self.functions[name]
        names = [each.arg for each in function.args.args[1:]]
        self.environment = {"p": layer, **dict(zip(names, arguments, strict=True))}
        found: list[int] = []
        for statement in function.body:
            if isinstance(statement, ast.Return):
                assert isinstance(statement.value, ast.expr)
                found = self.values(statement.value)
            else:
                self.run(statement)
        self.environment = outer
        return found

    def values(self, expression: ast.expr) -> list[int]:
        """Return the symbols of the elements of nested tuples, or of one value."""
        if isinstance(expression, ast.Tuple):
            return [value for each in expression.elts for value in self.values(each)]
        return [self.value(expression)]

    def value(self, expression: ast.expr) -> int:
        if isinstance(expression, ast.Name) and expression.id in self.environment:
            found = self.environment[expression.id]
            assert isinstance(found, int)
            return found
        # `[x]` and `x.pop()` let a function free its argument.
        if isinstance(expression, ast.List) and len(expression.elts) == 1:
            return self.value(expression.elts[0])
        if ast.unparse(expression).endswith(".pop()"):
            assert isinstance(expression, ast.Call)
            assert isinstance(expression.func, ast.Attribute)
            return self.value(expression.func.value)
        if (content := self.content(expression)) is not None:
            return self.symbol(content)
        if isinstance(expression, ast.Call) and (name := called(expression)).startswith("loop_"):
            layer = self.path(expression.args[0])
            assert layer is not None
            operands = [self.value(each) for each in expression.args[1:]]
            return self.symbol(f"{self.loop_text(name, layer)} {operands}")
        copied = ast.parse(ast.unparse(expression), mode="eval").body
        return self.symbol(ast.unparse(self.visit(copied)))

    def loop_text(self, name: str, layer: str) -> str:
        """Return the source of a function `loop_N` without its name, with symbols in place of
        parameters and with numbers in place of the names of variables.
        """
        outer = self.environment
        self.environment = {"p": layer}
        text = "\n".join(
            ast.unparse(self.visit(ast.parse(ast.unparse(each)).body[0]))
            for each in self.functions[name].body
        )
        self.environment = outer
        numbers: dict[str, int] = {}
        return re.sub(
            r"\bx\d+\b", lambda match: f"v{numbers.setdefault(match[0], len(numbers))}", text
        )

    def path(self, node: ast.AST) -> str | None:
        """Return the path of an object that is `p`, a layer, a list of layers or an attribute of
        these; None for another expression.
        """
        if isinstance(node, ast.Name):
            found = self.environment.get(node.id)
            return found if isinstance(found, str) else None
        if isinstance(node, ast.Attribute) and (outer := self.path(node.value)) is not None:
            return f"{outer}.{node.attr}".removeprefix(".")
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            outer = self.path(node.value)
            return None if outer is None else f"{outer}.{node.slice.value}"
        return None

    def content(self, node: ast.AST) -> str | None:
        """Return what identifies a parameter, a constant or a random key, None for another
        expression.
        """
        if isinstance(node, ast.Constant):
            is_key = type(node.value) is int and node.value >= RANDOM_KEY
            return f"attribute {node.value}" if is_key else None
        path = self.path(node)
        return f"attribute {self.attributes[path]}" if path in self.attributes else None

    def generic_visit(self, node: ast.AST) -> ast.AST:
        is_variable = isinstance(node, ast.Name) and isinstance(self.environment.get(node.id), int)
        if is_variable or self.content(node) is not None:
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
            assert isinstance(statement.target, ast.Name)
            for layer in self.layers(statement.iter):
                self.environment[statement.target.id] = layer
                for each in statement.body:
                    self.run(each)
        else:
            assert isinstance(statement, ast.Assign)
            self.assign(statement)

    def layers(self, expression: ast.expr) -> list[str]:
        """Return the paths of the layers in a list or in a slice of it."""
        chosen = slice(None)
        if isinstance(expression, ast.Subscript):
            assert isinstance(expression.slice, ast.Slice)
            ends = (expression.slice.lower, expression.slice.upper)
            chosen = slice(*(ast.literal_eval(each) for each in ends if each is not None))
            expression = expression.value
        path = self.path(expression)
        assert path is not None
        matches = (re.match(rf"{re.escape(path)}\.(\d+)\.", each) for each in self.attributes)
        numbers = sorted({int(match[1]) for match in matches if match is not None})
        return [f"{path}.{number}" for number in numbers][chosen]

    def assign(self, statement: ast.Assign) -> None:
        (target,) = statement.targets
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        value = statement.value
        name = called(value) if isinstance(value, ast.Call) else ""
        if isinstance(value, ast.Call) and name in self.functions and not name.startswith("loop_"):
            layer = self.path(value.args[0])
            assert layer is not None
            arguments = [self.value(each) for each in value.args[1:]]
            self.bind(targets, self.call(name, layer, arguments))
            return
        symbol = self.value(value)
        found = [symbol]
        if isinstance(target, ast.Tuple):
            found = [self.symbol(f"{symbol}[{index}]") for index in range(len(targets))]
        self.bind(targets, found)

    def bind(self, targets: Sequence[ast.expr], values: Sequence[int]) -> None:
        """Assign values to variables."""
        for target, value in zip(targets, values, strict=True):
            assert isinstance(target, ast.Name)
            self.environment[target.id] = value


def called(call: ast.Call) -> str:
    """Return the name of the function that a call calls, "" if it is not a plain name."""
    return call.func.id if isinstance(call.func, ast.Name) else ""


def assert_same_results(one: ForwardSource, other: ForwardSource) -> None:
    """Assert that two sources of a stage compute equal results."""
    symbols: dict[str, int] = {}
    results = [
        Evaluation(each.text, dict(each.attributes), symbols).results() for each in (one, other)
    ]
    assert results[0] == results[1]
