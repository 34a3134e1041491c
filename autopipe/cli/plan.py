"""`autopipe plan`: decide which device computes what, and when.

One screen about a plan.

Comparison of a plan with the one that it was made from.

The plan that another one is made from, and what the new one has to keep of it.

A plan written back into a copy of its model, as ONNX's multi-device annotations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.cli.configuration_flags import configuration_options
from autopipe.cli.options import standard_options
from autopipe.cli.output import Output, Verbosity, bytes_text, counted_text, devices_text, kinds_text, seconds_text
from autopipe.cli.plan_folder import check_editable
from autopipe.cli.plan_text import distance_lines, trained_lines, weighed_screen
from autopipe.configs.configuration import Configuration, load_configuration
from autopipe.ir.codec import encode
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.placement import SplitProof
from autopipe.ir.plan import CostCoverage, Plan, Summary
from autopipe.ir.plan_file import plan_digest, read_plan
from autopipe.passes.annotations import annotated, write_annotated
from autopipe.passes.pipeline import PlanResult, Request
from autopipe.passes.placement.given import Given


@click.command()
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder to write; default MODEL.plan, or the DIR of --from.",
)
@click.option(
    "--from",
    "former",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Plan again what DIR holds: its placement.yaml and config.yaml, edited or not, under the other flags.",
)
@click.option(
    "--annotate",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also write MODEL with the plan as ONNX multi-device annotations.",
)
@click.option("--no-cache", is_flag=True, help="Search anew what an earlier run has found.")
@click.option("--dump-after", metavar="PASS", multiple=True, help="Print what PASS gave (repeatable).")
@configuration_options
@standard_options
def plan(
    output: Output,
    model: Path | None,
    folder: Path | None,
    former: Path | None,
    annotate: Path | None,
    no_cache: bool,
    dump_after: tuple[str, ...],
    configuration: Configuration,
) -> None:
    """Plan the ONNX file MODEL for a cluster and write the plan's folder.

    With --from the placement is not searched: that of DIR/placement.yaml is scheduled and simulated, and the price of
    the change is said. MODEL is then that of the plan in DIR where it is not given.

    \b
    Example:
      autopipe plan gpt.onnx --gpus 4
      autopipe plan llama.onnx --gpus 64 --cluster a100-80gb --batch-size 256 --set recompute=full
      autopipe plan gpt.onnx --gpus 4 --annotate gpt.annotated.onnx
      autopipe plan --from gpt.onnx.plan --schedule gpipe -o gpipe.plan
    """
    from autopipe.cli.output import check_writable
    from autopipe.cli.plan_folder import check_target, write_plan_folder
    from autopipe.cli.progress import Watcher, names_of
    from autopipe.cli.request import request_of
    from autopipe.passes.auto.choose import choose
    from autopipe.passes.auto.plan_cache import answers
    from autopipe.passes.pipeline import make_plan

    held = None if former is None else BasePlan.read(former)
    if model is None:
        if held is None:
            raise click.UsageError("Missing argument 'MODEL'.")
        model = Path(held.plan.model)
    target = folder or former or Path(f"{model}.plan")
    check_target(target)
    if annotate is not None:
        check_writable(annotate)
    request = request_of(configuration, model)
    if held is not None:
        held.check_kept(configuration, request)
    with output.progress("planning", total=len(names_of(request))) as bar:
        debug = bool(click.get_current_context().params["debug"])
        watcher = Watcher(output, bar, request, dump_after, debug)
        if request.strategy is None:
            # Values are dumped where they are made.
            planned = choose(request, watcher, None if no_cache or dump_after else answers())
        else:
            planned = make_plan(request, watcher)
    # What shows a plan is loaded once there is one.
    from autopipe.ir.codec import encode

    left_out = annotate_model(planned, annotate) if annotate is not None else ()
    write_plan_folder(target, planned, configuration)
    for warning in planned.model.warnings:
        output.warn(warning)
    if annotate is not None:
        warn_of_untold(output, planned, left_out)
    price = None if held is None else PlanDelta(held, planned.plan)
    schedule = planned.plan.schedule
    data = {
        "plan": target,
        "annotated": annotate,
        "mode": planned.plan.mode,
        "summary": encode(planned.plan.summary),
        "period_s": schedule.period,
        "proof": schedule.proof,
        "breakdown": planned.plan.breakdown,
        "alternatives": [encode(each) for each in planned.plan.alternatives],
        **({} if price is None else {"from": price.form()}),
    }
    written = (f"annotated model in {annotate}",) if annotate is not None else ()
    priced = () if price is None else tuple(price.lines())
    output.result(
        data, *plan_screen(planned, request, target, output.verbosity is Verbosity.DETAILED), *priced, *written
    )


_DECIDED = {
    "recompute": "placement.yaml says of each stage whether it recomputes",
    "constraints": "the stages of placement.yaml are taken as they are",
}
"""Keys that strategies read, and what decides instead where a placement is given."""


@dataclass(frozen=True, slots=True)
class BasePlan:
    """The folder that a plan is made again from, and the plan that it held."""

    folder: Path
    plan: Plan

    @staticmethod
    def read(folder: Path) -> BasePlan:
        """The plan of `folder`. Raises ConfigurationError for a folder that holds none."""
        return BasePlan(folder, read_plan(folder))

    def check_kept(self, configuration: Configuration, request: Request) -> None:
        """Raise ConfigurationError for a setting that a placement which is kept cannot bear, or has no use for."""
        strategy, summary = request.strategy, self.plan.summary
        if not isinstance(strategy, Given):
            raise self._refused(f"strategy {configuration.strategy.name} would make another placement")
        if request.mode is not None and request.mode.value != self.plan.mode:
            raise self._refused(f"the placement is to {self.plan.mode}, not to {request.mode.value}")
        devices = request.cluster.size
        if devices not in (summary.devices, strategy.devices):
            raise self._refused(f"the placement is for {summary.devices} devices, not for {devices}")
        size = _micro_batch_size(request)
        if size != summary.micro_batch_size:
            wanted = "a number of samples to be chosen" if size is None else f"{size} samples"
            raise self._refused(f"the placement is for micro-batches of {summary.micro_batch_size}, not of {wanted}")
        own = load_configuration(check_editable(self.folder)[0])
        for key, instead in _DECIDED.items():
            if getattr(configuration, key) != getattr(own, key):
                raise ConfigurationError(f"--from keeps the placement: {key} would change nothing", instead, key)

    def _refused(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"--from keeps the placement: {why}", "plan without --from", str(self.folder))


def _micro_batch_size(request: Request) -> int | None:
    """The samples of a micro-batch that a request asks for; None where it leaves them open."""
    if request.micro_batch_size is not None:
        return request.micro_batch_size
    if request.batch_size is None or request.micro_batches is None:
        return None
    return request.batch_size // request.micro_batches


_SAME = 5e-4
"""Relative changes below this are none to a reader."""


@dataclass(frozen=True, slots=True)
class PlanDelta:
    """A plan, and the one that its folder held before."""

    former: BasePlan
    now: Plan

    @property
    def same(self) -> bool:
        """True if the decisions and their predictions are equal."""
        return plan_digest(self.former.plan) == plan_digest(self.now)

    @property
    def slowdown(self) -> float:
        """How many samples the former plan takes while this one takes one: above 1 where this one is worse."""
        before, now = self.former.plan.summary.samples_per_s, self.now.summary.samples_per_s
        return before / now if now else 1.0

    def lines(self) -> Iterator[RenderableType]:
        """The figures before and after, and whether that is worse."""
        if self.same:
            yield f"the same plan as {self.former.folder} held"
            return
        before, now = self.former.plan.summary, self.now.summary
        table = Table("", "before", "now", "change", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        times, rates = (before.step_time_s, now.step_time_s), (before.samples_per_s, now.samples_per_s)
        peaks, bubbles = (before.peak_memory_bytes, now.peak_memory_bytes), (before.bubble_rate, now.bubble_rate)
        table.add_row("step", *map(seconds_text, times), _share(*times))
        table.add_row("samples/s", *(f"{rate:,.1f}" for rate in rates), _share(*rates))
        table.add_row("bubble", *(f"{rate:.1%}" for rate in bubbles), f"{100 * (bubbles[1] - bubbles[0]):+.1f} points")
        table.add_row("peak memory", *map(bytes_text, map(max, peaks)), _share(*map(max, peaks)))
        yield table
        yield f"{self._verdict()} what {self.former.folder} held"

    def form(self) -> dict[str, object]:
        """The same for a program."""
        before = encode(self.former.plan.summary)
        return {"plan": self.former.folder, "same": self.same, "worse": self.slowdown > 1, "before": before}

    def _verdict(self) -> str:
        ratio = self.slowdown
        if abs(ratio - 1) < _SAME:
            return "neither better nor worse than"
        if self.former.plan.batch_size != self.now.batch_size:
            how = f"{1 - 1 / ratio:.1%} fewer" if ratio > 1 else f"{1 / ratio - 1:.1%} more"
            return f"{'worse' if ratio > 1 else 'better'}: {how} samples a second than"
        if ratio > 1:
            return f"worse: a step takes {ratio - 1:.1%} longer than"
        return f"better: a step takes {1 - ratio:.1%} less than"


def _share(before: float, now: float) -> str:
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


def annotate_model(planned: PlanResult, target: Path) -> tuple[str, ...]:
    """Write the model of `planned` to `target` with annotations that say where its nodes run.

    Returns the names of the graph's nodes that the annotations do not tell all of. Raises ConfigurationError where
    they have no words for the placement or the file cannot be written.
    """
    devices = planned.problem.cluster.devices
    names = tuple(f"{device.name}:{index}" for index, device in enumerate(devices))
    found = annotated(planned.problem.graph, planned.plan.placement, planned.model.origins, names)
    write_annotated(planned.model.path, target, found.configuration)
    return found.left_out


def warn_of_untold(output: Output, planned: PlanResult, left_out: tuple[str, ...]) -> None:
    """Warn of what the annotations of `planned` do not tell; `left_out` is what `annotate_model` gave."""
    if left_out:
        output.warn(
            f"annotations do not tell all of {len(left_out)} nodes, among them {left_out[0]!r}: they are not in the"
            " file, or split along an axis of no tensor in it"
        )
    if planned.plan.has_own_sizes:
        output.warn(
            "annotations do not tell that stages have micro-batches of their own",
            "constraints say it: micro_batch_size",
        )
