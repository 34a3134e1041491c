"""`autopipe generate`: generates tokens with a decoder that runs on the ranks of a plan."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from autopipe.api.program_folder import flag_words
from autopipe.cli.options import FORCE, MODEL, PATH, standard_options
from autopipe.cli.output import Output
from autopipe.ir.errors import CANDIDATE_ERRORS, CodegenError, ConfigurationError, InfeasibleError
from autopipe.ir.output_files import scratch_folder
from autopipe.ir.output_kinds import NPY, TOKENS, OutputFile, plan_inputs
from autopipe.ir.plan import PLAN_FILE
from autopipe.ir.words import plural

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.manifest import Manifest
    from autopipe.backends.torch.runtime.modes.decoder import Decoder
    from autopipe.passes.pipeline import PlanResult

_TOKENS = click.IntRange(min=0)


@click.command()
@click.argument("program", metavar="PLAN|PROGRAM", type=PATH)
@click.option(
    "--prompts", "prompts", multiple=True, required=True, metavar="FILE|IDS",
    help=(
        "Token ids: FILE.json, a list of lists; FILE.npy, a row a prompt; or ids like 17,4,92 "
        "(repeatable)."
    ),
)  # fmt: skip
@click.option(
    "--prefill-chunk", type=click.IntRange(min=1), default=64, show_default=True,
    help="Tokens of a prompt that a step feeds, at most; of a PROGRAM they are as planned.",
)  # fmt: skip
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Of each sequence.",
)
@click.option(
    "--eos",
    "eos",
    type=_TOKENS,
    multiple=True,
    metavar="ID",
    help="Token that ends a sequence (repeatable).",
)
@click.option(
    "--greedy",
    is_flag=True,
    help="Take the likeliest token each time, as without the options that sample.",
)
@click.option(
    "--temperature", type=click.FloatRange(min=0), help="Sample, from logits divided by this."
)
@click.option("--top-k", type=click.IntRange(min=1), help="Sample of the K likeliest tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample of the likeliest tokens that make up P together.",
)
@click.option("--seed", type=_TOKENS, default=0, show_default=True, help="Of what is sampled.")
@click.option(
    "-o", "--output", "target", type=PATH, metavar="FILE",
    help=(
        "Where to write the new tokens: .json, a list for each prompt; .npy, a row for each, "
        "filled up with -1."
    ),
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="Where to run."
)
@FORCE
@MODEL
@standard_options
def generate(
    output: Output,
    program: Path,
    prompts: tuple[str, ...],
    prefill_chunk: int,
    max_new_tokens: int,
    eos: tuple[int, ...],
    greedy: bool,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    target: Path | None,
    device: str,
    force: bool,
    model: Path | None,
) -> None:
    """Generate tokens with a decoder that was planned for inference.

    The model is one exported with inputs past_key_values.N.key and .value and outputs present.N.key
    and .value. Each stage keeps its layers' keys and values; micro-batches are groups of sequences
    in flight over the pipeline.

    \b
    Example:
      autopipe generate decoder.plan --prompts 17,4,92 --prompts 5 --max-new-tokens 32
      autopipe generate decoder.plan --prompts prompts.json --max-new-tokens 32 --temperature 0.8
      --top-p 0.95 -o t.npy
    """
    # As in launch: torch reads this variable when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from autopipe.api.program_folder import open_program
    from autopipe.backends.torch.runtime.modes.decoder import Decoder, GenerationRequest

    sampled = {"--temperature": temperature, "--top-k": top_k, "--top-p": top_p}
    given = [flag for flag, value in sampled.items() if value is not None]
    if greedy and given:
        raise click.UsageError(f"--greedy takes the likeliest token: leave out {given[0]}")
    if temperature is None:
        temperature = 1.0 if given else 0.0
    written_to = None
    if target is not None:
        written_to = _output_file(
            target,
            (*plan_inputs(program), *map(Path, prompts), *([] if model is None else [model])),
            force,
        )
        written_to.check()
    sequences = tuple(tuple(ids) for text in prompts for ids in read_prompts(text))
    request = GenerationRequest(sequences, max_new_tokens, eos, temperature, top_k, top_p, seed)
    longest = max(map(len, sequences))
    with program_of(program, model) as (folder, planned):
        manifest = open_program(folder, model)
        decoder = Decoder.of(manifest)
        decoder.check(request)
        check_layout(manifest.model, decoder)
        if planned is not None:
            # A decoder that writes its cache in place cannot feed more tokens than the cache has
            # room for.
            most = decoder.cache_length - 1 if decoder.in_place else None
            write_prefill(planned, folder, min(longest, prefill_chunk), output.note, most)
        report = run(manifest, request, device, output)
    found: list[list[int]] = report["generated"]
    if written_to is not None:
        write_tokens(written_to, found)
    tokens = sum(map(len, found))
    speed = (
        f"{tokens:,} {plural(tokens, 'token')} in {report['seconds']:.2f} "
        f"s ({tokens / report['seconds']:,.1f} a second)"
    )
    lines = [] if target is not None else [" ".join(map(str, each)) for each in found]
    output.result(
        {
            "generated": found,
            "steps": report["steps"],
            "seconds": report["seconds"],
            "output": target,
        },
        *lines,
        f"{len(found)} {plural(len(found), 'sequence')}, {speed}"
        + (f", in {target}" if target is not None else ""),
    )


def read_prompts(text: str) -> list[list[int]]:
    """Return the prompts in a file, or the one prompt in `text`. Raise ConfigurationError if they
    are not lists of token ids.
    """
    path = Path(text)
    if path.suffix not in (".json", ".npy"):
        try:
            return [[int(each) for each in text.replace(",", " ").split()]]
        except ValueError:
            hint = "give FILE.json, FILE.npy or ids like 17,4,92"
            raise ConfigurationError(
                f"{text!r} is no list of token ids", hint, "--prompts"
            ) from None
    try:
        found = (
            json.loads(path.read_text(encoding="utf-8"))
            if path.suffix == ".json"
            else np.load(path, allow_pickle=False).tolist()
        )
    except OSError as error:
        raise ConfigurationError(f"prompts cannot be read: {error.strerror}", where=text) from error
    except (ValueError, EOFError, RecursionError) as error:
        raise ConfigurationError(f"prompts cannot be read: {error}", where=text) from error
    if isinstance(found, list) and found and all(_is_token(each) for each in found):
        found = [found]
    if not isinstance(found, list) or not found:
        raise ConfigurationError(
            "there are no prompts", hint="a list of lists of token ids", where=text
        )
    for number, ids in enumerate(found):
        if not isinstance(ids, list) or not all(_is_token(each) for each in ids):
            raise ConfigurationError(f"prompt {number} is no list of token ids", where=text)
    return found


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _output_file(target: Path, inputs: tuple[Path, ...], force: bool) -> OutputFile:
    """Return the file for the new tokens. Raise ConfigurationError if the extension of `target` is
    not a supported format.
    """
    kind = {".json": TOKENS, ".npy": NPY}.get(target.suffix)
    if kind is None:
        raise ConfigurationError(f"{target} is neither .json nor .npy", where="--output")
    return OutputFile(target, kind, inputs, force)


@contextmanager
def program_of(folder: Path, model: Path | None) -> Iterator[tuple[Path, PlanResult | None]]:
    """Context manager that yields the folder of a program, and its plan or None.

    If `folder` has a program, it is used without a plan. If `folder` has a plan, its program is
    written to a temporary folder. `model` replaces the ONNX file of the plan.
    """
    if not (folder / PLAN_FILE).is_file():
        yield folder.absolute(), None
        return
    from autopipe.api.codegen import write_programs
    from autopipe.api.plan_folder import open_plan

    planned = open_plan(folder, model)
    with scratch_folder("generate") as name:
        write_programs(planned, Path(name) / "program")
        yield Path(name) / "program", planned


def check_layout(model: Path, decoder: Decoder) -> None:
    """Raise ConfigurationError if the cache layout of a decoder is not supported.

    A decoder with GroupQueryAttention must write its cache in place. A decoder without the input
    `position_ids` must write its cache in place, or derive the positions from its attention mask
    with CumSum.
    """
    from autopipe.passes.frontend.load import load

    operators = {node.op_type for node in load(model).nodes}
    if "GroupQueryAttention" in operators and not decoder.in_place:
        hint = (
            "plan with --dim past_sequence_length and --dim total_sequence_length of the same "
            "number of places"
        )
        raise ConfigurationError("GroupQueryAttention fills its cache from the front", hint)
    if decoder.positions is None and not decoder.in_place and "CumSum" not in operators:
        hint = "export it with position_ids"
        raise ConfigurationError(
            "the model has no input 'position_ids', and counts no positions by its mask", hint
        )


def write_prefill(
    planned: PlanResult,
    folder: Path,
    chunk: int,
    note: Callable[[str], None],
    most: int | None = None,
) -> None:
    """Write a second program next to the program of a plan in `folder`. Each of its steps feeds
    `chunk` tokens of each sequence, rounded up to a multiple that the plan's splits allow. No
    program is written if that is more than `most`, or if the model or the plan does not allow it.
    In the latter case, `note` is called with the reason.
    """
    from autopipe.api.codegen import write_programs
    from autopipe.backends.torch.runtime.manifest import read_manifest
    from autopipe.backends.torch.runtime.modes.decoder import PREFILL
    from autopipe.passes.prefill import with_step_length

    second = folder.with_name(PREFILL)
    # A multiple of the device counts can be split along the tokens.
    even = math.lcm(*(len(stage.devices) for stage in planned.plan.placement.stages))
    length = -(-chunk // even) * even
    if most is not None and length > most:
        return
    try:
        if (wider := with_step_length(planned, length)) is None:
            return
        if write_programs(wider, second).channels != read_manifest(folder).channels:
            raise InfeasibleError("its stages exchange other tensors")
    except (*CANDIDATE_ERRORS, CodegenError) as error:
        note(
            f"prompts are fed as the plan's own steps do, not {chunk} {plural(chunk, 'token')} "
            f"a step: {error.message}"
        )
        return
    second.rename(folder / PREFILL)


def run(manifest: Manifest, request: Any, device: str, output: Output) -> dict[str, Any]:
    """Run the request on all ranks on this machine. Return the report of rank 0."""
    from autopipe.api.launching import placement_note, visible_gpus
    from autopipe.backends.torch.launcher import LaunchConfig, launch_program, local_ranks
    from autopipe.backends.torch.runtime.modes.decoder import GENERATED_FILE

    config = LaunchConfig(
        gpus=visible_gpus(device), debug=bool(click.get_current_context().params["debug"])
    )
    output.note(placement_note(device, local_ranks(manifest, config)[1]))
    with scratch_folder("launch") as name:
        request.write(Path(name))
        arguments = flag_words(device=device, generate=Path(name), model=manifest.model)
        launch_program(manifest, arguments, config, output.note)
        found: dict[str, Any] = json.loads(
            (Path(name) / GENERATED_FILE).read_text(encoding="utf-8")
        )
        return found


def write_tokens(target: OutputFile, found: Sequence[Sequence[int]]) -> None:
    with target.open() as file:
        if target.kind is TOKENS:
            file.write(json.dumps(found).encode())
            return
        rows = np.full((len(found), max(map(len, found))), -1, np.int64)
        for row, tokens in zip(rows, found, strict=True):
            row[: len(tokens)] = tokens
        np.save(file, rows)
