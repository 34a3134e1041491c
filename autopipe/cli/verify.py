"""`autopipe verify`: the ranks against one device, and one device against ONNX Runtime."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output


@click.command()
@click.argument("program", type=click.Path(path_type=Path))
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="Where to run.")
@click.option("--data", help="FILE.npz or module:function; random data without it.")
@click.option("--seed", type=int, help="Seed of random data and of weights that the model does not store.")
@click.option("--tolerance", type=float, help="Largest relative difference taken for equal [1e-5; 2e-2 in bf16, fp16].")
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
    from rich.table import Table

    from autopipe.backends.torch.runtime.manifest import read_manifest
    from autopipe.cli.verification import Verification
    from autopipe.ir.errors import VerificationError

    manifest = read_manifest(program.absolute())
    limit = tolerance or (1e-5 if manifest.precision == "fp32" else 2e-2)
    arguments = ["--device", device]
    arguments += ["--data", data] if data else []
    arguments += ["--seed", str(seed)] if seed is not None else []
    with tempfile.TemporaryDirectory() as scratch, output.progress("verifying", total=4) as bar:
        checks = list(Verification(manifest, arguments, data, seed, Path(scratch)).run(bar.advance))
    table = Table("compared", "with", "tensors", "worst", "difference")
    for check in checks:
        table.add_row(
            check.compared, check.reference, str(check.count), check.worst.tensor, f"{check.worst.relative:.2e}"
        )
    result = {"tolerance": limit, "checks": [check.as_json() for check in checks]}
    failed = [check for check in checks if not check.worst.relative <= limit]
    output.result(result | {"equal": not failed}, table)
    if failed:
        check = failed[0]
        raise VerificationError(
            f"{check.compared} differ from {check.reference} by {check.worst.relative:.2e} (limit {limit:g})",
            where=repr(check.worst.tensor),
        )
