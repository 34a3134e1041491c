"""Tables and figures of Lin et al., "Tessel" (HPCA 2024), section VI.

Schedules of the five placement shapes are searched as block graphs. GPT, mT5 and Flava are planned
for V100s and simulated. The baseline 1F1B on models with large tables is a chain of stages
(sections II and VI-D). Because an embedding does not fit on one device, either a few devices have
the embedding and the layers are on the others (Figure 2), or each stage is sharded over a
sufficiently large group. In the model zoo, heads are tied to the embedding, so the chain ends on
the devices of the table.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from autopipe.configs import zoo
from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.configs.zoo import Setting
from autopipe.ir.block_schedule import BlockSchedule
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.analysis.chain import Chain, make_chain
from autopipe.passes.cost.memory_check import with_16_bit_copies
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.frontend import read_model
from autopipe.passes.pipeline import Request, Runner, supported_problems
from autopipe.passes.placement.tessel_shapes import (
    CostedModel,
    ModelPart,
    SharedTableNodes,
    TesselShapes,
    chain_parts,
    costed_model,
    divide_devices,
    large_tables,
    make_split_stage,
    make_unsplit_stage,
    move_gathers_first,
    node_chain,
    shared_table_nodes,
)
from autopipe.passes.registry import Scheduler
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.published.base import GPipe
from autopipe.passes.schedule.published.blocks import SHAPES, schedule_blocks, shape_blocks
from autopipe.passes.schedule.published.one_f_one_b import (
    Chimera,
    OneForwardOneBackward,
    OneForwardOneBackwardPlus,
)
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.schedule.tessel.model import SearchOptions, constant_distance
from autopipe.passes.schedule.tessel.scheduler import Tessel
from autopipe.passes.schedule.tessel.search import search
from benchmarks.table import Case, Row, cases_of
from benchmarks.tessel_baselines import search_all_at_once, search_in_flight

# Numbers of the paper, on four devices.
BUBBLE_RATES: Final = {
    "m": {"1f1b": 0.0, "chimera": 0.20, "1f1b_plus": 0.25, "tessel": 0.0},
    "nn": {"1f1b": 0.0, "chimera": 0.20, "1f1b_plus": 0.20, "tessel": 0.0},
    "k": {"1f1b": 0.0, "chimera": 0.20, "tessel": 0.0},
}
"""Table II: bubble rate by placement and schedule. 1F1B runs on a V and Chimera on an X in all
rows.
"""
AVERAGE_SEARCH_S: Final = 147.3
"""Section VI-B: mean seconds of all its searches."""
TIME_OPTIMAL_V_16_S: Final = 3752.0
"""Figure 9: seconds of Z3 for the complete schedule of a V with 16 micro-batches."""
UNITS_FOR_ZERO_BUBBLE: Final = {"v": 4, "m": 6, "nn": 6}
"""Figure 11: minimum number of micro-batches in a repetend for which the bubble is zero."""
GPT_SPEEDUP: Final = {"1f1b": 4.8, "1f1b_plus": 1.4}
"""Figure 13: maximum speedup over the named schedule."""
MT5_SPEEDUP: Final = {"1f1b": 5.5, "1f1b_plus": 1.4}
"""Figure 14: maximum speedup over the named schedule."""
FLAVA_THROUGHPUT: Final = {"tensor_parallel": 1.5, "1f1b": 2.0}
"""Figure 15: throughput relative to tensor parallelism, and relative to 1F1B for few
micro-batches.
"""
FLAVA_LATENCY_REDUCTION: Final = 0.38
"""Figure 15: reduction of the latency of one micro-batch relative to 1F1B."""
FIGURE_2_IMBALANCE: Final = 3.4
"""Figure 2: slowest stage divided by fastest stage of 1F1B's placement with 40 layers."""

DEVICES: Final = 4
"""Default number of devices."""


