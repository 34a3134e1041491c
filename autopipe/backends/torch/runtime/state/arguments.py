"""The first argument `p` of generated functions, and its attributes.

In the flat form of a stage, `p` has the attributes `w0`, `c1` and so on, which the stage's module
lists. In the form with one function per layer, the paths of attributes come from the model, such as
`embedding.weight`, and the file `stage_NN.json` next to the module lists them. The first number in
a path, as in `layers.3.norm.weight`, is an index in a list of `LayerArguments`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch

from autopipe.ir.codec import decode
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.files import JsonRecord
from autopipe.ir.program import StageAttributes

_PATH: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.([A-Za-z][A-Za-z0-9_]*|\d{1,6}))*")
"""Form of the path of an attribute. No word starts with an underscore, as the attributes of
Python's objects do.
"""
_CONTENT: Final = re.compile(r"[wc]\d{1,9}")
"""Form of the content of an attribute that is a parameter or a constant."""


class Arguments(SimpleNamespace):
    """The first argument `p` of a stage's forward: parameters, constants, `device`, the process
    group `group`, the queue of deferred gradients `weight_grads`, random numbers `random`, running
    statistics `running`, and `training`, which is False in a validation.
    """


class LayerArguments:
    """The first argument `p` of the function of a layer: the parameters and constants of one layer,
    and the other attributes of the stage's `p`.
    """

    def __init__(self, stage: Arguments, path: str) -> None:
        """`path` names the layer, such as `layers.3`."""
        self.stage = stage
        self.path = path

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stage's `p`. Python calls this method if the layer has no
        attribute of this name.
        """
        return getattr(self.stage, name)


def read_attributes(module: ModuleType) -> StageAttributes:
    """Return the attributes of the `p` of a stage, given its generated module. Raise
    ConfigurationError if the file of a module without a table of names is missing or invalid.
    """
    if (parameters := getattr(module, "PARAMETERS", None)) is not None:
        names = (*parameters, *module.CONSTANTS)
        segments = getattr(module, "SEGMENTS", ())
        return StageAttributes(tuple((name, name) for name in names), segments)
    path = Path(str(module.__file__)).with_suffix(".json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"the names of the stage's parameters cannot be read: {error}",
            hint="run autopipe codegen again",
            where=str(path),
        ) from error
    found: StageAttributes = decode(JsonRecord(raw, str(path)), StageAttributes)
    for name, content in found.attributes:
        is_known = isinstance(content, int) or _CONTENT.fullmatch(content) is not None
        if _PATH.fullmatch(name) is None or not is_known:
            raise ConfigurationError(
                f"attribute {name!r} has the content {content!r}, expected the path of an "
                "attribute and a parameter such as 'w3' or a constant such as 'c3'",
                hint="run autopipe codegen again",
                where=str(path),
            )
    return found


def parameter_index(content: str | int) -> int | None:
    """Return the index of a parameter, given the content of an attribute (`StageAttributes`), or
    None for a constant and a random key.
    """
    if isinstance(content, str) and content.startswith("w"):
        return int(content[1:])
    return None


def set_attributes(
    p: Arguments, attributes: Iterable[tuple[str, str | int]], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Set attributes of `p` and of its layers. `attributes` are those of `StageAttributes`;
    `tensors` has the parameters and constants by content, such as `w3`. Raise ConfigurationError if
    a tensor is missing.
    """
    for path, content in attributes:
        if isinstance(content, str) and content not in tensors:
            raise ConfigurationError(
                f"attribute {path!r} of a stage is {content!r}, which this rank does not have",
                hint="run autopipe codegen again",
            )
        value = content if isinstance(content, int) else tensors[content]
        set_attribute(p, path, value)


def set_attribute(p: Arguments, path: str, value: object) -> None:
    """Set the attribute of `p` with a path such as `layers.3.norm.weight`. Objects and layers on
    the path that do not exist are created.
    """
    *beginning, last = path.split(".")
    holder: Any = p
    for index, word in enumerate(beginning):
        if word.isdigit():
            holder = _layer(p, holder, int(word), ".".join(beginning[: index + 1]))
            continue
        if word not in vars(holder):
            is_list = index + 1 < len(beginning) and beginning[index + 1].isdigit()
            setattr(holder, word, [] if is_list else SimpleNamespace())
        holder = vars(holder)[word]
    setattr(holder, last, value)


def _layer(p: Arguments, layers: list[LayerArguments], index: int, path: str) -> LayerArguments:
    """Return the layer at `index` in a list, after layers up to it have been created. `path` is the
    path of the layer.
    """
    while len(layers) <= index:
        layers.append(LayerArguments(p, f"{path.rpartition('.')[0]}.{len(layers)}"))
    return layers[index]


def get_attribute(p: Arguments, path: str) -> Any:
    """Return the attribute of `p` with a path such as `layers.3.norm.weight`."""
    holder: Any = p
    for word in path.split("."):
        holder = holder[int(word)] if word.isdigit() else getattr(holder, word)
    return holder
