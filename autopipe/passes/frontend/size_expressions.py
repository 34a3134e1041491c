"""Evaluation of arithmetic expressions over the symbolic dimensions of a file, for example
`2*frames` and `floor(s0/2) + 1`. Exporters write them in sympy's syntax.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import lru_cache

_MAX_LENGTH = 500
"""Maximum number of characters of an expression. Longer text counts as one symbol."""
_MAX_NUMBER = 1 << 62
"""Maximum absolute value of a result and of each intermediate result."""
_MAX_EXPONENT = 64
"""Maximum exponent of a power."""


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return base ** exponent. Raises ValueError unless the exponent is an integer from 0 to
    `_MAX_EXPONENT` and the base is at most `_MAX_NUMBER` in absolute value.
    """
    if exponent.denominator != 1 or not 0 <= exponent <= _MAX_EXPONENT or abs(base) > _MAX_NUMBER:
        raise ValueError(
            f"the power {base} ** {exponent} is not supported: the exponent must be an integer "
            "from 0 to 64, and the base at most 2**62"
        )
    return Fraction(base ** int(exponent))


_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_CALLS: dict[str, Callable[..., Fraction]] = {
    "floor": lambda number: Fraction(math.floor(number)),
    "ceil": lambda number: Fraction(math.ceil(number)),
    "ceiling": lambda number: Fraction(math.ceil(number)),
    "max": max,
    "min": min,
    "mod": operator.mod,
    "floordiv": lambda left, right: Fraction(left // right),
    "cleandiv": operator.truediv,
}
"""Functions that an expression may call, by their names in lower case."""


def symbols_of(text: str) -> frozenset[str]:
    """Return the symbols in an expression. Text that cannot be parsed is a single symbol."""
    tree = _parse(text)
    if tree is None or isinstance(tree, ast.Name | ast.Attribute):
        return frozenset({text})
    return frozenset(_symbol_names(tree))


def size_of(text: str, symbols: Mapping[str, int]) -> int | None:
    """Return the value of the expression `text`. Returns None if a symbol has no value in
    `symbols`, or if the result is not an integer.
    """
    if text in symbols:
        return symbols[text]
    found = _evaluate_text(text, symbols)
    return int(found) if found is not None and found.denominator == 1 else None


def solve_symbol(text: str, size: int, symbols: Mapping[str, int]) -> dict[str, int]:
    """Return {symbol: value} such that the expression `text` equals `size`. The symbol must be the
    only one in the expression without a value in `symbols`.

    Returns {} if several symbols or none have no value, if the expression is not linear in the
    symbol (tested at 0, 1 and 7), or if the solution is not an integer >= 0.
    """
    unknown = sorted(symbols_of(text) - symbols.keys())
    if len(unknown) != 1 or unknown == [text]:
        return {}
    name = unknown[0]
    at_zero, at_one, at_seven = (
        _evaluate_text(text, {**symbols, name: number}) for number in (0, 1, 7)
    )
    if at_zero is None or at_one is None or at_seven is None:
        return {}
    slope = at_one - at_zero
    if not slope or at_seven - at_zero != 7 * slope:
        return {}
    solution = (size - at_zero) / slope
    return {name: int(solution)} if solution.denominator == 1 and solution >= 0 else {}


@lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr | None:
    """Return the syntax tree of an expression; None if the text is too long or cannot be parsed,
    such as a name that contains a blank.
    """
    if len(text) > _MAX_LENGTH:
        return None
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _symbol_names(tree: ast.expr) -> Iterable[str]:
    """Yield the symbols in a syntax tree."""
    match tree:
        case ast.Name(id=name):
            yield name
        case ast.Attribute():
            yield ast.unparse(tree)
        case ast.BinOp(left=left, right=right):
            yield from (*_symbol_names(left), *_symbol_names(right))
        case ast.UnaryOp(operand=operand):
            yield from _symbol_names(operand)
        case ast.Call(args=arguments):
            for each in arguments:
                yield from _symbol_names(each)


def _evaluate_text(text: str, symbols: Mapping[str, int | Fraction]) -> Fraction | None:
    """Return the value of the expression `text`; None if it is not arithmetic or if a symbol has no
    value.
    """
    tree = _parse(text)
    try:
        return None if tree is None else _evaluate_tree(tree, symbols)
    except (ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _evaluate_tree(tree: ast.expr, symbols: Mapping[str, int | Fraction]) -> Fraction:
    """Return the value of a syntax tree. Raises KeyError if a symbol or operator is unknown, and
    ValueError, TypeError or ArithmeticError if the tree is not arithmetic or cannot be evaluated.
    """
    match tree:
        case ast.Constant(value=int() as number):
            found = Fraction(number)
        case ast.Name() | ast.Attribute():
            found = Fraction(symbols[ast.unparse(tree)])
        case ast.BinOp(left=left, op=kind, right=right):
            found = _BINARY[type(kind)](
                _evaluate_tree(left, symbols), _evaluate_tree(right, symbols)
            )
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_evaluate_tree(operand, symbols)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            found = _CALLS[name.lower()](*(_evaluate_tree(each, symbols) for each in arguments))
        case _:
            raise ValueError("the expression is not arithmetic")
    if abs(found) > _MAX_NUMBER:
        raise ValueError(f"the size {found} is too large, expected at most {_MAX_NUMBER}")
    return found