def cases() -> list[Case]:
    """Return all parts, Table II first, then in the order of the paper."""
    shapes = [(f"{name}/{DEVICES}", (name,)) for name in SHAPES]
    searched = [
        (f"{name}/{devices}", (name, devices)) for devices in (4, 8, 16, 32) for name in SHAPES
    ]
    whole = (("v", 4), ("v", 16), ("x", 4), ("m", 4), ("nn", 4), ("nn", 6), ("k", 4))
    trained = [
        (f"{model.name}-{size}/p={devices}", (model, size, devices))
        for model in _MODELS
        for devices, size in model.sizes.items()
    ]
    return [
        *cases_of(
            "Table II", _bubble_rates, ((f"{name}/{DEVICES}", (name,)) for name in BUBBLE_RATES)
        ),
        *cases_of("search time", _search_times, searched),
        *cases_of(
            "Figure 9",
            _time_optimal,
            ((f"{name}/{DEVICES}", (name, units)) for name, units in whole),
        ),
        *cases_of("Figure 11", _bubble_by_units, shapes),
        *cases_of("Figure 12", _bubble_by_memory, shapes),
        *cases_of("Figure 2", _imbalance, [(f"gpt-tessel-figure-2/p={DEVICES}", ())]),
        *cases_of("Figures 13, 14", _training, trained),
        *cases_of("Figure 15", _inference, [(f"flava-paper/p={DEVICES}", ())]),
    ]


# Table II and Figures 9, 11 and 12: schedules of blocks.


def _bubble_rates(case: str, name: str) -> Iterator[Row]:
    """Yield the idle time in the steady state, with equal work on all devices."""
    for schedule, theirs in BUBBLE_RATES[name].items():
        # In all rows, the paper runs 1F1B on a V and Chimera on an X.
        blocks = shape_blocks(
            {"1f1b": "v", "chimera": "x"}.get(schedule, name), DEVICES, train=True
        )
        count = 24  # All schedules reach their steady state.
        made = (
            search(blocks, count)
            if schedule == "tessel"
            else schedule_blocks(schedule, blocks, count)
        )
        period, units = _steady_state(made)
        micro_batches = units * blocks.micro_batches_per_unit
        note = (
            f"{period} time units for {micro_batches} "
            f"micro-batch{'es' if micro_batches > 1 else ''}, counted"
        )
        yield Row(
            case, "bubble_rate", theirs, 1 - units * max(blocks.loads) / period, "", schedule, note
        )
        yield Row(case, "period", None, period / units, "per unit", schedule, note)


def _steady_state(schedule: BlockSchedule) -> tuple[int, int]:
    """Return (time, micro-batches) of one repetition in the middle third of a schedule."""
    first = schedule.units // 3
    last = 2 * schedule.units // 3
    for units in range(1, last - first):
        distance = constant_distance(schedule.starts, units, first, last)
        if distance is not None:
            return distance, units
    raise AssertionError("a named schedule repeats")


def _search_times(case: str, name: str, devices: int) -> Iterator[Row]:
    """Yield the seconds of the search, and the proven period."""
    blocks = shape_blocks(name, devices, train=True)
    units = 128
    search(shape_blocks("m", 2, train=True), 8)  # Load modules before the measurement.
    start = time.perf_counter()
    made = search(blocks, units)
    seconds = time.perf_counter() - start
    proven = "proven minimum"
    if not made.optimal:
        proven = f"at least {made.lower_bound}, gap {made.gap:.1%}"
    theirs = AVERAGE_SEARCH_S if devices == DEVICES else None
    note = (
        f"measured once, steady state and {units} micro-batches; the paper's value is the mean of "
        "all its searches"
    )
    yield Row(case, "search_time_s", theirs, seconds, "s", "tessel", note)
    note = f"paper: the largest load; {proven}"
    yield Row(case, "period", max(blocks.loads), made.period, "per unit", "tessel", note)
    yield Row(case, "makespan", None, made.makespan, "", "tessel", f"{units} units")


def _time_optimal(case: str, name: str, units: int) -> Iterator[Row]:
    """Yield the search of all micro-batches at once and the search of a steady state that is
    extended.
    """
    blocks = shape_blocks(name, DEVICES, train=True)
    limit_s = 30.0
    start = time.perf_counter()
    whole = search_all_at_once(blocks, units, SearchOptions(time_limit=limit_s))
    between = time.perf_counter()
    made = search(blocks, units)
    end = time.perf_counter()
    proof = (
        "proven" if whole.optimal else f"stopped at {limit_s:.0f} s, at least {whole.lower_bound}"
    )
    theirs = TIME_OPTIMAL_V_16_S if (name, units) == ("v", 16) else None
    at_once = f"whole, N={units}"
    extended = f"steady, N={units}"
    yield Row(
        case,
        "search_time_s",
        theirs,
        between - start,
        "s",
        at_once,
        f"measured once; {proof}",
    )
    yield Row(case, "search_time_s", None, end - between, "s", extended, "measured once")
    yield Row(case, "makespan", None, whole.makespan, "", at_once, proof)
    yield Row(
        case,
        "makespan",
        None,
        made.makespan,
        "",
        extended,
        "steady state, warm-up and cool-down, or better",
    )


