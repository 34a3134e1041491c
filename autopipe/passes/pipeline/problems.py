"""The planning problems of a request: one for each division of the batch into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopipe.ir.errors import (
    CANDIDATE_ERRORS,
    AutopipeError,
    ConfigurationError,
    InfeasibleError,
    ModelError,
)
from autopipe.ir.graph import DType, Graph
from autopipe.ir.problem import (
    AVERAGED_LOSS,
    Constraint,
    LossDivision,
    Mode,
    NodeCost,
    Optimizer,
    Problem,
)
from autopipe.ir.words import plural
from autopipe.passes.analysis.batch_forms import LossKind, sample_mixing
from autopipe.passes.analysis.loss_division import (
    batch_size_note,
    choose_loss_division,
    differentiated_value,
    form_of_loss,
    with_loss_totals,
)
from autopipe.passes.analysis.training import check_padding, check_parameter_groups
from autopipe.passes.annotations import annotated_constraints
from autopipe.passes.batching import Batching, Division, batchings
from autopipe.passes.cost.measured import costed_work
from autopipe.passes.frontend import Model
from autopipe.passes.pipeline.reading import (
    graph_on_several_samples,
    read_request_model,
    read_resized_model,
)
from autopipe.passes.pipeline.request import Request
from autopipe.passes.pipeline.runner import Runner
from autopipe.passes.registry import Strategy


def costed_problem(request: Request, batching: Batching, runner: Runner) -> tuple[Model, Problem]:
    """Return (model, problem) for a division of the batch into micro-batches. `runner` caches the
    model and its costs, so they are computed once per micro-batch size.
    """
    model = read_request_model(request, runner)
    size = None
    if model.batch not in (None, batching.micro_batch_size):
        size = batching.micro_batch_size
        first = model
        model = read_request_model(request, runner, size, first.source)
        _require_scalar_loss(first, model)
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
        costed = _use_loss_totals(request, model, division, batching, runner)
        form = size, costed.scores, division.divided
        if form not in runner.work:
            runner.work[form] = runner.run("cost", lambda: node_costs(request, costed))
        runner.costed[key] = (
            costed,
            make_problem(request, costed, divided, runner.work[form], division),
        )
    model, problem = runner.costed[key]
    if model.mode is not Mode.TRAIN:
        note = _output_warning(request, model, batching, runner)
    else:
        note = (
            ""
            if request.normalize != "auto"
            else batch_size_note(runner.loss_forms.get(model.loss), model.loss, batching)
        )
    return replace(model, warnings=(*model.warnings, note)) if note else model, problem


_COUNTING = frozenset({"Shape", "Size"})
"""ONNX operators whose results may contain the number of samples."""


def _output_warning(request: Request, model: Model, batching: Batching, runner: Runner) -> str:
    """Return a warning if a division into micro-batches may change an output of inference and the
    model has no other warning about this output. Otherwise return "".
    """
    if model.batch is None or (batching.micro_batches == 1 and not batching.sizes):
        return ""
    if runner.sample_mixing is None:
        several = (
            model.graph if model.batch > 1 else graph_on_several_samples(request, runner, model)
        )
        counts = model.source is not None and any(
            node.op_type in _COUNTING for node in model.source.nodes
        )
        more = graph_on_several_samples(request, runner, model, 2) if counts else None
        runner.sample_mixing = sample_mixing(several, more)
    mixing = runner.sample_mixing
    if not mixing.reason or any(repr(mixing.name) in text for text in model.warnings):
        return ""
    return f"{mixing.reason}: micro-batches may change outputs (--micro-batches 1 does not)"


def _require_scalar_loss(first: Model, model: Model) -> None:
    """Raise ModelError if the loss of `model` is not a scalar although it is a scalar in `first`,
    which is the same model read with fewer samples.
    """
    if first.mode is not Mode.TRAIN or model.loss == first.loss:
        return
    shape = (
        list(model.graph.type_of(first.loss).shape) if model.graph.has(first.loss) else "unknown"
    )
    samples = f"{model.batch} {plural(model.batch or 0, 'sample')}"
    message = f"the loss {first.loss!r} has shape {shape} for {samples}, expected a scalar"
    raise ModelError(
        message, "reduce the loss to a scalar in the model, or use --mode infer", str(model.path)
    )


def node_costs(request: Request, model: Model) -> tuple[NodeCost, ...]:
    """Return the cost of each node of the model. For training, raise ConfigurationError if there is
    no loss or several outputs could be the loss, and ModelError if the model has no trainable
    parameters.
    """
    train = model.mode is Mode.TRAIN
    if request.mode is not Mode.INFER and model.loss_choices:
        named = ", ".join(map(repr, model.loss_choices))
        hint = f"choose the loss with --set loss={model.loss_choices[0]}, or use --mode infer"
        raise ConfigurationError(
            f"several outputs can be the loss: {named}",
            hint,
        )
    if train and not model.loss:
        hint = "choose the loss with --set loss=NAME, or use --mode infer"
        raise ConfigurationError(
            "training requires a loss, but the model lacks an output 'loss'", hint
        )
    if train and not any(each.trainable for each in model.graph.parameters):
        hint = "set model.trainable to names listed by autopipe inspect -v, or use --mode infer"
        raise ModelError(
            "training requires trainable parameters, but the model has none", hint, str(model.path)
        )
    if train and request.data.last_batch == "pad":
        check_padding(model.graph, model.loss)
    if train:
        check_parameter_groups(request.optimizer, model.graph)
    return costed_work(
        model.graph, request.precision, request.cluster, request.costs, request.compiled
    )


def _loss_division(
    request: Request, model: Model, batching: Batching, runner: Runner
) -> tuple[LossDivision, Batching]:
    """Return (division, batching).

    division: how the losses of micro-batches are combined into the loss of the step.
    batching: the given batching. Its list of other micro-batch sizes that stages may use is empty
    if these sizes would change the loss.

    Raise InfeasibleError if the losses of micro-batches do not determine the loss of the step.
    """
    if model.mode is not Mode.TRAIN:
        return AVERAGED_LOSS, batching
    if model.loss not in runner.loss_forms:
        first = read_request_model(request, runner)
        runner.loss_forms[model.loss] = form_of_loss(
            first, lambda size: read_resized_model(request, runner, first, size)
        )
    form = runner.loss_forms[model.loss]
    divisible = LossKind.SUM if request.normalize == "tokens" else LossKind.MEAN
    if form is not None and form.kind is not divisible:
        batching = replace(batching, sizes=())
    return choose_loss_division(form, model, request.normalize, batching), batching


def _use_loss_totals(
    request: Request, model: Model, division: LossDivision, batching: Batching, runner: Runner
) -> Model:
    """Return the model whose micro-batches return the dividend and the divisor of the loss
    separately, if `division` requires this. Otherwise return the given model.
    """
    if not division.divided:
        return model
    key = model.batch, model.scores
    if key not in runner.totals:
        runner.totals[key] = with_loss_totals(model, runner.loss_forms[model.loss], batching)
    return runner.totals[key]


def make_problem(
    request: Request,
    model: Model,
    batching: Batching,
    work: tuple[NodeCost, ...],
    division: LossDivision,
    annotated: tuple[Constraint, ...] | None = None,
) -> Problem:
    """Return the problem of a model on micro-batches of the size of `batching`. `annotated`
    contains the constraints that follow from annotations in the model's file; None to derive them
    from the model.
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
        loss=differentiated_value(model, division) or None,
        optimizer=_optimizer_with_eps(request, model.graph),
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


