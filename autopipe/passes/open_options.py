"""Options of a strategy that a request leaves open, and the values that a plan contains for them.
An open option has a default value, for example None, for which the strategy chooses a value itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from autopipe.ir.plan import Plan
from autopipe.passes.registry import Strategy


def with_settled_options(strategy: Strategy, plan: Plan) -> Strategy:
    """Return the strategy with each option that is open, so that the strategy would choose its
    value, set to the value that `plan` contains for it. Other options stay unchanged.
    """
    defaults = _option_defaults(strategy)
    settled = {
        name: value
        for name, value in _planned_options(plan).items()
        if name in defaults and getattr(strategy, name) == defaults[name]
    }
    return (
        cast(Strategy, dataclasses.replace(cast(Any, strategy), **settled)) if settled else strategy
    )


def with_open_options(strategy: Strategy, plan: Plan) -> Strategy:
    """Return the strategy with each option for which `plan` contains a value reset to its default,
    with which the strategy chooses the value itself.
    """
    defaults = _option_defaults(strategy)
    opened = {name: defaults[name] for name in _planned_options(plan) if name in defaults}
    return (
        cast(Strategy, dataclasses.replace(cast(Any, strategy), **opened)) if opened else strategy
    )


def _planned_options(plan: Plan) -> dict[str, int | str]:
    """Return, by name, the values that `plan` contains for options of its strategy."""
    degrees = plan.summary.degrees
    return {**dict(plan.placement.options), **(degrees.options if degrees is not None else {})}


def _option_defaults(strategy: Strategy) -> dict[str, Any]:
    """Return the default of each option by name. For an option whose value a strategy can choose
    itself, the default is the value that leaves this choice to the strategy.
    """
    return {field.name: field.default for field in dataclasses.fields(cast(Any, strategy))}
