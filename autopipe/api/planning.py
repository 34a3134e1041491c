"""Command `plan`: search a placement and a schedule for a model, and write the plan folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from autopipe.api.plan_folder import (
    check_editable,
    check_target,
    check_unmixed,
    write_plan_folder,
)
from autopipe.api.request import make_request
from autopipe.configs.configuration import Configuration, load_configuration
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.output_kinds import ONNX, OutputFile
from autopipe.ir.plan import Plan, read_plan
from autopipe.ir.words import plural
from autopipe.passes.annotations import plan_annotations, write_annotated
from autopipe.passes.auto.choose import choose_plan
from autopipe.passes.auto.plan_cache import open_plan_cache
from autopipe.passes.pipeline import Observer, PlanResult, Request, make_plan
from autopipe.passes.placement.explicit import Explicit


@dataclass(frozen=True, slots=True)
class PlannedFolder:
    """A plan that was written to a folder."""

    folder: Path
    result: PlanResult
    request: Request
    """The request that was planned. Its fields are None for decisions of the search."""
    before: Plan | None
    """The plan in the folder `base` before this plan was made, None without `base`."""
    edited_copy: Path | None
    """The file to which an edited `config.yaml` was moved, None if none was replaced."""
    missing_annotations: tuple[tuple[str, str], ...]
    """Warnings, with hints, about decisions that the annotated model does not contain."""


@contextmanager
def ignore_passes(request: Request) -> Iterator[Observer]:
    """Yield an observer that ignores the passes of `request`."""
    yield Observer()


def plan(
    configuration: Configuration,
    model: Path | None = None,
    folder: Path | None = None,
    *,
    base: Path | None = None,
    annotate: Path | None = None,
    force: bool = False,
    cached: bool = True,
    observe: Callable[[Request], AbstractContextManager[Observer]] = ignore_passes,
) -> PlannedFolder:
    """Plan the ONNX file `model` and write the plan folder, `MODEL.plan` unless `folder` is given.

    `base` is a plan folder whose placement is scheduled and simulated under `configuration`,
    without a search for another placement. Its model and its folder replace `model` and `folder` if
    these are None.

    `annotate` is a path to which the model is written with the plan as ONNX multi-device
    annotations. `force` replaces files that were edited. With `cached`, the result of an earlier
    search for an equal request is used. `observe` is called with the request and yields the
    observer of the passes. Raises ConfigurationError, ModelError or InfeasibleError.
    """
    before = None
    if base is not None:
        check_unmixed(base)
        before = read_plan(base)
    if model is None:
        if before is None:
            raise ConfigurationError("the model is missing", "name an ONNX file")
        model = Path(before.model)
    target = folder or base or Path(f"{model}.plan")
    check_target(target, base, force)
    if annotate is not None:
        OutputFile(annotate, ONNX, (model,), force).check()
    request = make_request(configuration, model)
    if base is not None and before is not None:
        request = _keeping_placement(base, before, configuration, request)
    with observe(request) as observer:
        if request.strategy is None:
            result = choose_plan(request, observer, open_plan_cache() if cached else None)
        else:
            result = make_plan(request, observer, advise=True)
    missing = () if annotate is None else tuple(annotate_model(result, annotate))
    copy = write_plan_folder(target, result, configuration, base, force)
    return PlannedFolder(target, result, request, before, copy, missing)


_REASON_WITHOUT_EFFECT = {
    "recompute": "placement.yaml says of each stage whether it recomputes",
    "constraints": "the stages of placement.yaml are taken as they are",
}
"""Configuration keys that only a search reads, with the reason why they have no effect if the
placement is given.
"""


def _with_planned_size(before: Plan, request: Request) -> Request:
    """Return the request with the micro-batch size of the plan `before` if its stages have
    different micro-batch sizes and the request leaves the micro-batches open.

    The effective configuration of such a plan leaves the number of micro-batches open.
    """
    if (
        not before.has_different_micro_batch_sizes
        or request.micro_batches is not None
        or request.micro_batch_size is not None
    ):
        return request
    return replace(request, micro_batch_size=before.summary.micro_batch_size)


def _keeping_placement(
    folder: Path, before: Plan, configuration: Configuration, request: Request
) -> Request:
    """Return the request with the micro-batches of the placement in `folder`, which is kept.

    Raises ConfigurationError for a setting that contradicts the placement, or that has no effect
    because the placement is given.
    """
    request = _with_planned_size(before, request)
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
            f"--from cannot keep the placement: {why}", "plan without --from", str(folder)
        )
    own = load_configuration(check_editable(folder)[0])
    for key, instead in _REASON_WITHOUT_EFFECT.items():
        if getattr(configuration, key) != getattr(own, key):
            raise ConfigurationError(
                f"{key} has no effect with --from, which keeps the placement", instead, key
            )
    return request


def annotate_model(planned: PlanResult, target: Path) -> list[tuple[str, str]]:
    """Write the ONNX file of `planned` to `target`, with the stages and splits as multi-device
    annotations.

    Return warnings, each with its hint, about decisions of the plan that the annotations do not
    contain. Raises ConfigurationError if annotations cannot express the placement, or if the file
    cannot be written.
    """
    devices = planned.problem.cluster.devices
    names = tuple(f"{device.name}:{index}" for index, device in enumerate(devices))
    configuration, left_out = plan_annotations(
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
    if planned.plan.has_different_micro_batch_sizes:
        what = "annotations do not tell that stages have micro-batches of their own"
        warnings.append((what, "constraints say it: micro_batch_size"))
    return warnings
