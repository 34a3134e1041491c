"""Command `generate`: generate tokens with a decoder that runs on the ranks of a plan."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autopipe.api.events import Events, SilentEvents
from autopipe.api.program_folder import open_program, rank_arguments
from autopipe.ir.errors import CANDIDATE_ERRORS, CodegenError, ConfigurationError, InfeasibleError
from autopipe.ir.output_files import scratch_folder
from autopipe.ir.output_kinds import NPY, TOKENS, OutputFile, plan_inputs
from autopipe.ir.plan import PLAN_FILE
from autopipe.ir.words import plural

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.manifest import Manifest
    from autopipe.backends.torch.runtime.modes.decoder import Decoder, GenerationRequest
    from autopipe.passes.pipeline import PlanResult


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """The settings of a generation. `GenerationRequest` describes those that it also has."""

    prompts: tuple[str, ...]
    """Token ids such as `17,4,92`, or files with token ids."""
    prefill_chunk: int = 64
    """Maximum number of tokens of a prompt that a step feeds. No effect if a program is given
    instead of a plan.
    """
    max_new_tokens: int = 64
    eos: tuple[int, ...] = ()
    temperature: float | None = None
    """None: 1 if `top_k` or `top_p` is given, otherwise 0."""
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    output: Path | None = None
    """File for the new tokens, None for none."""
    device: str = "auto"
    model: Path | None = None
    """ONNX file to use instead of the planned one, or None."""
    force: bool = False
    """True to replace a file at `output` that is no file of tokens."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The tokens that a decoder has generated, and the number of steps and seconds that it took."""

    tokens: list[list[int]]
    """The new tokens of each sequence, in the order of the prompts."""
    steps: int
    seconds: float


def generate(
    program: Path,
    settings: GenerationSettings,
    *,
    debug: bool = False,
    events: Events | None = None,
) -> Generated:
    """Generate tokens with the program in the folder `program`, or with a program of the plan in
    this folder, and write them if a file is given.

    With `debug`, log lines of torch elastic are shown. Raises ConfigurationError if the program is
    no decoder, or if the prompts do not fit it, and LaunchError if a rank fails.
    """
    # This variable hides log lines of torch's C++ code. It must be set before the import of torch,
    # which reads it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from autopipe.backends.torch.runtime.modes.decoder import Decoder, GenerationRequest

    events = events or SilentEvents()
    written_to = None
    if settings.output is not None:
        read = (*plan_inputs(program), *map(Path, settings.prompts))
        if settings.model is not None:
            read = (*read, settings.model)
        written_to = _output_file(settings.output, read, settings.force)
        written_to.check()
    temperature = settings.temperature
    if temperature is None:
        temperature = 0.0 if settings.top_k is None and settings.top_p is None else 1.0
    sequences = tuple(tuple(ids) for text in settings.prompts for ids in read_prompts(text))
    request = GenerationRequest(
        sequences,
        settings.max_new_tokens,
        settings.eos,
        temperature,
        settings.top_k,
        settings.top_p,
        settings.seed,
    )
    longest = max(map(len, sequences))
    with _program_of(program, settings.model) as (folder, planned):
        manifest = open_program(folder, settings.model)
        decoder = Decoder.from_manifest(manifest)
        decoder.check(request)
        _check_layout(manifest.model, decoder)
        if planned is not None:
            # A decoder that writes its cache in place cannot read more tokens in one step than the
            # cache can store.
            most = decoder.cache_length - 1 if decoder.in_place else None
            chunk = min(longest, settings.prefill_chunk)
            write_prefill(planned, folder, chunk, events.note, most)
        report = _run(manifest, request, settings.device, debug, events)
    if written_to is not None:
        write_tokens(written_to, report["generated"])
    return Generated(report["generated"], report["steps"], report["seconds"])


def read_prompts(text: str) -> list[list[int]]:
    """Return the prompts in a file, or the one prompt in `text`. Raise ConfigurationError if they
    are not lists of token ids.
    """
    path = Path(text)
    if path.suffix not in (".json", ".npy"):
        try:
            return [[int(each) for each in text.replace(",", " ").split()]]
        except ValueError:
            hint = "use FILE.json, FILE.npy or ids such as 17,4,92"
            raise ConfigurationError(
                f"{text!r} is not a list of token ids", hint, "--prompts"
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
            "the file contains no prompts", hint="write a list of lists of token ids", where=text
        )
    for number, ids in enumerate(found):
        if not isinstance(ids, list) or not all(_is_token(each) for each in ids):
            raise ConfigurationError(f"prompt {number} is not a list of token ids", where=text)
    return found


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _output_file(target: Path, inputs: tuple[Path, ...], force: bool) -> OutputFile:
    """Return the file for the new tokens. Raise ConfigurationError if the extension of `target` is
    not a supported format.
    """
    kind = {".json": TOKENS, ".npy": NPY}.get(target.suffix)
    if kind is None:
        raise ConfigurationError(
            f"the output file is {target}, expected .json or .npy", where="--output"
        )
    return OutputFile(target, kind, inputs, force)


