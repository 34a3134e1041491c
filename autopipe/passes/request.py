"""From a request to the problem that a strategy is given: the model read, its batch divided, its operators costed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import REFUSALS, AutopipeError, ConfigurationError, ModelError
from autopipe.ir.measured_costs import Costs
from autopipe.ir.problem import Constraint, Mode, Optimizer, Problem, Work
from autopipe.passes.analysis.constraints import wishes_of
from autopipe.passes.annotations import annotated_constraints
from autopipe.passes.base import Scheduler, Strategy
from autopipe.passes.batching import Batching, Division, batchings
from autopipe.passes.cost.measured import costed_work
from autopipe.passes.frontend import CrossEntropy, Model, Source, read_model
from autopipe.passes.runner import Runner


@dataclass(frozen=True, slots=True)
class Request:
    """All that a plan is made from. Where a field is None, the pipeline chooses."""

    model: Path
    cluster: Cluster
    strategy: Strategy | None
    scheduler: Scheduler | None
    dims: tuple[tuple[str, int], ...] = ()
    batch_axes: tuple[tuple[str, int | None], ...] = ()
    frozen: tuple[str, ...] = ()
    trainable: tuple[str, ...] = ()
    mode: Mode | None = None
    loss: str | CrossEntropy | None = None
    """The output to minimise, or a loss to add; the model's own where None."""
    batch_size: int | None = None
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    optimizer: Optimizer = field(default=Optimizer())
    shard_open: bool = True
    """True if the search for the best plan may share out the optimizer's state where `optimizer` does not."""
    precision: str = "fp32"
    recompute: str | None = None
    memory_limit: int | None = None
    constraints: tuple[Constraint, ...] = ()
    time_limit: float | None = None
    seed: int = 0
    costs: Costs | None = None
    """Measured costs of the cluster's devices; the data sheet alone counts where None."""


def first_problem(request: Request, strategy: Strategy, runner: Runner) -> tuple[Model, Problem]:
    """The problem with the first division of the batch that the model and the strategy take."""
    return next(problems_of(request, strategy, runner))


def problems_of(request: Request, strategy: Strategy, runner: Runner) -> Iterator[tuple[Model, Problem]]:
    """The problems that the model and the strategy take, with the best division of the batch first.

    Raises the reason against the best division where there is none.
    """
    read = _read(request, runner, None)
    refused: list[AutopipeError] = []
    declined: list[AutopipeError] = []
    last: Problem | None = None
    found = False
    try:
        for batching in _divisions(request, strategy.division(read.graph), read):
            try:
                if last is not None:
                    # What it asks of the division alone is known before the model is read on so many samples.
                    strategy.requires(replace(last, micro_batches=batching.micro_batches))
                    last = None
                model, problem = at_batching(request, runner, read, batching)
            except REFUSALS as error:
                (refused if last is None else declined).append(error)
                continue
            try:
                strategy.requires(problem)
            except REFUSALS as error:
                declined.append(error)
                last = problem
                continue
            found = True
            yield model, problem
    except ConfigurationError as error:
        refused.insert(0, error)  # That there is no division says more than why one was refused.
    if not found:
        raise (declined or refused)[0]


def open_problem(request: Request, runner: Runner) -> Problem:
    """The problem with the largest micro-batches that the model takes, whatever the strategy.

    Raises what is wrong with the request itself: its model, its batch, its constraints.
    """
    read = _read(request, runner, None)
    refused: AutopipeError | None = None
    for batching in _divisions(request, Division.OWN, read):
        try:
            _, problem = at_batching(request, runner, read, batching)
        except REFUSALS as error:
            refused = refused or error
            continue
        wishes_of(problem, 1 + max((each.pipeline for each in problem.constraints), default=0), own_sizes=True)
        return problem
    assert refused is not None, "there is a division, or an error says why not"
    raise refused


def build_problem(request: Request, runner: Runner, batching: Batching) -> tuple[Model, Problem]:
    """The model on micro-batches of a division that is known, and its problem."""
    return at_batching(request, runner, first_model(request, runner), batching)


def first_model(request: Request, runner: Runner) -> Model:
    """The model on the samples that its file fixes, else on one."""
    return _read(request, runner, None)


