"""Options of several commands: the options of every command, which make its `Output`, and the
options of a configuration.

A command is a function with the decorators `@click.command()`, its own options and
`@standard_options`. Modules that take long to import are imported inside the function. A command
ends with `output.result`, or with `output.report` if it writes files: the object for --json, then
texts and tables for the terminal. It raises subclasses of `AutopipeError`, which only
`autopipe.cli.main` catches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import click
from click.shell_completion import CompletionItem

from autopipe.cli.output import Output, Verbosity
from autopipe.ir.errors import ConfigurationError

PATH: Final = click.Path(path_type=Path)
FORCE: Final = click.option(
    "--force",
    is_flag=True,
    help="Replace files that were edited, are inputs, or are of another kind.",
)
MODEL: Final = click.option(
    "--model", type=PATH, metavar="FILE", help="Path of the ONNX file [as planned]."
)
P = ParamSpec("P")
R = TypeVar("R")
Command = TypeVar("Command", bound=Callable[..., Any])


def standard_options(command: Callable[Concatenate[Output, P], R]) -> Callable[P, R]:
    """Give `command` the options --json, -q, -v and --debug, and pass it an `Output` with these
    options as first argument. This decorator must be the innermost one.
    """
    return _with_output(command, "Print one JSON object on stdout and nothing else there.")


def stepwise_options(command: Callable[Concatenate[Output, P], R]) -> Callable[P, R]:
    """Give `command` the same options as `standard_options` does. Use it for a command that prints
    one record per step.
    """
    return _with_output(
        command,
        "Print one JSON object per step on stdout, then one object with all steps, and nothing "
        "else.",
    )


def _with_output(command: Callable[Concatenate[Output, P], R], json_help: str) -> Callable[P, R]:
    @functools.wraps(command)
    def with_output(*args: P.args, **kwargs: P.kwargs) -> R:
        as_json, quiet, verbose = (
            bool(kwargs.pop(name)) for name in ("as_json", "quiet", "verbose")
        )
        # The flag --debug is not passed on, because `autopipe.cli.main` reads it and prints the
        # traceback.
        kwargs.pop("debug")
        if quiet and verbose:
            raise click.UsageError("-q and -v contradict each other")
        verbosity = (
            Verbosity.QUIET if quiet else Verbosity.DETAILED if verbose else Verbosity.NORMAL
        )
        output = Output(as_json=as_json, verbosity=verbosity)
        return command(output, *args, **kwargs)

    for option in (
        click.option(
            "--debug",
            is_flag=True,
            help="Print the traceback of an error and the versions that a bug report needs.",
        ),
        click.option("-v", "--verbose", is_flag=True, help="Print more details."),
        click.option(
            "-q", "--quiet", is_flag=True, help="Print only results, warnings and errors."
        ),
        click.option("--json", "as_json", is_flag=True, help=json_help),
    ):
        option(with_output)
    return with_output


_MODEL_FLAG_ARGUMENTS = ("dim", "assignment", "batch_axis")
"""Names of the arguments in which click passes the values of `_model_flags`."""


def _model_flags() -> tuple[Callable[[Command], Command], ...]:
    dim = (
        "Set the size of a symbolic dimension (repeatable). INPUT:AXIS=SIZE sets one axis of an "
        "input, and RESULT:0=SIZE the maximum size of the result of a Range with a data-dependent "
        "size."
    )
    return (
        click.option("--dim", multiple=True, metavar="NAME=SIZE", help=dim),
        click.option(
            "--batch-axis",
            multiple=True,
            metavar="INPUT=AXIS",
            help="Batch axis of an input; null if it has no batch dimension (repeatable).",
        ),
        click.option(
            "--set",
            "assignment",
            multiple=True,
            metavar="KEY=VALUE",
            help="Set a key of the configuration (repeatable).",
        ),
    )


def model_options(command: Command) -> Command:
    """Give `command` the flags that affect how a model is read, and pass it the resulting
    `Configuration` as argument `configuration`.
    """
    from autopipe.configs.configuration import load_configuration

    @functools.wraps(command)
    def with_configuration(*args: Any, **kwargs: Any) -> Any:
        dims, assignments, axes = (kwargs.pop(name) for name in _MODEL_FLAG_ARGUMENTS)
        configuration = load_configuration(dims=dims, assignments=assignments, batch_axes=axes)
        return command(*args, configuration=configuration, **kwargs)

    for option in reversed(_model_flags()):
        option(with_configuration)
    return with_configuration  # type: ignore[return-value]


def _completion_function(
    flag: str,
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]] | None:
    """Return the function that completes values of `flag` in a shell, None if its values are not
    names from a list.
    """
    from autopipe.configs.cluster import cluster_names
    from autopipe.passes.registry import scheduler_names, strategy_names

    lists = {
        "--strategy": strategy_names,
        "--schedule": scheduler_names,
        "--cluster": cluster_names,
    }
    names = lists.get(flag)
    if names is None:
        return None

    def complete(
        context: click.Context, parameter: click.Parameter, start: str
    ) -> list[CompletionItem]:
        found = [CompletionItem(name) for name in names() if name.startswith(start)]
        # If no name matches, the shell completes a file name, because --cluster also accepts a
        # file.
        return found or [CompletionItem(start, type="file")]

    return complete


def configuration_options(command: Command) -> Command:
    """Give `command` the flags of a configuration, and pass it the effective `Configuration` as
    argument `configuration`.

    If the command has an argument `base` with a plan folder, the flags override the configuration
    and the placement of that folder. This decorator must be directly above `standard_options`.
    """
    from autopipe.configs.configuration import (
        OPTION_FLAGS,
        Configuration,
        load_configuration,
        top_level_flags,
    )
    from autopipe.configs.schema import field_docs

    docs = field_docs(Configuration)
    texts = {
        flag: (metavar, docs[key].replace("`", ""))
        for flag, (key, metavar) in top_level_flags().items()
    }
    texts |= {flag: (metavar, text) for flag, (_, metavar, text) in OPTION_FLAGS.items()}
    # click passes the values of the flags in arguments with these names. The prefix distinguishes
    # them from the command's other options.
    names = {flag: "configuration_" + flag.strip("-").replace("-", "_") for flag in texts}

    @functools.wraps(command)
    def with_configuration(*args: Any, **kwargs: Any) -> Any:
        file, *words = (kwargs.pop(name) for name in ("config", *_MODEL_FLAG_ARGUMENTS))
        given = {
            flag: word for flag, name in names.items() if (word := kwargs.pop(name)) is not None
        }
        over = None
        if kwargs.get("base") is not None:
            # The import is in the function, because it is slow and only --from requires it.
            from autopipe.api.plan_folder import check_editable

            if file is not None:
                hint = "omit --config"
                raise ConfigurationError(
                    "--from DIR reads the configuration DIR/config.yaml",
                    hint=hint,
                    where="--config",
                )
            file, over = check_editable(kwargs["base"])
        configuration = load_configuration(file, given, words[0], words[1], over, words[2])
        return command(*args, configuration=configuration, **kwargs)

    for option in reversed(
        (
            click.option(
                "--config",
                metavar="FILE",
                help="YAML file with the configuration; flags override its keys.",
            ),
            *(
                click.option(
                    flag,
                    names[flag],
                    metavar=word,
                    help=text,
                    shell_complete=_completion_function(flag),
                )
                for flag, (word, text) in texts.items()
            ),
            *_model_flags(),
        )
    ):
        option(with_configuration)
    return with_configuration  # type: ignore[return-value]
