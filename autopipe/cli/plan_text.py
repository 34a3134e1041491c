"""Other plans that were tried: the best of each strategy, and by how much it lost.

What a person reads about what is trained: three lines, or every tensor.

How far a step is from the ideal, in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.output import bytes_text, seconds_text
from autopipe.ir.plan import Alternative, Breakdown, best_of_each
from autopipe.passes.frontend.model import Tensor

_LEAST = 5e-4
"""Share of a step that is worth a word."""
_EXCHANGES = ("messages", "collectives", "gradients")


def distance_lines(breakdown: Breakdown, devices: int, kinds: int = 1) -> Iterator[str]:
    """The ideal of the devices, by kind, and the parts of the step on top of it, the largest first."""
    ideal_s, step_s = breakdown.ideal_s, breakdown.step_s
    times = f"the step takes {step_s / ideal_s:.2f} times that" if ideal_s else "the step takes that and more"
    shared = f"one device's work at the roofline / {devices}" if devices > 1 else "the device's work at the roofline"
    if kinds > 1:
        shared = f"the work at the roofline of {devices} devices, each as fast as it is"
    yield f"ideal {seconds_text(ideal_s)} ({shared}), {times}"
    parts = [part for name, seconds, note in _grouped(breakdown) if (part := _part(name, seconds, step_s, note))]
    if parts:
        yield f"of the step: ideal {ideal_s / step_s:.1%}, {', '.join(parts)}"


def _grouped(breakdown: Breakdown) -> list[tuple[str, float, str]]:
    """The losses, the largest first, with communication as one that is told by its parts."""
    losses = [(name, seconds) for name, seconds in breakdown.losses if name not in _EXCHANGES]
    inside = [_part(name, seconds, breakdown.step_s) for name, seconds in breakdown.losses if name in _EXCHANGES]
    exchanges = ("communication", breakdown.communication_s, ", ".join(filter(None, inside)))
    return sorted([*((*each, "") for each in losses), exchanges], key=lambda each: -each[1])


def _part(name: str, seconds: float, step_s: float, note: str = "") -> str:
    """A part of the step; nothing where it is too small."""
    if abs(seconds) < _LEAST * step_s or not step_s:
        return ""
    return f"{name} {seconds / step_s:.1%}" + (f" ({note})" if note else "")


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


REASONS = 4
"""Reasons named in a line before the rest is only counted."""


def trained_lines(tensors: Sequence[Tensor], every: bool) -> Iterator[tuple[str, str]]:
    """A word and a text each: what is trained, what is not, what is doubtful, with the reasons; then `every` tensor."""
    for word, chosen in (("trained", True), ("not trained", False)):
        found = [each for each in tensors if each.trained is chosen]
        if found or chosen:
            yield word, _summary(found)
    doubtful = [each for each in tensors if each.doubtful]
    if doubtful:
        names = ", ".join(repr(each.value.name) for each in doubtful[:REASONS])
        more = f" and {len(doubtful) - REASONS} more" if len(doubtful) > REASONS else ""
        yield "doubtful", f"{names}{more}"
    for each in tensors if every else ():
        shape = "×".join(map(str, each.value.shape)) or "scalar"
        word = "trained" if each.trained else "not trained"
        yield word, f"{each.value.name!r} {shape}, {each.value.elements:,}: {each.why}"


def tensors_form(tensors: Sequence[Tensor]) -> list[dict[str, object]]:
    """The same for programs to read."""
    return [
        {
            "name": each.value.name,
            "shape": each.value.shape,
            "elements": each.value.elements,
            "trained": each.trained,
            "why": each.why,
            "doubtful": each.doubtful,
        }
        for each in tensors
    ]


def _summary(tensors: Sequence[Tensor]) -> str:
    if not tensors:
        return "nothing"
    reasons: Counter[str] = Counter()
    for each in tensors:
        reasons[each.why] += each.value.elements
    told = reasons.most_common()
    texts = [f"{count:,} {why}" for why, count in told[:REASONS]]
    if len(told) > REASONS:
        texts.append(f"{sum(count for _, count in told[REASONS:]):,} for other reasons")
    total = f"{sum(reasons.values()):,} elements in {len(tensors):,} tensor{'s' if len(tensors) > 1 else ''}"
    return f"{total}: {', '.join(texts)}"
