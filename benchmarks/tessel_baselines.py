"""Searches that Tessel is compared with: all micro-batches at once (Figure 9 of the paper), and a
limited number of micro-batches in flight (Figure 11).
"""

from __future__ import annotations

from autopipe.ir.block_schedule import BlockGraph, BlockRepetend, BlockSchedule, check_start_times
from autopipe.ir.errors import ConfigurationError
from autopipe.passes.schedule.tessel.model import (
    Budget,
    PeriodicStarts,
    SearchOptions,
    frees_all_memory,
    is_valid,
    makespan,
    pairs_sharing_a_device,
    period_bound,
    unroll_steady_state,
    with_reserved_memory,
)
from autopipe.passes.schedule.tessel.periodic import (
    CyclicModel,
    construct_steady_state,
    serial_steady_state,
    widest_block,
)
from autopipe.passes.schedule.tessel.search import one_by_one_order, shortest_schedule
from autopipe.passes.solvers.cp_sat import Status, solve


def search_all_at_once(
    graph: BlockGraph, micro_batches: int, options: SearchOptions | None = None
) -> BlockSchedule:
    """Return the shortest schedule found with all micro-batches in one problem: the time-optimal
    search of Tessel's Figure 9.

    The search starts from a steady state that is found without a solver. Raise ConfigurationError
    for invalid blocks, and InfeasibleError if the memory does not suffice for one micro-batch.
    """
    graph.verify()
    if micro_batches < 1:
        raise ConfigurationError(
            f"the number of micro-batches is {micro_batches}; the minimum is 1"
        )
    budget = Budget(options or SearchOptions())
    reduced = with_reserved_memory(graph, micro_batches)
    known = construct_steady_state(
        reduced,
        period_bound(reduced),
        one_by_one_order(graph, micro_batches, budget.limit(0.2)),
        budget,
    )
    starts, bound, _ = shortest_schedule(
        graph, unroll_steady_state(graph, known, micro_batches), budget.limit(1.0), budget.report
    )
    optimal = makespan(graph, starts) == bound
    schedule = BlockSchedule(graph, starts, None, bound, optimal, None, budget.used)
    check_start_times(schedule)
    return schedule


def model_in_flight(graph: BlockGraph, low: int, high: int, in_flight: int) -> CyclicModel:
    """Return a model of all repetends with periods from `low` to `high` that contain blocks of at
    most `in_flight` micro-batches. Phases are not limited to [0, period): each device may begin its
    repetition at another time.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    blocks = range(len(graph.blocks))
    furthest = high * (len(graph.blocks) + 1)
    bounds = [(0, 0) if index == widest_block(graph) else (-furthest, furthest) for index in blocks]
    cyclic_model = CyclicModel(
        graph,
        model,
        model.new_int_var(low, high, ""),
        [model.new_int_var(*each, "") for each in bounds],
        [model.new_int_var(0, in_flight - 1, "") for _ in blocks],
        {pair: model.new_bool_var("") for pair in pairs_sharing_a_device(graph)},
    )
    cyclic_model.order_pairs()
    for index, waits in enumerate(graph.waits):
        for other, wait in waits:
            model.add(cyclic_model.modulo_stages[index] >= cyclic_model.modulo_stages[other])
            if low == high:
                model.add(cyclic_model.start(index, low) >= cyclic_model.start(other, low) + wait)
                continue
            gaps = [model.new_bool_var("") for _ in range(in_flight)]
            model.add_exactly_one(gaps)
            for size, gap in enumerate(gaps):
                model.add(
                    cyclic_model.modulo_stages[index] - cyclic_model.modulo_stages[other] == size
                ).only_enforce_if(gap)
                end = cyclic_model.phases[other] + wait
                model.add(
                    cyclic_model.phases[index] + size * cyclic_model.period >= end
                ).only_enforce_if(gap)
    cyclic_model.limit_memory()
    cyclic_model.fix_first_blocks()
    return cyclic_model


def search_in_flight(
    graph: BlockGraph, micro_batches: int, in_flight: int, options: SearchOptions | None = None
) -> BlockSchedule:
    """Return the schedule with the shortest period of all repetends that contain blocks of at most
    `in_flight` micro-batches.

    `in_flight` is N_R of Lin et al., "Tessel" (HPCA 2024), Algorithm 1 and Figure 11. Each device
    may begin its repetition at another time. `optimal` and `lower_bound` hold for such repetends
    only. Warm-up and cool-down are as early as the order of blocks permits. Raise
    ConfigurationError for invalid blocks, and InfeasibleError if the memory does not suffice.
    """
    graph.verify()
    if micro_batches < 1 or in_flight < 1:
        raise ConfigurationError(
            f"the number of micro-batches is {micro_batches}, in flight {in_flight}; the minimum "
            "is 1"
        )
    budget = Budget(options or SearchOptions())
    reduced = with_reserved_memory(graph, micro_batches)
    known = serial_steady_state(graph, one_by_one_order(graph, micro_batches, budget.limit(0.2)))
    bound = period_bound(reduced)
    period = known.period
    phases = known.starts
    modulo_stages = (0,) * len(graph.blocks)
    runs = (
        ((bound, 0.4, None), (known.period - 1, 1.0, budget.report)) if known.period > bound else ()
    )
    for high, fraction, report in runs:
        cyclic_model = model_in_flight(reduced, period_bound(reduced), high, in_flight)
        if report is not None:
            cyclic_model.model.minimize(cyclic_model.period)
        result = solve(
            cyclic_model.model,
            [cyclic_model.period, *cyclic_model.phases, *cyclic_model.modulo_stages],
            budget.limit(fraction),
            report,
        )
        budget.work += result.work
        if report is not None and frees_all_memory(graph):
            bound = (
                known.period
                if result.status is Status.INFEASIBLE
                else max(bound, result.bound or 0)
            )
        if result.found:
            (period, *values) = result.values
            count = len(graph.blocks)
            phases = tuple(values[:count])
            modulo_stages = tuple(values[count:])
            break
    first = min(phase + period * stage for phase, stage in zip(phases, modulo_stages, strict=True))
    cyclic = PeriodicStarts(
        period,
        tuple(
            phase + period * stage - first
            for phase, stage in zip(phases, modulo_stages, strict=True)
        ),
    )
    assert is_valid(reduced, cyclic), "the solver's steady state violates a constraint of its model"
    repetend = BlockRepetend(
        tuple(phase - min(phases) for phase in phases),
        tuple(max(modulo_stages) - stage for stage in modulo_stages),
    )
    starts = unroll_steady_state(graph, cyclic, micro_batches)
    is_optimal = cyclic.period == bound
    schedule = BlockSchedule(graph, starts, cyclic.period, bound, is_optimal, repetend, budget.used)
    check_start_times(schedule)
    return schedule
