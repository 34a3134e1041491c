"""Blocks of statements that codegen compares, to find blocks that can share a function, and the
names inside such a function.

A token is a variable, a parameter, a constant or a random key (the key of a random operator). The
*canonical form* of a block is its text with each token replaced by a number, in the order of first
occurrence. Blocks with equal canonical forms can share a function whose arguments are the tokens
that the block does not compute.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from autopipe.backends.torch.codegen.statement import Statement
from autopipe.ir.layer_names import DEFAULT_NAME, layer_name, suffix_after_number

TOKEN: Final = re.compile(r"\bp\.w\d+\b|\bp\.c\d+\b|\bx\d+\b|\b0x[0-9a-f]{16}\b")
"""Pattern of a token: a parameter, a constant, a variable, or a random key (the key of a random
operator).
"""
ARGUMENT_ORDER: Final = {"x": 0, "w": 1, "c": 2, "k": 3}
"""Order of the arguments of a function: variables, parameters, constants, random keys."""
_DEFAULT_STEMS: Final = {"w": "weight", "c": "constant", "k": "random_key"}
"""Name of an argument whose name in the model is of no use, by the kind of the token."""
_RESERVED: Final = (
    frozenset(
        {"p", "torch", "F", "operators", "recompute", "forward", "math", "weights", *dir(builtins)}
    )
    | frozenset(keyword.kwlist)
    | frozenset(keyword.softkwlist)
)
"""Names that generated functions, arguments and variables must not have."""
_MAX_NAME_CHARACTERS: Final = 40
"""Maximum number of characters of a name that is derived from a name in the model."""


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive statements, with indices [start, stop)."""

    start: int
    stop: int
    canonical: str
    """Canonical form: the text of the statements with a number in place of each token."""
    tokens: tuple[str, ...]
    """Distinct tokens in the order of their first occurrence."""


def block_of(statements: Sequence[Statement], start: int, stop: int) -> Block:
    """Return the block of the statements from `start` to `stop` - 1."""
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        token = match[0]
        return f"<{kind_of(token)}{numbers.setdefault(token, len(numbers))}>"

    texts = []
    for statement in statements[start:stop]:
        code = TOKEN.sub(number, statement.code)
        targets = ", ".join(
            each if each == "_" else TOKEN.sub(number, each) for each in statement.targets
        )
        texts.append(f"{targets} = {code} # {statement.facts}")
    return Block(start, stop, "\n".join(texts), tuple(numbers))


def kind_of(token: str) -> str:
    """Return the kind of a token as a letter: x for a variable, w for a parameter, c for a
    constant, k for the key of a random operator.
    """
    return {"x": "x", "0": "k"}.get(token[0]) or token[2]


def rename_tokens(statement: Statement, names: Mapping[str, str]) -> Statement:
    """Return a statement with other names of its variables, parameters, constants and keys."""
    if not names:
        return statement

    def new(match: re.Match[str]) -> str:
        return names.get(match[0], match[0])

    return replace(
        statement,
        targets=tuple(names.get(each, each) for each in statement.targets),
        code=TOKEN.sub(new, statement.code),
        dead=tuple(names.get(each, each) for each in statement.dead),
    )


def function_name(blocks: Sequence[Block], names: Mapping[str, str], used: set[str]) -> str:
    """Return a name for the function that computes `blocks`, derived from the names of their
    parameters. `names` has the name in the model of each parameter and constant, such as `p.w3`.
    `used` has the names that are taken; the new name is added to it.
    """
    slots = [
        tuple(names.get(token, "") for token in tokens)
        for tokens in zip(*(block.tokens for block in blocks), strict=True)
        if kind_of(tokens[0]) == "w"
    ]
    return _unique(identifier(layer_name(slots) or DEFAULT_NAME), used)


def local_names(
    blocks: Sequence[Block], arguments: Sequence[int], names: Mapping[str, str]
) -> dict[str, str]:
    """Return the name of each token of the first block inside the function that computes `blocks`.
    `arguments` are the indices, in `Block.tokens`, of the values that the function gets from its
    caller. `names` has the name in the model of each parameter and constant, such as `p.w3`.
    """
    first = blocks[0]
    used: set[str] = set()
    numbers = itertools.count()
    local: dict[str, str] = {}
    taken = set(arguments)
    inner = [place for place in range(len(first.tokens)) if place not in taken]
    for place in (*arguments, *inner):
        token = first.tokens[place]
        kind = kind_of(token)
        if kind == "x":
            local[token] = f"v{next(numbers)}"
        elif place in taken:
            known = tuple(names.get(each.tokens[place], "") for each in blocks)
            stem = suffix_after_number(known) or _DEFAULT_STEMS[kind]
            local[token] = _unique(identifier(stem), used)
    return local


def identifier(text: str) -> str:
    """Return a Python identifier for a text: ASCII letters, digits and underscores only."""
    found = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")[:_MAX_NAME_CHARACTERS].lower()
    found = f"n_{found}" if not found or found[0].isdigit() else found
    # Generated code uses names such as x0, v1 or segment_2 for variables and functions. An
    # underscore distinguishes an equal identifier from these names.
    if found in _RESERVED or re.fullmatch(r"[a-z]\d+|(segment|loop)_\d+", found):
        found = f"{found}_"
    return found


def _unique(name: str, used: set[str]) -> str:
    """Return the name, with a number if it is in `used`, and add it to `used`."""
    found = name
    for number in itertools.count(2):
        if found not in used:
            break
        found = f"{name}_{number}"
    used.add(found)
    return found
