"""The tables and figures of section IV of Elango, "PaSE: Parallelization Strategies for Efficient
DNN Training" (IPDPS 2021).

The paper does not state the costs of its strategies. The minimum costs here are those that the
paper's public prototype finds with its cost model. If the prototype does not finish, they are the
costs on which two independent exact solvers agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Final

import numpy as np

from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.batch import batch_axes_of
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Mode, Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.cost.stages import stage_costs, step_seconds
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.pase.paper_costs import LayerGraph, PaperTables
from autopipe.passes.placement.pase.paper_search import find_strategy, make_paper_tables
from autopipe.passes.placement.pase.strategy import Pase
from autopipe.passes.registry import Strategy, strategy_class
from autopipe.passes.schedule.limits import check_memory
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.solvers.milp import Builder
from autopipe.passes.solvers.milp import solve as solve_milp
from autopipe.passes.solvers.min_sum import Assignment, MinSum, TableTooLargeError, eliminate, solve
from autopipe.passes.solvers.min_sum.metropolis import random_walk
from autopipe.passes.solvers.min_sum.model import merge_edges
from benchmarks.table import Case, Row, cases_of, zoo_graph

DEVICES: Final = (4, 8, 16, 32, 64)
BATCH: Final = {"alexnet": 128, "inceptionv3": 128, "rnnlm": 64, "transformer": 64}
"""Section IV."""
MODELS: Final = tuple(BATCH)

SEARCH_S: Final = {
    "alexnet": (0.226, 0.253, 0.295, 0.361, 0.475),
    "inceptionv3": (14.398, 20.018, 39.791, 86.039, 196.253),
    "rnnlm": (0.057, 0.086, 0.069, 0.131, 0.215),
    "transformer": (9.752, 28.798, 130.882, 553.022, 1883.187),
}
"""Table I, the paper's method, by `DEVICES`."""
BREADTH_FIRST_S: Final = {
    "alexnet": (0.234, 0.260, 0.303, 0.385, 0.485),
    "rnnlm": (0.070, 0.084, 0.109, 0.167, 0.271),
}
"""Table I, breadth-first order; on the other two models it runs out of memory."""
FLEXFLOW_S: Final = {
    "alexnet": (2.540, 2.770, 6.980, 7.920, 257.300),
    "inceptionv3": (69.210, 146.510, 365.820, 937.96, 2237.04),
    "rnnlm": (107.070, 164.290, 432.190, 668.220, 1041.980),
}
"""Table I, FlexFlow's random walk with costs measured on devices; it does not have Transformer."""
LEAST_COST: Final = {
    "alexnet": (148215719552, 97098296512, 70320712672, 53136349552, 41120456048),
    "inceptionv3": (986757044608, 782140602432, 673045949344, 602425599824, 553203648656),
    "rnnlm": (6866837733376, 4024963186688, 2476066881536, 1491938058240, 935818633216),
    "transformer": (2189181321216, 1421082828800, 1004992614400, 727566614528, 521017024512),
}
"""Operations, by `DEVICES`."""
SPEEDUP_AT_32: Final = {"alexnet": 1.44, "inceptionv3": 1.09, "rnnlm": 1.41, "transformer": 1.51}
"""Figure 6a: over data parallelism on 32 GeForce GTX 1080 Ti."""
LARGEST_SPEEDUP: Final = {"1080ti-pcie": 1.85, "2080ti-pcie": 4.0}
"""Section IV-B, "up to", over all models and numbers of devices."""
STRATEGIES: Final[dict[str, dict[str, dict[str, int]]]] = {
    "alexnet": {
        "/conv1/Conv": {"b": 32},
        "/conv2/Conv": {"b": 32},
        "/conv3/Conv": {"b": 32},
        "/conv4/Conv": {"b": 32},
        "/conv5/Conv": {"c": 2},
        "/fc6/Gemm": {"n": 4, "k": 8},
        "/fc7/Gemm": {"n": 8, "k": 4},
        "/fc8/Gemm": {"n": 4, "k": 8},
    },
    "inceptionv3": {
        "/mixed_a.0/one.0/conv/Conv": {},
        "/mixed_e.1/one.0/conv/Conv": {},
        "/classifier/Gemm": {},
    },
    "rnnlm": {
        "/embedding/Gather": {"v": 32},
        "/layers.0/LSTM": {"l": 2, "b": 4, "n": 2, "k": 2},
        "/projection/MatMul": {},
    },
    "transformer": {
        "/source_embedding/Gather": {},
        "/encoder.1/attention/MatMul_1": {},
        "/encoder.1/feed_forward/up/MatMul": {},
        "/encoder.1/feed_forward/down/MatMul": {},
        "/projection/MatMul": {},
    },
}
"""Table II and section IV-C, 32 GeForce GTX 1080 Ti: parts of a layer's axes where they are known
to us.

Axes: b samples, c and k inputs, n outputs, l layers, v vocabulary.
"""