@contextmanager
def _program_of(folder: Path, model: Path | None) -> Iterator[tuple[Path, PlanResult | None]]:
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


def _check_layout(model: Path, decoder: Decoder) -> None:
    """Raise ConfigurationError if the cache layout of a decoder is not supported.

    A decoder with GroupQueryAttention must write its cache in place. A decoder without the input
    `position_ids` must write its cache in place, or derive the positions from its attention mask
    with CumSum.
    """
    from autopipe.passes.frontend.load import load

    operators = {node.op_type for node in load(model).nodes}
    if "GroupQueryAttention" in operators and not decoder.in_place:
        hint = (
            "plan with equal values of --dim past_sequence_length and --dim total_sequence_length"
        )
        raise ConfigurationError(
            "GroupQueryAttention requires a cache that is written in place", hint
        )
    if decoder.positions is None and not decoder.in_place and "CumSum" not in operators:
        hint = "export the model with position_ids"
        raise ConfigurationError(
            "the model has neither an input 'position_ids' nor positions computed from the mask",
            hint,
        )


def write_prefill(
    planned: PlanResult,
    folder: Path,
    chunk: int,
    note: Callable[[str], None],
    most: int | None = None,
) -> None:
    """Write a second program, for the prefill of prompts, next to the program of a plan in
    `folder`. Each of its steps feeds `chunk` tokens of each sequence, rounded up to a multiple that
    the plan's splits allow.

    No program is written if that number of tokens is more than `most`, or if the model or the plan
    does not allow such a program. In the second case, `note` is called with the reason.
    """
    from autopipe.api.codegen import write_programs
    from autopipe.backends.torch.runtime.manifest import read_manifest
    from autopipe.backends.torch.runtime.modes.decoder import PREFILL_FOLDER
    from autopipe.passes.prefill import with_step_length

    second = folder.with_name(PREFILL_FOLDER)
    # Splits along the tokens require that the step length is a multiple of the number of devices of
    # each stage. So `chunk` is rounded up.
    even = math.lcm(*(len(stage.devices) for stage in planned.plan.placement.stages))
    length = -(-chunk // even) * even
    if most is not None and length > most:
        return
    try:
        if (wider := with_step_length(planned, length)) is None:
            return
        if write_programs(wider, second).channels != read_manifest(folder).channels:
            raise InfeasibleError("the stages send other tensors in the prefill program")
    except (*CANDIDATE_ERRORS, CodegenError) as error:
        note(
            f"prompts are fed as the plan's own steps do, not {chunk} {plural(chunk, 'token')} "
            f"a step: {error.message}"
        )
        return
    second.rename(folder / PREFILL_FOLDER)


def _run(
    manifest: Manifest, request: GenerationRequest, device: str, debug: bool, events: Events
) -> dict[str, Any]:
    """Run the request on all ranks on this machine. Return the report of rank 0."""
    from autopipe.api.launch_config import placement_note, visible_gpus
    from autopipe.backends.torch.launcher import LaunchConfig, launch_program, local_ranks
    from autopipe.backends.torch.runtime.modes.decoder import GENERATED_FILE

    config = LaunchConfig(gpus=visible_gpus(device), debug=debug)
    events.note(placement_note(device, local_ranks(manifest, config)[1]))
    with scratch_folder("launch") as name:
        request.write(Path(name))
        arguments = rank_arguments(device=device, generate=Path(name), model=manifest.model)
        launch_program(manifest, arguments, config, events.note)
        found: dict[str, Any] = json.loads(
            (Path(name) / GENERATED_FILE).read_text(encoding="utf-8")
        )
        return found


def write_tokens(target: OutputFile, found: Sequence[Sequence[int]]) -> None:
    """Write the tokens of each sequence: a list per sequence in JSON, otherwise a NumPy array with
    a row per sequence, filled up with -1.
    """
    with target.open() as file:
        if target.kind is TOKENS:
            file.write(json.dumps(found).encode())
            return
        rows = np.full((len(found), max(map(len, found))), -1, np.int64)
        for row, tokens in zip(rows, found, strict=True):
            row[: len(tokens)] = tokens
        np.save(file, rows)
