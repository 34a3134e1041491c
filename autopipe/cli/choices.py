"""The strategy and the scheduler that a configuration names, with its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from autopipe.configs.choice import Choice, build
from autopipe.configs.configuration import Configuration
from autopipe.ir.errors import ConfigurationError
from autopipe.passes.base import Scheduler, Strategy
from autopipe.passes.registry import scheduler_class, strategy_class


def chosen_strategy(configuration: Configuration) -> Strategy:
    """The strategy; raises ConfigurationError for an unknown name or an option it does not have."""
    choice = configuration.strategy
    return cast(Strategy, build(choice, _class_of(choice, strategy_class), "strategy"))


def chosen_scheduler(configuration: Configuration) -> Scheduler:
    """The scheduler; raises ConfigurationError for an unknown name or an option it does not have."""
    choice = configuration.schedule
    return cast(Scheduler, build(choice, _class_of(choice, scheduler_class), "schedule"))


def _class_of(choice: Choice, find: Callable[[str], type[Any]]) -> type[Any]:
    """The class that `find` knows under the choice's name; an unknown name is told with the place it was written at."""
    try:
        return find(choice.name)
    except ConfigurationError as error:
        raise ConfigurationError(error.message, hint=error.hint, where=str(choice.place)) from error
