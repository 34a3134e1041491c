"""`autopipe plan`: decides which device computes which part of a model, and when."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopipe.cli.options import FORCE, PATH, configuration_options, standard_options
from autopipe.cli.output import Output
from autopipe.configs.configuration import Configuration

if TYPE_CHECKING:
    from autopipe.passes.pipeline import PlanResult


@click.command()
@click.argument("model", required=False, type=PATH)
@click.option(
    "-o",
    "--output",
    "folder",
    type=PATH,
    help="Folder of the plan [MODEL.plan; with --from, DIR].",
)
@click.option(
    "--from",
    "base",
    metavar="DIR",
    type=PATH,
    help=(
        "Schedule and simulate placement.yaml of the plan folder DIR, with its config.yaml and "
        "flags."
    ),
)
@click.option(
    "--annotate",
    metavar="FILE",
    type=PATH,
    help="Also write a copy of MODEL with the plan as ONNX multi-device annotations.",
)
@FORCE
@click.option("--no-cache", is_flag=True, help="Ignore cached results of earlier searches.")
@click.option(
    "--dump-after", metavar="PASS", multiple=True, help="Print the result of PASS (repeatable)."
)
@configuration_options
@standard_options
def plan(
    output: Output,
    model: Path | None,
    folder: Path | None,
    base: Path | None,
    annotate: Path | None,
    force: bool,
    no_cache: bool,
    dump_after: tuple[str, ...],
    configuration: Configuration,
) -> None:
    """Plan the ONNX file MODEL for a cluster and write the plan's folder.

    With --from, no placement is searched. The command schedules and simulates the placement in
    DIR/placement.yaml, which you may have edited, and reports the change of the step time. MODEL is
    then optional; the default is the model of the plan in DIR.

    \b
    Example:
      autopipe plan gpt.onnx --gpus 4
      autopipe plan llama.onnx --gpus 64 --cluster a100-80gb --batch-size 256 --set recompute=full
      autopipe plan gpt.onnx --gpus 4 --annotate gpt.annotated.onnx
      autopipe plan --from gpt.onnx.plan --schedule gpipe -o gpipe.plan
    """
    from autopipe.api.planning import plan as plan_model
    from autopipe.cli.progress import ProgressObserver, pass_names_of_request
    from autopipe.passes.pipeline import Observer, Request, untried_options

    if model is None and base is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    debug = bool(click.get_current_context().params["debug"])

    @contextmanager
    def observe(request: Request) -> Iterator[Observer]:
        with output.progress("planning", total=len(pass_names_of_request(request))) as bar:
            yield ProgressObserver(output, bar, request, dump_after, debug)

    made = plan_model(
        configuration,
        model,
        folder,
        base=base,
        annotate=annotate,
        force=force,
        # A cached result has no intermediate results of passes, so --dump-after requires a search.
        cached=not no_cache and not dump_after,
        observe=observe,
    )
    # These imports take long and are required only after the search.
    from autopipe.api.summary_text import degrees_text
    from autopipe.cli.plan_report import plan_delta, plan_screen
    from autopipe.configs.local_devices import local_cluster
    from autopipe.ir.codec import encode

    planned = made.result
    target = made.folder
    _report_kept_files(output, target, planned, made.edited_copy)
    for warning in (*((text, "") for text in planned.model.warnings), *made.missing_annotations):
        output.warn(*warning)
    plan = planned.plan
    schedule = planned.plan.schedule
    untried = untried_options(made.request, planned)
    data = {
        "plan": target,
        "annotated": annotate,
        "mode": plan.mode,
        "summary": encode(plan.summary),
        "degrees": degrees_text(plan.summary),
        "period_s": schedule.period,
        "proof": schedule.proof,
        "breakdown": plan.breakdown,
        "host_bound_stages": plan.host_bound_stages,
        "untried": untried,
        "alternatives": [encode(each) for each in plan.alternatives],
    }
    here = local_cluster() if configuration.cluster.is_open else None
    _warn_of_devices(output, planned, configuration, "" if here is None else here.warning)
    screen = list(
        plan_screen(planned, made.request, target, here.why if here else "", untried, output)
    )
    if base is not None and made.before is not None:
        data["from"], lines = plan_delta(base, made.before, plan)
        screen += lines
    if annotate is not None:
        screen.append(f"annotated model in {annotate}")
    output.report(data, *screen)


def _report_kept_files(
    output: Output, folder: Path, planned: PlanResult, copy: Path | None
) -> None:
    """Report where an edited configuration was moved, and warn of a program of an earlier plan."""
    from autopipe.api.plan_folder import stale_program

    if copy is not None:
        output.note(f"flags changed config.yaml, which was edited: the edited file is now {copy}")
    stale = stale_program(folder, planned.digest)
    if stale is not None:
        output.warn(
            f"the program {stale} belongs to an earlier plan",
            f"run autopipe codegen {shlex.quote(str(folder))}",
        )


def _warn_of_devices(
    output: Output, planned: PlanResult, configuration: Configuration, about_this_machine: str
) -> None:
    """Warn of devices without a stage, and of a bandwidth factor between nodes if there is one
    node.

    `about_this_machine` is a warning about the devices of this machine, or "" if there is none.
    """
    from autopipe.ir.placement import devices_text
    from autopipe.ir.words import count_text

    size = planned.problem.cluster.size
    used = set[int]().union(*(stage.devices for stage in planned.plan.placement.stages))
    idle = sorted(set(range(size)) - used)
    if idle:
        message = (
            f"{count_text(len(idle), 'device')} of {size} are idle, because no stage "
            f"uses them: {devices_text(idle)}"
        )
        output.warn(message, "plan for fewer devices with --gpus")
    if (
        configuration.cluster.internode_bandwidth_factor != 1
        and planned.problem.cluster.node_count == 1
    ):
        output.warn("cluster.internode_bandwidth_factor has no effect: all devices are in one node")
    if about_this_machine:
        output.warn(about_this_machine, "set a preset or a file with --cluster")