_MAX_VARIED = 8
"""Maximum of the parameter by which bubble rates are searched."""
_MICRO_BATCHES = 64
"""Micro-batches of these schedules."""


def _bubble_by_units(case: str, name: str) -> Iterator[Row]:
    """Yield the bubble rate by the maximum number of micro-batches in a repetend, with sufficient
    memory.
    """
    enough: int | None = None
    for units in range(1, _MAX_VARIED + 1):
        row = _rate(
            case,
            f"N_R={units}",
            search_in_flight(shape_blocks(name, DEVICES, train=True), _MICRO_BATCHES, units),
        )
        yield row
        if row.ours == 0.0:
            enough = units
            break
    note = "minimum number of micro-batches in a repetend for a bubble of zero (Figure 11)"
    yield Row(
        case, "units_for_zero_bubble", UNITS_FOR_ZERO_BUBBLE.get(name), enough, "", "tessel", note
    )


def _bubble_by_memory(case: str, name: str) -> Iterator[Row]:
    """Yield the bubble rate by memory, in activations of a stage, of repetends with each block
    once.
    """
    for memory in range(1, _MAX_VARIED + 1):
        variant = f"M={memory}"
        try:
            made = search_in_flight(
                shape_blocks(name, DEVICES, train=True, memory=memory),
                _MICRO_BATCHES,
                _MICRO_BATCHES,
            )
        except InfeasibleError as error:
            yield Row(case, "bubble_rate", None, None, "", variant, error.message)
            continue
        row = _rate(case, variant, made)
        yield row
        if row.ours == 0.0:
            return


def _rate(case: str, variant: str, made: BlockSchedule) -> Row:
    note = f"computed: period {made.period}, {'proven' if made.optimal else f'gap {made.gap:.1%}'}"
    return Row(case, "bubble_rate", None, made.steady_bubble_rate, "", variant, note)


# Models on the paper's machines.