_ASSUMPTIONS: Final = {
    "1080ti-pcie": "simulated: GTX 1080 Ti by data sheet (fp32), eight a server, 12 GB/s a device in it over "
    "PCIe 3.0, 6.25 GB/s a device between servers; gradients are exchanged after backward, and "
    "nothing else overlaps either",
    "2080ti-pcie": "simulated: RTX 2080 Ti by data sheet (fp32), eight a server, 6 GB/s a device through the "
    "host's memory, 6 GB/s between servers; gradients are exchanged after backward, and nothing "
    "else overlaps either",
}
CLUSTERS: Final = tuple(_ASSUMPTIONS)
"""Presets: servers of eight devices on PCIe, InfiniBand between them."""


def cases() -> list[Case]:
    """Return all parts in the paper's order; the comparison of methods on the tables of Table I
    follows Table I.
    """
    every = [(f"{model}/p={devices}", (model, devices)) for model in MODELS for devices in DEVICES]
    at_32 = [(f"{model}/p=32", (model,)) for model in MODELS]
    return [
        *cases_of("Table I", _search_times, every),
        *cases_of("methods", _methods, every),
        *cases_of("Table II", _strategies, at_32),
        *cases_of("Figure 6", _speedups, every),
        *cases_of("Figure 6", _largest_speedup, [("all", ())]),
        *cases_of("Figure 6", _overlapped, at_32),
    ]


