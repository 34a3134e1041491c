"""`autopipe plan`: decide which device computes what, and when."""

from __future__ import annotations

from pathlib import Path

import click

from autopipe.cli.configuration_flags import configuration_options
from autopipe.cli.options import standard_options
from autopipe.cli.output import Output, Verbosity
from autopipe.configs.configuration import Configuration


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
    from autopipe.cli.files import check_writable
    from autopipe.cli.former import BasePlan
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
    from autopipe.cli.annotation import annotate_model, warn_of_untold
    from autopipe.cli.plan_screen import plan_screen
    from autopipe.cli.price import PlanDelta
    from autopipe.ir.plan_file import alternatives_form, summary_form

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
        "summary": summary_form(planned.plan.summary),
        "period_s": schedule.period,
        "proof": schedule.proof,
        "breakdown": planned.plan.breakdown,
        "alternatives": alternatives_form(planned.plan.alternatives),
        **({} if price is None else {"from": price.form()}),
    }
    written = (f"annotated model in {annotate}",) if annotate is not None else ()
    priced = () if price is None else tuple(price.lines())
    output.result(
        data, *plan_screen(planned, request, target, output.verbosity is Verbosity.DETAILED), *priced, *written
    )