def problem_on_v100(
    model: str,
    settings: Mapping[str, Setting],
    devices: int,
    batch_size: int,
    micro_batch_size: int,
) -> Problem:
    """Return a problem with a model of the zoo on V100s with 32 GB, eight per server, in fp16 with
    SGD (8 bytes per parameter).
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        zoo.build(zoo.configure(model, {**settings, "weights": "none"})).save(path)
        request = Request(
            path,
            build_cluster(cluster_preset("v100-32gb"), devices, None, None),
            strategy=None,
            scheduler=None,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            precision="fp16",
            recompute="full",
            memory_limit=2**60,  # `step_seconds` checks memory.
        )
        runner = Runner()
        # The logits of the loss are saved, as in the paper.
        read = read_model(path, batch=micro_batch_size, scores="keep")
        runner.models.update(dict.fromkeys((None, micro_batch_size), read))
        return next(supported_problems(request, TesselShapes(), runner))[1]


def step_seconds(problem: Problem, placement: Placement, scheduler: Scheduler) -> float:
    """Return the seconds of a simulated step. Raise InfeasibleError if the scheduler does not apply
    or the memory does not suffice.
    """
    placement.verify(problem.graph)
    placement = with_16_bit_copies(replace(problem, memory_limit=None), placement)
    scheduler.requires(problem, placement)
    prediction = predict(problem, placement)
    if isinstance(scheduler, Tessel):
        # Tessel would plan within the memory limit; here memory is checked afterwards.
        schedule = scheduler.run_with(replace(problem, memory_limit=None), placement, prediction)
    else:
        schedule = scheduler.run(problem, placement)
    step = simulate(schedule, StageGraph.of(problem, placement).stage_devices, prediction)
    used = max(step.peak_memory)
    limit = problem.cluster.devices[0].memory_bytes
    if used > limit:
        raise InfeasibleError(f"out of memory: {used / 2**30:.1f} GiB of {limit / 2**30:.1f}")
    return step.end


def with_layers_recomputed(placement: Placement) -> Placement:
    """Return the placement with recomputation in all stages with layers, as in the paper. Stages
    with only tables or heads do not recompute.
    """

    def has_layers(stage: Stage) -> bool:
        # A table, or a head with its loss, has fewer than 100 nodes.
        return len(stage.devices) == 1 or len(stage.nodes) > 100

    return replace(
        placement,
        stages=tuple(replace(each, recompute=has_layers(each)) for each in placement.stages),
    )


def device_seconds(problem: Problem, placement: Placement) -> list[float]:
    """Return the seconds of forward and backward of a micro-batch on each device."""
    seconds = [0.0] * problem.cluster.size
    for stage, cost in zip(placement.stages, stage_costs(problem, placement), strict=True):
        for device in stage.devices:
            seconds[device] += cost.forward_s + cost.backward_s
    return seconds


# Chains of stages for 1F1B.

_MOST_BLOCKS = 224
_LAYER_PARTS = 8
"""Number of equal parts of the layers, some of which are on the devices of the tables."""


def separate_tables(problem: Problem) -> Iterator[Placement]:
    """Yield placements with the tables on 1, 2, 4, ... devices, together with none to half of the
    layers; the other layers are a chain with one stage per device.
    """
    for degree in _powers_of_2(problem.cluster.size // 2):
        for parts_with_tables in range(_LAYER_PARTS // 2 + 1):
            with suppress(InfeasibleError):
                yield place_tables_separately(problem, degree, parts_with_tables)


def equal_groups(problem: Problem) -> Iterator[Placement]:
    """Yield placements with stages on groups of 1, 2, 4, ... devices each. Each stage is sharded
    over its group; tables are at both ends.
    """
    model = costed_model(problem)
    tables = large_tables(model, at_least_one=True)
    for degree in _powers_of_2(model.devices):
        with suppress(InfeasibleError):
            line = _line(model, shared_table_nodes(model, tables, degree))
            runs = node_chain(model, line, line.order).partition_evenly(
                [None] * (model.devices // degree)
            )
            groups = (
                tuple(range(place * degree, (place + 1) * degree)) for place in range(len(runs))
            )
            stages = tuple(
                make_split_stage(problem, model, run, group, tables)
                for run, group in zip(runs, groups, strict=True)
            )
            yield with_layers_recomputed(Placement(stages))


def place_tables_separately(problem: Problem, degree: int, parts_with_tables: int) -> Placement:
    """Return a placement with tables, heads and `parts_with_tables` eighths of the layers on the
    first `degree` devices, and the other layers on the other devices.
    """
    model = costed_model(problem)
    tables = large_tables(model, at_least_one=True)
    wide = shared_table_nodes(model, tables, degree)
    line = _line(model, wide)
    parts = _with_layers_moved(
        model,
        line,
        move_gathers_first(model, chain_parts(model, line, wide), wide),
        parts_with_tables,
    )
    layers = [part for part in parts if not part.shared]
    if len(layers) > model.devices - degree:
        raise InfeasibleError(
            f"{len(layers)} chains of layers need more than {model.devices - degree} devices"
        )
    groups = iter(
        divide_devices([model.seconds_of(part.nodes) for part in layers], model.devices - degree)
    )
    stages: list[Stage] = []
    for part in parts:
        if part.shared:
            stages.append(
                make_split_stage(problem, model, part.nodes, tuple(range(degree)), tables)
            )
            continue
        devices = [degree + device for device in next(groups)]
        runs = node_chain(model, line, part.nodes).partition_evenly([None] * len(devices))
        stages += [
            make_unsplit_stage(problem, run, (device,))
            for run, device in zip(runs, devices, strict=True)
        ]
    return with_layers_recomputed(Placement(tuple(stages)))


def _powers_of_2(most: int) -> Iterator[int]:
    yield from (2**power for power in range(most.bit_length()))


def _line(model: CostedModel, wide: tuple[SharedTableNodes, ...]) -> Chain:
    return make_chain(
        model.graph, model.seconds, _MOST_BLOCKS, tuple(tuple(each.nodes) for each in wide)
    )


def _with_layers_moved(
    model: CostedModel, line: Chain, parts: tuple[ModelPart, ...], parts_with_tables: int
) -> list[ModelPart]:
    """Return the parts with the beginning of the first chain moved into the shared part before
    it.
    """
    found = list(parts)
    position = next(index for index, part in enumerate(found) if not part.shared)
    if not parts_with_tables or not position:
        return found
    runs = node_chain(model, line, found[position].nodes).partition_evenly([None] * _LAYER_PARTS)
    moved = tuple(node for run in runs[:parts_with_tables] for node in run)
    rest = tuple(node for run in runs[parts_with_tables:] for node in run)
    found[position - 1 : position + 1] = [
        ModelPart((*found[position - 1].nodes, *moved), True),
        ModelPart(rest, False),
    ]
    return found


def _imbalance(case: str) -> Iterator[Row]:
    """Figure 2: yield the imbalance of 1F1B's placement, which a large embedding causes, for GPTs
    with more and more layers.
    """
    for layers in (24, 32, 40):
        settings: dict[str, Setting] = {"size": "tessel-figure-2", "layers": layers, "loss": True}
        problem = problem_on_v100("gpt", settings, DEVICES, batch_size=128, micro_batch_size=1)
        seconds = device_seconds(
            problem, place_tables_separately(problem, degree=2, parts_with_tables=0)
        )
        theirs = FIGURE_2_IMBALANCE if layers == 40 else None
        note = (
            f"roofline: table and tied head on 2 of {DEVICES} devices, layers on the others, "
            "2048 tokens, one sample per micro-batch, layers recomputed; memory not limited"
        )
        imbalance = max(seconds) / min(seconds)
        yield Row(
            case,
            "imbalance",
            theirs,
            imbalance,
            "slowest / fastest device",
            f"1f1b, layers={layers}",
            note,
        )


# Figures 13 and 14: training.

_BATCH = 128
_ASSUMPTIONS = (
    "simulated: V100-32GB by data sheet, eight per server, 50 GB/s within and 12.5 GB/s between "
    "servers; fp16 compute on fp32 parameters, SGD, so 8 bytes per parameter; each layer "
    "recomputed; batch 128; best micro-batch of 1, 2 and 4"
)


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model in Table III by number of devices, and the speedups that the paper
    reports.
    """

    name: str
    sizes: Mapping[int, str]
    tokens: Mapping[str, int]
    """Settings for the length of a sample."""
    shape: str
    speedup: Mapping[str, float]