def paper_problem(
    model: str, devices: int, cluster: str = CLUSTERS[0], micro_batches: int = 1
) -> Problem:
    """Return the training of a model at the paper's size and batch, with its loss, in fp32 with
    SGD.
    """
    batch = BATCH[model]
    graph = zoo_graph(model, (("size", "paper"),), batch // micro_batches)
    links = build_cluster(cluster_preset(cluster), devices, None, None)
    return Problem(graph, roofline_costs(graph), links, batch, micro_batches, Mode.TRAIN, "loss")


# Table I: searches in the paper's space and under its costs.


def _search_times(case: str, model: str, devices: int) -> Iterator[Row]:
    problem = paper_problem(model, devices)
    place = DEVICES.index(devices)
    # Modules that are imported on first use do not count.
    find_strategy(make_paper_tables(paper_problem("rnnlm", 2)))
    start = time.perf_counter()
    tables = make_paper_tables(problem)
    built = time.perf_counter()
    found = find_strategy(tables)
    end = time.perf_counter()
    note = (
        "measured here, once, from the model's graph to the answer; theirs on a Xeon E5 (Sandy "
        "Bridge)"
    )
    yield Row(case, "search_time_s", SEARCH_S[model][place], end - start, "s", "pase", note)
    yield Row(
        case, "table_time_s", None, built - start, "s", "pase", "of this, building the tables"
    )
    proof = "proven least" if found.proven else f"at least {found.bound:.6g}"
    note = f"theirs: the least that their prototype's cost model allows; ours: {proof}"
    yield Row(
        case, "optimal_cost", LEAST_COST[model][place], int(found.cost), "operations", "pase", note
    )


# Methods against each other on the same tables.

_ITERATIONS = 250_000
"""Section IV-A stops FlexFlow after as many."""
_MOST_PAIRS = 60_000
_MILP_S = 30.0


def _methods(case: str, model: str, devices: int) -> Iterator[Row]:
    problem = paper_problem(model, devices)
    tables = make_paper_tables(problem)
    costs = tables.model
    start = _samples_first(tables, sample_axes(problem.graph, tables.graph))
    theirs_too = "; theirs with its tables"
    walked = f"; at most {_ITERATIONS} steps from data parallelism; theirs is FlexFlow"
    methods: dict[
        str, tuple[Callable[[MinSum], Assignment], Mapping[str, Sequence[float]], str]
    ] = {
        "dual, prune, eliminate": (solve, {}, ""),
        "eliminate, generate_seq": (
            partial(eliminate, ordering="generate_seq"),
            SEARCH_S,
            theirs_too,
        ),
        "eliminate, min_fill": (partial(eliminate, ordering="min_fill"), {}, ""),
        "eliminate, breadth_first": (
            partial(eliminate, ordering="breadth_first"),
            BREADTH_FIRST_S,
            theirs_too,
        ),
        "mcmc": (
            partial(random_walk, start=start, iterations=_ITERATIONS, temperature=0.1),
            FLEXFLOW_S,
            walked,
        ),
    }
    least = solve(costs).cost
    for name, (method, published, note) in methods.items():
        theirs = published[model][DEVICES.index(devices)] if model in published else None
        began = time.perf_counter()
        try:
            answer = method(costs)
        except TableTooLargeError as error:
            yield Row(case, "solve_time_s", theirs, None, "s", name, str(error).partition(";")[0])
            continue
        seconds = time.perf_counter() - began
        yield Row(
            case,
            "solve_time_s",
            theirs,
            seconds,
            "s",
            name,
            f"measured here, once, tables not counted{note}",
        )
        if not answer.proven:
            excess = f"of the best strategy's cost{note}"
            yield Row(
                case, "cost_over_least", None, float(answer.cost / least), "times", name, excess
            )
    seconds_or_none, note = _milp(costs, least)
    yield Row(case, "solve_time_s", None, seconds_or_none, "s", "milp", note)


def sample_axes(graph: Graph, layers: LayerGraph) -> tuple[int | None, ...]:
    """Return the sample axis of each layer, or None if the layer has none.

    It is inferred from the batch axes of the model's values, and otherwise from the operands of the
    layer.
    """
    found: list[int | None] = [None] * len(layers.layers)
    for name, places in batch_axes_of(graph).values.items():
        place = layers.locations.get(name)
        if place is not None and found[place.layer] is None and place.groups[places[0].dimension]:
            outer = place.groups[places[0].dimension][0]
            axes = layers.layers[place.layer].results[place.result].axes[outer]
            found[place.layer] = axes[0] if axes else None
    for edge in layers.edges:
        if found[edge.target] is None and found[edge.source] is not None:
            written, read = (tensor.axes for tensor in layers.edge_tensors(edge))
            cuts = (
                axes[0]
                for before, axes in zip(written, read, strict=True)
                if found[edge.source] in before and axes
            )
            found[edge.target] = next(cuts, None)
    return tuple(found)


def _samples_first(tables: PaperTables, counted: Sequence[int | None]) -> list[int]:
    """Return the choice closest to data parallelism: only samples are split, into as many parts as
    permitted.
    """
    found = []
    for configurations, axis in zip(tables.configurations, counted, strict=True):
        parts = configurations.prod(axis=1)
        by_samples = parts if axis is None else parts - configurations[:, axis]
        allowed = [
            row for row in range(len(parts)) if by_samples[row] == (1 if axis is None else 0)
        ]
        found.append(max(allowed, key=lambda row: int(parts[row])))
    return found


def _milp(costs: MinSum, least: float) -> tuple[float | None, str]:
    """Return (seconds of the integer program, or None if it is not solved; a note about the
    result).
    """
    pairs = sum(edge.costs.size for edge in merge_edges(costs).edges)
    if pairs > _MOST_PAIRS:
        return None, f"{pairs} pairs are too many for an integer program"
    start = time.perf_counter()
    found, proven = least_by_milp(costs, _MILP_S)
    seconds = time.perf_counter() - start
    if not proven:
        return None, f"HiGHS through scipy, not done in {_MILP_S:.0f} s"
    off = abs(found - least) > 1e-6 * least
    excess = (
        f"; its answer costs {found / least:.6f} times the least, within its tolerances"
        if off
        else ""
    )
    return seconds, f"HiGHS through scipy, {pairs} pairs{excess}"


def least_by_milp(model: MinSum, time_limit: float) -> tuple[float, bool]:
    """Return (the minimum cost that HiGHS finds in `time_limit` seconds, True if it is proven).

    There is one variable per configuration, and one per pair of configurations on an edge. Each
    node chooses one configuration, and the pairs of an edge agree with the choices of both ends
    (the local polytope: Schlesinger, 1976).
    """
    simple = merge_edges(model)
    sizes = [len(costs) for costs in simple.costs]
    starts = np.concatenate(([0], np.cumsum(sizes)))
    builder = Builder()
    chosen = builder.add_variables(int(starts[-1]), np.concatenate(simple.costs).astype(float))
    builder.add_rows(np.repeat(np.arange(len(sizes)), sizes), chosen, lower=1, upper=1)
    for edge in simple.edges:
        both = builder.add_variables(
            edge.costs.size, edge.costs.ravel().astype(float), integral=False
        )
        places = both.reshape(edge.costs.shape)
        for node, other in ((edge.source, places), (edge.target, places.T)):
            own = np.arange(sizes[node])
            row = np.concatenate((np.repeat(own, other.size // len(own)), own))
            columns = np.concatenate((other.ravel(), starts[node] + own))
            values = np.concatenate((np.ones(other.size), -np.ones(sizes[node])))
            builder.add_rows(row, columns, values, lower=0, upper=0)
    answer = solve_milp(builder.model(), time_limit)
    return answer.objective, answer.proven


# Table II: the strategies found on 32 GeForce GTX 1080 Ti, in the paper's search space and in the
# executable one.


def _strategies(case: str, model: str) -> Iterator[Row]:
    problem = paper_problem(model, 32)
    found = find_strategy(make_paper_tables(problem)).splits()
    (stage,) = placed(model, 32, CLUSTERS[0], "pase").stages
    nodes = {node.name: index for index, node in enumerate(problem.graph.nodes)}
    published = (
        "parts of the axis; theirs where the paper says it in words or its prototype finds it"
    )
    own = "parts of the axis of the ONNX node, under our costs on 1080 Ti servers"
    for layer, theirs in STRATEGIES[model].items():
        name = layer.strip("/")
        yield from _parts(case, f"{name}, paper's space", found[layer], theirs, published)
        ours = {split.axis: split.degree for split in stage.splits_of(nodes[layer])}
        yield from _parts(case, f"{name}, executable", ours, {}, own)


def _parts(
    case: str, name: str, ours: Mapping[str, int], theirs: Mapping[str, int], note: str
) -> Iterator[Row]:
    """Yield a row for each axis that is split in the paper or here."""
    for axis in dict.fromkeys((*ours, *theirs)):
        if ours.get(axis, 1) > 1 or axis in theirs:
            yield Row(case, f"parts of {axis}", theirs.get(axis), ours.get(axis, 1), "", name, note)


# Figure 6: simulated training steps of several strategies, compared with data parallelism.


def _speedups(case: str, model: str, devices: int) -> Iterator[Row]:
    for cluster in CLUSTERS:
        note = _ASSUMPTIONS[cluster]
        base, base_note = step_of_strategy(model, devices, cluster, "data_parallel")
        yield Row(
            case, "step_time_s", None, base, "s", f"data_parallel, {cluster}", base_note or note
        )
        for strategy in ("pase", "handcrafted", "mcmc"):
            step, why = step_of_strategy(model, devices, cluster, strategy)
            figure = base / step if base and step else None
            published = strategy == "pase" and devices == 32 and cluster == CLUSTERS[0]
            theirs = SPEEDUP_AT_32[model] if published else None
            yield Row(case, "step_time_s", None, step, "s", f"{strategy}, {cluster}", why or note)
            yield Row(
                case,
                "speedup",
                theirs,
                figure,
                "times",
                f"{strategy}, {cluster}",
                why or base_note or note,
            )


def _largest_speedup(case: str) -> Iterator[Row]:
    for cluster in CLUSTERS:
        found = []
        for model in MODELS:
            for devices in DEVICES:
                base, _ = step_of_strategy(model, devices, cluster, "data_parallel")
                step, _ = step_of_strategy(model, devices, cluster, "pase")
                found += [base / step] if base and step else []
        note = f"up to, over four models on 4 to 64 devices; {_ASSUMPTIONS[cluster]}"
        yield Row(
            case, "speedup", LARGEST_SPEEDUP[cluster], max(found), "times", f"pase, {cluster}", note
        )


@cache
def placed(
    model: str, devices: int, cluster: str, strategy: str, micro_batches: int = 1
) -> Placement:
    """Return the placement of a strategy with default options. Raise InfeasibleError if the
    strategy rejects the problem.
    """
    problem = paper_problem(model, devices, cluster, micro_batches)
    chosen = strategy_class(strategy)()
    chosen.requires(problem)
    placement: Placement = chosen.run(problem)
    return placement


@cache
def step_of_strategy(
    model: str, devices: int, cluster: str, strategy: str
) -> tuple[float | None, str]:
    """Return (seconds of a step, or None if the strategy is infeasible; the reason or a note).

    A placement with one stage uses the fewest micro-batches that fit into memory, and a pipeline
    the best number of several.
    """
    found: list[tuple[float, int]] = []
    refusal = ""
    for micro_batches in (1, 2, 4, 8):
        problem = paper_problem(model, devices, cluster, micro_batches)
        try:
            placement = placed(model, devices, cluster, strategy, micro_batches)
            found.append((_simulated(problem, placement), micro_batches))
        except InfeasibleError as error:
            refusal = refusal or error.message
            continue
        if len(placement.stages) == 1:
            break
    if not found:
        return None, refusal
    step, chosen = min(found)
    return step, f"{_ASSUMPTIONS[cluster]}; {chosen} micro-batches" if chosen > 1 else ""


def _simulated(problem: Problem, placement: Placement) -> float:
    """Return the seconds of a step. Raise InfeasibleError if memory is insufficient."""
    schedule = OneForwardOneBackward().run(problem, placement)
    step = simulate(
        schedule, StageGraph.of(problem, placement).stage_devices, predict(problem, placement)
    )
    check_memory(problem, placement, step)
    return step.end


def _overlapped(case: str, model: str) -> Iterator[Row]:
    """Yield Figure 6 on 32 devices if backward hides the gradient all-reduce, which helps data
    parallelism most.
    """

    def seconds(problem: Problem, strategy: Strategy) -> float:
        (cost,) = stage_costs(problem, strategy.run(problem))
        return step_seconds(cost, problem.micro_batches, overlap=True)

    for cluster in CLUSTERS:
        problem = paper_problem(model, 32, cluster)
        theirs = SPEEDUP_AT_32[model] if cluster == CLUSTERS[0] else None
        figure: float | None = None
        note = (
            "by the cost model: gradients are exchanged during backward, at most all of it, in "
            "both; links and devices "
            "as in the other speed-ups"
        )
        try:
            figure = seconds(problem, DataParallel()) / seconds(problem, Pase(overlap=True))
        except InfeasibleError as error:
            note = error.message
        yield Row(case, "speedup_overlapped", theirs, figure, "times", f"pase, {cluster}", note)
