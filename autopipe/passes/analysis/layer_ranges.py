"""Ranges of layers: the layers of a model by name and number, the parts of the model that a stage
holds, and the nodes that a configuration selects by layers.

The layers of all classes of one name form a series. They are numbered from 0 in the order of the
model. So `decoder[2:4]` are two layers, even if the decoder's layers differ and form several
classes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph, Node
from autopipe.ir.layer_names import part_name
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.model_parts import LayerSelection, ModelPart, parts_text
from autopipe.ir.ops import OPERATORS, qualified_name
from autopipe.ir.placement import node_ranges
from autopipe.ir.words import count_text, plural
from autopipe.passes.analysis.layers import (
    does_most_work,
    find_layers,
    name_layers,
)

_MAIN_FACTOR: Final = 4
"""A series is the model's main one if it covers at least this many times the nodes of any other
series."""
_MAX_HEAD_OPERATORS: Final = 2
"""Maximum number of matmuls or convolutions with parameters after the last layer that are called
the head of the model. If there are more, they are rather a further part without equal layers."""
_MAX_LISTED_SERIES: Final = 6
"""Maximum number of series that a hint lists."""
_WORD: Final = "layer"
"""Word at the end of names of layers, which a selection may omit."""
_SELECTION: Final = re.compile(
    r"\s*(?P<name>[^\[\]]*?)\s*"
    r"(?:\[\s*(?P<first>\d{1,9})?\s*(?P<colon>:)?\s*(?P<stop>\d{1,9})?\s*\])?\s*"
)


@dataclass(frozen=True, slots=True)
class LayerSeries:
    """The layers of a model that have one name, in the order of the model."""

    name: str
    """Name of each layer, such as `decoder layer`."""
    layers: tuple[tuple[int, ...], ...]
    """For each layer, its nodes in the graph, ascending."""

    @property
    def short_name(self) -> str:
        """The name by which selections are written, such as `decoder` for `decoder layer`."""
        return self.name.removesuffix(f" {_WORD}")

    @property
    def nodes(self) -> int:
        """Number of nodes of all layers."""
        return sum(map(len, self.layers))


@memoize(MAX_CACHED_GRAPHS)
def layer_series(graph: Graph) -> tuple[LayerSeries, ...]:
    """Return the series of layers of a graph, in the order of their first layers. Layers inside of
    layers are in no series.
    """
    classes = find_layers(graph)
    by_name: dict[str, list[tuple[int, ...]]] = {}
    for name, each in zip(name_layers(graph, classes), classes, strict=True):
        by_name.setdefault(name, []).extend(tuple(sorted(nodes)) for nodes in each.instances)
    return tuple(LayerSeries(name, tuple(sorted(layers))) for name, layers in by_name.items())


def layer_label(graph: Graph, nodes: Collection[int]) -> str:
    """Return the parts of a model that consist of `nodes` as text, such as `embedding, layers 0–7`;
    "" if they are in no layer and in no part with a usual name. `nodes` are indices in `graph`.
    """
    return parts_text(model_parts(graph, nodes))


def model_parts(graph: Graph, nodes: Collection[int]) -> tuple[ModelPart, ...]:
    """Return the parts of a model that consist of `nodes`, in the order of the model: ranges of
    layers, parts of layers, and parts outside of all layers that have a usual name. Other nodes
    outside of layers, such as a mask, are in no part.
    """
    held = frozenset(nodes)
    found: list[tuple[int, ModelPart]] = []
    for series in layer_series(graph):
        complete = []
        for number, layer in enumerate(series.layers):
            inside = [node for node in layer if node in held]
            if len(inside) == len(layer):
                complete.append(number)
            elif inside:
                found.append((inside[0], ModelPart(series.name, number, number, incomplete=True)))
        for start, stop in node_ranges(complete):
            found.append((series.layers[start][0], ModelPart(series.name, start, stop - 1)))
    outside: dict[str, int] = {}
    for node, name in _parts_outside_layers(graph).items():
        if node in held:
            outside.setdefault(name, node)
    found += [(node, ModelPart(name)) for name, node in outside.items()]
    return tuple(part for _, part in sorted(found, key=lambda each: each[0]))


@memoize(MAX_CACHED_GRAPHS)
def _parts_outside_layers(graph: Graph) -> dict[int, str]:
    """Return the usual name of the part of the model to which a node outside of all layers belongs,
    by node. Only nodes that decide where a part is have an entry: embedding lookups, and matmuls
    and convolutions with parameters. The dict is empty for a model without layers.

    The names of parameters decide first. Otherwise, a lookup is an embedding, and the last few
    matmuls or convolutions, behind all layers, are the head.
    """
    inside = {node for series in layer_series(graph) for layer in series.layers for node in layer}
    if not inside:
        return {}
    last = max(inside)
    found: dict[int, str] = {}
    unnamed: list[int] = []
    for index, node in enumerate(graph.nodes):
        parameters = () if index in inside else _parameters_of(graph, node)
        operator = OPERATORS.get(qualified_name(node))
        is_lookup = operator is not None and operator.lookup
        if not parameters or not (is_lookup or does_most_work(node)):
            continue
        name = next(filter(None, map(part_name, parameters)), "")
        if is_lookup:
            # The table of the embedding can also be the weight of the head, and have its name.
            found[index] = "embedding"
        elif index > last and name == "embedding":
            found[index] = "head"
        elif name:
            found[index] = name
        elif index > last:
            unnamed.append(index)
    if len(unnamed) <= _MAX_HEAD_OPERATORS:
        found.update(dict.fromkeys(unnamed, "head"))
    return found


def _parameters_of(graph: Graph, node: Node) -> tuple[str, ...]:
    """Return the names of the parameters that a node reads. If it reads none, return those that the
    producers of its operands read, such as a transposition of the weight.
    """
    own = tuple(name for name in node.inputs if graph.parameter(name) is not None)
    if own:
        return own
    producers = (graph.producer(name) for name in node.inputs)
    return tuple(
        name
        for index in producers
        if index is not None
        for name in graph.nodes[index].inputs
        if graph.parameter(name) is not None
    )


def selected_layers(graph: Graph, selection: LayerSelection) -> tuple[tuple[str, int], ...]:
    """Return pairs (name of a series, number of a layer) for the layers that a selection of a
    configuration selects, in its order.

    A selection is a pair [first, last] of numbers of layers of the model's main series, a text such
    as `encoder[0:4]` (layers 0 to 3), `encoder[2]` or `encoder` (all layers), or a list of texts.
    Raise ConfigurationError for a name or a number that no layer has, and for a layer that is
    selected twice.
    """
    if isinstance(selection, str):
        found = [*_layers_of_text(graph, selection)]
    elif selection and isinstance(selection[0], int):
        found = [*_layers_of_pair(graph, selection)]
    else:
        found = [each for text in selection for each in _layers_of_text(graph, str(text))]
    if not found:
        raise ConfigurationError(
            f"layers {selection_text(selection)} selects no layer",
            "select at least one layer, such as [0, 7] or encoder[0:4]",
        )
    twice = next((each for index, each in enumerate(found) if each in found[:index]), None)
    if twice is not None:
        raise ConfigurationError(
            f"layers {selection_text(selection)} selects {twice[0]} {twice[1]} twice",
            "select each layer once",
        )
    return tuple(found)


def nodes_of_layers(graph: Graph, layers: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """Return the nodes of layers that `selected_layers` returned, ascending."""
    by_name = {series.name: series for series in layer_series(graph)}
    return tuple(sorted(node for name, number in layers for node in by_name[name].layers[number]))


def layer_selection(
    graph: Graph, nodes: Collection[int]
) -> tuple[LayerSelection | None, tuple[int, ...]]:
    """Return (selection, nodes): the layers all of whose nodes are in `nodes`, and their nodes,
    ascending. The selection is None if there is no such layer.
    """
    held = frozenset(nodes)
    texts = []
    ranges: list[tuple[LayerSeries, int, int]] = []
    found: list[int] = []
    for series in layer_series(graph):
        complete = [number for number, layer in enumerate(series.layers) if held.issuperset(layer)]
        found += [node for number in complete for node in series.layers[number]]
        for start, stop in node_ranges(complete):
            ranges.append((series, start, stop))
            texts.append(f"{series.short_name}[{start}:{stop}]")
    if not ranges:
        return None, ()
    selection: LayerSelection = tuple(texts) if len(texts) > 1 else texts[0]
    if len(ranges) == 1 and ranges[0][0] is _main_series(graph):
        selection = (ranges[0][1], ranges[0][2] - 1)
    return selection, tuple(sorted(found))


def selection_text(selection: LayerSelection) -> str:
    """Return a selection as a configuration contains it, for messages."""
    return selection if isinstance(selection, str) else f"[{', '.join(map(str, selection))}]"


def _main_series(graph: Graph) -> LayerSeries | None:
    """Return the series whose layers a pair of numbers selects: the only series, or the one that
    covers at least `_MAIN_FACTOR` times the nodes of any other one. None if there is none.
    """
    first, *others = sorted(layer_series(graph), key=lambda each: -each.nodes) or (None,)
    if first is None or (others and others[0].nodes * _MAIN_FACTOR > first.nodes):
        return None
    return first


def _layers_of_pair(graph: Graph, pair: Sequence[int | str]) -> Iterator[tuple[str, int]]:
    """Yield the layers of the main series that a pair [first, last] selects."""
    series = _main_series(graph)
    text = f"layers [{', '.join(map(str, pair))}]"
    if series is None:
        every = layer_series(graph)
        if not every:
            raise _no_layers(text)
        raise ConfigurationError(
            f"{text} does not say which layers: the model has {_series_text(every)}",
            f"name the layers, such as {every[0].short_name}[0:{len(every[0].layers)}]",
        )
    first, last = map(int, pair)
    if first > last:
        raise ConfigurationError(
            f"{text} has its last layer before its first layer", "write the smaller number first"
        )
    _check_number(text, series, last)
    yield from ((series.name, number) for number in range(first, last + 1))


def _layers_of_text(graph: Graph, text: str) -> Iterator[tuple[str, int]]:
    """Yield the layers that a text such as `encoder[0:4]` selects."""
    match = _SELECTION.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"{text!r} selects no layers", "use a text such as encoder[0:4] or encoder[2]"
        )
    every = layer_series(graph)
    if not every:
        raise _no_layers(repr(text))
    series = next((each for each in every if _key(each.name) == _key(match["name"])), None)
    if series is None:
        raise ConfigurationError(
            f"{text!r} names no layers of the model, which has {_series_text(every)}",
            f"use the name of layers, such as {every[0].short_name}[0:{len(every[0].layers)}]",
        )
    count = len(series.layers)
    first = int(match["first"] or 0)
    stop = int(match["stop"] or count)
    if "[" in text and match["colon"] is None:
        if match["first"] is None or match["stop"] is not None:
            raise ConfigurationError(
                f"{text!r} selects no layers", "use a text such as encoder[0:4] or encoder[2]"
            )
        stop = first + 1
    if first >= stop:
        raise ConfigurationError(
            f"{text!r} selects no layers: layer {stop} is not behind layer {first}",
            "write the number of the first layer and the number after the last layer",
        )
    _check_number(repr(text), series, stop - 1)
    yield from ((series.name, number) for number in range(first, stop))


def _check_number(text: str, series: LayerSeries, last: int) -> None:
    """Raise ConfigurationError unless the series has a layer with the number `last`."""
    count = len(series.layers)
    if last >= count:
        raise ConfigurationError(
            f"{text} selects {series.name} {last}, but the model has "
            f"{count_text(count, series.name)}",
            f"use numbers from 0 to {count - 1}",
        )


def _key(name: str) -> str:
    """Return a text that is equal for the names that select one series: `decoder layer`,
    `decoder layers`, `Decoder` and `decoder` are equal.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    if words and words[-1] in (_WORD, plural(2, _WORD)):
        words.pop()
    text = " ".join(words)
    return text[:-1] if text.endswith("s") else text


def _series_text(series: Sequence[LayerSeries]) -> str:
    """Return the names and numbers of layers as text for messages."""
    texts = [count_text(len(each.layers), each.name) for each in series[:_MAX_LISTED_SERIES]]
    more = ["..."] if len(series) > _MAX_LISTED_SERIES else []
    return ", ".join([*texts, *more])


def _no_layers(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"{text} selects layers, but the model has no repeated layers",
        "select nodes instead; autopipe inspect MODEL lists the layers of a model",
    )
