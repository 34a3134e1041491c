"""`autopipe bench`: reports where the benchmarks of the papers are."""

from __future__ import annotations

import click

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output
from autopipe.ir.errors import ConfigurationError


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("name", default="NAME")
@standard_options
def bench(output: Output, name: str) -> None:
    """Tell where to find the benchmark NAME, which computes tables and figures of a paper again.
    The benchmarks are not part of the installed package, but of a checkout.

    \b
    Example:
      autopipe bench tessel
    """
    del output
    raise ConfigurationError(
        f"benchmarks are not part of the package: run `python -m benchmarks {name}` in a checkout"
    )