_MODELS = (
    Model("gpt", {4: "11b", 8: "24b", 16: "47b", 32: "77b"}, {"sequence": 1024}, "m", GPT_SPEEDUP),
    Model(
        "mt5",
        {4: "1.8b", 8: "9.5b", 16: "43b", 32: "88b"},
        {"source": 512, "target": 512},
        "nn",
        MT5_SPEEDUP,
    ),
)


@dataclass(frozen=True, slots=True)
class System:
    """A schedule and the placements for it."""

    name: str
    placements: Callable[[Problem], Iterable[Placement]]
    scheduler: Scheduler
    published: str | None = None
    """Name of the baseline in the paper; None if the paper has no such baseline."""


def baselines(shape: str) -> tuple[System, ...]:
    """Return the baselines of the paper for a shape, and Chimera."""
    return (
        System("1f1b_plus", _in_shape(shape), OneForwardOneBackwardPlus(), "1f1b_plus"),
        System("1f1b, equal groups", equal_groups, OneForwardOneBackward(), "1f1b"),
        System("1f1b, tables apart", separate_tables, OneForwardOneBackward()),
        System("chimera", _in_shape("x"), Chimera()),
    )


def _in_shape(name: str) -> Callable[[Problem], Iterable[Placement]]:
    return lambda problem: [with_layers_recomputed(TesselShapes(name).run(problem))]


def _training(case: str, model: Model, size: str, devices: int) -> Iterator[Row]:
    ours = System("tessel", _in_shape(model.shape), Tessel(time_limit=10.0))
    settings: dict[str, Setting] = {"size": size, "loss": True, **model.tokens}
    problems = problems_in_sizes(model.name, settings, devices, _BATCH)
    lengths = ", ".join(f"{name} {count} tokens" for name, count in model.tokens.items())
    tessel_step: float | None = None
    for system in (ours, *baselines(model.shape)):
        step, note = best_step(problems, system)
        throughput = _BATCH / step if step else None
        yield Row(
            case, "throughput", None, throughput, "samples/s", system.name, f"{note}; {lengths}"
        )
        if system is ours:
            tessel_step = step
            continue
        theirs = model.speedup[system.published] if system.published else None
        meaning = "paper: maximum over all sizes" if theirs else "paper: no value"
        speedup = step / tessel_step if step and tessel_step else None
        yield Row(case, "speedup", theirs, speedup, "times", f"tessel over {system.name}", meaning)


