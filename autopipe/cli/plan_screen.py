"""One screen about a plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.cli.explanation.distance import distance_lines
from autopipe.cli.explanation.weighed import weighed_screen
from autopipe.cli.figures import bytes_text, counted_text, devices_text, kinds_text, seconds_text
from autopipe.cli.roles import trained_lines
from autopipe.ir.placement import SplitProof
from autopipe.ir.plan import CostCoverage, Plan, Summary
from autopipe.passes.pipeline import PlanResult, Request

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
    """Predicted step, throughput, bubble and memory."""
    return (
        f"step {seconds_text(summary.step_time_s)} ({summary.samples_per_s:,.1f} samples/s, at best"
        f" {seconds_text(summary.lower_bound_s)}), bubble {summary.bubble_rate:.1%}, peak memory"
        f" {bytes_text(max(summary.peak_memory_bytes))}"
    )


def traffic_line(summary: Summary) -> str:
    """Bytes that devices exchange in a step."""
    if summary.communication_bytes is None:
        return "exchanged in a step: unknown, as some of the splits cannot be executed"
    parts = (f"{kind.replace('_', '-')} {bytes_text(size)}" for kind, size in summary.communication_bytes if size)
    return f"exchanged in a step: {', '.join(parts) or 'nothing'}"


def splits_line(proof: SplitProof) -> str:
    """Proof of the splits."""
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
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[2 + len(kinds) :]:
        column.justify = "right"
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