def operators_of(request: Request, runner: Runner) -> int:
    """How many operators the model has, on the samples that its file fixes, else on one."""
    return len(first_model(request, runner).graph.nodes)


def at_batching(request: Request, runner: Runner, read: Model, batching: Batching) -> tuple[Model, Problem]:
    """The model on micro-batches of a division, and its problem."""
    model = read
    if read.batch not in (None, batching.micro_batch_size):
        model = _read(request, runner, batching.micro_batch_size)
    return model, _build_problem(request, runner, model, batching)


def _read(request: Request, runner: Runner, micro_batch_size: int | None) -> Model:
    """The model as `read_for` gives it, read once a run: requests of one run are for one model."""
    source = None if micro_batch_size is None else first_model(request, runner).source
    return runner.once("read", micro_batch_size, lambda: read_for(request, micro_batch_size, source))


def _build_problem(request: Request, runner: Runner, model: Model, batching: Batching) -> Problem:
    """The problem that the model poses, its operators costed once a run: so are requests for one cluster.

    Requests that differ in nothing of a problem pose one and the same, so that what is known of it is known of theirs.
    """
    work = runner.once("cost", id(model), lambda: work_of(request, model))
    held = id(model), id(request.cluster), id(request.costs)
    settled = request.optimizer, request.precision, request.recompute, request.memory_limit, request.constraints
    key = "problem", *held, batching, *settled, request.time_limit, request.seed
    return runner.known(key, lambda: costed(request, model, batching, work))


def _divisions(request: Request, division: Division, read: Model) -> Iterator[Batching]:
    """Divisions of the batch, best first; `read` is the model on the samples that its file fixes, else on one.

    One sample may be what the file fixes or what an open batch was bound to: first it is taken for open.
    """
    given = request.batch_size, request.micro_batches, request.micro_batch_size
    owns = (None, 1) if read.batch == 1 else (read.batch or 1,)
    seen: set[Batching] = set()
    for own in owns:
        for batching in batchings(*given, own, request.cluster.size, division):
            if batching not in seen:
                seen.add(batching)
                yield batching


def read_for(request: Request, micro_batch_size: int | None, source: Source | None = None) -> Model:
    """The model on micro-batches of that many samples; on what its file fixes, else one, where that is None.

    `source` is the parsed file where it is at hand.
    """
    return read_model(
        source or request.model,
        dims=dict(request.dims),
        batch=micro_batch_size,
        batch_axes=dict(request.batch_axes),
        loss=request.loss,
        mode=request.mode,
        frozen=request.frozen,
        trainable=request.trainable,
    )


def work_of(request: Request, model: Model) -> tuple[Work, ...]:
    """What each node of the model costs.

    Raises ConfigurationError where it is to train and has no loss, ModelError where nothing of it would be trained.
    """
    if model.mode is Mode.TRAIN and not model.loss:
        raise ConfigurationError(
            "the model has no output called 'loss' to train", hint="name one by --set loss=NAME, or use --mode infer"
        )
    if model.mode is Mode.TRAIN and not any(each.trainable for each in model.graph.parameters):
        raise ModelError(
            "nothing in it would be trained",
            hint="autopipe inspect -v says why; name what is to be trained in model.trainable, or use --mode infer",
            where=str(model.path),
        )
    return costed_work(model.graph, request.precision, request.cluster, request.costs)


def costed(request: Request, model: Model, batching: Batching, work: tuple[Work, ...]) -> Problem:
    """The problem that the model poses with nodes of such costs."""
    return Problem(
        graph=model.graph,
        work=work,
        cluster=request.cluster,
        batch_size=batching.batch_size,
        micro_batches=batching.micro_batches,
        mode=model.mode,
        loss=model.loss or None,
        optimizer=request.optimizer,
        precision=request.precision,
        recompute=request.recompute or "none",
        memory_limit=request.memory_limit,
        constraints=(*request.constraints, *annotated_constraints(model, request.cluster.size)),
        time_limit=request.time_limit,
        seed=request.seed,
        micro_batch_sizes=batching.sizes,
        costs=request.costs,
    )
