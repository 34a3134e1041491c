"""The order of the passes: from an ONNX file and a cluster to a plan and what it is expected to take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopipe.ir.errors import CodegenError, ConfigurationError, InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.plan import Plan, Summary
from autopipe.ir.prediction import Prediction
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Schedule
from autopipe.ir.serial.plan_file import plan_digest
from autopipe.ir.stage_graph import StageGraph
from autopipe.ir.timeline import Timeline
from autopipe.passes.batching import Batching, Division
from autopipe.passes.cost.measured import coverage
from autopipe.passes.cost.precision import element_bytes
from autopipe.passes.cost.uses import uses_of
from autopipe.passes.frontend import Model
from autopipe.passes.lower.portions import check_portions
from autopipe.passes.lower.traffic import communication_bytes
from autopipe.passes.request import Request, costed, divided, problems_of, read_for
from autopipe.passes.runner import Observer, Runner, Silent
from autopipe.passes.schedule.limits import check_memory, lower_bound, quality
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the problem it answers and the step it is expected to take."""

    plan: Plan
    problem: Problem
    timeline: Timeline
    model: Model
    """What the plan's graph was read from."""

    @property
    def digest(self) -> str:
        """SHA-256 of the plan: equal for equal decisions on equal graphs, however long the search took."""
        return plan_digest(self.plan)


def pass_names(request: Request) -> tuple[str, ...]:
    """The passes, in the order in which they run."""
    return ("read", "cost", request.strategy.name, request.scheduler.name, "predict", "simulate")


def make_plan(request: Request, observer: Observer | None = None) -> Planned:
    """Read the model, cost it, place it, schedule it and simulate a step.

    Raises ConfigurationError, ModelError or InfeasibleError, naming the pass where the message itself names no place.
    """
    runner = Runner(observer or Silent())
    scheduler = request.scheduler
    model, problem, placement = _placed(request, runner)
    check_portions(problem.graph, placement)
    graph = StageGraph.of(problem, placement)
    schedule = runner.run(
        scheduler.name,
        lambda: scheduler.run(problem, placement),
        lambda: scheduler.requires(problem, placement),
        lambda result: result.verify(graph, problem.train),
    )
    prediction = runner.run("predict", lambda: predict(problem, placement))
    timeline = runner.run("simulate", lambda: simulate(schedule, graph.stage_devices, prediction))
    check_memory(problem, placement, timeline)
    plan = Plan(
        model=str(request.model),
        graph_digest=problem.graph.digest(),
        mode=problem.mode.value,
        batch_size=problem.batch_size,
        placement=placement,
        schedule=schedule,
        summary=_summary(request, problem, placement, schedule, prediction, timeline, runner.seconds),
        prediction=prediction,
        memory_limits=tuple(problem.memory_of(device) for device in range(problem.cluster.size)),
    )
    return Planned(plan, problem, timeline, model)


def reopen(request: Request, plan: Plan) -> Planned:
    """The plan again, with its problem made anew from the model's file and its step simulated from its predictions.

    `request` must fix what the plan was made with: mode, batch and micro-batches. Raises ConfigurationError where the
    plan does not belong to the model.
    """
    model = read_for(request, plan.summary.micro_batch_size)
    problem = costed(request, model, Batching(plan.batch_size, plan.summary.micro_batches))
    if problem.graph.digest() != plan.graph_digest:
        raise ConfigurationError(
            f"the plan does not belong to this model: the graph of {request.model} is not the one that was planned",
            hint="plan again, or restore the model's file",
        )
    _check_decisions(problem, plan)
    stage_devices = tuple(stage.devices for stage in plan.placement.stages)
    return Planned(plan, problem, simulate(plan.schedule, stage_devices, plan.prediction), model)


def _check_decisions(problem: Problem, plan: Plan) -> None:
    """Raise ConfigurationError unless the plan's decisions fit the problem: its files may have been edited."""
    if problem.mode.value != plan.mode:
        raise ConfigurationError(f"the plan is to {plan.mode}, its configuration to {problem.mode.value}")
    if plan.placement.devices > problem.cluster.size or plan.schedule.devices != problem.cluster.size:
        raise ConfigurationError(
            f"the plan is for {plan.schedule.devices} devices, its configuration for {problem.cluster.size}"
        )
    if max(max(stage.nodes, default=0) for stage in plan.placement.stages) >= len(problem.graph.nodes):
        raise ConfigurationError(f"the plan places nodes that the graph of {len(problem.graph.nodes)} nodes has not")
    try:
        plan.placement.verify(problem.graph)
        StageGraph.of(problem, plan.placement)
    except InfeasibleError as error:
        raise ConfigurationError(error.message, hint="plan again", where="placement") from error


