"""Division of a generated `forward` into functions that torch.compile compiles separately.

A stage with repeated layers has one function per layer class, which `forward` calls. If torch
compiled `forward` as a whole, it would compile each call. So the statements between the calls of
generated functions become functions too, and `forward` itself, which then only calls functions,
runs eagerly.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

PART_NAME = "forward_part_{number}"
"""Name of the function of a part of `forward`."""


@dataclass(frozen=True, slots=True)
class DividedForward:
    """The source of a `forward` that calls its parts, and of the parts."""

    source: str
    parts: tuple[str, ...]
    """Names of the functions of the parts."""

    def define(self, scope: dict[str, Any]) -> FunctionType:
        """Define the parts in `scope`, the global names of the generated module, and return the
        `forward` that calls them.
        """
        made: dict[str, Any] = {}
        exec(compile(self.source, "<parts of forward>", "exec"), scope, made)  # noqa: S102
        for name in self.parts:
            scope[name] = made[name]
        forward = made["forward"]
        assert isinstance(forward, FunctionType)
        return forward


def divide_forward(source: str, functions: Collection[str]) -> DividedForward:
    """Return the `forward` of a generated module in which each sequence of statements that call
    none of `functions` is a function of its own.

    A part gets the variables that it reads and returns the variables that later statements read.
    Time is linear in the number of statements times the number of variables.
    """
    tree = ast.parse(source)
    (forward,) = (
        each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "forward"
    )
    *body, returned = forward.body
    texts: list[str] = []
    names: list[str] = []
    lines: list[ast.stmt] = []
    known = [each.arg for each in forward.args.args]
    for is_call, statements in _runs(body, functions):
        run = statements
        if not is_call:
            rest = [*body[body.index(statements[-1]) + 1 :], returned]
            name = PART_NAME.format(number=len(names))
            text, run = _part(name, statements, known, rest)
            texts.append(text)
            names.append(name)
        lines += run
        for statement in run:
            known = [*dict.fromkeys((*known, *_names(statement, ast.Store)))]
            deleted = _names(statement, ast.Del)
            known = [each for each in known if each not in deleted]
    forward.body = [*lines, returned]
    texts.append(ast.unparse(forward))
    return DividedForward("\n\n".join(texts), tuple(names))


def _runs(
    body: Sequence[ast.stmt], functions: Collection[str]
) -> list[tuple[bool, list[ast.stmt]]]:
    """Return the consecutive statements that do, or do not, call one of `functions`, as
    (do they call one, statements).
    """
    found: list[tuple[bool, list[ast.stmt]]] = []
    for statement in body:
        calls = any(name in functions for name in _names(statement, ast.Load))
        if not found or found[-1][0] is not calls:
            found.append((calls, []))
        found[-1][1].append(statement)
    return found


def _part(
    name: str, statements: Sequence[ast.stmt], known: Sequence[str], rest: Sequence[ast.stmt]
) -> tuple[str, list[ast.stmt]]:
    """Return (source, call): the source of the function `name` with the given statements, and the
    statements that call it. `known` are the variables before the part, and `rest` are the
    statements after it.
    """
    read = _names_read_first(statements)
    deleted = {each for statement in statements for each in _names(statement, ast.Del)}
    arguments = [each for each in known if each in read]
    bound: set[str] = set()
    for statement in statements:
        bound.update(_names(statement, ast.Store))
        bound.difference_update(_names(statement, ast.Del))
    results = sorted(bound & _names_read_first(rest))
    body = "\n".join(ast.unparse(each) for each in statements)
    lines = [*body.splitlines(), f"return ({''.join(f'{each}, ' for each in results)})"]
    text = f"def {name}({', '.join(arguments)}):\n" + "\n".join(f"    {each}" for each in lines)
    target = f"({''.join(f'{each}, ' for each in results)}) = " if results else ""
    call = f"{target}{name}({', '.join(arguments)})"
    freed = [each for each in known if each in deleted and each not in results]
    if freed:
        call += f"\ndel {', '.join(freed)}"
    return text, ast.parse(call).body


def _names_read_first(statements: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements read or delete before they assign them."""
    found: set[str] = set()
    assigned: set[str] = set()
    for statement in statements:
        used = (*_names(statement, ast.Load), *_names(statement, ast.Del))
        found.update(each for each in used if each not in assigned)
        assigned.update(_names(statement, ast.Store))
    return found


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> list[str]:
    """Return the names that a statement reads (`ast.Load`), assigns (`ast.Store`) or deletes
    (`ast.Del`).
    """
    return [
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    ]
