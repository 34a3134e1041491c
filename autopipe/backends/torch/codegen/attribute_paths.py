"""Attributes of `p`, the first argument of generated functions, for parameters, constants and
random keys, such as `p.attention.query.weight`.

A path such as `attention.query.weight` is a sequence of identifiers that dots separate. The file
`stage_NN.json` next to the module of a stage lists the parameter or constant of each path.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autopipe.backends.torch.codegen.identifiers import (
    RUNTIME_ATTRIBUTES,
    identifier,
    numbered_name,
)
from autopipe.ir.layer_names import (
    is_invented_name,
    path_words,
    suffix_after_number,
    without_containers,
)

_DEFAULT_NAMES = {"w": "weight", "c": "constant", "k": "random_key"}
"""Attribute of a parameter, a constant or a random key without a name in the model, by the kind of
the token (`kind_of`).
"""


class AttributePaths:
    """The attributes of one object: paths of which none is the beginning of another one, and none
    is an attribute that the runtime sets.
    """

    def __init__(self) -> None:
        self._paths = set(RUNTIME_ATTRIBUTES)
        """Paths of attributes."""
        self._taken = set(RUNTIME_ATTRIBUTES)
        """Paths of attributes, and of the objects that contain them."""

    def reserve(self, path: str) -> str:
        """Return `path`, with numbers at the ends of words that are taken, and regard it as
        taken.
        """
        *outer, last = path.split(".")
        found = ""
        for word in outer:
            found = numbered_name(f"{found}{word}", self._paths.__contains__)
            self._taken.add(found)
            found += "."
        found = numbered_name(f"{found}{last}", self._taken.__contains__)
        self._paths.add(found)
        self._taken.add(found)
        return found


def model_path(name: str, scope: str, kind: str) -> str:
    """Return the attribute path of a parameter or constant that is called `name` in the model.
    `scope` is the name of the first node that reads it; it replaces a name that the exporter
    invented. `kind` is the kind of the token (`kind_of`).
    """
    if name and not is_invented_name(name) and not _is_result_name(name, kind):
        return _path_of(without_containers(path_words(name)), _DEFAULT_NAMES[kind])
    return _path_of([*_module_words(scope), _DEFAULT_NAMES[kind]], _DEFAULT_NAMES[kind])


def path_in_layer(names: Sequence[str], scopes: Sequence[str], kind: str) -> str:
    """Return the attribute path of the corresponding parameters of equal layers, relative to the
    layer. `names` and `scopes` have, for each layer, the arguments of `model_path`.
    """
    default = _DEFAULT_NAMES[kind]
    if not _is_result_name(names[0], kind) and (suffix := suffix_after_number(names)):
        return _path_of(suffix.split("."), default)
    if suffix := suffix_after_number(scopes):
        return _path_of([*_module_words(f"/{suffix.replace('.', '/')}"), default], default)
    if len(set(names)) == 1 and names[0] and not is_invented_name(names[0]):
        return _path_of(without_containers(path_words(names[0])), default)
    return default


def _is_result_name(name: str, kind: str) -> bool:
    """True for the name that torch's exporters give to the result of a node, such as
    `/layers.0/gate/Constant_4_output_0`, or `unsqueeze` for a constant. `kind` is the kind of the
    token.
    """
    is_short = kind == "c" and len(path_words(name)) == 1
    return is_short or re.search(r"_output_\d+$", name) is not None


def _module_words(scope: str) -> list[str]:
    """Return the path of the module in the name of a node, such as `/encoder/query/MatMul`. The
    last word of the name is the operator.
    """
    return path_words(scope)[:-1] if "/" in scope else []


def _path_of(words: Sequence[str], default: str) -> str:
    """Return the attribute path for the words of a name. A number is joined to the word before it,
    because an attribute cannot start with a digit.
    """
    found: list[str] = []
    for word in words:
        if word.isdigit() and found:
            found[-1] = identifier(f"{found[-1]}_{word}")
        elif word:
            found.append(identifier(word))
    return ".".join(found) or default
