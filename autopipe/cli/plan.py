"""`autopipe plan`: decide which device computes what, and when."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopipe.cli.options import FORCE, PATH, configuration_options, standard_options
from autopipe.cli.output import Output
from autopipe.configs.configuration import Configuration
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.words import plural

if TYPE_CHECKING:
    from autopipe.ir.plan import Plan
    from autopipe.passes.pipeline import PlanResult, Request


@click.command()
@click.argument("model", required=False, type=PATH)
@click.option(
    "-o",
    "--output",
    "folder",
    type=PATH,
    help="Folder to write; default MODEL.plan, or the DIR of --from.",
)
@click.option(
    "--from",
    "base",
    metavar="DIR",
    type=PATH,
    help=(
        "Plan again what DIR holds: its placement.yaml and config.yaml, edited or not, under the "
        "other flags."
    ),
)
@click.option(
    "--annotate",
    metavar="FILE",
    type=PATH,
    help="Also write MODEL with the plan as ONNX multi-device annotations.",
)
@FORCE
@click.option("--no-cache", is_flag=True, help="Search anew what an earlier run has found.")
@click.option(
    "--dump-after", metavar="PASS", multiple=True, help="Print what PASS gave (repeatable)."
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

    With --from the placement is not searched: that of DIR/placement.yaml is scheduled and
    simulated, and the price of the change is said. MODEL is then that of the plan in DIR where it
    is not given.

    \b
    Example:
      autopipe plan gpt.onnx --gpus 4
      autopipe plan llama.onnx --gpus 64 --cluster a100-80gb --batch-size 256 --set recompute=full
      autopipe plan gpt.onnx --gpus 4 --annotate gpt.annotated.onnx
      autopipe plan --from gpt.onnx.plan --schedule gpipe -o gpipe.plan
    """
    from autopipe.cli.plan_folder import check_target, check_unmixed, write_plan_folder
    from autopipe.cli.progress import Watcher, names_of
    from autopipe.cli.request import request_of
    from autopipe.ir.output_kinds import ONNX, OutputFile
    from autopipe.ir.plan import read_plan
    from autopipe.passes.auto.choose import choose
    from autopipe.passes.auto.plan_cache import answers
    from autopipe.passes.pipeline import make_plan, untried_options

    before = None
    if base is not None:
        check_unmixed(base)
        before = read_plan(base)
    if model is None:
        if before is None:
            raise click.UsageError("Missing argument 'MODEL'.")
        model = Path(before.model)
    target = folder or base or Path(f"{model}.plan")
    check_target(target, base, force)
    if annotate is not None:
        OutputFile(annotate, ONNX, (model,), force).check()
    request = request_of(configuration, model)
    if base is not None and before is not None:
        request = _keeping_placement(base, before, configuration, request)
    with output.progress("planning", total=len(names_of(request))) as bar:
        debug = bool(click.get_current_context().params["debug"])
        watcher = Watcher(output, bar, request, dump_after, debug)
        if request.strategy is None:
            # Values are dumped where they are made.
            planned = choose(request, watcher, None if no_cache or dump_after else answers())
        else:
            planned = make_plan(request, watcher, advise=True)
    # What shows a plan is loaded once there is one.
    from autopipe.cli.plan_report import degrees_text, plan_delta, plan_screen
    from autopipe.configs.local_devices import local_cluster
    from autopipe.ir.codec import encode

    untold = [] if annotate is None else annotate_model(planned, annotate)
    copy = write_plan_folder(target, planned, configuration, base, force)
    _tell_what_stayed(output, target, planned, copy)
    for warning in (*((text, "") for text in planned.model.warnings), *untold):
        output.warn(*warning)
    plan = planned.plan
    schedule = planned.plan.schedule
    untried = untried_options(request, planned)
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
    screen = list(plan_screen(planned, request, target, here.why if here else "", untried, output))
    if base is not None and before is not None:
        data["from"], lines = plan_delta(base, before, plan)
        screen += lines
    if annotate is not None:
        screen.append(f"annotated model in {annotate}")
    output.report(data, *screen)


def _tell_what_stayed(output: Output, folder: Path, planned: PlanResult, copy: Path | None) -> None:
    """Name the copy of an edited configuration, and a program in the plan folder that is of an
    earlier plan.
    """
    from autopipe.cli.plan_folder import stale_program

    if copy is not None:
        output.note(f"flags changed config.yaml, which was edited: the edited file is now {copy}")
    stale = stale_program(folder, planned.digest)
    if stale is not None:
        output.warn(
            f"{stale} is the program of an earlier plan",
            f"autopipe codegen {shlex.quote(str(folder))}",
        )


