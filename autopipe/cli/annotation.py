"""A plan written back into a copy of its model, as ONNX's multi-device annotations."""

from __future__ import annotations

from pathlib import Path

from autopipe.cli.output import Output
from autopipe.passes.annotations import annotated, write_annotated
from autopipe.passes.pipeline import PlanResult


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
