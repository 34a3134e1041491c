"""Blocks of statements that codegen compares, to find blocks that can share a function.

A token is a variable, a parameter, a constant or a random key (the key of a random operator). The
*canonical form* of a block is its text with each token replaced by a number, in the order of first
occurrence. Blocks with equal canonical forms can share a function whose arguments are the tokens
that the block does not compute.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from autopipe.backends.torch.codegen.statement import Statement

TOKEN: Final = re.compile(r"\bp\.w\d+\b|\bp\.c\d+\b|\bx\d+\b|\b0x[0-9a-f]{16}\b")
"""Pattern of a token: a parameter, a constant, a variable, or a random key (the key of a random
operator).
"""
_LOOP_NAME: Final = re.compile(r"\bloop_\d+\b")
"""Pattern of the name of a function that runs a loop operator."""


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
        code = TOKEN.sub(number, _LOOP_NAME.sub("loop", statement.code))
        targets = ", ".join(
            each if each == "_" else TOKEN.sub(number, each) for each in statement.targets
        )
        helper = TOKEN.sub(number, _without_variable_numbers(statement.helper))
        texts.append(f"{targets} = {code} # {statement.facts}\n{helper}")
    return Block(start, stop, "\n".join(texts), tuple(numbers))


def _without_variable_numbers(helper: str) -> str:
    """Return the source of a function `loop_N` in a form that is equal for functions that are equal
    except for their name, the numbers of their variables, parameters, constants and random keys.
    Parameters, constants and random keys remain.
    """
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        token = match[0]
        if kind_of(token) != "x":
            return token
        return f"<v{numbers.setdefault(token, len(numbers))}>"

    return TOKEN.sub(number, _LOOP_NAME.sub("loop", helper))


def tokens_read(statement: Statement) -> list[str]:
    """Return the tokens that a statement reads, in order and with repetitions, and the parameters,
    constants and random keys that its function `loop_N` reads.
    """
    inside = [each for each in TOKEN.findall(statement.helper) if kind_of(each) != "x"]
    return [*TOKEN.findall(statement.code), *inside]


def text_without_tokens(statement: Statement) -> str:
    """Return the code of a statement and of its function `loop_N` with the kind of each token in
    its place.
    """
    helper = _without_variable_numbers(statement.helper)
    return TOKEN.sub(
        lambda match: kind_of(match[0]), f"{_LOOP_NAME.sub('loop', statement.code)}\n{helper}"
    )


def kind_of(token: str) -> str:
    """Return the kind of a token as a letter: x for a variable, w for a parameter, c for a
    constant, k for the key of a random operator.
    """
    return {"x": "x", "0": "k"}.get(token[0]) or token[2]


def rename_tokens(text: str, names: Mapping[str, str]) -> str:
    """Return a source text with other names of its variables, parameters, constants and keys."""
    return TOKEN.sub(lambda match: names.get(match[0], match[0]), text)