def _warn_of_devices(
    output: Output, planned: PlanResult, configuration: Configuration, about_this_machine: str
) -> None:
    """Name the devices without a stage, and say `about_this_machine` if the plan is for it.

    Also warn of a factor for links between nodes if there is one node.
    """
    from autopipe.cli.output import count_text, devices_text

    size = planned.problem.cluster.size
    used = set[int]().union(*(stage.devices for stage in planned.plan.placement.stages))
    idle = sorted(set(range(size)) - used)
    if idle:
        told = (
            f"{count_text(len(idle), 'device')} of {size} idle, without a stage: "
            f"{devices_text(idle)}"
        )
        output.warn(told, "--gpus plans for fewer")
    if (
        configuration.cluster.internode_bandwidth_factor != 1
        and planned.problem.cluster.node_count == 1
    ):
        output.warn(
            "cluster.internode_bandwidth_factor changes nothing: all devices are in one node"
        )
    if about_this_machine:
        output.warn(about_this_machine, "--cluster names a preset or a file")


_DECIDED = {
    "recompute": "placement.yaml says of each stage whether it recomputes",
    "constraints": "the stages of placement.yaml are taken as they are",
}
"""Keys that strategies read, and what decides instead where a placement is given."""


def _with_own_sizes(before: Plan, request: Request) -> Request:
    """Return the request with the micro-batches of the plan `before` if its stages have
    micro-batches of their own.

    The configuration of such a plan leaves the number of micro-batches open. A number that is asked
    for stays.
    """
    if (
        not before.has_own_sizes
        or request.micro_batches is not None
        or request.micro_batch_size is not None
    ):
        return request
    return replace(request, micro_batch_size=before.summary.micro_batch_size)


def _keeping_placement(
    folder: Path, before: Plan, configuration: Configuration, request: Request
) -> Request:
    """Return the request with the micro-batches of the placement in `folder`, which is kept.

    Raises ConfigurationError for a setting that contradicts the placement or that it has no use
    for.
    """
    from autopipe.cli.plan_folder import check_editable
    from autopipe.configs.configuration import load_configuration
    from autopipe.passes.placement.explicit import Explicit

    request = _with_own_sizes(before, request)
    strategy = request.strategy
    summary = before.summary
    devices = request.cluster.size
    size = request.micro_batch_size
    if size is None and request.batch_size is not None and request.micro_batches is not None:
        size = request.batch_size // request.micro_batches
    why = ""
    if not isinstance(strategy, Explicit):
        why = f"strategy {configuration.strategy.name} would make another placement"
    elif request.mode is not None and request.mode.value != before.mode:
        why = f"the placement is to {before.mode}, not to {request.mode.value}"
    elif devices not in (summary.devices, strategy.devices):
        why = (
            f"the placement is for {summary.devices} {plural(summary.devices, 'device')}, not for "
            f"{devices}"
        )
    elif size != summary.micro_batch_size:
        wanted = (
            "a number of samples to be chosen"
            if size is None
            else f"{size} {plural(size, 'sample')}"
        )
        why = f"the placement is for micro-batches of {summary.micro_batch_size}, not of {wanted}"
    if why:
        raise ConfigurationError(
            f"--from keeps the placement: {why}", "plan without --from", str(folder)
        )
    own = load_configuration(check_editable(folder)[0])
    for key, instead in _DECIDED.items():
        if getattr(configuration, key) != getattr(own, key):
            raise ConfigurationError(
                f"--from keeps the placement: {key} would change nothing", instead, key
            )
    return request


def annotate_model(planned: PlanResult, target: Path) -> list[tuple[str, str]]:
    """Write the model of `planned` to `target` with annotations that say where its nodes run.
    Returns warnings, with hints, of what the annotations do not tell. Raises ConfigurationError
    where they have no words for the placement or the file cannot be written.
    """
    from autopipe.passes.annotations import annotated, write_annotated

    devices = planned.problem.cluster.devices
    names = tuple(f"{device.name}:{index}" for index, device in enumerate(devices))
    configuration, left_out = annotated(
        planned.problem.graph, planned.plan.placement, planned.model.origins, names
    )
    write_annotated(planned.model.path, target, configuration)
    warnings = []
    if left_out:
        what = (
            f"all of {len(left_out)} {plural(len(left_out), 'node')}, among "
            f"them {left_out[0]!r}: they are not in the file"
        )
        warnings.append(
            (f"annotations do not tell {what}, or split along an axis of no tensor in it", "")
        )
    if planned.plan.has_own_sizes:
        what = "annotations do not tell that stages have micro-batches of their own"
        warnings.append((what, "constraints say it: micro_batch_size"))
    return warnings
