"""Searches that Tessel is measured against: all units at once (its Figure 9), and few units in
flight (Figure 11).
"""

from __future__ import annotations

from autopipe.ir.block_schedule import BlockGraph, BlockRepetend, BlockSchedule, check_blocks
from autopipe.ir.errors import ConfigurationError
from autopipe.passes.schedule.tessel.model import (
    Budget,
    PeriodicStarts,
    SearchOptions,
    frees_all,
    is_valid,
    makespan,
    pairs_sharing_a_device,
    period_bound,
    unroll,
    with_reserved_memory,
)
from autopipe.passes.schedule.tessel.periodic import (
    CyclicModel,
    construct,
    one_at_a_time,
    widest_block,
)
from autopipe.passes.schedule.tessel.search import one_by_one_order, shortest_schedule
from autopipe.passes.solvers.cp_sat import Status, solve


def search_whole(
    graph: BlockGraph, units: int, options: SearchOptions | None = None
) -> BlockSchedule:
    """The schedule of least makespan, all units in one problem: the time-optimal search of Tessel's
    Figure 9.

    Begins from a steady state that is constructed without a solver. Raises ConfigurationError for
    blocks that make no sense, InfeasibleError where memory does not suffice for one unit.
    """
    graph.verify()
    if units < 1:
        raise ConfigurationError(f"the number of micro-batches is {units}; the minimum is 1")
    budget = Budget(options or SearchOptions())
    roomy = with_reserved_memory(graph, units)
    known = construct(
        roomy, period_bound(roomy), one_by_one_order(graph, units, budget.limit(0.2)), budget
    )
    starts, bound, _ = shortest_schedule(
        graph, unroll(graph, known, units), budget.limit(1.0), budget.report
    )
    optimal = makespan(graph, starts) == bound
    schedule = BlockSchedule(graph, starts, None, bound, optimal, None, budget.used)
    check_blocks(schedule)
    return schedule


def model_in_flight(graph: BlockGraph, low: int, high: int, in_flight: int) -> CyclicModel:
    """A model of all repetends of periods from `low` to `high` that hold blocks of at most
    `in_flight` units.

    Phases are not held within [0, period): each device may begin its repetition at a time of its
    own.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    blocks = range(len(graph.blocks))
    furthest = high * (len(graph.blocks) + 1)
    bounds = [(0, 0) if index == widest_block(graph) else (-furthest, furthest) for index in blocks]
    made = CyclicModel(
        graph,
        model,
        model.new_int_var(low, high, ""),
        [model.new_int_var(*each, "") for each in bounds],
        [model.new_int_var(0, in_flight - 1, "") for _ in blocks],
        {pair: model.new_bool_var("") for pair in pairs_sharing_a_device(graph)},
    )
    made.order_pairs()
    for index, waits in enumerate(graph.waits):
        for other, wait in waits:
            model.add(made.modulo_stages[index] >= made.modulo_stages[other])
            if low == high:
                model.add(made.start(index, low) >= made.start(other, low) + wait)
                continue
            gaps = [model.new_bool_var("") for _ in range(in_flight)]
            model.add_exactly_one(gaps)
            for size, gap in enumerate(gaps):
                model.add(
                    made.modulo_stages[index] - made.modulo_stages[other] == size
                ).only_enforce_if(gap)
                end = made.phases[other] + wait
                model.add(made.phases[index] + size * made.period >= end).only_enforce_if(gap)
    made.limit_memory()
    made.fix_first_blocks()
    return made


def search_in_flight(
    graph: BlockGraph, units: int, in_flight: int, options: SearchOptions | None = None
) -> BlockSchedule:
    """The schedule whose repetend has blocks of at most `in_flight` units and the least period of
    all such.

    This is N_R of Lin et al., "Tessel" (HPCA 2024), Algorithm 1 and Figure 11: each device may
    begin its repetition at a time of its own. `optimal` and `lower_bound` are said of such
    repetends alone. The ends are as early as the order of blocks allows. Raises ConfigurationError
    for blocks that make no sense, InfeasibleError where memory does not suffice.
    """
    graph.verify()
    if units < 1 or in_flight < 1:
        raise ConfigurationError(
            f"{units} units, {in_flight} of them in flight; there must be at least one"
        )
    budget = Budget(options or SearchOptions())
    roomy = with_reserved_memory(graph, units)
    known = one_at_a_time(graph, one_by_one_order(graph, units, budget.limit(0.2)))
    bound = period_bound(roomy)
    period = known.period
    phases = known.starts
    stages = (0,) * len(graph.blocks)
    questions = (
        ((bound, 0.4, None), (known.period - 1, 1.0, budget.report)) if known.period > bound else ()
    )
    for high, share, report in questions:
        made = model_in_flight(roomy, period_bound(roomy), high, in_flight)
        if report is not None:
            made.model.minimize(made.period)
        answer = solve(
            made.model,
            [made.period, *made.phases, *made.modulo_stages],
            budget.limit(share),
            report,
        )
        budget.work += answer.work
        if report is not None and frees_all(graph):
            bound = (
                known.period
                if answer.status is Status.INFEASIBLE
                else max(bound, answer.bound or 0)
            )
        if answer.found:
            (period, *values) = answer.values
            count = len(graph.blocks)
            phases = tuple(values[:count])
            stages = tuple(values[count:])
            break
    first = min(phase + period * stage for phase, stage in zip(phases, stages, strict=True))
    cyclic = PeriodicStarts(
        period,
        tuple(phase + period * stage - first for phase, stage in zip(phases, stages, strict=True)),
    )
    assert is_valid(roomy, cyclic), "the solver's steady state breaks a rule of its own model"
    repetend = BlockRepetend(
        tuple(phase - min(phases) for phase in phases),
        tuple(max(stages) - stage for stage in stages),
    )
    starts = unroll(graph, cyclic, units)
    least = cyclic.period == bound
    schedule = BlockSchedule(graph, starts, cyclic.period, bound, least, repetend, budget.used)
    check_blocks(schedule)
    return schedule
