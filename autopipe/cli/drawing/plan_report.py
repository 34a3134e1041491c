"""Page about a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopipe.cli.drawing.comparison import ScheduleResult, comparison_markup
from autopipe.cli.drawing.markup import markup_row, markup_table
from autopipe.cli.drawing.palette import stage_colour
from autopipe.cli.drawing.picture import plan_picture
from autopipe.cli.drawing.report import Report
from autopipe.cli.drawing.stage_graph import plan_graph_svg
from autopipe.cli.figures import bytes_text, devices_text, kinds_text, seconds_text
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Phase
from autopipe.ir.timeline import Timeline


def plan_report(plan: Plan, timeline: Timeline, rivals: Sequence[ScheduleResult]) -> Report:
    """The page of a plan. Without rivals nothing is compared."""
    summary, picture = plan.summary, plan_picture(plan, timeline)
    sections = [("Stages", plan_graph_svg(plan) + _stages(plan))]
    if rivals:
        table = comparison_markup(rivals, picture.limits, seconds_text, bytes_text)
        sections.append(("This placement under every schedule", table))
    sections.append(("Search", _search(plan)))
    return Report(
        title=f"{plan.model.rpartition('/')[2]}: {summary.strategy} with {summary.schedule}",
        subtitle=plan.model,
        figures=(
            ("step", seconds_text(summary.step_time_s)),
            ("samples a second", f"{summary.samples_per_s:,.1f}"),
            ("at best", seconds_text(summary.lower_bound_s)),
            ("bubble", f"{summary.bubble_rate:.1%}"),
            ("peak memory", bytes_text(max(summary.peak_memory_bytes))),
            ("devices", str(summary.devices)),
            (f"stages, depth {summary.depth}", str(summary.stages)),
            ("micro-batches", f"{summary.micro_batches} of {summary.micro_batch_size}"),
            ("mode", plan.mode),
        ),
        pictures=(("", picture),),
        sections=tuple(sections),
    )


def _stages(plan: Plan) -> str:
    """Predictions of the cost model, a stage a row; of a backward's halves where the schedule has them."""
    split = any(task.phase is Phase.INPUT_GRADIENT for order in plan.schedule.tasks for task in order)
    halves = ("input gradient", "weight gradient") if split else ()
    pipelines = ("pipeline",) if plan.placement.pipelines > 1 else ()
    samples = ("micro-batch",) if plan.has_own_sizes else ()
    kinds = ("kind",) if len(set(plan.device_names)) > 1 else ()
    heads = ("stage", "devices", *kinds, *pipelines, *samples, "nodes", "parameters", "forward", "backward", *halves)
    heads += ("gradient sum", "update", "kept a micro-batch", "static memory", "recompute")
    return markup_table(heads, list(_stage_rows(plan, split)))


def _stage_rows(plan: Plan, split: bool) -> Iterator[str]:
    for index, (stage, predicted) in enumerate(zip(plan.placement.stages, plan.prediction.stages, strict=True)):
        halves = [predicted.seconds(each) for each in (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)] if split else ()
        times = (predicted.forward_s, predicted.backward_s, *halves, predicted.gradient_s, predicted.update_s)
        cells = (
            str(index),
            devices_text(stage.devices),
            *((kinds_text(plan.device_names, stage.devices),) if len(set(plan.device_names)) > 1 else ()),
            *((str(stage.pipeline),) if plan.placement.pipelines > 1 else ()),
            *((str(stage.micro_batch_size),) if plan.has_own_sizes else ()),
            str(len(stage.nodes)),
            bytes_text(predicted.parameter_bytes),
            *map(seconds_text, times),
            bytes_text(predicted.kept_bytes),
            bytes_text(predicted.static_bytes),
            "yes" if stage.recompute else "no",
        )
        yield markup_row(cells, stage_colour(index, Phase.BACKWARD))


def _search(plan: Plan) -> str:
    rows = [markup_row((name, seconds_text(seconds))) for name, seconds in plan.summary.search_time_s]
    return markup_table(("pass", "time"), rows)
