"""`autopipe plan`: decide which device computes what, and when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopipe.cli.configuration_flags import configuration_options
from autopipe.cli.options import standard_options
from autopipe.cli.output import Output, Verbosity
from autopipe.configs.configuration import Configuration
from autopipe.ir.errors import ConfigurationError

if TYPE_CHECKING:
    from autopipe.ir.plan import Plan
    from autopipe.passes.pipeline import PlanResult, Request


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
    from autopipe.cli.plan_text import PlanDelta, plan_screen
    from autopipe.ir.codec import encode

    left_out = annotate_model(planned, annotate) if annotate is not None else ()
    write_plan_folder(target, planned, configuration)
    for warning in planned.model.warnings:
        output.warn(warning)
    if annotate is not None:
        warn_of_untold(output, planned, left_out)
    price = None if held is None else PlanDelta(held.folder, held.plan, planned.plan)
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
        from autopipe.ir.plan_file import read_plan

        return BasePlan(folder, read_plan(folder))

    def check_kept(self, configuration: Configuration, request: Request) -> None:
        """Raise ConfigurationError for a setting that a placement which is kept cannot bear, or has no use for."""
        from autopipe.cli.plan_folder import check_editable
        from autopipe.configs.configuration import load_configuration
        from autopipe.passes.placement.given import Given

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


def annotate_model(planned: PlanResult, target: Path) -> tuple[str, ...]:
    """Write the model of `planned` to `target` with annotations that say where its nodes run.

    Returns the names of the graph's nodes that the annotations do not tell all of. Raises ConfigurationError where
    they have no words for the placement or the file cannot be written.
    """
    from autopipe.passes.annotations import annotated, write_annotated

    devices = planned.problem.cluster.devices
    names = tuple(f"{device.name}:{index}" for index, device in enumerate(devices))
    configuration, left_out = annotated(planned.problem.graph, planned.plan.placement, planned.model.origins, names)
    write_annotated(planned.model.path, target, configuration)
    return left_out


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
