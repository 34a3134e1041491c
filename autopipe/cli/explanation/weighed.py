"""What else was weighed when a plan was chosen: the best of each strategy, and by what it lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.figures import bytes_text, seconds_text
from autopipe.ir.alternatives import Alternative, best_of_each
from autopipe.ir.plan import Plan


def weighed_screen(plan: Plan) -> Iterator[RenderableType]:
    """A row for the best plan of each strategy, then why others have none; nothing where the strategy was named."""
    if not plan.alternatives:
        return
    best = best_of_each(plan.alternatives)
    steps = sum(each.step_time_s is not None for each in plan.alternatives)
    yield f"weighed: {len(plan.alternatives)} plans, {steps} of them with a step; of each strategy the best:"
    yield _table([each for each in best if each.step_time_s is not None], plan.summary.step_time_s)
    refused = [each for each in best if each.step_time_s is None]
    if refused:
        yield _refusals(refused)


def strategy_text(alternative: Alternative) -> str:
    """A strategy with the options that it was given."""
    choice = alternative.choice
    options = " ".join(name if value == "true" else f"{name}={value}" for name, value in choice.options)
    decided = [options, *(["recompute"] if choice.recompute != "none" else []), *(["zero-1"] if choice.shard else [])]
    told = ", ".join(each for each in decided if each)
    return f"{choice.strategy} ({told})" if told else choice.strategy


def over_text(step_s: float, chosen_s: float) -> str:
    """How much longer a step is than the chosen one."""
    if step_s == chosen_s:
        return "same"
    return f"{step_s / chosen_s - 1:+.1%}" if chosen_s else "-"


def _table(rows: Sequence[Alternative], chosen_s: float) -> Table:
    table = Table(
        "strategy", "schedule", "micro-batches", "step", "longer", "at best", "memory", box=None, pad_edge=False
    )
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for each in rows:
        assert each.step_time_s is not None and each.lower_bound_s is not None and each.peak_memory_bytes is not None
        table.add_row(
            strategy_text(each),
            each.choice.schedule if each.same_as is None else f"{each.choice.schedule}, as {each.same_as}",
            str(each.micro_batches),
            seconds_text(each.step_time_s),
            over_text(each.step_time_s, chosen_s),
            seconds_text(each.lower_bound_s),
            bytes_text(each.peak_memory_bytes),
        )
    return table


def _refusals(rows: Sequence[Alternative]) -> Table:
    """Strategies without a plan, those with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for each in rows:
        reasons.setdefault(each.refused or "", []).append(each.choice.strategy)
    table = Table("no plan", "", box=None, pad_edge=False)
    for reason, names in reasons.items():
        table.add_row(", ".join(names), reason)
    return table
