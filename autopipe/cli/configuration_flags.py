"""The flags of every command that takes a configuration, made from its declaration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from autopipe.configs.configuration import OPTION_FLAGS, Configuration, flags, load_configuration
from autopipe.configs.schema import field_docs
from autopipe.ir.errors import ConfigurationError

Command = TypeVar("Command", bound=Callable[..., Any])

_METAVARS = {
    "--mode": "train|infer",
    "--batch-size": "B",
    "--micro-batches": "M",
    "--micro-batch-size": "B",
    "--cluster": "PRESET|FILE",
    "--gpus": "N",
    "--costs": "roofline|FILE",
    "--strategy": "NAME",
    "--schedule": "NAME",
    "--stages": "N",
    "--memory-limit": "14GiB",
    "--time-limit": "SECONDS",
}


def configuration_options(command: Command) -> Command:
    """Give `command` the flags of a configuration, and the effective `Configuration` as the argument `configuration`.

    Where it takes the folder of a plan as `former`, that plan's own files are what flags override. Stands above
    `standard_options`, under click's own decorators.
    """

    @functools.wraps(command)
    def with_configuration(*args: Any, **kwargs: Any) -> Any:
        file, dims, assignments = (kwargs.pop(name) for name in ("config", "dim", "assignment"))
        file, over = _files(file, kwargs.get("former"))
        words = {flag: kwargs.pop(_parameter(flag)) for flag in (*flags(), *OPTION_FLAGS)}
        given = {flag: word for flag, word in words.items() if word is not None}
        configuration = load_configuration(file, given, dims, assignments, over)
        return command(*args, configuration=configuration, **kwargs)

    docs = field_docs(Configuration)
    options = [click.option("--config", metavar="FILE", help="A YAML file; the other flags override it.")]
    for flag, key in flags().items():
        text = docs[key].replace("`", "")
        options.append(click.option(flag, _parameter(flag), metavar=_METAVARS[flag], help=text))
    for flag, (_, text) in OPTION_FLAGS.items():
        options.append(click.option(flag, _parameter(flag), metavar=_METAVARS[flag], help=text))
    options.append(
        click.option("--dim", multiple=True, metavar="NAME=EXTENT", help="Bind a symbolic dimension (repeatable).")
    )
    options.append(
        click.option("--set", "assignment", multiple=True, metavar="KEY=VALUE", help="Set any key (repeatable).")
    )
    for option in reversed(options):
        option(with_configuration)
    return with_configuration  # type: ignore[return-value]


def _files(file: str | None, former: Path | None) -> tuple[str | Path | None, Path | None]:
    """The YAML file that flags override, and the one that is laid over it first."""
    if former is None:
        return file, None
    from autopipe.cli.plan_folder import check_editable  # heavy, and for few commands

    if file is not None:
        raise ConfigurationError("--from DIR plans with DIR/config.yaml", hint="leave out --config", where="--config")
    return check_editable(former)


def _parameter(flag: str) -> str:
    """The name click passes the flag's word by; no option of a command itself has such a name."""
    return "configuration_" + flag.strip("-").replace("-", "_")
