"""`autopipe checkpoint`: the commands. None of them needs torch."""

from __future__ import annotations

from pathlib import Path

import click

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output

_STEP = click.option("--step", type=click.IntRange(min=0), metavar="N", help="Of these steps [the newest].")


@click.group()
def checkpoint() -> None:
    """Look at checkpoints, check every byte of them, write trained weights into an ONNX file.

    DIR is the folder that `autopipe launch --checkpoint DIR` saved to.

    \b
    Example:
      autopipe checkpoint inspect ckpt
      autopipe checkpoint export ckpt -o trained.onnx
    """


@checkpoint.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@_STEP
@standard_options
def inspect(output: Output, folder: Path, step: int | None) -> None:
    """Say which checkpoints are in DIR, and what one of them holds: parameters, their shapes and shards.

    \b
    Example:
      autopipe checkpoint inspect ckpt --step 20
    """
    from autopipe.backends.torch.checkpoint.format import read_checkpoint
    from autopipe.cli.checkpoint.chosen import FoundCheckpoint, found_paths
    from autopipe.cli.checkpoint.inspection import as_json, screen

    paths = found_paths(folder, None)
    chosen = found_paths(folder, step)[-1]
    found = [FoundCheckpoint(path, read_checkpoint(path)) for path in paths]
    shown = next(each for each in found if each.path == chosen)
    output.result(as_json(found, shown), *screen(found, shown))


@checkpoint.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Of these steps alone [all].")
@standard_options
def verify(output: Output, folder: Path, step: int | None) -> None:
    """Read every byte of the checkpoints in DIR: sizes and SHA-256, and each element of each tensor stored once.

    Says which file is damaged, and ends with 5.

    \b
    Example:
      autopipe checkpoint verify ckpt
    """
    from autopipe.backends.torch.checkpoint.format import read_checkpoint
    from autopipe.backends.torch.checkpoint.read import check_checkpoint
    from autopipe.cli.checkpoint.chosen import FoundCheckpoint, found_paths
    from autopipe.cli.checkpoint.inspection import step_json, step_line
    from autopipe.ir.errors import LaunchError

    whole: list[FoundCheckpoint] = []
    damage: list[LaunchError] = []
    for path in found_paths(folder, step):
        try:
            found = FoundCheckpoint(path, read_checkpoint(path))
            with output.progress(f"reading {path.name}", total=found.bytes) as bar:
                check_checkpoint(path, found.checkpoint, bar.advance)
        except LaunchError as error:
            damage.append(error)
            output.line(f"{path.name}: damaged")
            continue
        whole.append(found)
        output.line(f"{step_line(found)}: whole")
    if damage:
        raise damage[0]
    output.result({"folder": folder, "whole": True, "checkpoints": [step_json(each) for each in whole]})


@checkpoint.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("-o", "--output", "target", type=click.Path(path_type=Path), required=True, help="ONNX file to write.")
@_STEP
@click.option("--model", type=click.Path(path_type=Path), metavar="FILE", help="The model [where it was trained].")
@standard_options
def export(output: Output, folder: Path, target: Path, step: int | None, model: Path | None) -> None:
    """Write the model that was trained, as it was given, with the weights of a checkpoint in DIR.

    Shards of all ranks are put together a piece at a time. Weights of more than 1.5 GiB lie in a second file beside
    the model's, FILE.data.

    \b
    Example:
      autopipe checkpoint export ckpt -o trained.onnx
    """
    from autopipe.backends.torch.checkpoint.read import check_checkpoint
    from autopipe.cli.checkpoint.chosen import newest
    from autopipe.cli.checkpoint.exporting import model_of, numbers_of
    from autopipe.cli.figures import bytes_text
    from autopipe.cli.files import check_writable
    from autopipe.passes.export import write_trained

    found = newest(folder, step)
    check_writable(target)
    path = model_of(found, model)
    with output.progress("reading", total=found.bytes) as bar:
        check_checkpoint(found.path, found.checkpoint, bar.advance)
    numbers = numbers_of(found)
    with output.progress("writing", total=sum(each.value.bytes for each in numbers.values())) as bar:
        written = write_trained(path, target, numbers, bar.advance)
    data = {
        "path": target,
        "files": written.files,
        "model": path,
        "step": found.checkpoint.step,
        "parameters": len(numbers),
        "replaced": written.replaced,
        "added": written.added,
        "bytes": written.bytes,
    }
    beside = f" and {written.files[1].name}" if len(written.files) > 1 else ""
    output.result(
        data,
        f"{target}{beside}: {len(numbers)} parameters after {found.checkpoint.step} steps,"
        f" {bytes_text(written.bytes)} of weights",
    )
