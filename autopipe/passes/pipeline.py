"""The passes from a request to its plan, in order: read, cost, place, predict, schedule, simulate.

`make_plan` runs all passes. The functions below it run one pass each. A `Runner` measures the time
of each pass and adds the name of the pass to errors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import (
    CANDIDATE_ERRORS,
    AutopipeError,
    ConfigurationError,
    InfeasibleError,
    InternalError,
    ModelError,
    OutOfMemoryError,
)
from autopipe.ir.graph import DType, Graph
from autopipe.ir.graph_file import PlannedGraph
from autopipe.ir.measured_costs import Costs
from autopipe.ir.placement import Placement
from autopipe.ir.plan import LossScores, Plan, plan_digest
from autopipe.ir.problem import (
    AVERAGED_LOSS,
    Constraint,
    LossDivision,
    Mode,
    NodeCost,
    Optimizer,
    Problem,
    Scores,
)
from autopipe.ir.schedule import Schedule, StageGraph
from autopipe.ir.timeline import Prediction, Timeline
from autopipe.ir.training import DataSettings, Evaluation, LRScheduler, Training
from autopipe.ir.words import plural
from autopipe.passes.analysis.batch_forms import LossForm, LossKind, Mixing, mixed_output
from autopipe.passes.analysis.joined_samples import joining_node
from autopipe.passes.analysis.loss_division import (
    divided_loss,
    form_of,
    in_totals,
    note_on,
    trained_loss,
)
from autopipe.passes.analysis.micro_batches import check_portions
from autopipe.passes.analysis.training import check_groups, check_padding
from autopipe.passes.annotations import annotated_constraints
from autopipe.passes.batching import Batching, Division, batchings
from autopipe.passes.cost.loss_scores import compare_scores, may_be_short
from autopipe.passes.cost.measured import costed_work
from autopipe.passes.cost.memory_check import size_text, with_copies, without_copies
from autopipe.passes.cost.stage_work import check_whole_matrices
from autopipe.passes.frontend import CrossEntropy, Model, Source, read_model
from autopipe.passes.frontend.input_shapes import has_fixed_batch
from autopipe.passes.frontend.model import require_trainable
from autopipe.passes.registry import Scheduler, Strategy
from autopipe.passes.schedule.boundary_gathers import choose_gathers
from autopipe.passes.schedule.limits import check_memory
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.simulate import simulate

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Request:
    """The model, the cluster and the settings of a plan. The pipeline decides a field that is
    None.
    """

    model: Path
    cluster: Cluster
    strategy: Strategy | None
    scheduler: Scheduler | None
    dims: tuple[tuple[str, int], ...] = ()
    batch_axes: tuple[tuple[str, int | None], ...] = ()
    fixed_inputs: tuple[tuple[str, bool | int | float], ...] = ()
    frozen: tuple[str, ...] = ()
    trainable: tuple[str, ...] = ()
    mode: Mode | None = None
    training_graph: bool | None = None
    """True if Dropout and BatchNormalization behave as in training, if the file declares it; False
    if they behave as in evaluation; None for the behaviour of the mode.
    """
    loss: str | CrossEntropy | None = None
    """Name of the output to minimise, or a cross-entropy to add; None for the loss of the model."""
    normalize: str = "auto"
    """Value of the key `loss.normalize`: how the losses of micro-batches are combined into the loss
    of a step.
    """
    scores: Scores | None = None
    """`keep` if losses save their logits for backward, `recompute` if they recompute them; None if
    the plan chooses.
    """
    batch_size: int | None = None
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    optimizer: Optimizer = field(default=Optimizer())
    lr_scheduler: LRScheduler = field(default=LRScheduler())
    training: Training = field(default=Training())
    shard_open: bool = True
    """True if a search may shard the optimizer state although `optimizer` does not."""
    eps_open: bool = False
    """True if `optimizer.eps` is not given. It is then increased if float16 weights are trained."""
    precision: str = "fp32"
    compiled: bool = False
    recompute: str | None = None
    memory_limit: int | None = None
    constraints: tuple[Constraint, ...] = ()
    time_limit: float | None = None
    solver: str = "auto"
    seed: int = 0
    costs: Costs | None = None
    """Measured costs of the devices of the cluster; None to use only their data sheets."""
    data: DataSettings = field(default=DataSettings())
    evaluation: Evaluation = field(default=Evaluation())


class Observer:
    """Callbacks of a `Runner`. The base class does nothing; override the callbacks that you
    need.
    """

    def started(self, name: str) -> None:
        """Called before the pass `name` runs."""

    def finished(self, name: str, value: object, seconds: float) -> None:
        """Called after the pass `name` returned `value` and `value` was verified."""

    def improved(self, step_s: float, bound_s: float) -> None:
        """Called if a search found a plan with a shorter step than before. `bound_s` is a lower
        bound, in seconds, of the steps of all placements that were tried.
        """

    def failed(self, error: InternalError) -> None:
        """Called if one of several candidates raised an internal error. The search skips the
        candidate, unless this method raises an exception.
        """


class Runner:
    """Runs the passes of requests for one model on one cluster, and caches results that several
    requests use.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer or Observer()
        self.models: dict[int | None, Model] = {}
        """Models by number of samples of a forward pass. Under None: the model on the number of
        samples that the file fixes, or on one sample if the file fixes none.
        """
        self.totals: dict[tuple[int | None, Scores], Model] = {}
        """Models whose micro-batches return the dividend and the divisor of the loss, by number of
        samples and form of the losses.
        """
        self.work: dict[tuple[int | None, Scores, str], tuple[NodeCost, ...]] = {}
        """Costs of the nodes by number of samples, form of the losses, and name of the loss that is
        divided ("" if no loss is divided).
        """
        self.loss_forms: dict[str, LossForm | None] = {}
        """By name of the loss: how the loss of a batch depends on the losses of its parts."""
        self.mixed_output: Mixing | None = None
        """Why micro-batches may change an output of inference; None if it was not checked yet."""
        self.costed: dict[Hashable, tuple[Model, Problem]] = {}
        """Models and problems by every field that affects them. Equal requests share one problem
        object, so that caches with the problem as key return their entries.
        """
        self.failures = 0
        """Number of candidates that raised an internal error."""
        self.seconds: dict[str, float] = {}
        """Wall-clock seconds by pass, in the order in which the passes first ran."""

    def run(
        self,
        name: str,
        compute: Callable[[], Result],
        requires: Callable[[], None] | None = None,
        verify: Callable[[Result], None] | None = None,
    ) -> Result:
        """Call `requires`, `compute` and `verify`, and return the result of `compute`. Errors name
        the pass, and the passes before it.
        """
        self.observer.started(name)
        begin = time.perf_counter()
        try:
            if requires is not None:
                requires()
            result = compute()
            if verify is not None:
                verify(result)
        except AutopipeError as error:
            error.where = error.where or self._place(name)
            if type(error) is AutopipeError:
                # The error comes from a solver, and neither the user nor the model is the cause.
                raise InternalError(
                    error.message, error.hint or "rerun with --debug", error.where
                ) from error
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise InternalError(
                f"internal error: {reason}", "rerun with --debug", self._place(name)
            ) from error
        seconds = time.perf_counter() - begin
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.observer.finished(name, result, seconds)
        return result

    def _place(self, name: str) -> str:
        done = ", ".join(each for each in self.seconds if each != name)
        return f"pass {name}" + (f", after {done}" if done else "")


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement with its problem and the predicted times of its stages and messages."""

    model: Model
    problem: Problem
    placement: Placement
    graph: StageGraph
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A schedule of a placement and the simulated step, which fits the memory of all devices."""

    schedule: Schedule
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan with its problem, its simulated step, and the request that gives an equal plan. The
    request names the strategy and the scheduler.
    """

    plan: Plan
    problem: Problem
    timeline: Timeline
    model: Model
    request: Request

    @property
    def digest(self) -> str:
        """SHA-256 of the decisions and the graph of the plan. Search times do not affect it."""
        return plan_digest(self.plan)


def make_plan(
    request: Request, observer: Observer | None = None, advise: bool = False
) -> PlanResult:
    """Return the plan of a request that names strategy and scheduler: read the model, compute
    costs, place, schedule and simulate a step.

    If the request leaves open whether losses save their logits, a plan that saves them is made
    first. A second plan that recomputes them is made if memory may be short or recomputation is
    faster for the loss itself. The plan with the shorter step time per sample is returned. Raise
    ConfigurationError, ModelError or InfeasibleError, with the name of the pass unless the error
    has another location. With `advise`, the hint of an OutOfMemoryError names options with which
    the plan fits, if they are found within about `_OPTIONS_S` seconds.
    """
    runner = Runner(observer)
    request = with_whole_batch(request, runner)
    try:
        return _made(request, runner)
    except OutOfMemoryError as error:
        if advise:
            error.hint = "; ".join((*memory_options(request, runner), error.hint))
        raise


def _made(request: Request, runner: Runner) -> PlanResult:
    """Return the plan of a request whose batch is known, with the faster form of the losses."""
    if request.scores is not None or read(request, runner).other is None:
        return assemble_plan(request, *_planned(request, runner), runner)
    keeping = replace(request, scores="keep")
    recomputing = replace(request, scores="recompute")
    kept: tuple[Placed, Scheduled] | None = None
    refused: str | None = None
    try:
        kept = _planned(keeping, runner)
    except InfeasibleError as error:
        refused = error.line
    if kept is not None and not _may_gain(kept[0]):
        return assemble_plan(keeping, *kept, runner)
    try:
        recomputed = _planned(recomputing, runner)
    except InfeasibleError as error:
        if kept is None:
            raise
        return with_other_scores(assemble_plan(keeping, *kept, runner), refused=error.line)
    if kept is None or _sample_seconds(recomputed) < _sample_seconds(kept):
        result = assemble_plan(recomputing, *recomputed, runner)
        return with_other_scores(result, kept and kept[1].timeline.end, refused)
    return with_other_scores(assemble_plan(keeping, *kept, runner), recomputed[1].timeline.end)


_OPTIONS_S = 20.0
"""Seconds during which options are tried after a plan did not fit into memory. The last search may
take the same time again.
"""


def memory_options(request: Request, runner: Runner) -> Iterator[str]:
    """Yield hints for a request whose plan did not fit into memory: recomputation or a sharded
    optimizer state, if that suffices.

    Each option is planned with the request's strategy and scheduler, and both together only if
    neither suffices. The hint includes the maximum peak memory of any device.
    """
    model = read(request, runner)
    if model.mode is not Mode.TRAIN:
        return
    full = "--recompute full"
    shard = "--set optimizer.zero_stage=1"
    sharded = replace(request.optimizer, shard=True)
    scores = request.scores if model.other is None else request.scores or "recompute"
    limit_s = _OPTIONS_S if request.time_limit is None else min(request.time_limit, _OPTIONS_S)
    base = replace(request, scores=scores, time_limit=limit_s)
    varied: dict[tuple[str, ...], Request] = {}
    if request.recompute in (None, "none"):
        varied[full,] = replace(base, recompute="full")
    if not request.optimizer.shard and request.optimizer.name != "muon":
        varied[shard,] = replace(base, optimizer=sharded)
    if len(varied) == 2:
        varied[full, shard] = replace(base, recompute="full", optimizer=sharded)
    end = time.monotonic() + limit_s
    found = list[str]()
    refused = list[str]()
    for options, each in varied.items():
        if time.monotonic() > end or (found and len(options) > 1):
            break
        own = Runner()  # An observer of the request sees no passes of the options.
        own.models = runner.models
        own.work = runner.work
        try:
            timeline = _planned(each, own)[1].timeline
        except OutOfMemoryError:
            refused.append(" ".join(options))
        except CANDIDATE_ERRORS:
            continue
        else:
            found.append(f"{' '.join(options)} (needs {size_text(max(timeline.peak_memory))})")
    if found:
        yield f"add {' or '.join(found)}"
        settled = {full: request.recompute is not None, shard: not request.shard_open}
        left_out = [
            option for option in (full, shard) if (option,) in varied and not settled[option]
        ]
        if left_out:
            yield (
                f"a named strategy leaves out {' and '.join(left_out)}, which plan without "
                "--strategy tries"
            )
    elif refused:
        yield f"{refused[-1]} does not suffice"


def untried_options(request: Request, planned: PlanResult) -> tuple[str, ...]:
    """Return the options that strategy `auto` would have tried and that the strategy of `request`
    did not try.

    `request` is the request of `planned`. Recomputation is included if memory may be short, and
    neither the request nor the placement decides on it. A sharded optimizer state is included if
    the request leaves it open and several devices hold equal parameters.
    """
    plan = planned.plan
    problem = planned.problem
    if request.strategy is None or not problem.train:
        return ()
    options = []
    recomputed = any(stage.recompute for stage in plan.placement.stages)
    if request.recompute is None and not recomputed and may_be_short(problem):
        options.append("--recompute")
    degrees = plan.summary.degrees
    if (
        request.shard_open
        and not problem.optimizer.shard
        and degrees is not None
        and degrees.has_replicas
    ):
        options.append("optimizer.zero_stage=1")
    return tuple(options)


def _planned(request: Request, runner: Runner) -> tuple[Placed, Scheduled]:
    """Return the placement and the schedule of a request that names strategy and scheduler."""
    strategy, scheduler = strategy_and_scheduler(request)
    placed = predict_placement(*run_strategy(request, strategy, runner), runner)
    return schedule_placed(placed, scheduler, runner)


def _may_gain(kept: Placed) -> bool:
    """True if a plan that recomputes logits could have a shorter step than a plan that saves
    them.
    """
    found = scores_of(kept)
    return found is None or found.recompute_s < found.keep_s or may_be_short(kept.problem)


def _sample_seconds(planned: tuple[Placed, Scheduled]) -> float:
    """Seconds of a step per sample: plans may differ in their batch if the request leaves it
    open.
    """
    placed, scheduled = planned
    return scheduled.timeline.end / placed.problem.batch_size


def with_other_scores(
    result: PlanResult, step_s: float | None = None, refused: str | None = None
) -> PlanResult:
    """Return the result with the step time of the plan with the other form of the losses, or the
    reason why there is no such plan.
    """
    scores = result.plan.summary.scores
    if scores is None:
        return result
    summary = replace(
        result.plan.summary, scores=replace(scores, other_step_s=step_s, other_refused=refused)
    )
    return replace(result, plan=replace(result.plan, summary=summary))


def scores_of(placed: Placed) -> LossScores | None:
    """Return the costs of both forms of the losses; None if the losses have one form."""
    other = placed.model.other
    return None if other is None else compare_scores(placed.problem, other, placed.model.scores)


def pass_names(request: Request) -> tuple[str, ...]:
    """Return the names of the passes of `make_plan`, in the order in which they run."""
    strategy, scheduler = strategy_and_scheduler(request)
    return ("read", "cost", strategy.name, "predict", scheduler.name, "simulate")


def strategy_and_scheduler(request: Request) -> tuple[Strategy, Scheduler]:
    """Return the strategy and the scheduler of a request that names both."""
    if request.strategy is None or request.scheduler is None:
        raise ValueError("the request leaves open by which strategy or scheduler")
    return request.strategy, request.scheduler


def read_for(
    request: Request,
    micro_batch_size: int | None,
    source: Source | None = None,
    opened: bool = False,
) -> Model:
    """Return the model on `micro_batch_size` samples. If that is None, use the number of samples
    that the file fixes, or one sample.

    `source` is the parsed file if it is available. `opened` is the same as in `read_model`. Raise
    ModelError as `read_model`, and if a tensor that an exporter computed from parameters would be
    trained instead of them.
    """
    model = read_model(
        source or request.model,
        dims=dict(request.dims),
        batch=micro_batch_size,
        batch_axes=dict(request.batch_axes),
        fixed_inputs=dict(request.fixed_inputs),
        loss=request.loss,
        normalize=request.normalize,
        scores=request.scores,
        mode=request.mode,
        training=request.training_graph,
        frozen=request.frozen,
        trainable=request.trainable,
        opened=opened,
    )
    require_trainable(model)
    return model


def read(
    request: Request, runner: Runner, size: int | None = None, source: Source | None = None
) -> Model:
    """Return the model as `read_for`, with the requested form of the losses.

    A runner reads the model once per number of samples, for both forms of the losses.
    """
    if size not in runner.models:
        runner.models[size] = runner.run("read", lambda: read_for(request, size, source))
    model = runner.models[size]
    return model.with_scores(request.scores or model.scores)


_FOLLOWED = 3
"""Minimum number of samples of the graph in which the batch axis is followed if the model was read
on one sample.
"""
_COUNTING = frozenset({"Shape", "Size"})
"""ONNX operators whose results may contain the number of samples."""


def with_whole_batch(request: Request, runner: Runner) -> Request:
    """Return the request with one micro-batch per batch if inference computes an output from
    several samples, otherwise the request.

    The batch is the batch that the file fixes, otherwise the batch of the step. Raises
    ConfigurationError if the request has smaller micro-batches.
    """
    model = read(request, runner)
    if model.mode is Mode.TRAIN or model.batch is None or request.micro_batches == 1:
        return request
    node = joining_node(
        model.graph if model.batch > 1 else _several_samples(request, runner, model)
    )
    if node is None:
        return request
    fixed = model.batch if model.batch > 1 else None
    size = request.micro_batch_size
    count = request.micro_batches
    batch = (
        request.batch_size
        or fixed
        or next(batchings(None, None, None, None, request.cluster.size)).batch_size
    )
    if size == (fixed or batch):
        return request
    if size is not None or (count is not None and (fixed is None or batch // count != fixed)):
        raise ConfigurationError(
            (
                f"{node.op} {node.name!r} computes an output from several samples, which "
                "micro-batches would change"
            ),
            hint="--micro-batches 1" if fixed is None else f"--micro-batch-size {fixed}",
        )
    return replace(request, batch_size=batch, micro_batch_size=fixed or batch)


def _several_samples(request: Request, runner: Runner, model: Model, times: int = 1) -> Graph:
    """Return the graph of the model on several samples, or on `times` as many. If the model cannot
    be read on several samples, return its graph on one sample, in which no batch axis can be
    followed.
    """
    size = times * max(request.micro_batch_size or 1, _FOLLOWED)
    if size not in runner.models:
        try:
            runner.models[size] = read_for(request, size, model.source)
        except CANDIDATE_ERRORS:
            return model.graph
    return runner.models[size].graph


def cost(request: Request, batching: Batching, runner: Runner) -> tuple[Model, Problem]:
    """Return (model, problem) for a division of the batch into micro-batches. A runner reads the
    model and computes the costs once per micro-batch size.
    """
    model = read(request, runner)
    size = None
    if model.batch not in (None, batching.micro_batch_size):
        size = batching.micro_batch_size
        first = model
        model = read(request, runner, size, first.source)
        _require_loss(first, model)
    updates = request.optimizer, request.lr_scheduler, request.training
    settled = (
        *updates,
        request.precision,
        request.recompute,
        request.memory_limit,
        request.constraints,
    )
    key = (
        batching,
        *settled,
        request.compiled,
        request.time_limit,
        request.solver,
        request.seed,
        model.scores,
    )
    if key not in runner.costed:
        division, divided = _loss_division(request, model, batching, runner)
        costed = _in_totals(request, model, division, batching, runner)
        form = size, costed.scores, division.divided
        if form not in runner.work:
            runner.work[form] = runner.run("cost", lambda: _work(request, costed))
        runner.costed[key] = costed, _problem(request, costed, divided, runner.work[form], division)
    model, problem = runner.costed[key]
    if model.mode is not Mode.TRAIN:
        note = _note_on_outputs(request, model, batching, runner)
    else:
        note = (
            ""
            if request.normalize != "auto"
            else note_on(runner.loss_forms.get(model.loss), model.loss, batching)
        )
    return replace(model, warnings=(*model.warnings, note)) if note else model, problem


def _note_on_outputs(request: Request, model: Model, batching: Batching, runner: Runner) -> str:
    """Return a warning if micro-batches may change an output of inference and the model has no
    other warning about it, otherwise "".
    """
    if model.batch is None or (batching.micro_batches == 1 and not batching.sizes):
        return ""
    if runner.mixed_output is None:
        several = model.graph if model.batch > 1 else _several_samples(request, runner, model)
        counts = model.source is not None and any(
            node.op_type in _COUNTING for node in model.source.nodes
        )
        more = _several_samples(request, runner, model, 2) if counts else None
        runner.mixed_output = mixed_output(several, more)
    mixing = runner.mixed_output
    if not mixing.reason or any(repr(mixing.name) in text for text in model.warnings):
        return ""
    return f"{mixing.reason}: micro-batches may change outputs (--micro-batches 1 does not)"


def _require_loss(first: Model, model: Model) -> None:
    """Raise ModelError if the loss of `model` is not a scalar, although it is a scalar in `first`,
    the same model on fewer samples.
    """
    if first.mode is not Mode.TRAIN or model.loss == first.loss:
        return
    shape = (
        list(model.graph.type_of(first.loss).shape) if model.graph.has(first.loss) else "unknown"
    )
    samples = f"{model.batch} {plural(model.batch or 0, 'sample')}"
    message = f"on {samples} the loss {first.loss!r} is no number: its shape is {shape}"
    raise ModelError(
        message, "reduce it to one number in the model, or use --mode infer", str(model.path)
    )


def _work(request: Request, model: Model) -> tuple[NodeCost, ...]:
    """Return the cost of each node of the model. Raises ConfigurationError if the loss to train
    with is missing or one of several outputs, ModelError if nothing of the model would be trained.
    """
    train = model.mode is Mode.TRAIN
    if request.mode is not Mode.INFER and model.loss_choices:
        named = ", ".join(map(repr, model.loss_choices))
        hint = f"name one by --set loss={model.loss_choices[0]}, or use --mode infer"
        raise ConfigurationError(
            (
                f"{len(model.loss_choices)} {plural(len(model.loss_choices), 'output')} can be the "
                f"loss: {named}"
            ),
            hint,
        )
    if train and not model.loss:
        hint = "name one by --set loss=NAME, or use --mode infer"
        raise ConfigurationError("the model has no output called 'loss' to train", hint)
    if train and not any(each.trainable for each in model.graph.parameters):
        hint = (
            "autopipe inspect -v says why; name what is to be trained in model.trainable, or use "
            "--mode infer"
        )
        raise ModelError("nothing in it would be trained", hint, str(model.path))
    if train and request.data.last_batch == "pad":
        check_padding(model.graph, model.loss)
    if train:
        check_groups(request.optimizer, model.graph)
    return costed_work(
        model.graph, request.precision, request.cluster, request.costs, request.compiled
    )


def _loss_division(
    request: Request, model: Model, batching: Batching, runner: Runner
) -> tuple[LossDivision, Batching]:
    """Return (division, batching): how the losses of micro-batches are combined into the loss of
    the step, and the batching without micro-batch sizes that would change the loss.

    Raise InfeasibleError if the losses of micro-batches do not determine the loss of the step.
    """
    if model.mode is not Mode.TRAIN:
        return AVERAGED_LOSS, batching
    if model.loss not in runner.loss_forms:
        first = read(request, runner)
        runner.loss_forms[model.loss] = form_of(
            first, lambda size: _read_opened(request, runner, first, size)
        )
    form = runner.loss_forms[model.loss]
    divisible = LossKind.SUM if request.normalize == "tokens" else LossKind.MEAN
    if form is not None and form.kind is not divisible:
        batching = replace(batching, sizes=())
    return divided_loss(form, model, request.normalize, batching), batching


def _read_opened(request: Request, runner: Runner, first: Model, size: int) -> Model:
    """Return the model on `size` samples, even if its file fixes the batch to one sample. `first`
    is the model on the samples that the file fixes, or on one.
    """
    offered = () if first.source is None else first.source.graph.input
    if has_fixed_batch(offered, first.graph.batch_axes):
        return read_for(request, size, first.source, opened=True)
    if size not in runner.models:
        runner.models[size] = read_for(request, size, first.source)
    model = runner.models[size]
    return model.with_scores(request.scores or model.scores)


def _in_totals(
    request: Request, model: Model, division: LossDivision, batching: Batching, runner: Runner
) -> Model:
    """Return the model whose micro-batches return the dividend and the divisor of the loss if
    `division` requires them, otherwise the model.
    """
    if not division.divided:
        return model
    key = model.batch, model.scores
    if key not in runner.totals:
        runner.totals[key] = in_totals(model, runner.loss_forms[model.loss], batching)
    return runner.totals[key]


def _problem(
    request: Request,
    model: Model,
    batching: Batching,
    work: tuple[NodeCost, ...],
    division: LossDivision,
    annotated: tuple[Constraint, ...] | None = None,
) -> Problem:
    """Return the problem of a model on micro-batches. `annotated` are the constraints that follow
    from the annotations of the model's file; None to derive them from the model.
    """
    if annotated is None:
        annotated = annotated_constraints(model, request.cluster.size)
    return Problem(
        graph=model.graph,
        work=work,
        cluster=request.cluster,
        batch_size=batching.batch_size,
        micro_batches=batching.micro_batches,
        mode=model.mode,
        loss=trained_loss(model, division) or None,
        optimizer=_optimizer(request, model.graph),
        lr_scheduler=request.lr_scheduler,
        training=request.training,
        precision=request.precision,
        compiled=request.compiled,
        recompute=request.recompute or "none",
        memory_limit=request.memory_limit,
        constraints=(*request.constraints, *annotated),
        time_limit=request.time_limit,
        solver=request.solver,
        seed=request.seed,
        micro_batch_sizes=batching.sizes,
        costs=request.costs,
        loss_division=division,
    )


_EPS_OF_HALVES = 1e-4


def _optimizer(request: Request, graph: Graph) -> Optimizer:
    """Return the requested optimizer, with a larger `eps` for Adam with float16 weights if `eps` is
    open.

    Adam's averages of squared gradients have the type of the weights. In float16, averages below
    6e-8 are 0, so `eps` alone must keep the denominator away from 0.
    """
    halves = any(each.trainable and each.value.dtype is DType.FLOAT16 for each in graph.parameters)
    if not (request.eps_open and halves and request.optimizer.name in ("adamw", "adam", "muon")):
        return request.optimizer
    return replace(request.optimizer, eps=_EPS_OF_HALVES)


def divisions(request: Request, division: Division, model: Model) -> Iterator[Batching]:
    """Yield divisions of the batch into micro-batches, the best first. `model` is the result of
    `read`.

    If the model has one sample, the batch may be open or fixed to one sample. Divisions of an open
    batch come first.
    """
    given = request.batch_size, request.micro_batches, request.micro_batch_size
    seen: set[Batching] = set()
    for own in (None, 1) if model.batch == 1 else (model.batch or 1,):
        try:
            for batching in batchings(*given, own, request.cluster.size, division):
                if batching not in seen:
                    seen.add(batching)
                    yield batching
        except ConfigurationError:
            if not seen:  # An open batch could not be divided either.
                raise


def problems_of(
    request: Request, strategy: Strategy, runner: Runner
) -> Iterator[tuple[Model, Problem]]:
    """Yield (model, problem) for each division of the batch that the model and the strategy
    support, the best division first. If none is supported, raise the reason against the best
    division.
    """
    model = read(request, runner)
    reasons: dict[str, AutopipeError] = {}  # The first error of the model, and of the strategy.
    found = False
    declined = None
    try:
        for batching in divisions(request, strategy.division(model.graph), model):
            by = "strategy"
            try:
                if declined is not None:
                    # Requirements on the number of micro-batches are checked before the model is
                    # read on other samples.
                    strategy.requires(replace(declined, micro_batches=batching.micro_batches))
                by = "model"
                declined = None
                model, problem = cost(request, batching, runner)
                by = "strategy"
                declined = problem
                strategy.requires(problem)
                found = True
                declined = None
            except CANDIDATE_ERRORS as error:
                reasons.setdefault(by, error)
            else:
                yield model, problem
    except ConfigurationError as error:
        # A batch without a division is a better reason than an error of the model, unless the loss
        # is the reason (InfeasibleError).
        if not isinstance(reasons.get("model"), InfeasibleError):
            reasons["model"] = error
    if not found:
        raise reasons.get("strategy") or reasons["model"]


def run_strategy(
    request: Request, strategy: Strategy, runner: Runner
) -> tuple[Model, Problem, Placement]:
    """Return (model, problem, placement) for the first division of the batch that has a placement.

    A strategy with `Division.FEW` starts with the largest micro-batches. If memory does not
    suffice, it tries smaller ones. A strategy that chooses micro-batch sizes gets the model on the
    chosen size (the largest size if stages differ). If the frontend simplifies that model to other
    operators, the strategy runs again. Raises as `make_plan`.
    """

    def answer(problem: Problem) -> Placement:
        return runner.run(
            strategy.name,
            lambda: strategy.run(problem),
            lambda: strategy.requires(problem),
            lambda found: found.verify(problem.graph),
        )

    refused: OutOfMemoryError | None = None
    for model, problem in problems_of(request, strategy, runner):
        try:
            placement = answer(problem)
        except OutOfMemoryError as error:
            if strategy.division(problem.graph) is not Division.FEW:
                raise
            refused = error
            continue
        while problem.micro_batch_sizes:
            size = math.lcm(*(stage.micro_batch_size for stage in placement.stages))
            if size == problem.micro_batch_size:
                break
            sizes = tuple(each for each in problem.micro_batch_sizes if size % each == 0)
            known = [(node.op, node.name, node.outputs) for node in problem.graph.nodes]
            model, problem = cost(
                request, Batching(problem.batch_size, problem.batch_size // size, sizes), runner
            )
            if [(node.op, node.name, node.outputs) for node in problem.graph.nodes] != known:
                placement = answer(problem)
        return model, problem, placement
    assert refused is not None, "there is a problem, or an error says why not"
    raise refused


def place_as(request: Request, batching: Batching, placement: Placement, runner: Runner) -> Placed:
    """Return a given placement with its problem and predicted times, for a division of the batch.
    Raises as `make_plan`, and InfeasibleError if the placement does not fit the graph.
    """
    model, problem = cost(request, batching, runner)
    if placement.devices > problem.cluster.size:
        raise InfeasibleError(
            f"the placement is for {placement.devices} "
            f"{plural(placement.devices, 'device')}, of which not all are there"
        )
    placement.verify(problem.graph)
    return predict_placement(model, problem, placement, runner)


def predict_placement(
    model: Model, problem: Problem, placement: Placement, runner: Runner
) -> Placed:
    """Return a placement of the problem's graph with predicted times of stages and messages.

    Stages gather received tensors if that is faster. Raises ConfigurationError or InfeasibleError
    if a stage cannot run on micro-batches of its size.
    """
    check_portions(problem.graph, placement, problem.loss if problem.train else None)
    check_whole_matrices(problem, placement)
    placement = choose_gathers(problem, with_copies(problem, placement))
    prediction = runner.run("predict", lambda: predict(problem, placement))
    return Placed(model, problem, placement, StageGraph.of(problem, placement), prediction)


def schedule_placed(
    placed: Placed, scheduler: Scheduler, runner: Runner
) -> tuple[Placed, Scheduled]:
    """Return (placed, scheduled): the placement with its schedule and simulated step.

    If memory does not suffice, stages that recompute keep no copies of parameters. Raises
    InfeasibleError if the scheduler does not support the placement or memory still does not
    suffice.
    """
    try:
        return placed, time_schedule(placed, run_scheduler(placed, scheduler, runner), runner)
    except OutOfMemoryError:
        if not any(stage.holds_copies for stage in placed.placement.stages):
            raise
    placement = without_copies(placed.placement)
    prediction = runner.run("predict", lambda: predict(placed.problem, placement))
    placed = replace(placed, placement=placement, prediction=prediction)
    return placed, time_schedule(placed, run_scheduler(placed, scheduler, runner), runner)


def run_scheduler(placed: Placed, scheduler: Scheduler, runner: Runner) -> Schedule:
    """Return the schedule of a scheduler. Raises InfeasibleError if the scheduler does not support
    the placement.
    """
    return runner.run(
        scheduler.name,
        lambda: scheduler.run(placed.problem, placed.placement),
        lambda: scheduler.requires(placed.problem, placed.placement),
        lambda result: result.verify(placed.graph, placed.problem.train),
    )


def time_schedule(
    placed: Placed, schedule: Schedule, runner: Runner, known: tuple[Scheduled, ...] = ()
) -> Scheduled:
    """Return a schedule with its simulated step. If one of the `known` schedules has equal orders
    of tasks, its step is used. Raises InfeasibleError if memory does not suffice.
    """
    same = next((each for each in known if each.schedule.has_orders_of(schedule)), None)
    if same is not None:
        return Scheduled(schedule, same.timeline)
    timeline = runner.run(
        "simulate", lambda: simulate(schedule, placed.graph.stage_devices, placed.prediction)
    )
    check_memory(placed.problem, placed.placement, timeline)
    return Scheduled(schedule, timeline)


def assemble_plan(
    request: Request, placed: Placed, scheduled: Scheduled, runner: Runner
) -> PlanResult:
    """Return the plan of a request that names the strategy and the scheduler, from its placement
    and its schedule.
    """
    from autopipe.passes.degrees import open_degrees

    # Imports all of lowering, which candidates of a search do not need.
    from autopipe.passes.summary import finished_plan

    strategy, scheduler = strategy_and_scheduler(request)
    problem = placed.problem
    timeline = scheduled.timeline
    step = placed.placement, placed.prediction, scheduled.schedule, timeline
    names = strategy.name, scheduler.name
    plan = finished_plan(
        request.model,
        names,
        problem,
        *step,
        tuple(runner.seconds.items()),
        scores_of(placed),
        open_degrees(strategy),
    )
    return PlanResult(plan, problem, timeline, placed.model, request)


def read_planned(request: Request, plan: Plan) -> Model:
    """Return the model of a plan, on its micro-batches. Raise the errors of `read_for`, and
    InfeasibleError if the loss of the model is no longer divided as in the plan.
    """
    model = read_for(request, plan.summary.micro_batch_size)
    if not plan.loss_division.divided:
        return model
    form = form_of(model, lambda size: read_for(request, size, model.source, opened=True))
    return in_totals(model, form, Batching(plan.batch_size, plan.summary.micro_batches))


def planned_graph(planned: PlanResult) -> PlannedGraph:
    """Return the graph of a plan with the data from which `reopen` recreates its problem."""
    own = len(planned.request.constraints)
    return PlannedGraph(
        graph=planned.problem.graph,
        model_digest=planned.model.digest,
        loss=planned.model.loss,
        scores=planned.model.scores,
        constraints=planned.problem.constraints[own:],
    )


def _stored_model(request: Request, plan: Plan, stored: PlannedGraph) -> Model:
    """Return the model of a graph that is stored in a plan folder. It lacks the data of the ONNX
    file: parsed nodes, warnings, and the other form of the losses.
    """
    graph = stored.graph
    return Model(
        graph=graph,
        path=request.model,
        digest=stored.model_digest,
        batch=plan.summary.micro_batch_size if graph.batch_axes else None,
        loss=stored.loss,
        mode=Mode(plan.mode) if request.mode is None else request.mode,
        nodes_before=len(graph.nodes),
        configurations=(),
        unsupported=(),
        warnings=(),
        scores=stored.scores,
    )


def reopen(request: Request, plan: Plan, stored: PlannedGraph | None = None) -> PlanResult:
    """Return the plan with its problem, and with its step simulated from its predictions.

    The problem is created from the graph `stored` in the plan folder, or from the model's file if
    `stored` is None. `request` must have the mode, the batch and the micro-batches of the plan.
    Raise ConfigurationError if the plan does not belong to the graph or to the request.
    """
    batching = Batching(plan.batch_size, plan.summary.micro_batches)
    if stored is None:
        model = read_planned(request, plan)
        annotated = None
    else:
        model = _stored_model(request, plan, stored)
        annotated = stored.constraints
    work = _work(request, model)
    problem = _problem(request, model, batching, work, plan.loss_division, annotated)
    if problem.graph.digest() != plan.graph_digest:
        raise ConfigurationError(
            (
                f"the plan does not belong to this model: the graph of {request.model} is not the "
                "one that was planned"
            ),
            hint="plan again, or restore the model's file",
        )
    # The plan's files may have been edited.
    if problem.mode.value != plan.mode:
        raise ConfigurationError(
            f"the plan is to {plan.mode}, its configuration to {problem.mode.value}"
        )
    devices = plan.schedule.devices
    size = problem.cluster.size
    if plan.placement.devices > size or devices != size:
        raise ConfigurationError(
            f"the plan is for {devices} {plural(devices, 'device')}, its configuration for {size}"
        )
    if max(max(stage.nodes, default=-1) for stage in plan.placement.stages) >= len(
        problem.graph.nodes
    ):
        raise ConfigurationError(
            f"the plan places nodes that the graph of {len(problem.graph.nodes)} "
            f"{plural(len(problem.graph.nodes), 'node')} has not"
        )
    try:
        plan.placement.verify(problem.graph)
        stage_devices = StageGraph.of(problem, plan.placement).stage_devices
    except InfeasibleError as error:
        raise ConfigurationError(error.message, hint="plan again", where="placement") from error
    return PlanResult(
        plan, problem, simulate(plan.schedule, stage_devices, plan.prediction), model, request
    )