def _placed(request: Request, runner: Runner) -> tuple[Model, Problem, Placement]:
    """The placement, of the first division that has one: smaller micro-batches help where memory is short.

    They do so for a strategy that wants as few as there can be, and therefore begins with the largest.
    """
    refused: InfeasibleError | None = None
    for model, problem in problems_of(request, runner):
        try:
            placement = _answer(request, runner, problem)
        except InfeasibleError as error:
            if request.strategy.division(problem.graph) is not Division.FEW:
                raise
            refused = error
        else:
            return _with_chosen_size(request, runner, model, problem, placement)
    assert refused is not None, "there is a problem, or an error says why not"
    raise refused


def _answer(request: Request, runner: Runner, problem: Problem) -> Placement:
    """What the strategy says."""
    strategy = request.strategy
    return runner.run(
        strategy.name,
        lambda: strategy.run(problem),
        lambda: strategy.requires(problem),
        lambda found: found.verify(problem.graph),
    )


def _with_chosen_size(
    request: Request, runner: Runner, model: Model, problem: Problem, placement: Placement
) -> tuple[Model, Problem, Placement]:
    """The model and the problem on the micro-batches that the strategy chose, the largest where stages differ.

    Where the frontend leaves other operators in a model of so few samples, the strategy is asked again, for those.
    """
    while problem.micro_batch_sizes:
        size = math.lcm(*(stage.micro_batch_size for stage in placement.stages))
        if size == problem.micro_batch_size:
            break
        sizes = tuple(each for each in problem.micro_batch_sizes if size % each == 0)
        batching = Batching(problem.batch_size, problem.batch_size // size, sizes)
        model, smaller = divided(request, runner, model, batching)
        same = _nodes(smaller) == _nodes(problem)
        problem = smaller
        if not same:
            placement = _answer(request, runner, problem)
    return model, problem, placement


def _nodes(problem: Problem) -> list[tuple[str, str, tuple[str, ...]]]:
    """What tells the nodes of a graph from those of another, whatever their shapes."""
    return [(node.op, node.name, node.outputs) for node in problem.graph.nodes]


def _summary(
    request: Request,
    problem: Problem,
    placement: Placement,
    schedule: Schedule,
    prediction: Prediction,
    timeline: Timeline,
    seconds: tuple[tuple[str, float], ...],
) -> Summary:
    bound = lower_bound(problem, placement, prediction)
    if schedule.proof is not None and schedule.period is None:
        bound = max(bound, schedule.proof.lower_bound)
    optimal, gap = quality(schedule, timeline.end, bound)
    return Summary(
        strategy=request.strategy.name,
        schedule=request.scheduler.name,
        devices=problem.cluster.size,
        stages=len(placement.stages),
        micro_batches=problem.micro_batches,
        micro_batch_size=problem.micro_batch_size,
        depth=StageGraph.of(problem, placement).depth,
        step_time_s=timeline.end,
        samples_per_s=problem.batch_size / timeline.end if timeline.end else 0.0,
        bubble_rate=timeline.bubble_rate,
        peak_memory_bytes=timeline.peak_memory,
        search_time_s=seconds,
        lower_bound_s=bound,
        optimal=optimal,
        gap=gap,
        communication_bytes=_communication_bytes(problem, placement),
        splits=placement.proof,
        costs=coverage(problem),
    )


def _communication_bytes(problem: Problem, placement: Placement) -> tuple[tuple[str, int], ...] | None:
    """What a step's exchanges move, by kind; None where the placement cannot be executed."""
    widths = element_bytes(problem.graph, uses_of(problem.graph), problem.precision)
    loss = problem.loss if problem.train else None
    try:
        found = communication_bytes(problem.graph, placement, problem.micro_batches, problem.cluster.size, loss, widths)
    except CodegenError:
        return None
    return tuple(found.items())
