"""Translate a configuration into a request to the pipeline."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, cast

from autopipe.cli.choices import choice_of, chosen_scheduler, chosen_strategy
from autopipe.configs.configuration import Configuration, Loss
from autopipe.configs.load import resolve_cluster
from autopipe.ir.cost_file import read_costs
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.measured_costs import Costs
from autopipe.ir.problem import Mode
from autopipe.passes.cost.measured import measured_cluster
from autopipe.passes.frontend import CrossEntropy
from autopipe.passes.pipeline import PlanResult, Request


def request_of(configuration: Configuration, model: Path) -> Request:
    """The request for a plan of `model`. Raises ConfigurationError or InfeasibleError for what cannot be asked for."""
    costs = _costs(configuration)
    cluster = resolve_cluster(configuration)
    return Request(
        model=model,
        cluster=cluster if costs is None else measured_cluster(cluster, costs),
        strategy=chosen_strategy(configuration),
        scheduler=chosen_scheduler(configuration),
        dims=configuration.model.dims,
        batch_axes=configuration.model.batch_axes,
        frozen=configuration.model.frozen,
        trainable=configuration.model.trainable,
        mode=None if configuration.mode is None else Mode(configuration.mode),
        loss=_loss(configuration),
        batch_size=configuration.batch_size,
        micro_batches=None if configuration.micro_batches == "auto" else configuration.micro_batches,
        micro_batch_size=configuration.micro_batch_size,
        optimizer=configuration.optimizer.for_problem(),
        shard_open=configuration.optimizer.shard is None,
        precision=configuration.precision,
        recompute=configuration.recompute,
        memory_limit=configuration.memory_limit,
        constraints=tuple(constraint.for_problem() for constraint in configuration.constraints),
        time_limit=configuration.time_limit,
        seed=configuration.seed,
        costs=costs,
    )


def _costs(configuration: Configuration) -> Costs | None:
    """Measured costs, where plans are not made with the roofline alone."""
    if configuration.costs == "roofline":
        return None
    if configuration.costs == "pase-paper":
        raise ConfigurationError(f"plans are not made with {configuration.costs!r} costs", where="costs")
    return read_costs(Path(configuration.costs))


def _loss(configuration: Configuration) -> str | CrossEntropy | None:
    if isinstance(configuration.loss, Loss):
        choice = configuration.loss.cross_entropy
        return CrossEntropy(choice.logits, choice.labels)
    return configuration.loss


def effective(configuration: Configuration, planned: PlanResult) -> Configuration:
    """The configuration with everything decided that the pipeline chose."""
    problem = planned.problem
    return dataclasses.replace(
        configuration,
        model=dataclasses.replace(configuration.model, path=str(Path(planned.plan.model).absolute())),
        mode=problem.mode.value,
        loss=configuration.loss or problem.loss,
        optimizer=dataclasses.replace(configuration.optimizer, shard=problem.optimizer.shard),
        gpus=problem.cluster.size,
        batch_size=problem.batch_size,
        micro_batches=problem.micro_batches,
        micro_batch_size=None,
        recompute=cast(Literal["none", "full", "auto"], problem.recompute),
        strategy=choice_of(planned.request.strategy),
        schedule=choice_of(planned.request.scheduler),
    )
