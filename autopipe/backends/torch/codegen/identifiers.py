"""Python identifiers from names in models, for functions, variables and attributes in generated
code.

Names in models are untrusted. An identifier consists of ASCII letters, digits and underscores, and
is neither a keyword, a builtin nor a name that generated code uses for something else.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable
from typing import Final

RUNTIME_ATTRIBUTES: Final = frozenset(
    {"device", "group", "random", "running", "training", "weight_grads", "stage", "path"}
)
"""Attributes of `p`, the first argument of generated functions, that are no parameters."""
_RESERVED: Final = (
    frozenset(
        {
            "p",
            "torch",
            "F",
            "operators",
            "recompute",
            "forward",
            "math",
            "layer",
            "weights",
            *dir(builtins),
        }
    )
    | RUNTIME_ATTRIBUTES
    | frozenset(keyword.kwlist)
    | frozenset(keyword.softkwlist)
)
"""Names that generated functions, variables and attributes must not have."""
_NUMBERED: Final = re.compile(r"x\d+|(segment|loop)_\d+")
"""Names that generated code uses for variables and functions without a name in the model."""
_MAX_CHARACTERS: Final = 40
"""Maximum number of characters of an identifier, without the number that makes it unique."""


def identifier(text: str) -> str:
    """Return a Python identifier for a text: ASCII letters, digits and underscores only."""
    found = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")[:_MAX_CHARACTERS].strip("_").lower()
    found = f"n_{found}" if not found or found[0].isdigit() else found
    # An underscore distinguishes a name from the names that are used for something else.
    return f"{found}_" if found in _RESERVED or _NUMBERED.fullmatch(found) else found


def numbered_name(name: str, is_taken: Callable[[str], bool]) -> str:
    """Return the name or, if it is taken, the name with the smallest number from 2 on that is not
    taken.
    """
    found = name
    number = 1
    while is_taken(found):
        number += 1
        found = f"{name.rstrip('_')}_{number}"
    return found
