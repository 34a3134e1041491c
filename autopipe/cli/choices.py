"""The strategy and the scheduler that a configuration names, with its options."""

from __future__ import annotations

from typing import cast

from autopipe.configs.choice import build
from autopipe.configs.configuration import Configuration
from autopipe.passes.base import Scheduler, Strategy
from autopipe.passes.registry import scheduler_class, strategy_class


def chosen_strategy(configuration: Configuration) -> Strategy:
    """The strategy; raises ConfigurationError for an unknown name or an option it does not have."""
    choice = configuration.strategy
    return cast(Strategy, build(choice, strategy_class(choice.name), "strategy"))


def chosen_scheduler(configuration: Configuration) -> Scheduler:
    """The scheduler; raises ConfigurationError for an unknown name or an option it does not have."""
    choice = configuration.schedule
    return cast(Scheduler, build(choice, scheduler_class(choice.name), "schedule"))
