"""`autopipe verify`: the ranks against one device, and one device against ONNX Runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output

if TYPE_CHECKING:
    from autopipe.cli.verification import Check


@click.command()
@click.argument("program", type=click.Path(path_type=Path))
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="Where to run.")
@click.option("--data", help="FILE.npz or module:function; random data without it.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Seed of random data, of Dropout, and of weights that the model does not store.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    help="Largest relative difference taken for equal [what types, depth and conditioning of the model come to].",
)
@standard_options
def verify(
    output: Output, program: Path, device: str, data: str | None, seed: int | None, tolerance: float | None
) -> None:
    """Check that the ranks of PROGRAM compute what one device computes.

    Training: the loss and every gradient of one step. Inference: every output. Then the forward of one device against
    ONNX Runtime on the model as it was given.

    \b
    Example:
      autopipe verify gpt.plan/program --device cpu
    """
    from autopipe.backends.torch.runtime.data import check_data
    from autopipe.backends.torch.runtime.manifest import read_manifest
    from autopipe.cli.verification import Verification, precision_of_program
    from autopipe.ir.errors import VerificationError

    manifest = read_manifest(program.absolute())
    check_data(manifest, data, 1)
    arguments = ["--device", device]
    arguments += ["--data", data] if data else []
    arguments += ["--seed", str(seed)] if seed is not None else []
    precision = precision_of_program(manifest)
    with tempfile.TemporaryDirectory() as scratch, output.progress("verifying", total=4) as bar:
        run = Verification(manifest, arguments, data, seed, Path(scratch), precision, tolerance)
        checks = list(run.run(bar.advance))
    failed = [check for check in checks if not check.worst.relative <= check.limit]
    limit = precision.limit if tolerance is None else tolerance
    parts = f" = {precision}" if tolerance is None else ""
    verdict = f"{'not equal' if failed else 'equal'}: the limit is {limit:.2g}{parts}"
    result = {
        "tolerance": limit,
        "precision": {"dtype": precision.dtype, "depth": precision.depth},
        "checks": [check.as_json() for check in checks],
    }
    output.result(result | {"equal": not failed}, *_lines(checks), *_measured(checks), verdict)
    if failed:
        check = failed[0]
        raise VerificationError(
            f"{check.compared}: {check.worst.relative:.2e} away from {check.reference} (limit {check.limit:.2g})",
            where=repr(check.worst.tensor),
        )


def _measured(checks: Sequence[Check]) -> Iterator[str]:
    """What was measured where the least limit did not do."""
    for check in checks:
        if check.response:
            yield (
                f"{check.compared}: the limit of {check.worst.tensor!r} is {check.limit:.2g}, since one unit "
                f"in the last place of every input and weight changes it by {check.response:.1e}"
            )
        if check.note:
            yield f"{check.compared}: {check.note}"


def _lines(checks: Sequence[Check]) -> Iterator[str]:
    """A line a check below the headings. The worst tensor's name, which may be long, stands last and is never cut."""
    rows = [("compared", "with", "tensors", "difference", "worst")]
    rows += [
        (check.compared, check.reference, str(check.count), f"{check.worst.relative:.2e}", check.worst.tensor)
        for check in checks
    ]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for compared, reference, count, relative, worst in rows:
        yield f"{compared:{first}}  {reference:{second}}  {count:>7}  {relative:>10}  {worst}"
