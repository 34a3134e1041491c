"""Table II: the strategies found on 32 GeForce GTX 1080 Ti, in the paper's space and in ours, which runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from autopipe.cli.bench.pase.models import CLUSTERS, paper_problem
from autopipe.cli.bench.pase.published import MODELS, STRATEGIES
from autopipe.cli.bench.pase.speedups import placed
from autopipe.cli.bench.row import Case, Row
from autopipe.passes.placement.pase.paper_search import search

_DEVICES = 32

_PAPER = "parts of the axis; theirs where the paper says it in words or its prototype finds it"
_OURS = "parts of the axis of the ONNX node, under our costs on 1080 Ti servers"


def strategies() -> list[Case]:
    """One case a model."""
    return [Case(f"{model}/p={_DEVICES}", "Table II", partial(_rows, model)) for model in MODELS]


def _rows(model: str) -> Iterator[Row]:
    case = f"{model}/p={_DEVICES}"
    problem = paper_problem(model, _DEVICES)
    found = search(problem).splits()
    (stage,) = placed(model, _DEVICES, CLUSTERS[0], "pase").stages
    nodes = {node.name: index for index, node in enumerate(problem.graph.nodes)}
    for layer, theirs in STRATEGIES[model].items():
        name = layer.strip("/")
        yield from _parts(case, f"{name}, paper's space", found[layer], theirs, _PAPER)
        ours = {split.axis: split.degree for split in stage.splits_of(nodes[layer])}
        yield from _parts(case, f"{name}, executable", ours, {}, _OURS)


def _parts(case: str, name: str, ours: Mapping[str, int], theirs: Mapping[str, int], note: str) -> Iterator[Row]:
    """A row for each axis that is cut, in the paper or here."""
    for axis in dict.fromkeys((*ours, *theirs)):
        if ours.get(axis, 1) > 1 or axis in theirs:
            yield Row(case, f"parts of {axis}", theirs.get(axis), ours.get(axis, 1), "", name, note)
