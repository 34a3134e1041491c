"""Names of layer classes, such as `decoder layer`, from the names that the exporter kept.

Exporters derive names of parameters and nodes from module paths, for example
`model.layers.3.self_attn.q_proj.weight` or `/encoder/layer.3/attention/MatMul`. In equal layers,
corresponding names differ in one number. The words before this number name the class.

Names come from untrusted files. Only ASCII letters, digits and spaces of them are kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from autopipe.ir.graph import Graph
from autopipe.passes.analysis.layers import LayerClass

DEFAULT_NAME: Final = "layer"
"""Name of a class whose layers have no common name."""
_SEPARATOR: Final = re.compile(r"[./:]+")
_NUMBERED: Final = re.compile(r"(.*?)[_-]?(\d{1,6})")
_CONTAINERS: Final = frozenset(
    {"model", "module", "transformer", "backbone", "net", "network", "base_model", "features"}
)
"""Names of modules that tell nothing about the layers inside them. These words are left out of
class names.
"""
_GENERIC: Final = {
    "": "layer",
    "l": "layer",
    "h": "layer",
    "layer": "layer",
    "layers": "layer",
    "blk": "block",
    "block": "block",
    "blocks": "block",
}
"""Names of modules that describe their layers only with the name of the enclosing module, as in
`decoder.layers`. The value is the word that the class name contains instead.
"""
_IRREGULAR_SINGULARS: Final = {"branches": "branch", "boxes": "box"}
"""Singular forms of plurals that do not only end in s."""
_MIN_PLURAL_CHARACTERS: Final = 3
"""A word with more characters than this that ends in s is assumed to be a plural."""
_MAX_CHARACTERS: Final = 40
"""Maximum number of characters of a class name."""
_MAX_SAMPLED_INSTANCES: Final = 4
"""Maximum number of instances of a class whose names are compared."""


def name_layers(graph: Graph, classes: Sequence[LayerClass]) -> tuple[str, ...]:
    """Return a name for each layer class. Names are unique among `classes`: a number is appended to
    a name that an earlier class has.
    """
    counts: Counter[str] = Counter()
    names = []
    for each in classes:
        name = _class_name(graph, each)
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name} {counts[name]}")
    return tuple(names)


def _class_name(graph: Graph, layer: LayerClass) -> str:
    """Return the name of a layer class. It is the most frequent common name of corresponding
    parameters or, if these have none, of corresponding nodes. Return `DEFAULT_NAME` if neither have
    a common name.
    """
    instances = layer.instances[:_MAX_SAMPLED_INSTANCES]
    from_parameters: Counter[str] = Counter()
    from_nodes: Counter[str] = Counter()
    for indices in zip(*instances, strict=True):
        nodes = [graph.nodes[index] for index in indices]
        from_nodes[_common_name([node.name for node in nodes])] += 1
        for operands in zip(*(node.inputs for node in nodes), strict=True):
            if graph.parameter(operands[0]) is not None:
                from_parameters[_common_name(operands)] += 1
    for found in (from_parameters, from_nodes):
        del found[""]
        if found:
            return found.most_common(1)[0][0]
    return DEFAULT_NAME


def _common_name(names: Sequence[str]) -> str:
    """Return the class name that follows from `names`, the corresponding names in several
    instances; "" if the names do not differ in exactly one number.
    """
    paths = [_SEPARATOR.split(name.strip("/.")) for name in names]
    if len({len(path) for path in paths}) != 1:
        return ""
    for place, words in enumerate(zip(*paths, strict=True)):
        if len(set(words)) == 1:
            continue
        numbered = [_NUMBERED.fullmatch(word) for word in words]
        stems = {match[1] for match in numbered if match is not None}
        if None in numbered or len(stems) != 1 or len(set(words)) != len(words):
            return ""
        return _class_words([*paths[0][:place], stems.pop()])
    return ""


def _class_words(path: Sequence[str]) -> str:
    """Return the class name for layers in the module with the path `path`, such as `decoder layer`
    for `decoder.layers`. Return "" if no word of the path says anything about the layers.
    """
    known = [word for word in path if word and not word.isdigit() and word not in _CONTAINERS]
    if not known:
        return ""
    last = known[-1].lower()
    if last in _GENERIC:
        words = [*map(_singular, known[-2:-1]), _GENERIC[last]]
    elif _singular(last) != last:
        words = [_singular(last)]
    else:
        words = [last, DEFAULT_NAME]
    text = re.sub(r"[^A-Za-z0-9]+", " ", " ".join(words)).strip()
    return text[:_MAX_CHARACTERS].strip()


def _singular(word: str) -> str:
    """Return the singular of `word` if it is a plural, otherwise `word`."""
    if word.endswith("s") and len(word) > _MIN_PLURAL_CHARACTERS:
        return _IRREGULAR_SINGULARS.get(word, word[:-1])
    return word
