"""Rules that concern several keys of a configuration at once, or the meaning of a text."""

from __future__ import annotations

import re

from autopipe.configs.configuration import ClusterChoice, Configuration, Constraint, Optimizer
from autopipe.configs.presets import cluster_preset
from autopipe.configs.source import Entry, quote
from autopipe.ir.errors import ConfigurationError


def check(configuration: Configuration, document: Entry) -> None:
    """Raise ConfigurationError, at the entry of `document` that is to blame, for the first rule that is broken."""
    _check_batches(configuration, document)
    _check_optimizer(configuration.optimizer, document)
    for key in ("frozen", "trainable"):
        for index, pattern in enumerate(getattr(configuration.model, key)):
            _check_pattern(pattern, f"model.{key}[{index}]", _place(document, "model", key))
    for index, constraint in enumerate(configuration.constraints):
        _check_constraint(constraint, configuration.gpus, index, _place(document, "constraints", index))
    _check_cluster(configuration.cluster, document)


def _check_cluster(choice: ClusterChoice, document: Entry) -> None:
    if choice.preset is not None:
        cluster_preset(choice.preset, where=_place(document, "cluster", "preset"))
    elif choice.file is None and choice.inline is None:
        raise ConfigurationError(
            "no cluster is chosen", hint="give cluster.preset or cluster.file", where=_place(document, "cluster")
        )


def _check_batches(configuration: Configuration, document: Entry) -> None:
    batch = configuration.batch_size
    for name in ("micro_batches", "micro_batch_size"):
        part = getattr(configuration, name)
        if batch is not None and isinstance(part, int) and batch % part:
            divisors = [divisor for divisor in range(1, min(batch, 4096) + 1) if batch % divisor == 0]
            near = min(divisors, key=lambda divisor: abs(divisor - part))
            raise ConfigurationError(
                f"{name} {part} does not divide batch_size {batch}", hint=f"{near} does", where=_place(document, name)
            )


def _check_optimizer(optimizer: Optimizer, document: Entry) -> None:
    foreign = {"adamw": ("momentum",), "sgd": ("betas", "eps")}[optimizer.name]
    plain = Optimizer()
    for name in foreign:
        if getattr(optimizer, name) != getattr(plain, name):
            raise ConfigurationError(
                f"optimizer {optimizer.name} has no {name}", hint="remove it", where=_place(document, "optimizer", name)
            )
    if max(optimizer.betas) >= 1:
        raise ConfigurationError(
            f"optimizer.betas are {list(optimizer.betas)}",
            hint="each must be below 1",
            where=_place(document, "optimizer", "betas"),
        )


def _check_constraint(constraint: Constraint, gpus: int | None, index: int, where: str) -> None:
    path = f"constraints[{index}]"
    _check_pattern(constraint.match, f"{path}.match", where)
    decided = constraint.stage, constraint.devices, constraint.split, constraint.micro_batch_size
    if all(each is None for each in decided):
        hint = "give it stage, devices, split or micro_batch_size"
        raise ConfigurationError(f"{path} decides nothing", hint=hint, where=where)
    if not isinstance(constraint.devices, tuple):
        return
    if not constraint.devices or len(set(constraint.devices)) < len(constraint.devices):
        raise ConfigurationError(
            f"{path}.devices is {list(constraint.devices)}", hint="name each device once, at least one", where=where
        )
    if gpus is not None and max(constraint.devices) >= gpus:
        raise ConfigurationError(
            f"{path} names device {max(constraint.devices)}, but there are {gpus}",
            hint=f"devices are 0 to {gpus - 1}",
            where=where,
        )


def _check_pattern(pattern: str, path: str, where: str) -> None:
    if not pattern.startswith("re:"):
        return
    try:
        re.compile(pattern.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigurationError(f"{path}: {quote(pattern)} is no regular expression: {error}", where=where) from error


def _place(document: Entry, *path: str | int) -> str:
    """Where the entry at `path` was written, or the deepest one above it that was."""
    entry = document
    for step in path:
        inner: Entry | None = None
        if isinstance(entry.value, dict) and isinstance(step, str):
            inner = entry.value.get(step)
        elif isinstance(entry.value, tuple) and isinstance(step, int):
            inner = entry.value[step]
        if inner is None:
            break
        entry = inner
    return str(entry.place)
