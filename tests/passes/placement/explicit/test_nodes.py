"""Nodes by index, name, glob and range; and entries for nodes, whatever their names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.passes.placement.explicit import (
    NodeEntry,
    NodeNames,
    layer_globs,
    node_entries,
    role_globs,
)
from tests.passes.cost.graphs import perceptron


def named_graph(*names: str) -> Graph:
    """A chain of nodes of these names."""
    graph = perceptron([4] * (len(names) // 2 + 2))
    nodes = (replace(node, name=name) for node, name in zip(graph.nodes, names, strict=False))
    return replace(graph, nodes=tuple(nodes))


NAMES = NodeNames(
    named_graph("/layers.1/up", "/layers.1/down", "same", "same", "", "*", "layers.10/up", "[x]")
)


@pytest.mark.parametrize(
    ("entry", "nodes"),
    [
        ("/layers.1/up", (0,)),
        ("/layers.1/*", (0, 1)),
        ("layers.1/*", (0, 1)),  # the slash that exporters put first may be left out
        ("*/up", (0, 6)),
        ("same", (2, 3)),
        ("", (4,)),
        ("*", (5,)),  # a node is called so
        ("[x]", (7,)),
        ("[[]x]", (7,)),
        (3, (3,)),
        (("/layers.1/down", 4), (1, 2, 3, 4)),
        (("*/down", "[x]"), (1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_what_an_entry_means(entry: NodeEntry, nodes: tuple[int, ...]) -> None:
    assert NAMES.selected_nodes(entry) == nodes


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "/layers.1/dawn",
            "'/layers.1/dawn' matches the name of no node .*such as '/layers.1/down'",
        ),
        (8, "no node has the index 8 .*from 0 to 7"),
        (-1, "no node has the index -1"),
        (("same", 5), "selects 2 nodes, expected one node .*use the index of one node: 2, 3"),
        ((5, "/layers.1/up"), "has its last node before its first"),
    ],
)
def test_what_means_no_node_is_told(entry: NodeEntry, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        NAMES.selected_nodes(entry)


def test_whole_layers_are_one_line_each() -> None:
    names = NodeNames(
        named_graph(
            "in", "/layers.1/up", "/layers.1/down", "/layers.2/up", "/layers.2/down", "out/3"
        )
    )
    nodes = (0, 1, 2, 3)
    entries = node_entries(names, nodes, range(6), set(nodes), layer_globs(names, nodes))
    assert entries == ("in", "/layers.1/*", "/layers.2/up")
    assert node_entries(names, (2, 3, 4), range(6), {2, 3, 4}, ()) == (
        ("/layers.1/down", "/layers.2/down"),
    )
    assert tuple(role_globs(names, range(6))) == ("/layers.*/up", "/layers.*/down")


PARTS = st.sampled_from(
    ["a", "b1", "layers.0", "layers.12", "[1]", "*", "?2", "", "re:x", "'", "\n", "\ud800", "12"]
)


@given(st.lists(st.lists(PARTS, max_size=4).map("/".join), min_size=2, max_size=12), st.data())
@settings(max_examples=100, deadline=None)
def test_entries_mean_what_they_were_made_for(spelled: list[str], data: st.DataObject) -> None:
    names = NodeNames(named_graph(*spelled))
    among = sorted(data.draw(st.sets(st.sampled_from(range(len(spelled))), min_size=1)))
    nodes = data.draw(st.sets(st.sampled_from(among)))
    also = data.draw(st.sets(st.sampled_from(among)))
    globs = (*layer_globs(names, nodes), *role_globs(names, nodes), "*", "b*")
    entries = node_entries(names, nodes, among, nodes | also, globs)
    meant = {node for entry in entries for node in names.selected_nodes(entry)}.intersection(among)
    assert nodes <= meant <= nodes | also
