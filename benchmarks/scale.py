"""How long plans and programs for 64, 512 and 4096 devices take: processor seconds of each command, as a table.

    python benchmarks/scale.py [FOLDER]

Models are written into FOLDER (default: a temporary one) without weights. Figures are of one process on one core.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path

from autopipe.cli.main import main

CASES = (
    ("llama", "7b", "h100-80gb", 8, 64),
    ("llama", "70b", "h100-superpod", 64, 256),
    ("llama", "70b", "h100-superpod", 512, 512),
    ("llama", "70b", "h100-superpod", 4096, 4096),
    ("gpt", "175b", "h100-superpod", 512, 1536),
)
"""Model, size, cluster, devices and samples of a step."""


def seconds(*words: object) -> float:
    """Processor seconds of a command. Raises RuntimeError where it fails."""
    begin = time.process_time()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([str(word) for word in words])
    if code:
        raise RuntimeError(f"{' '.join(map(str, words))}: {said.getvalue()}")
    return time.process_time() - begin


def row(folder: Path, model: str, size: str, cluster: str, devices: int, batch: int) -> str:
    """One line of the table."""
    file, plan = folder / f"{model}-{size}.onnx", folder / f"{model}-{size}-{devices}"
    if not file.exists():
        seconds(
            "zoo", "build", model, "-o", file, "--set", f"size={size}", "--set", "weights=none", "--set", "loss=true"
        )
    flags = ["--cluster", cluster, "--gpus", devices, "--batch-size", batch, "--strategy", "grid", "--schedule", "1f1b"]
    choices = ["--set", "recompute=auto", "--set", "precision=bf16", "--set", "optimizer.name=adamw"]
    planning = seconds("plan", file, *flags, *choices, "-q", "-o", plan)
    showing = seconds("show", plan, "-q")
    writing = seconds("codegen", plan, "--ranks", f"0,{devices // 2},{devices - 1}", "-q")
    return f"| {model} {size} | {cluster} | {devices} | {batch} | {planning:.1f} | {showing:.1f} | {writing:.1f} |"


def run(folder: Path) -> None:
    """Print the table."""
    print("| model | cluster | devices | samples | plan (s) | show (s) | codegen of three ranks (s) |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        print(row(folder, *case), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            run(Path(scratch))
