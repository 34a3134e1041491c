"""Text and tables about a plan: decisions and predictions, trained tensors, other candidates, and
changes relative to an earlier plan.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.api.summary_text import degrees_text, update_text
from autopipe.cli.output import Output, Verbosity, counted_text, kinds_text, plain_table
from autopipe.ir.codec import encode
from autopipe.ir.placement import devices_text
from autopipe.ir.plan import Alternative, Breakdown, Plan, Summary, best_per_strategy, plan_digest
from autopipe.ir.problem import Mode
from autopipe.ir.schedule import Phase
from autopipe.ir.words import bytes_text, count_text, join_first, plural, seconds_text

if TYPE_CHECKING:
    from autopipe.passes.frontend.model import Model, Tensor
    from autopipe.passes.pipeline import PlanResult, Request

_MIN_LISTED_FRACTION = 5e-4
"""Fraction of a step below which a part is not listed."""
_COMMUNICATION_PARTS = ("exposed P2P", "collectives", "gradients")


def distance_lines(breakdown: Breakdown, devices: int, kinds: int = 1) -> Iterator[str]:
    """Yield the ideal time of the devices, and the parts of the step beyond it, the largest first.
    The kinds of communication are combined to one part and listed in parentheses.

    `kinds` is the number of device types.
    """
    ideal_s = breakdown.ideal_s
    step_s = breakdown.step_s
    told_s = f"the step of {seconds_text(step_s)}"
    times = (
        f"{told_s} takes {step_s / ideal_s:.2f} times that" if ideal_s else f"{told_s} takes more"
    )
    work = (
        f"one device's work at the roofline / {devices}"
        if devices > 1
        else "the device's work at the roofline"
    )
    if kinds > 1:
        work = (
            f"the work at the roofline of {devices} {plural(devices, 'device')}, each as fast as "
            "it is"
        )
    yield f"ideal {seconds_text(ideal_s)} ({work}), {times}"

    def parts_text(parts: Iterable[tuple[str, float, str]]) -> str:
        large = (each for each in parts if step_s and abs(each[1]) >= _MIN_LISTED_FRACTION * step_s)
        return ", ".join(f"{name} {seconds / step_s:.1%}{note}" for name, seconds, note in large)

    losses = [(*each, "") for each in breakdown.losses]
    inside = parts_text(each for each in losses if each[0] in _COMMUNICATION_PARTS)
    outside = [each for each in losses if each[0] not in _COMMUNICATION_PARTS]
    exchanged_s = breakdown.exposed_p2p_s + breakdown.collectives_s + breakdown.gradients_s
    outside.append(("communication", exchanged_s, f" ({inside})" if inside else ""))
    if parts := parts_text(sorted(outside, key=lambda each: -each[1])):
        yield f"of the step: ideal {ideal_s / step_s:.1%}, {parts}"


def candidates_screen(
    alternatives: Sequence[Alternative], chosen_s: float, most: int | None = None
) -> Iterator[RenderableType]:
    """Yield a table with the best candidate of each strategy, then the reasons why other strategies
    have no plan. Yield nothing if there are no candidates.

    `chosen_s` is the step time of the chosen plan in seconds. With `most`, only the best `most`
    candidates after the chosen one are listed.
    """
    best = best_per_strategy(alternatives)
    if most is not None:
        # Strategies with equal step time and equal peak memory count as equal plans and share one
        # row.
        plans = {
            (each.step_time_s, each.peak_memory_bytes): each
            for each in reversed(best)
            if each.step_time_s
        }
        best = tuple(sorted(plans.values(), key=lambda each: each.rank))[1 : most + 1]
    if not best:
        return
    simulated = sum(each.step_time_s is not None for each in alternatives)
    which = "the best of each strategy" if most is None else "the best of other strategies"
    yield f"{count_text(len(alternatives), 'candidate')}, {simulated:,} of them simulated; {which}:"
    heads = ["strategy", "schedule", "micro-batches", "step", "slowdown", "memory"]
    if most is None:
        heads[2:] = ["micro-\nbatches", "step", "slowdown", "lower\nbound", "memory"]
    table = plain_table(*heads, right=2, no_wrap=True)
    reasons: dict[str, list[str]] = {}
    for each in best:
        bound_s = each.lower_bound_s
        memory = each.peak_memory_bytes
        schedule = each.choice.schedule or "any"
        at_least, least_s = ("≥ ", bound_s) if each.step_time_s is None else ("", each.step_time_s)
        # A candidate without step time and schedule was skipped, because a lower bound of its step
        # time exceeded the best step time. The table shows this bound.
        if least_s is None or (each.step_time_s is None and each.choice.schedule is not None):
            reasons.setdefault(each.refused or "", []).append(each.choice.strategy)
            continue
        table.add_row(
            strategy_text(each),
            schedule if each.same_as is None else f"{schedule}, as {each.same_as}",
            str(each.micro_batches),
            f"{at_least}{seconds_text(least_s)}",
            f"{at_least}{text_over_chosen(least_s, chosen_s)}",
            *(["-" if bound_s is None else seconds_text(bound_s)] if most is None else []),
            "-" if memory is None else bytes_text(memory),
        )
    yield table
    if reasons:
        refusals = plain_table("no plan", "")
        for reason, names in reasons.items():
            refusals.add_row(", ".join(names), reason)
        yield refusals


def strategy_text(alternative: Alternative) -> str:
    choice = alternative.choice
    options = " ".join(
        name if value == "true" else f"{name}={value}" for name, value in choice.options
    )
    decided = [
        options,
        "recompute" if choice.recompute != "none" else "",
        "zero-1" if choice.shard else "",
        "recomputed scores" if choice.scores == "recompute" else "",
    ]
    told = ", ".join(filter(None, decided))
    return f"{choice.strategy} ({told})" if told else choice.strategy


def text_over_chosen(step_s: float, chosen_s: float) -> str:
    return "same" if step_s == chosen_s else _change_text(chosen_s, step_s)


def _change_text(before: float, now: float) -> str:
    return f"{now / before - 1:+.1%}" if before else "-"


MAX_LISTED_REASONS = 4
"""Maximum number of reasons listed in a line. The others are only counted."""


def trained_lines(tensors: Sequence[Tensor], every: bool) -> Iterator[tuple[str, str]]:
    """Yield pairs of a word and a text: the trained tensors, the tensors that are not trained, and
    the doubtful ones, with the reasons. With `every`, a pair per tensor follows.
    """
    for word, chosen in (("trained", True), ("not trained", False)):
        found = [each for each in tensors if each.trained is chosen]
        if found or chosen:
            yield word, _reasons_text(found) if found else "nothing"
    doubtful = [each for each in tensors if each.doubtful]
    if doubtful:
        yield (
            "doubtful",
            join_first([repr(each.value.name) for each in doubtful], MAX_LISTED_REASONS),
        )
    for each in tensors if every else ():
        shape = "×".join(map(str, each.value.shape)) or "scalar"
        word = "trained" if each.trained else "not trained"
        yield word, f"{each.value.name!r} {shape}, {each.value.elements:,}: {each.why}"


def gradient_lines(model: Model) -> Iterator[tuple[str, str]]:
    """Yield a word and a text if the ONNX file does not record where the PyTorch module that it was
    exported from stops gradients.
    """
    if model.mode is Mode.TRAIN and model.unrecorded:
        names = ", ".join(model.unrecorded)
        yield (
            "gradients",
            f"unknown if the module stops any: the file records no {names} (autopipe export does)",
        )


def _reasons_text(tensors: Sequence[Tensor]) -> str:
    reasons: Counter[str] = Counter()
    for each in tensors:
        reasons[each.why] += each.value.elements
    told = reasons.most_common()
    texts = [f"{count:,} {why}" for why, count in told[:MAX_LISTED_REASONS]]
    if len(told) > MAX_LISTED_REASONS:
        texts.append(f"{sum(count for _, count in told[MAX_LISTED_REASONS:]):,} for other reasons")
    total = (
        f"{sum(reasons.values()):,} {plural(sum(reasons.values()), 'element')} in "
        f"{count_text(len(tensors), 'tensor')}"
    )
    return f"{total}: {', '.join(texts)}"


_EQUAL_TOLERANCE = 5e-4
"""Relative changes below this count as none."""


def plan_delta(
    folder: Path, before: Plan, now: Plan
) -> tuple[dict[str, object], list[RenderableType]]:
    """Compare a plan with the one that `folder` held before. Return the comparison for JSON output,
    and the table and the verdict for the terminal.
    """
    same = plan_digest(before) == plan_digest(now)
    was = before.summary
    is_now = now.summary
    # Ratio of the throughputs, in samples per second, of the old plan and this plan. It is above 1
    # if this plan is worse.
    ratio = was.samples_per_s / is_now.samples_per_s if is_now.samples_per_s else 1.0
    form = {"plan": folder, "same": same, "worse": ratio > 1, "before": encode(was)}
    if same:
        return form, [f"the same plan as {folder} held"]
    table = plain_table("", "before", "now", "change", right=1)
    times = (was.step_time_s, is_now.step_time_s)
    rates = (was.samples_per_s, is_now.samples_per_s)
    bubbles = (was.bubble_rate, is_now.bubble_rate)
    peaks = [max(each.peak_memory_bytes) for each in (was, is_now)]
    table.add_row("step", *map(seconds_text, times), _change_text(*times))
    table.add_row("samples/s", *(f"{rate:,.1f}" for rate in rates), _change_text(*rates))
    table.add_row(
        "bubble",
        *(f"{rate:.1%}" for rate in bubbles),
        f"{100 * (bubbles[1] - bubbles[0]):+.1f} points",
    )
    table.add_row("peak memory", *map(bytes_text, peaks), _change_text(*peaks))
    if abs(ratio - 1) < _EQUAL_TOLERANCE:
        verdict = "neither better nor worse than"
    elif before.batch_size != now.batch_size:
        how = (
            f"worse: {1 - 1 / ratio:.1%} fewer"
            if ratio > 1
            else f"better: {1 / ratio - 1:.1%} more"
        )
        verdict = f"{how} samples a second than"
    elif ratio > 1:
        verdict = f"worse: a step takes {ratio - 1:.1%} longer than"
    else:
        verdict = f"better: a step takes {1 - ratio:.1%} less than"
    return form, [table, f"{verdict} what {folder} held"]


_MAX_STAGE_ROWS = 16
"""Maximum number of stages in a table. If there are more, only the first and the last are
listed.
"""
_MIN_STAGE_ROWS = 3
MAX_SCREEN_LINES = 20
"""Maximum number of lines that `autopipe plan` prints; -v removes the limit."""
_LISTED_ALTERNATIVES = 3


def plan_screen(
    planned: PlanResult,
    request: Request,
    folder: Path,
    found: str,
    untried: Sequence[str],
    output: Output,
) -> Iterator[RenderableType]:
    """Yield the decisions, the predictions, the next best candidates, the plan's folder and the
    next commands.

    The stages are listed if `MAX_SCREEN_LINES` allows it. `found` describes how the devices were
    determined. `untried` are the options that only strategy `auto` would have tried.
    """
    plan = planned.plan
    problem = planned.problem
    every = output.verbosity is Verbosity.DETAILED
    summary = plan.summary
    devices = count_text(summary.devices, "device")
    kinds = f": {counted_text(plan.device_names)}" if plan.device_names else ""
    before: list[RenderableType] = [
        f"{request.model}: {summary.strategy} with {summary.schedule}, {plan.mode}, on {devices} of"
        f" {problem.cluster.name}{kinds}{f' ({found})' if found else ''}",
        _batch_line(planned, request),
    ]
    if problem.train and every:
        before += [f"{word}: {text}" for word, text in trained_lines(planned.model.tensors, every)]
    elif problem.train:
        before += trained_summary(planned.model.tensors)
    if problem.train:
        before += [f"{word}: {text}" for word, text in gradient_lines(planned.model)]
        optimizer = problem.optimizer
        before.append(
            "update: "
            f"{update_text(optimizer.name, optimizer.lr, problem.lr_scheduler, problem.training)}"
        )
    word = shlex.quote(str(folder))
    degrees = degrees_text(summary)
    after: list[RenderableType] = [
        *([f"degrees: {degrees}"] if degrees else []),
        f"{prediction_line(summary)}{_memory_limits_text(plan)}",
        traffic_line(summary),
        *scores_lines(summary),
        schedule_line(plan),
        *host_help_lines(plan),
        *([untried_line(untried)] if untried else []),
        *candidates_screen(plan.alternatives, summary.step_time_s, _LISTED_ALTERNATIVES),
        f"plan in {folder}",
        f"next: autopipe explain {word}    autopipe show {word}    autopipe codegen {word}",
    ]
    room = MAX_SCREEN_LINES - sum(map(output.height, (*before, *after))) - 1
    stages = len(plan.placement.stages)
    yield from before
    if every or stages <= room or room > _MIN_STAGE_ROWS:
        yield stage_table(plan, _MAX_STAGE_ROWS if every else min(stages, room))
    else:
        yield f"{stages} {plural(stages, 'stage')}: autopipe show {word} lists them"
    yield from after


def untried_line(options: Sequence[str]) -> str:
    """Return the line that names the options that only strategy `auto` would have tried."""
    pronoun = "it" if len(options) == 1 else "both"
    return f"not tried: {', '.join(options)} (strategy auto tries {pronoun})"


def _batch_line(planned: PlanResult, request: Request) -> str:
    plan = planned.plan
    summary = planned.plan.summary
    batch = f"batch {plan.batch_size}{'' if request.batch_size else ' (chosen)'}"
    chosen = "" if request.micro_batches or request.micro_batch_size else " (chosen)"
    count = count_text(summary.micro_batches, "micro-batch")
    return f"{batch} = {count}{chosen} of {count_text(summary.micro_batch_size, 'sample')}"


def trained_summary(tensors: Sequence[Tensor]) -> Iterator[str]:
    """Yield the number of elements and tensors that are trained and that are not trained, then the
    doubtful tensors.
    """
    trained, frozen = ([each for each in tensors if each.trained is want] for want in (True, False))

    def elements_and_tensors_text(found: Sequence[Tensor]) -> str:
        return (
            f"{sum(each.value.elements for each in found):,} "
            f"{plural(sum(each.value.elements for each in found), 'element')} in "
            f"{count_text(len(found), 'tensor')}"
        )

    not_trained = f"; not trained: {elements_and_tensors_text(frozen)}" if frozen else ""
    yield f"trained: {elements_and_tensors_text(trained)}{not_trained}"
    yield from (
        f"{word}: {text}" for word, text in trained_lines(tensors, False) if word == "doubtful"
    )


def reason_lines(plan: Plan) -> Iterator[RenderableType]:
    """Yield the lines that only `explain` prints: notes and proofs of the search, the parts of the
    step, and the candidates.
    """
    yield from (f"note: {note}" for note in plan.placement.notes)
    yield from _proof_lines(plan.summary)
    yield from scores_lines(plan.summary)
    if plan.breakdown is not None:
        yield from distance_lines(plan.breakdown, plan.summary.devices, len(set(plan.device_names)))
    yield from host_time_lines(plan)
    yield from candidates_screen(plan.alternatives, plan.summary.step_time_s)


def _memory_limits_text(plan: Plan) -> str:
    """Return the memory capacity of the devices. If there are several device types, return the peak
    and the capacity per type.
    """
    if len(set(plan.device_names)) < 2:
        return f" of {bytes_text(plan.memory_limits[0])}"
    kinds: dict[str, list[int]] = {}
    for device, name in enumerate(plan.device_names):
        kinds.setdefault(name, []).append(device)
    parts = (
        f"{bytes_text(max(plan.summary.peak_memory_bytes[each] for each in devices))} of"
        f" {bytes_text(plan.memory_limits[devices[0]])} on {kind}"
        for kind, devices in kinds.items()
    )
    return f" ({', '.join(parts)})"


def prediction_line(summary: Summary) -> str:
    return (
        f"step {seconds_text(summary.step_time_s)} ({summary.samples_per_s:,.1f} samples/s, lower "
        f"bound {seconds_text(summary.lower_bound_s)} for this placement), bubble "
        f"{summary.bubble_rate:.1%}, peak memory {bytes_text(max(summary.peak_memory_bytes))}"
    )


def traffic_line(summary: Summary) -> str:
    if summary.communication_bytes is None:
        return "communication volume of a step: unknown, as some of the splits cannot be executed"
    parts = (
        f"{kind.replace('_', '-')} {bytes_text(size)}"
        for kind, size in summary.communication_bytes
        if size
    )
    return f"communication volume of a step: {', '.join(parts) or 'none'}"


def scores_lines(summary: Summary) -> Iterator[str]:
    """Yield one line if the losses can keep or recompute their logits: the choice, its memory, and
    the time of the other choice.
    """
    scores = summary.scores
    if scores is None:
        return
    size = f"{bytes_text(scores.saved_bytes)} per micro-batch"
    if scores.choice == "keep":
        text = f"scores kept, {size}"
        other = "recomputed"
        seconds = (scores.keep_s, scores.recompute_s)
    else:
        text = f"scores recomputed, saves {size}"
        other = "kept"
        seconds = (scores.recompute_s, scores.keep_s)
    own_s, other_s = map(seconds_text, seconds)
    text = f"loss: {text}; its product and the loss take {own_s}, {other_s} if {other}"
    if scores.other_step_s is not None:
        text += f" (step {seconds_text(scores.other_step_s)})"
    elif scores.other_refused is not None:
        text += f" (no plan: {scores.other_refused})"
    yield text


def _proof_lines(summary: Summary) -> Iterator[str]:
    if (proof := summary.splits) is not None:
        counted = (
            seconds_text(proof.cost) if proof.unit == "s" else f"{proof.cost:.6g} {proof.unit}"
        )
        how = "proven optimal" if proof.optimal else f"within {proof.gap:.1%} of optimal"
        yield f"splits: {counted} a step as the search counts, {how}"
    if (costs := summary.costs) is not None:
        nodes = costs.measured + costs.extrapolated
        rest = f", {costs.extrapolated} extrapolated" if costs.extrapolated else ""
        yield f"costs: {costs.measured} of {nodes} {plural(nodes, 'node')} measured{rest}"


def schedule_line(plan: Plan) -> str:
    """Return a line that names the scheduler whose order the plan uses, and how far the schedule
    may be from optimal.
    """
    schedule = plan.schedule
    summary = plan.summary
    proof = schedule.proof
    whose = (
        "" if proof is None or proof.order == summary.schedule else f"the order of {proof.order}, "
    )
    what = ""
    if proof is not None and schedule.period is not None:
        what = f"a micro-batch every {seconds_text(schedule.period / plan.placement.pipelines)}, "
    if not summary.optimal:
        return (
            f"schedule: {whose}{what}within {summary.gap or 0.0:.1%} of optimal for this placement"
        )
    rounded = (
        f", times rounded by at most {proof.rounding:.2%}"
        if proof is not None and proof.rounding
        else ""
    )
    return f"schedule: {whose}{what}proven optimal for this placement{rounded}"


def gap_text(summary: Summary) -> str:
    """Return the maximum fraction by which the schedule may be longer than the shortest one for its
    placement.
    """
    if summary.optimal:
        return "0, proven"
    return "unknown" if summary.gap is None else f"at most {summary.gap:.1%}"


def host_help_lines(plan: Plan) -> Iterator[str]:
    """Yield a line if stages are bound by the host: the fraction of the step that is lost, and the
    remedies.
    """
    if not plan.host_bound_stages or plan.breakdown is None:
        return
    share = plan.breakdown.host_s / plan.summary.step_time_s
    fewer = "fewer, larger micro-batches, or " if plan.summary.micro_batches > 1 else ""
    yield (
        f"bound by the host, for which devices wait {share:.0%} of the step; what helps: "
        f"{fewer}launch --cuda-graphs"
    )


def host_time_lines(plan: Plan) -> Iterator[str]:
    """Yield a line if stages are bound by the host: the host time and the device time of the
    slowest of these stages.
    """
    if not (bound := plan.host_bound_stages):
        return
    stages = plan.prediction.stages
    slowest = max(bound, key=lambda index: stages[index].forward_s + stages[index].backward_s)
    on_host = stages[slowest].on_host
    on_device = stages[slowest].on_device
    assert on_host is not None and on_device is not None, "the stage is bound by the host"
    of = (
        ""
        if len(stages) == 1
        else f" of stage {slowest}, the slowest of {len(bound)} that are bound by it,"
    )
    yield (
        f"bound by the host: a micro-batch{of} takes the host "
        f"{seconds_text(on_host.forward_s + on_host.backward_s)},"
        f" the device {seconds_text(on_device.forward_s + on_device.backward_s)}"
    )


def stage_columns(plan: Plan, full: bool) -> dict[str, list[str]]:
    """Return the properties of the stages, one column per property. With `full`, all predicted
    values are included; otherwise only those that fit a terminal.

    Device types and micro-batch sizes have a column if they differ between stages, and layers if
    the model has repeated layers. With `full`,
    pipelines have a column if there are several, and so do the halves of a backward if the schedule
    splits backwards.
    """
    stages = plan.placement.stages
    predicted = plan.prediction.stages
    columns = {
        "stage": [str(index) for index in range(len(stages))],
        "devices": [devices_text(each.devices) for each in stages],
    }
    if len(set(plan.device_names)) > 1:
        columns["kind"] = [kinds_text(plan.device_names, each.devices) for each in stages]
    if full and plan.placement.pipelines > 1:
        columns["pipeline"] = [str(each.pipeline) for each in stages]
    if plan.has_different_micro_batch_sizes:
        columns["micro-batch"] = [str(each.micro_batch_size) for each in stages]
    columns["nodes"] = [str(len(each.nodes)) for each in stages]
    if any(plan.stage_labels):
        columns["layers"] = [label or "-" for label in plan.stage_labels]
    columns["parameters"] = [bytes_text(each.parameter_bytes) for each in predicted]
    columns["forward"] = [seconds_text(each.forward_s) for each in predicted]
    columns["backward"] = [
        seconds_text(each.backward_s) if full or plan.mode == "train" else "-" for each in predicted
    ]
    if not full:
        peaks = plan.summary.peak_memory_bytes
        columns["memory"] = [
            bytes_text(max(peaks[device] for device in each.devices)) for each in stages
        ]
        return columns
    if any(task.phase is Phase.INPUT_GRADIENT for order in plan.schedule.tasks for task in order):
        for name, phase in (
            ("input gradient", Phase.INPUT_GRADIENT),
            ("weight gradient", Phase.WEIGHT_GRADIENT),
        ):
            columns[name] = [seconds_text(each.seconds(phase)) for each in predicted]
    columns["gradient sum"] = [seconds_text(each.gradient_s) for each in predicted]
    columns["update"] = [seconds_text(each.update_s) for each in predicted]
    columns["activation memory a micro-batch"] = [bytes_text(each.kept_bytes) for each in predicted]
    columns["static memory"] = [bytes_text(each.static_bytes) for each in predicted]
    columns["recompute"] = ["yes" if each.recompute else "no" for each in stages]
    if any(each.on_host is not None for each in predicted):
        hosts = [each.on_host for each in predicted]
        columns["host"] = [
            "-" if each is None else seconds_text(each.forward_s + each.backward_s)
            for each in hosts
        ]
        columns["host-bound"] = ["yes" if each.host_bound else "no" for each in predicted]
    return columns


def stage_table(plan: Plan, most: int = _MAX_STAGE_ROWS) -> Table:
    """Return a table with one row per stage. If there are more than `most` stages, the first and
    the last are listed, with a row `...` between them.
    """
    columns = stage_columns(plan, full=False)
    table = plain_table(*columns, right=3 if "kind" in columns else 2)
    # Rich narrows columns that may wrap before the others. Only the labels of layers are cut, so
    # that each stage takes one line and numbers stay complete.
    for column in table.columns:
        column.no_wrap = column.header != "layers"
        if column.header == "layers":
            column.justify = "left"
    cells: dict[str, list[str | Text]] = {name: [*texts] for name, texts in columns.items()}
    if "layers" in cells:
        cells["layers"] = [
            Text(label, no_wrap=True, overflow="ellipsis") for label in columns["layers"]
        ]
    rows: list[tuple[str | Text, ...]] = list(zip(*cells.values(), strict=True))
    if len(rows) > most:
        half = (most - 1) // 2
        rows[most - 1 - half : len(rows) - half] = [("...",)]
    for row in rows:
        table.add_row(*row)
    return table