def problems_in_sizes(
    model: str, settings: Mapping[str, Setting], devices: int, batch: int
) -> list[Problem]:
    """Return the problems for each micro-batch size that is tried."""
    return [problem_on_v100(model, settings, devices, batch, each) for each in (1, 2, 4)]


def best_step(problems: Sequence[Problem], system: System) -> tuple[float | None, str]:
    """Return (seconds, note) of the fastest step over micro-batch sizes and placements; (None,
    reason) if none is feasible.
    """
    best: tuple[float, int] | None = None
    failure = "out of memory"
    for problem in problems:
        try:
            step = _fastest(problem, system)
        except InfeasibleError as error:
            failure = error.message
            continue
        if best is None or step < best[0]:
            best = step, problem.micro_batch_size
    return (None, failure) if best is None else (best[0], f"{_ASSUMPTIONS}, here {best[1]}")


def _fastest(problem: Problem, system: System) -> float:
    """Return the shortest step of the placements that fit in memory. Placements are skipped if
    their busiest device alone takes longer than the best step. Raise InfeasibleError if none fits.
    """
    loads = [(max(device_seconds(problem, each)), each) for each in system.placements(problem)]
    best: float | None = None
    failure: InfeasibleError | None = None
    for load, placement in sorted(loads, key=lambda each: each[0]):
        if best is not None and load * problem.micro_batches >= best:
            break
        try:
            step = step_seconds(problem, placement, system.scheduler)
        except InfeasibleError as error:
            failure = failure or error
            continue
        best = step if best is None else min(best, step)
    if best is None:
        raise failure or InfeasibleError("the system has no placement for this problem")
    return best


# Figure 15: inference.


def tensor_parallel(problem: Problem) -> Placement:
    """Return the placement with all matmuls sharded over all devices."""
    model = costed_model(problem)
    nodes = range(len(problem.graph.nodes))
    return Placement((make_split_stage(problem, model, nodes, tuple(range(DEVICES)), frozenset()),))


def _inference(case: str) -> Iterator[Row]:
    """Yield Flava with its branches on different devices, a chain, and tensor parallelism."""
    counts = (1, 2, 4, 8, 32, 128)
    for size in (1, 4, 16):
        problem = problem_on_v100("flava", {"size": "paper"}, DEVICES, max(counts) * size, size)
        systems: dict[str, tuple[Placement, Scheduler]] = {
            "tessel": (TesselShapes("k").run(problem), Tessel()),
            "1f1b": (TesselShapes("v").run(problem), OneForwardOneBackward()),
            "tensor_parallel": (tensor_parallel(problem), GPipe()),
        }
        batches = [
            replace(problem, batch_size=size * count, micro_batches=count) for count in counts
        ]
        ends = {
            name: [step_seconds(each, *system) for each in batches]
            for name, system in systems.items()
        }
        note = f"simulated, V100-32GB by data sheet, fp16 compute, {size} sample(s) per micro-batch"
        for name, (first, *_, last) in ends.items():
            yield Row(case, "latency_s", None, first, "s", f"{name}, size={size}", note)
            yield Row(
                case,
                "throughput",
                None,
                counts[-1] * size / last,
                "samples/s",
                f"{name}, size={size}",
                note,
            )
        ours, chain, tensor = ends.values()
        few = max(theirs / mine for mine, theirs in zip(ours[:-1], chain, strict=False))
        for metric, theirs, figure, unit, variant in (
            ("latency_reduction", FLAVA_LATENCY_REDUCTION, 1 - ours[0] / chain[0], "", "1f1b"),
            ("speedup", FLAVA_THROUGHPUT["1f1b"], few, "times", "1f1b, few micro-batches"),
            (
                "speedup",
                FLAVA_THROUGHPUT["tensor_parallel"],
                tensor[-1] / ours[-1],
                "times",
                "tensor_parallel",
            ),
        ):
            yield Row(case, metric, theirs, figure, unit, f"over {variant}, size={size}", note)
