"""`autopipe launch`: runs the ranks of a program."""

from __future__ import annotations

import os
from pathlib import Path

import click

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output
from autopipe.ir.errors import ConfigurationError

_KEY_BYTES = 32
_SECONDS = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("program", type=click.Path(path_type=Path))
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu", "meta"]),
    default="auto",
    help="Where to run; meta, with --dry-run, is on no device: shapes and types alone, without memory for numbers.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Steps in all [1; in inference over a file all of it].")
@click.option("--data", help="FILE.npz or module:function; random data without it.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="Seed of random data, of Dropout, and of weights that the model does not store.",
)
@click.option("--nnodes", default="1", show_default=True, metavar="N|MIN:MAX", help="Number of machines.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), help="Ranks on each machine [an equal share].")
@click.option("--rdzv-endpoint", default="", metavar="HOST:PORT", help="Where several machines meet, alike on all.")
@click.option("--rdzv-id", default="", help="Name of the run, alike on all machines [from the plan].")
@click.option("--rdzv-key", metavar="FILE", help="Key of the run, 32 bytes or more, on all machines and for none else.")
@click.option("--max-restarts", type=click.IntRange(min=0), help="Times to start again [3 with --checkpoint, else 0].")
@click.option("--checkpoint", type=click.Path(path_type=Path), metavar="DIR", help="Where to save the training state.")
@click.option("--checkpoint-every", type=click.IntRange(min=1), metavar="K", help="Steps between two [only the last].")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --checkpoint DIR.")
@click.option("--start-timeout", type=_SECONDS, default=1800, show_default=True, help="Seconds to join and load.")
@click.option("--step-timeout", type=_SECONDS, default=600, show_default=True, help="Seconds for a task of a step.")
@click.option("--checkpoint-timeout", type=_SECONDS, default=7200, show_default=True, help="Seconds to write or read.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Chrome trace of this node's ranks.")
@click.option("--outputs", type=click.Path(path_type=Path), metavar="FILE.npz", help="Outputs of inference.")
@click.option("--blocking", is_flag=True, help="Overlap no message with a task, to see what that is worth.")
@click.option("--dry-run", is_flag=True, help="Run one step of one rank without the others, and say what it does.")
@click.option("--rank", type=click.IntRange(min=0), help="Which rank --dry-run runs [0].")
@standard_options
def launch(
    output: Output,
    program: Path,
    device: str,
    steps: int | None,
    data: str | None,
    seed: int | None,
    nnodes: str,
    nproc_per_node: int | None,
    rdzv_endpoint: str,
    rdzv_id: str,
    rdzv_key: str | None,
    max_restarts: int | None,
    checkpoint: Path | None,
    checkpoint_every: int | None,
    resume: bool,
    start_timeout: float,
    step_timeout: float,
    checkpoint_timeout: float,
    trace: Path | None,
    outputs: Path | None,
    blocking: bool,
    dry_run: bool,
    rank: int | None,
) -> None:
    """Run the ranks of PROGRAM, a folder that codegen wrote.

    A rank that does not get on for longer than a time-out, in seconds, while it waits for no other, is named with its
    task, and all are stopped.

    \b
    Example:
      autopipe launch gpt.plan/program --device cpu --steps 10 --checkpoint ckpt --checkpoint-every 5
    """
    # Rendezvous on a free port logs warnings from C++ that say nothing to a user; torch reads this when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from autopipe.backends.torch.launcher import LaunchConfig
    from autopipe.backends.torch.runtime.heartbeat import Timeouts
    from autopipe.backends.torch.runtime.manifest import read_manifest
    from autopipe.cli.launching import Launch, rehearsal_table

    manifest = read_manifest(program.absolute())
    restarts = max_restarts if max_restarts is not None else 3 if checkpoint is not None else 0
    gang = LaunchConfig(
        nodes=_nodes(nnodes),
        ranks_per_node=nproc_per_node,
        rendezvous_endpoint=rdzv_endpoint,
        rendezvous_id=rdzv_id,
        rendezvous_key=b"" if rdzv_key is None else _key(Path(rdzv_key)),
        max_restarts=restarts,
        timeouts=Timeouts(start_timeout, step_timeout, checkpoint_timeout),
        live=not output.as_json,
        debug=bool(click.get_current_context().params["debug"]),
    )
    run = Launch(manifest, device, steps, data, seed, checkpoint, checkpoint_every, resume, trace, outputs, blocking)
    if dry_run and blocking:
        raise click.UsageError("--dry-run exchanges nothing: leave out --blocking")
    if device == "meta" and not dry_run:
        raise click.UsageError("--device meta computes nothing: it goes with --dry-run")
    if dry_run:
        report = run.rehearse(rank or 0)
        output.result(report, rehearsal_table(report))
        return
    if rank is not None:
        raise click.UsageError("--rank goes with --dry-run")
    reports = run.start(gang, output.note)
    output.result({"program": program, "steps": reports})


def _key(path: Path) -> bytes:
    """The key in a file that nobody else may read."""
    try:
        others = path.stat().st_mode & 0o077
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(f"the key cannot be read: {error.strerror}", where=str(path)) from error
    if others:
        raise ConfigurationError("others may read the key", hint=f"chmod 600 {path}", where=str(path))
    if len(key) < _KEY_BYTES:
        hint = f"openssl rand -hex {_KEY_BYTES} makes one"
        raise ConfigurationError(f"the key has {len(key)} bytes, not {_KEY_BYTES} or more", hint=hint, where=str(path))
    return key


def _nodes(text: str) -> tuple[int, int]:
    """`2` or `1:4` as fewest and most."""
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a number nor MIN:MAX", param_hint="--nnodes") from None
    if not 1 <= found[0] <= found[1]:
        raise click.BadParameter(f"{text!r} must be at least 1, and MIN at most MAX", param_hint="--nnodes")
    return found
