"""Names of layer classes, such as `decoder layer`, from the names that the exporter kept.

Exporters derive names of parameters and nodes from module paths, for example
`model.layers.3.self_attn.q_proj.weight` or `/encoder/layer.3/attention/MatMul`. In equal layers,
corresponding names differ in one number. The words before this number name the class.

Names come from untrusted files. Only ASCII letters, digits and spaces of them are kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

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
_MIN_WORD_CHARACTERS: Final = 3
"""Minimum number of characters of a word that names layers. Shorter ones, such as `n`, are
variables."""
_MODEL_SUFFIX: Final = re.compile(r"_?(model|module)$")
"""End of the name of a module that the name of a class does not contain."""
_EXPORTER_PREFIXES: Final = ("onnx::", "node_", "val_")
"""Beginnings of names that torch's exporters invent. Such a name tells nothing about a layer."""
_PART_PATTERNS: Final = (
    ("embedding", re.compile(r".*embed.*|w[tp]e")),
    ("stem", re.compile(r"(.+_)?stem")),
    ("pooler", re.compile(r"(.+_)?pooler")),
    ("head", re.compile(r"(.+_)?(head|classifier|unembed)")),
)
"""Pairs (name of a part of a model, pattern of the names of modules that belong to this part)."""
_MAX_CHARACTERS: Final = 40
"""Maximum number of characters of a class name."""
_MAX_SAMPLED_LAYERS: Final = 4
"""Maximum number of layers whose names are compared."""


def layer_name(slots: Iterable[Sequence[str]]) -> str:
    """Return the name of a layer class: the most frequent name that follows from `slots`; "" if
    none follows.

    An entry of `slots` contains the names that one parameter or node of the layer has in several
    layers of the class.
    """
    return _class_words(layer_path(slots))


def layer_path(slots: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the path of the modules that contain the layers of a class, such as (`text_model`,
    `encoder`, `layers`): the most frequent path from which a name follows; () if there is none.
    `slots` is as in `layer_name`.
    """
    found = Counter(_common_path(names[:_MAX_SAMPLED_LAYERS]) for names in slots)
    named = [path for path, _ in found.most_common() if _class_words(path)]
    return named[0] if named else ()


def distinct_names(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the name of each class whose layers are in the modules with these paths. If names are
    equal, the first module in which the paths differ precedes them, as in `text encoder layer`.
    Names are equal if the paths differ in numbers only.
    """
    found = [_class_words(path) for path in paths]
    for name in {each for each in found if each}:
        places = [place for place, each in enumerate(found) if each == name]
        known = [_known_words(paths[place]) for place in places]
        depth = next(
            (
                index
                for index in range(min(map(len, known)))
                if len({words[index] for words in known}) > 1
            ),
            None,
        )
        if depth is None:
            continue
        for place, words in zip(places, known, strict=True):
            module = _MODEL_SUFFIX.sub("", words[depth].lower())
            if module not in _GENERIC and module not in name.split():
                found[place] = _plain_text(f"{module} {name}")
    return tuple(found)


def part_name(name: str) -> str:
    """Return the usual name of the part of a model to which the parameter `name` belongs:
    `embedding`, `stem`, `pooler` or `head`; "" if none of its modules has such a name.
    """
    modules = [word.lower() for word in path_words(name)[:-1]]
    return next(
        (part for part, pattern in _PART_PATTERNS if any(map(pattern.fullmatch, modules))),
        "",
    )


def suffix_after_number(names: Sequence[str]) -> str:
    """Return the part of `names` behind the number in which they differ, with `.` as separator,
    such as `attention.query.weight`; "" if they do not differ in one number. `names` are those of
    one parameter or node in several layers.
    """
    names = names[:_MAX_SAMPLED_LAYERS]
    place = _differing_place(names)
    return "" if place is None else ".".join(path_words(names[0])[place + 1 :])


def numbers_of(names: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers in which `names` differ, the names of one parameter or node in all layers
    of a class; () if they do not differ in exactly one number.
    """
    place = _differing_place(names)
    if place is None:
        return ()
    matches = [_NUMBERED.fullmatch(path_words(name)[place]) for name in names]
    return tuple(int(match[2]) for match in matches if match is not None)


def is_invented_name(name: str) -> bool:
    """True if torch's exporter invented the name, so that it tells nothing about a layer."""
    return name.startswith(_EXPORTER_PREFIXES)


def path_words(name: str) -> list[str]:
    """Return the parts of a name that separators divide."""
    return _SEPARATOR.split(name.strip("/."))


def without_containers(words: Sequence[str]) -> list[str]:
    """Return a path without the modules at its beginning that tell nothing about the modules inside
    them, such as `model`. The last word remains.
    """
    found = list(words)
    while len(found) > 1 and found[0].lower() in _CONTAINERS:
        del found[0]
    return found


def _common_path(names: Sequence[str]) -> tuple[str, ...]:
    """Return the words of `names`, the names of one parameter or node in several layers, up to the
    number in which they differ, without this number; () if they do not differ in one number.
    """
    place = _differing_place(names)
    if place is None:
        return ()
    words = path_words(names[0])
    numbered = _NUMBERED.fullmatch(words[place])
    return () if numbered is None else (*words[:place], numbered[1])


def _differing_place(names: Sequence[str]) -> int | None:
    """Return the index of the first word in which names differ; None unless this word ends in a
    different number in each name, and the names have equally many words.
    """
    paths = [path_words(name) for name in names]
    if is_invented_name(names[0]) or len({len(path) for path in paths}) != 1:
        return None
    for place, words in enumerate(zip(*paths, strict=True)):
        if len(set(words)) == 1:
            continue
        numbered = [_NUMBERED.fullmatch(word) for word in words]
        stems = {match[1] for match in numbered if match is not None}
        is_number = None not in numbered and len(stems) == 1
        return place if is_number and len(set(words)) == len(words) else None
    return None


def _class_words(path: Sequence[str]) -> str:
    """Return the class name for layers in the module with the path `path`, such as `decoder layer`
    for `decoder.layers`. Return "" if no word of the path says anything about the layers.
    """
    known = _known_words(path)
    if not known:
        return ""
    last = known[-1].lower()
    if last in _GENERIC:
        around = [word for word in known[:-1] if word.lower() not in _GENERIC]
        words = [*map(_singular, around[-1:]), _GENERIC[last]]
    elif len(last) < _MIN_WORD_CHARACTERS:
        return ""
    elif _singular(last) != last:
        words = [_singular(last)]
    else:
        words = [last, DEFAULT_NAME]
    return _plain_text(" ".join(words))


def _known_words(path: Sequence[str]) -> list[str]:
    """Return the words of a path that are neither numbers nor names of containers."""
    return [word for word in path if word and not word.isdigit() and word not in _CONTAINERS]


def _plain_text(text: str) -> str:
    """Return a text without characters other than letters, digits and single spaces, and with at
    most `_MAX_CHARACTERS` characters.
    """
    return re.sub(r"[^A-Za-z0-9]+", " ", text).strip()[:_MAX_CHARACTERS].strip()


def _singular(word: str) -> str:
    """Return the singular of `word` if it looks like a plural (it ends in s but not in ss, and
    has more than `_MIN_PLURAL_CHARACTERS` characters), otherwise `word`.
    """
    is_plural = word.endswith("s") and not word.endswith("ss")
    if is_plural and len(word) > _MIN_PLURAL_CHARACTERS:
        return _IRREGULAR_SINGULARS.get(word, word[:-1])
    return word
