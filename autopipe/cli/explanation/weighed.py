"""Other plans that were tried: the best of each strategy, and by how much it lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.figures import bytes_text, seconds_text
from autopipe.ir.plan import Alternative, best_of_each


def weighed_screen(alternatives: Sequence[Alternative], chosen_s: float) -> Iterator[RenderableType]:
    """A row for the best plan of each strategy, then why others have none; nothing where nothing was weighed.

    `chosen_s` are the seconds of the chosen plan's step.
    """
    if not alternatives:
        return
    best = best_of_each(alternatives)
    steps = sum(each.step_time_s is not None for each in alternatives)
    yield f"weighed: {len(alternatives)} plans, {steps} of them with a step; of each strategy the best:"
    yield _table([each for each in best if _has_row(each)], chosen_s)
    refused = [each for each in best if not _has_row(each)]
    if refused:
        yield _refusals(refused)


def _has_row(alternative: Alternative) -> bool:
    """True if there is a figure to show: a step, or a bound below it."""
    return alternative.step_time_s is not None or alternative.is_bounded


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
        "strategy", "schedule", "micro-\nbatches", "step", "longer", "at best", "memory", box=None, pad_edge=False
    )
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for each in rows:
        step_s, bound_s, memory = each.step_time_s, each.lower_bound_s, each.peak_memory_bytes
        least_s = step_s if step_s is not None else bound_s
        assert least_s is not None, "a row has a step or a bound"
        at_least = "" if step_s is not None else "≥ "
        table.add_row(
            strategy_text(each),
            _schedule_text(each),
            str(each.micro_batches),
            f"{at_least}{seconds_text(least_s)}",
            f"{at_least}{over_text(least_s, chosen_s)}",
            "-" if bound_s is None else seconds_text(bound_s),
            "-" if memory is None else bytes_text(memory),
        )
    return table


def _schedule_text(alternative: Alternative) -> str:
    schedule = alternative.choice.schedule or "any"
    return schedule if alternative.same_as is None else f"{schedule}, as {alternative.same_as}"


def _refusals(rows: Sequence[Alternative]) -> Table:
    """Strategies without a plan, those with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for each in rows:
        reasons.setdefault(each.refused or "", []).append(each.choice.strategy)
    table = Table("no plan", "", box=None, pad_edge=False)
    for reason, names in reasons.items():
        table.add_row(", ".join(names), reason)
    return table
