"""Conversion of a configuration into a request to the pipeline, and of a plan into its effective
configuration.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from autopipe.configs.configuration import Choice, Configuration, Loss, build, resolve_cluster
from autopipe.configs.yaml_source import Entry, Place
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.measured_costs import read_costs
from autopipe.ir.problem import Mode, Scores
from autopipe.passes.registry import (
    Scheduler,
    Strategy,
    scheduler_class,
    strategy_class,
    strategy_names,
)

if TYPE_CHECKING:
    from autopipe.passes.frontend import CrossEntropy
    from autopipe.passes.pipeline import PlanResult, Request

AUTO = "auto"
"""Name of the strategy, or of the schedule, with which autopipe searches all of them."""

_DEFAULT_SCHEDULER = "tessel"
"""The scheduler if the configuration names a strategy and no schedule."""


def chosen_strategy(configuration: Configuration) -> Strategy | None:
    """Return the strategy of the configuration, None for `auto`. Raises ConfigurationError for an
    unknown name and for an option that the strategy does not have.
    """
    choice = configuration.strategy
    if choice.name == AUTO:
        _check_no_options(choice, "strategy")
        return None
    schema = strategy_class(choice.name, str(choice.place))
    place = next((str(entry.place) for name, entry in choice.options if name == "stages"), "")
    if place.startswith("--stages") and not _has_stages_option(schema):
        takes = [name for name in strategy_names() if _has_stages_option(strategy_class(name))]
        hint = f"use a strategy with a given number of stages: {', '.join(takes)}"
        raise ConfigurationError(
            f"strategy {choice.name} chooses the number of stages itself", hint, place
        )
    return cast(Strategy, build(choice, schema, "strategy"))


def _has_stages_option(schema: type[Any]) -> bool:
    return any(field.name == "stages" for field in dataclasses.fields(schema))


def chosen_scheduler(configuration: Configuration) -> Scheduler | None:
    """Return the scheduler of the configuration, None if strategy and schedule are both `auto`.

    A named strategy with schedule `auto` has the scheduler `tessel`. Raises ConfigurationError for
    an unknown name and for an option that the scheduler does not have.
    """
    choice = configuration.schedule
    if choice.name == AUTO:
        _check_no_options(choice, "schedule")
        if configuration.strategy.name == AUTO:
            return None
        choice = dataclasses.replace(choice, name=_DEFAULT_SCHEDULER)
    return cast(
        Scheduler, build(choice, scheduler_class(choice.name, str(choice.place)), "schedule")
    )


def choice_with_all_options(chosen: Strategy | Scheduler | None) -> Choice:
    """Return the name and all options of a strategy or a scheduler, as a configuration states them.

    The stages of strategy `explicit` are not among its options, because `placement.yaml` contains
    them.
    """
    from autopipe.passes.placement.explicit import Explicit

    if chosen is None or isinstance(chosen, Explicit):
        return Choice(AUTO if chosen is None else Explicit.name)
    place = Place("the plan")

    def entry_of_value(value: Any) -> Entry:
        if isinstance(value, tuple):
            return Entry(tuple(map(entry_of_value, value)), place)
        return Entry(str(value) if isinstance(value, Path) else value, place)

    fields = dataclasses.fields(cast(Any, chosen))
    return Choice(
        chosen.name,
        tuple((field.name, entry_of_value(getattr(chosen, field.name))) for field in fields),
    )


def _check_no_options(choice: Choice, path: str) -> None:
    """Raise ConfigurationError for an option of `auto`, which has none."""
    for name, entry in choice.options:
        hint = f"set {path}.name to the {path} that supports this option"
        raise ConfigurationError(
            f"{path} {AUTO} does not support the option {name!r}", hint, str(entry.place)
        )


def make_request(configuration: Configuration, model: Path) -> Request:
    """Return the request for a plan of the ONNX file `model`. Raises ConfigurationError or
    InfeasibleError for settings that contradict one another or cannot be satisfied.
    """
    from autopipe.passes.cost.measured import measured_cluster
    from autopipe.passes.pipeline import Request
    from autopipe.passes.solvers.pulp_client import check_installed

    if configuration.costs == "pase-paper":
        raise ConfigurationError(
            f"costs {configuration.costs!r} are not supported for plans", where="costs"
        )
    check_installed(configuration.solver)
    costs = None if configuration.costs == "roofline" else read_costs(Path(configuration.costs))
    cluster = resolve_cluster(configuration)
    loss = configuration.loss
    return Request(
        model=model,
        cluster=cluster if costs is None else measured_cluster(cluster, costs),
        strategy=chosen_strategy(configuration),
        scheduler=chosen_scheduler(configuration),
        dims=configuration.model.dims,
        batch_axes=configuration.model.batch_axes,
        fixed_inputs=configuration.model.inputs,
        frozen=configuration.model.frozen,
        trainable=configuration.model.trainable,
        training_graph=configuration.model.training,
        mode=None if configuration.mode is None else Mode(configuration.mode),
        loss=wanted_loss(configuration),
        normalize=loss.normalize if isinstance(loss, Loss) else "auto",
        scores=logits_handling(configuration),
        batch_size=configuration.batch_size,
        micro_batches=None
        if configuration.micro_batches == "auto"
        else configuration.micro_batches,
        micro_batch_size=configuration.micro_batch_size,
        optimizer=configuration.optimizer.for_problem(),
        lr_scheduler=configuration.lr_scheduler,
        training=configuration.training,
        shard_open=(
            configuration.optimizer.zero_stage is None and configuration.optimizer.name != "muon"
        ),
        eps_open=configuration.optimizer.eps is None,
        precision=configuration.precision,
        compiled=configuration.compile,
        recompute=configuration.recompute,
        memory_limit=configuration.memory_limit,
        constraints=tuple(constraint.for_problem() for constraint in configuration.constraints),
        time_limit=configuration.time_limit,
        solver=configuration.solver,
        seed=configuration.seed,
        evaluation=configuration.eval,
        costs=costs,
        data=configuration.data,
    )


_IGNORED_LABEL = -100
"""The label that torch and Hugging Face ignore in a cross-entropy."""


def logits_handling(configuration: Configuration) -> Scores | None:
    """Return "keep" or "recompute" for the logits of losses, None if the plan decides."""
    loss = configuration.loss
    return loss.scores if isinstance(loss, Loss) and loss.scores != "auto" else None


def wanted_loss(configuration: Configuration) -> str | CrossEntropy | None:
    """Return the name of the output that is the loss, or the cross-entropy to add to the model;
    None for the loss that the model already has.
    """
    from autopipe.passes.frontend import CrossEntropy

    loss = configuration.loss
    if not isinstance(loss, Loss):
        return loss
    if loss.cross_entropy is None:
        return loss.output
    ignored = _IGNORED_LABEL if loss.normalize == "tokens" else None
    return CrossEntropy(loss.cross_entropy.logits, loss.cross_entropy.labels, ignored)


def _effective_loss(configuration: Configuration, planned: PlanResult) -> str | Loss | None:
    """Return the loss of the effective configuration: the output of the model, and the decision of
    the plan to keep or recompute logits.
    """
    loss = configuration.loss or planned.model.loss or None
    scores = planned.plan.summary.scores
    if scores is None:
        return loss
    if not isinstance(loss, Loss):
        loss = Loss(output=loss)
    return dataclasses.replace(loss, scores=scores.choice)


def effective_configuration(configuration: Configuration, planned: PlanResult) -> Configuration:
    """Return the configuration with the decision of the plan for each option that was open.

    The number of micro-batches stays open if it was open and stages have different micro-batch
    sizes, because a number would give all stages one size.
    """
    from autopipe.passes.open_options import with_settled_options

    problem = planned.problem
    strategy = planned.request.strategy
    sizes_stay_open = (
        planned.plan.has_different_micro_batch_sizes and configuration.micro_batches == "auto"
    )
    return dataclasses.replace(
        configuration,
        model=dataclasses.replace(configuration.model, path=planned.plan.model),
        mode=problem.mode.value,
        loss=_effective_loss(configuration, planned),
        optimizer=configuration.optimizer.settled(problem.optimizer),
        cluster=configuration.cluster.settled(),
        gpus=problem.cluster.size,
        batch_size=problem.batch_size,
        micro_batches="auto" if sizes_stay_open else problem.micro_batches,
        micro_batch_size=None,
        recompute=cast(Literal["none", "full", "auto"], problem.recompute),
        strategy=choice_with_all_options(
            None if strategy is None else with_settled_options(strategy, planned.plan)
        ),
        schedule=choice_with_all_options(planned.request.scheduler),
    )