def _optimizer_with_eps(request: Request, graph: Graph) -> Optimizer:
    """Return the requested optimizer. For Adam with float16 weights, its `eps` is increased if the
    request leaves `eps` open.

    Adam's averages of squared gradients have the type of the weights. In float16, averages below
    6e-8 are 0, so only `eps` keeps the denominator away from 0.
    """
    halves = any(each.trainable and each.value.dtype is DType.FLOAT16 for each in graph.parameters)
    if not (request.eps_open and halves and request.optimizer.name in ("adamw", "adam", "muon")):
        return request.optimizer
    return replace(request.optimizer, eps=_EPS_OF_HALVES)


def batch_divisions(request: Request, division: Division, model: Model) -> Iterator[Batching]:
    """Yield the possible divisions of the batch into micro-batches, the best first for the
    preference `division`. `model` is the result of `read_request_model`.

    If the model was read with one sample, its batch size may be open or fixed to one sample.
    Divisions for an open batch size come first.
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
            # For one sample, the open batch size is tried before the fixed one. If the open batch
            # size was divisible, an error for the fixed one is ignored. If no division was yielded,
            # the error is raised.
            if not seen:
                raise


def supported_problems(
    request: Request, strategy: Strategy, runner: Runner
) -> Iterator[tuple[Model, Problem]]:
    """Yield (model, problem) for each division of the batch that the model and the strategy
    support, the best division first. If none is supported, raise the error for the best division.
    """
    model = read_request_model(request, runner)
    # The first error of the model and the first error of the strategy, by "model" and "strategy".
    reasons: dict[str, AutopipeError] = {}
    found = False
    declined = None
    try:
        for batching in batch_divisions(request, strategy.division(model.graph), model):
            by = "strategy"
            try:
                if declined is not None:
                    # The strategy may also reject this number of micro-batches. Checking this on
                    # the last rejected problem avoids reading the model with another number of
                    # samples, which is slow.
                    strategy.requires(replace(declined, micro_batches=batching.micro_batches))
                by = "model"
                declined = None
                model, problem = costed_problem(request, batching, runner)
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
        # The batch cannot be divided. This is a more useful reason than another error of the model,
        # unless the loss forbids the division (InfeasibleError).
        if not isinstance(reasons.get("model"), InfeasibleError):
            reasons["model"] = error
    if not found:
        raise reasons.get("strategy") or reasons["model"]
