"""The options every command takes, and how a command gets its `Output`.

A command module looks like this (`autopipe/cli/shapes.py`, listed in `autopipe.cli.main`):

    @click.command()
    @click.argument("model", type=click.Path(path_type=Path))
    @standard_options
    def shapes(output: Output, model: Path) -> None:
        \"\"\"Print the shape of every value of MODEL.

        \\b
        Example:
          autopipe shapes gpt.onnx
        \"\"\"
        from autopipe.passes.frontend.load import load   # heavy modules only here

        with output.progress("reading", total=2) as bar:
            graph = load(model)
            bar.advance()
            ...
            bar.advance(note="fused 12 patterns")
        if missing:
            output.warn("3 weights are absent", hint="they are initialised at random")
        output.result({"values": len(values)}, table)    # the object for --json, then what a person reads

Raise the children of `AutopipeError` for what goes wrong; `autopipe.cli.main` alone catches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import click

from autopipe.cli.output import Output, Verbosity

P = ParamSpec("P")
R = TypeVar("R")


def standard_options(command: Callable[Concatenate[Output, P], R]) -> Callable[P, R]:
    """Give `command` the options --json, -q, -v and --debug, and an `Output` made of them as its first parameter.

    Stands next to the function, under click's own decorators.
    """

    @functools.wraps(command)
    def with_output(*args: P.args, **kwargs: P.kwargs) -> R:
        as_json, quiet, verbose = (bool(kwargs.pop(name)) for name in ("as_json", "quiet", "verbose"))
        kwargs.pop("debug")  # read by autopipe.cli.main, which prints the traceback
        if quiet and verbose:
            raise click.UsageError("-q and -v contradict each other")
        verbosity = Verbosity.QUIET if quiet else Verbosity.DETAILED if verbose else Verbosity.NORMAL
        return command(Output(as_json=as_json, verbosity=verbosity), *args, **kwargs)

    for option in (
        click.option("--debug", is_flag=True, help="Show the traceback of an error."),
        click.option("-v", "--verbose", is_flag=True, help="Say more about what is done."),
        click.option("-q", "--quiet", is_flag=True, help="Only results, warnings and errors."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else there."),
    ):
        option(with_output)
    return with_output
