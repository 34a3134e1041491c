"""The strategy and the scheduler that a configuration names, with its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

from autopipe.configs.choice import Choice, build
from autopipe.configs.configuration import Configuration
from autopipe.ir.errors import ConfigurationError
from autopipe.passes.base import Scheduler, Strategy
from autopipe.passes.registry import scheduler_class, strategy_class, strategy_names


def chosen_strategy(configuration: Configuration) -> Strategy:
    """The strategy; raises ConfigurationError for an unknown name or an option it does not have."""
    choice = configuration.strategy
    schema = _class_of(choice, strategy_class)
    _check_stages(choice, schema)
    return cast(Strategy, build(choice, schema, "strategy"))


def chosen_scheduler(configuration: Configuration) -> Scheduler:
    """The scheduler; raises ConfigurationError for an unknown name or an option it does not have."""
    choice = configuration.schedule
    return cast(Scheduler, build(choice, _class_of(choice, scheduler_class), "schedule"))


def _check_stages(choice: Choice, schema: type[Any]) -> None:
    """Raise ConfigurationError where the flag --stages stands and the strategy does not let one say how many."""
    place = next((entry.place for name, entry in choice.options if name == "stages"), None)
    if place is None or not str(place).startswith("--stages") or "stages" in _options(schema):
        return
    takes = [name for name in strategy_names() if "stages" in _options(strategy_class(name))]
    raise ConfigurationError(
        f"strategy {choice.name} chooses its stages itself",
        hint=f"strategies that make as many as they are told: {', '.join(takes)}",
        where=str(place),
    )


def _options(schema: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(schema)}


def _class_of(choice: Choice, find: Callable[[str], type[Any]]) -> type[Any]:
    """The class that `find` knows under the choice's name; an unknown name is told with the place it was written at."""
    try:
        return find(choice.name)
    except ConfigurationError as error:
        raise ConfigurationError(error.message, hint=error.hint, where=str(choice.place)) from error
