"""The paper's tables: sizes of graphs, optima to the last digit, strategies found."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopipe.passes.placement.pase.paper_costs import LayerGraph, PaperTables, build_tables
from autopipe.passes.placement.pase.paper_rules import make_layer_graph
from autopipe.passes.placement.pase.paper_search import PaperStrategy, find_strategy
from autopipe.passes.solvers.min_sum import eliminate
from tests.passes.placement.pase.paper.models import PAPER, cost_of, paper_graph

PUBLISHED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "pase.json").read_text(encoding="utf-8")
)
DEVICES = (4, 8, 16, 32, 64)


@cache
def layers(name: str) -> LayerGraph:
    return make_layer_graph(paper_graph(name))


@cache
def tables(name: str, devices: int) -> PaperTables:
    return build_tables(layers(name), devices)


@cache
def found(name: str, devices: int) -> PaperStrategy:
    return find_strategy(tables(name, devices))


@pytest.mark.parametrize("name", PAPER)
def test_graphs_are_the_papers(name: str) -> None:
    sizes = PUBLISHED["graph_sizes"][name]
    assert (len(layers(name).layers), len(layers(name).edges)) == (sizes["nodes"], sizes["edges"])
    most = [max(map(len, tables(name, devices).configurations)) for devices in DEVICES]
    assert most == sizes["max_configurations"]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", PAPER)
def test_optima_to_the_last_digit(name: str, devices: int) -> None:
    strategy = found(name, devices)
    assert strategy.cost == PUBLISHED["optimal_cost"][name][str(devices)]
    assert strategy.proven
    assert strategy.cost == strategy.bound


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_own_algorithm_finds_the_same(name: str) -> None:
    assert find_strategy(tables(name, 16), eliminate).cost == found(name, 16).cost


@pytest.mark.parametrize("name", PAPER)
def test_the_strategy_costs_what_the_search_says(name: str) -> None:
    strategy = found(name, 32)
    assert cost_of(layers(name), strategy.degrees) == strategy.cost


@pytest.mark.parametrize(
    ("name", "part"),
    [(name, part) for name, parts in PUBLISHED["table_ii_at_32_gpus"].items() for part in parts],
)
def test_strategies_of_table_ii(name: str, part: str) -> None:
    (split,) = [
        tuple(degrees.values())
        for layer, degrees in found(name, 32).splits().items()
        if f"/{part}/" in layer
    ]
    assert list(split) == PUBLISHED["table_ii_at_32_gpus"][name][part]


def test_equal_layers_and_edges_are_costed_once() -> None:
    transformer = tables("transformer", 16).model
    assert len({id(costs) for costs in transformer.costs}) < 25
    assert len({id(edge.costs) for edge in transformer.edges}) < 40
