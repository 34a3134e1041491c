"""Commands of autopipe in this process, and the option `--tiny` that every benchmark has."""

from __future__ import annotations

import argparse
import contextlib
import io

from autopipe.cli.main import main


def parse_arguments(parser: argparse.ArgumentParser, **tiny: object) -> argparse.Namespace:
    """The command line's arguments; under `--tiny`, options that are not given have these
    values.
    """
    parser.add_argument(
        "--tiny", action="store_true", help="smallest sizes: checks that it runs, measures nothing"
    )
    arguments = parser.parse_args()
    if arguments.tiny:
        parser.set_defaults(**tiny)
        arguments = parser.parse_args()
    return arguments


def autopipe(*words: object) -> str:
    """Run a command quietly and return what it prints. Raises SystemExit where it fails."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main([*map(str, words), "-q"])
    if code:
        raise SystemExit(f"autopipe {' '.join(map(str, words))}: exit code {code}")
    return printed.getvalue()
