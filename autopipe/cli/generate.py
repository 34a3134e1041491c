"""`autopipe generate`: generates tokens with a decoder that runs on the ranks of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autopipe.api.generation import GenerationSettings
from autopipe.api.generation import generate as generate_tokens
from autopipe.cli.options import FORCE, MODEL, PATH, standard_options
from autopipe.cli.output import Output
from autopipe.ir.words import plural

_TOKEN_COUNT_TYPE = click.IntRange(min=0)


@click.command()
@click.argument("program", metavar="PLAN|PROGRAM", type=PATH)
@click.option(
    "--prompts", "prompts", multiple=True, required=True, metavar="FILE|IDS",
    help=(
        "Token ids: FILE.json, a list of lists; FILE.npy, one prompt per row; or ids such as "
        "17,4,92 (repeatable)."
    ),
)  # fmt: skip
@click.option(
    "--prefill-chunk", type=click.IntRange(min=1), default=64, show_default=True,
    help="Maximum number of prompt tokens per step. A PROGRAM uses its planned number.",
)  # fmt: skip
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Maximum number of new tokens per sequence.",
)
@click.option(
    "--eos",
    "eos",
    type=_TOKEN_COUNT_TYPE,
    multiple=True,
    metavar="ID",
    help="Token that ends a sequence (repeatable).",
)
@click.option(
    "--greedy",
    is_flag=True,
    help="Always choose the token with the highest logit. Default without sampling options.",
)
@click.option(
    "--temperature", type=click.FloatRange(min=0), help="Sample from logits divided by this number."
)
@click.option("--top-k", type=click.IntRange(min=1), help="Sample from the K most probable tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample from the most probable tokens, whose probabilities add up to P.",
)
@click.option(
    "--seed", type=_TOKEN_COUNT_TYPE, default=0, show_default=True, help="Seed of the sampling."
)
@click.option(
    "-o", "--output", type=PATH, metavar="FILE",
    help=(
        "File for the new tokens: .json, one list per prompt; .npy, one row per prompt, padded "
        "with -1."
    ),
)  # fmt: skip
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    help="Device of the ranks.",
)
@FORCE
@MODEL
@standard_options
def generate(output: Output, /, program: Path, greedy: bool, **values: Any) -> None:
    """Generate tokens with a decoder that was planned for inference.

    The model must have inputs past_key_values.N.key and past_key_values.N.value and outputs
    present.N.key and present.N.value for each layer N. Each stage stores the keys and values of its
    layers. A micro-batch is a group of sequences that pass through the pipeline together.

    \b
    Example:
      autopipe generate decoder.plan --prompts 17,4,92 --prompts 5 --max-new-tokens 32
      autopipe generate decoder.plan --prompts prompts.json --max-new-tokens 32 --temperature 0.8
      --top-p 0.95 -o t.npy
    """
    given = [name for name in ("temperature", "top_k", "top_p") if values[name] is not None]
    if greedy and given:
        flag = f"--{given[0].replace('_', '-')}"
        raise click.UsageError(f"--greedy excludes sampling: omit {flag}")
    settings = GenerationSettings(**values)
    debug = bool(click.get_current_context().params["debug"])
    found = generate_tokens(program, settings, debug=debug, events=output)
    tokens = sum(map(len, found.tokens))
    speed = (
        f"{tokens:,} {plural(tokens, 'token')} in {found.seconds:.2f} "
        f"s ({tokens / found.seconds:,.1f} a second)"
    )
    lines = (
        [] if settings.output is not None else [" ".join(map(str, each)) for each in found.tokens]
    )
    output.result(
        {
            "generated": found.tokens,
            "steps": found.steps,
            "seconds": found.seconds,
            "output": settings.output,
        },
        *lines,
        f"{len(found.tokens)} {plural(len(found.tokens), 'sequence')}, {speed}"
        + (f", in {settings.output}" if settings.output is not None else ""),
    )
