"""Extents that a file spells as arithmetic over its symbols, such as `2*frames` or `floor(s0/2) + 1`.

Exporters write what sympy prints: sums, products, quotients, powers, and calls of a few functions.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import lru_cache

LONGEST = 500
"""Characters of an expression that are looked at."""
LARGEST = 1 << 62
"""Beyond this a number is no extent, and computing with it goes no further."""


def _power(base: Fraction, power: Fraction) -> Fraction:
    if power.denominator != 1 or not 0 <= power <= 64 or abs(base) > LARGEST:
        raise ValueError("no power of whole numbers")
    return Fraction(base ** int(power))


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
"""By their names in small letters."""


@lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr | None:
    """The tree of an expression; None for text that is none, such as a name with blanks in it."""
    if len(text) > LONGEST:
        return None
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def symbols_of(text: str) -> frozenset[str]:
    """The symbols of an expression, a symbol's own name among them."""
    tree = _parsed(text)
    return frozenset({text} if tree is None or isinstance(tree, ast.Name | ast.Attribute) else _names(tree))


def _names(tree: ast.expr) -> Iterable[str]:
    match tree:
        case ast.Name(id=name):
            yield name
        case ast.Attribute():
            yield ast.unparse(tree)
        case ast.BinOp(left=left, right=right):
            yield from (*_names(left), *_names(right))
        case ast.UnaryOp(operand=operand):
            yield from _names(operand)
        case ast.Call(args=arguments):
            for each in arguments:
                yield from _names(each)


def extent_of(text: str, symbols: Mapping[str, int]) -> int | None:
    """The extent that an expression comes to; None where a symbol is not bound or it comes to no whole number."""
    if text in symbols:
        return symbols[text]
    found = _value(text, symbols)
    return int(found) if found is not None and found.denominator == 1 else None


def _value(text: str, symbols: Mapping[str, int | Fraction]) -> Fraction | None:
    tree = _parsed(text)
    try:
        return None if tree is None else _computed(tree, symbols)
    except (ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _computed(tree: ast.expr, symbols: Mapping[str, int | Fraction]) -> Fraction:
    match tree:
        case ast.Constant(value=int() as number):
            found = Fraction(number)
        case ast.Name() | ast.Attribute():
            found = Fraction(symbols[ast.unparse(tree)])
        case ast.BinOp(left=left, op=kind, right=right):
            found = _BINARY[type(kind)](_computed(left, symbols), _computed(right, symbols))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_computed(operand, symbols)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            found = _CALLS[name.lower()](*(_computed(each, symbols) for each in arguments))
        case _:
            raise ValueError("not arithmetic")
    if abs(found) > LARGEST:
        raise ValueError("too large")
    return found


def solved(text: str, extent: int, symbols: Mapping[str, int]) -> dict[str, int]:
    """The one symbol of an expression that is not bound, where the expression is `extent` at one whole number of it.

    Only expressions that are linear in it are solved.
    """
    open_symbols = sorted(symbols_of(text) - symbols.keys())
    if len(open_symbols) != 1 or open_symbols == [text]:
        return {}
    name = open_symbols[0]
    at = [_value(text, {**symbols, name: number}) for number in (0, 1, 7)]
    if at[0] is None or at[1] is None or at[2] is None or at[1] == at[0] or at[2] - at[0] != 7 * (at[1] - at[0]):
        return {}
    number = (extent - at[0]) / (at[1] - at[0])
    return {name: int(number)} if number.denominator == 1 and number >= 0 else {}
