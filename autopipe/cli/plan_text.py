"""A plan in words and tables: what was decided and predicted, what is trained, what else was weighed, what changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.cli.output import bytes_text, counted_text, devices_text, kinds_text, plain_table, seconds_text
from autopipe.ir.codec import encode
from autopipe.ir.placement import SplitProof
from autopipe.ir.plan import Alternative, Breakdown, CostCoverage, Plan, Summary, best_of_each
from autopipe.ir.plan_file import plan_digest
from autopipe.passes.frontend.model import Tensor
from autopipe.passes.pipeline import PlanResult, Request

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
    table = plain_table(
        "strategy", "schedule", "micro-\nbatches", "step", "longer", "at best", "memory", right=2, no_wrap=True
    )
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
    table = plain_table("no plan", "")
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


_SAME = 5e-4
"""Relative changes below this are none to a reader."""


@dataclass(frozen=True, slots=True)
class PlanDelta:
    """A plan, and the one that `folder` held before."""

    folder: Path
    before: Plan
    now: Plan

    @property
    def same(self) -> bool:
        """True if the decisions and their predictions are equal."""
        return plan_digest(self.before) == plan_digest(self.now)

    @property
    def slowdown(self) -> float:
        """How many samples the former plan takes while this one takes one: above 1 where this one is worse."""
        before, now = self.before.summary.samples_per_s, self.now.summary.samples_per_s
        return before / now if now else 1.0

    def lines(self) -> Iterator[RenderableType]:
        """The figures before and after, and whether that is worse."""
        if self.same:
            yield f"the same plan as {self.folder} held"
            return
        before, now = self.before.summary, self.now.summary
        table = plain_table("", "before", "now", "change", right=1)
        times, rates = (before.step_time_s, now.step_time_s), (before.samples_per_s, now.samples_per_s)
        peaks, bubbles = (before.peak_memory_bytes, now.peak_memory_bytes), (before.bubble_rate, now.bubble_rate)
        table.add_row("step", *map(seconds_text, times), _change(*times))
        table.add_row("samples/s", *(f"{rate:,.1f}" for rate in rates), _change(*rates))
        table.add_row("bubble", *(f"{rate:.1%}" for rate in bubbles), f"{100 * (bubbles[1] - bubbles[0]):+.1f} points")
        table.add_row("peak memory", *map(bytes_text, map(max, peaks)), _change(*map(max, peaks)))
        yield table
        yield f"{self._verdict()} what {self.folder} held"

    def form(self) -> dict[str, object]:
        before = encode(self.before.summary)
        return {"plan": self.folder, "same": self.same, "worse": self.slowdown > 1, "before": before}

    def _verdict(self) -> str:
        ratio = self.slowdown
        if abs(ratio - 1) < _SAME:
            return "neither better nor worse than"
        if self.before.batch_size != self.now.batch_size:
            how = f"{1 - 1 / ratio:.1%} fewer" if ratio > 1 else f"{1 / ratio - 1:.1%} more"
            return f"{'worse' if ratio > 1 else 'better'}: {how} samples a second than"
        if ratio > 1:
            return f"worse: a step takes {ratio - 1:.1%} longer than"
        return f"better: a step takes {1 - ratio:.1%} less than"


def _change(before: float, now: float) -> str:
    return f"{now / before - 1:+.1%}" if before else "-"


_MOST_ROWS = 16
"""Stages shown; of more, the first and the last ones."""
_FEW_ROWS = 6
"""The same where there is more to be read on the screen."""


def plan_screen(planned: PlanResult, request: Request, folder: Path, every: bool) -> Iterator[RenderableType]:
    """The decisions, a table of the stages, the predictions, where the plan lies and what to type next."""
    plan, problem = planned.plan, planned.problem
    summary = plan.summary
    why = "" if request.mode else (" (the model has a loss)" if problem.train else " (the model has no loss)")
    chosen = "" if request.micro_batches or request.micro_batch_size else " (chosen)"
    yield (
        f"{request.model}: {summary.strategy} with {summary.schedule}, {plan.mode}{why}, on {summary.devices} devices"
        f" of {problem.cluster.name}{_taken(plan)}"
    )
    yield (
        f"batch {plan.batch_size}{'' if request.batch_size else ' (chosen)'} = {summary.micro_batches} micro-batches"
        f"{chosen} of {summary.micro_batch_size}"
    )
    if problem.train:
        # Names from the model are no markup.
        yield from (Text(f"{word}: {text}") for word, text in trained_lines(planned.model.tensors, every))
    yield stage_table(plan, _FEW_ROWS if plan.alternatives else _MOST_ROWS)
    yield f"{prediction_line(summary)}{_room(plan)}"
    yield traffic_line(summary)
    if summary.splits is not None:
        yield splits_line(summary.splits)
    if summary.costs is not None:
        yield costs_line(summary.costs)
    yield schedule_line(plan)
    yield from (f"note: {note}" for note in plan.placement.notes)
    if plan.breakdown is not None:
        yield from distance_lines(plan.breakdown, summary.devices, len(set(plan.device_names)))
    yield from weighed_screen(plan.alternatives, summary.step_time_s)
    yield f"plan in {folder}"
    yield f"next: autopipe explain {folder}    autopipe show {folder}    autopipe codegen {folder}"


def _taken(plan: Plan) -> str:
    """Which devices of a mixed cluster are planned for."""
    return f": {counted_text(plan.device_names)}" if plan.device_names else ""


def _room(plan: Plan) -> str:
    """The memory that devices have; where there are several kinds, with the peak on those of each."""
    kinds = dict.fromkeys(plan.device_names)
    if len(kinds) < 2:
        return f" of {bytes_text(plan.memory_limits[0])}"
    peaks, limits = plan.summary.peak_memory_bytes, plan.memory_limits
    own = {kind: [each for each, name in enumerate(plan.device_names) if name == kind] for kind in kinds}
    parts = (
        f"{bytes_text(max(peaks[each] for each in devices))} of {bytes_text(limits[devices[0]])} on {kind}"
        for kind, devices in own.items()
    )
    return f" ({', '.join(parts)})"


def prediction_line(summary: Summary) -> str:
    return (
        f"step {seconds_text(summary.step_time_s)} ({summary.samples_per_s:,.1f} samples/s, at best"
        f" {seconds_text(summary.lower_bound_s)}), bubble {summary.bubble_rate:.1%}, peak memory"
        f" {bytes_text(max(summary.peak_memory_bytes))}"
    )


def traffic_line(summary: Summary) -> str:
    if summary.communication_bytes is None:
        return "exchanged in a step: unknown, as some of the splits cannot be executed"
    parts = (f"{kind.replace('_', '-')} {bytes_text(size)}" for kind, size in summary.communication_bytes if size)
    return f"exchanged in a step: {', '.join(parts) or 'nothing'}"


def splits_line(proof: SplitProof) -> str:
    counted = seconds_text(proof.cost) if proof.unit == "s" else f"{proof.cost:.6g} {proof.unit}"
    if proof.optimal:
        return f"splits: {counted} a step as the search counts, proven the least"
    return f"splits: {counted} a step as the search counts, at most {proof.gap:.1%} above the least"


def costs_line(costs: CostCoverage) -> str:
    """How far measured costs went."""
    line = f"costs: {costs.measured} of {costs.measured + costs.judged} nodes as measured"
    if not costs.judged:
        return line
    return f"{line}, {costs.judged} by the roofline times what the measured ones took over it"


def schedule_line(plan: Plan) -> str:
    """Whose order it is, and what is proven of it."""
    schedule, summary = plan.schedule, plan.summary
    proof = schedule.proof
    whose = "" if proof is None or proof.order == summary.schedule else f"the order of {proof.order}, "
    what = "a step that is"
    if proof is not None and schedule.period is not None:
        what = f"a micro-batch every {seconds_text(schedule.period / plan.placement.pipelines)},"
    if not summary.optimal:
        return f"schedule: {whose}{what} at most {summary.gap or 0.0:.1%} too long for this placement"
    rounded = f", times rounded by at most {proof.rounding:.2%}" if proof is not None and proof.rounding else ""
    return f"schedule: {whose}{what} proven the shortest for this placement{rounded}"


def stage_table(plan: Plan, most: int = _MOST_ROWS) -> Table:
    """A row a stage: its devices, nodes and what each of its devices takes; its samples where stages differ in them.

    Where devices are of several kinds each stage's is told.

    Of more than `most` stages the first and the last are shown.
    """
    own_sizes = plan.has_own_sizes
    samples = ("micro-batch",) if own_sizes else ()
    kinds = ("kind",) if len(set(plan.device_names)) > 1 else ()
    columns = ("stage", "devices", *kinds, *samples, "nodes", "parameters", "forward", "backward", "memory")
    table = plain_table(*columns, right=2 + len(kinds))
    count = len(plan.placement.stages)
    for index, (stage, predicted) in enumerate(zip(plan.placement.stages, plan.prediction.stages, strict=True)):
        if count > most and most // 2 <= index < count - most // 2:
            if index == most // 2:
                table.add_row("...")
            continue
        table.add_row(
            str(index),
            devices_text(stage.devices),
            *((kinds_text(plan.device_names, stage.devices),) if kinds else ()),
            *((str(stage.micro_batch_size),) if own_sizes else ()),
            str(len(stage.nodes)),
            bytes_text(predicted.parameter_bytes),
            seconds_text(predicted.forward_s),
            seconds_text(predicted.backward_s) if plan.mode == "train" else "-",
            bytes_text(max(plan.summary.peak_memory_bytes[device] for device in stage.devices)),
        )
    return table
