"""`autopipe verify`: check that the ranks of a program compute the results of one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from autopipe.api import verification
from autopipe.api.static_verification import verify_statically
from autopipe.api.verification import Check, ExceededTensor
from autopipe.cli.launch import launch_option
from autopipe.cli.options import MODEL, PATH, standard_options
from autopipe.cli.output import Output
from autopipe.ir.words import plural


@click.command()
@click.argument("program", type=PATH)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    help="Device of the ranks.",
)
@MODEL
@launch_option("data")
@launch_option("seed")
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help=(
        "Maximum relative difference [from the rounding errors and the conditioning of the model]."
    ),
)
@click.option(
    "--static",
    is_flag=True,
    help="Only prove that schedule and communication are correct. Runs nothing and needs no torch.",
)
@launch_option("compile")
@standard_options
def verify(
    output: Output,
    /,
    program: Path,
    device: str,
    model: Path | None,
    data: str | None,
    seed: int | None,
    tolerance: float | None,
    static: bool,
    **flags: bool,
) -> None:
    """Check that the ranks of PROGRAM compute what one device computes.

    PROGRAM is the folder of a program, or a plan folder that contains its program.

    For training, compare the loss, all gradients and all buffers of one step, and the parameters
    after two updates. For inference, compare all outputs. Then compare the forward pass on one
    device with ONNX Runtime on the original model. A difference is accepted and reported if ONNX
    Runtime differs from itself by a similar amount, with optimizations or in float64.

    \b
    Example:
      autopipe verify gpt.plan --device cpu
      autopipe verify gpt.plan/program --static
    """
    if static:
        _verify_statically(output, program, model)
        return
    result = verification.verify(
        program,
        device=device,
        model=model,
        data=data,
        seed=seed,
        tolerance=tolerance,
        events=output,
        **flags,
    )
    parts = f" = {result.rounding}" if tolerance is None else ""
    output.result(
        result.data,
        *_check_lines(result.checks),
        f"{'not equal' if result.failed else 'equal'}: the limit is {result.limit:.2g}{parts}",
    )
    if result.error is not None:
        raise result.error


def _verify_statically(output: Output, program: Path, model: Path | None) -> None:
    """Print the facts that are proven about a program, and warn of edited files."""
    found = verify_statically(program, model=model, events=output)
    for name in found.edited:
        output.warn(
            f"the file {found.program / name} was edited: the proof is about the file that "
            "codegen wrote"
        )
    output.result(
        found.data,
        f"schedule  {found.tasks} {plural(found.tasks, 'task')} of {found.ranks} "
        f"{plural(found.ranks, 'rank')} keep every dependency",
        f"messages  on {found.channels} {plural(found.channels, 'channel')}, "
        f"all ranks come to their ends over gloo and NCCL",
        f"files     {found.files - len(found.edited)} of {found.files} are as the plan gives them",
    )


def _check_lines(checks: Sequence[Check]) -> Iterator[str]:
    """Yield a table with one line per check, then a line for each limit that was measured. The name
    of the worst tensor is the last column, because it may be long.
    """
    rows = [("compared", "with", "tensors", "difference", "worst")]
    rows += [
        (
            check.compared,
            check.reference,
            str(check.tensors),
            f"{check.relative_difference:.2e}",
            check.worst,
        )
        for check in checks
    ]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for compared, reference, count, relative, worst in rows:
        yield f"{compared:{first}}  {reference:{second}}  {count:>7}  {relative:>10}  {worst}"
    for check in checks:
        beyond = [each for each in check.above if each.spread is not None]
        if beyond:
            yield (
                f"{check.compared}: "
                f"{_spread_text(max(beyond, key=lambda each: each.difference / each.limit))}"
            )
            continue
        if check.response:
            yield (
                f"{check.compared}: the limit of {check.worst!r} is {check.limit:.2g}, since "
                "one unit "
                f"in the last place of every input and weight changes it by {check.response:.1e}"
            )
        if check.note:
            yield f"{check.compared}: {check.note}"


def _spread_text(found: ExceededTensor) -> str:
    """Return a sentence that says if differences between runs of ONNX Runtime explain the
    difference of a tensor.
    """
    verb = "is explained by" if found.difference <= found.limit else "is not explained by"
    return (
        f"the difference of {found.tensor!r}, {found.difference:.2e}, {verb} ONNX Runtime's own "
        f"spread: {found.spread}, so the limit is {found.limit:.2g}"
    )
