"""Every command that the README or a page of docs/ shows runs. test_tutorial.py runs the commands of
the tutorial and of the page on manual placement.

The commands of a page run in order, in a folder with small models and plans that `PREPARED` makes.
`SHORTER` replaces large sizes and long runs. `.ci/run` runs `./demo` and `./test`.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from autopipe.cli.main import main
from autopipe.passes.frontend import read_model
from tests.exports.decoders import decoder_file

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(
    r"^(?:    )?(?:\$ )?(?P<command>autopipe (?:.*\\\n)*.*)\n"
    r"(?P<shown>(?:(?!(?:    )?(?:\$ |autopipe )).*\n)*)",
    re.M,
)
BLOCK = re.compile(
    r"^```(?P<kind>sh|console|yaml)\n(?P<text>.*?)^```$|(?P<indented>(?:^    [^\n]*\n)+)",
    re.M | re.S,
)
NAMED = re.compile(r"# (?P<name>\S+\.yaml)\n")
"""First line of a YAML file on a page: its name as a comment."""
PAGES = {
    path.relative_to(ROOT).as_posix().removeprefix("docs/"): text
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.name not in ("tutorial.md", "manual-placement.md")
    and COMMAND.search(text := path.read_text(encoding="utf-8"))
}
"""Text of each page that shows commands, by its path below docs/ (README.md: of the root)."""

SMALL = (
    "--set loss=true --set layers=2 --set hidden=32 --set heads=2 --set vocabulary=64 --set "
    "sequence=8"
)
GPT = f"autopipe zoo build gpt -o gpt.onnx {SMALL}"
PLAN = (
    "autopipe plan gpt.onnx --gpus 2 --cluster cpu-local --batch-size 4 --strategy pipedream "
    "--schedule"
)
PROGRAM = (GPT, f"{PLAN} 1f1b -o gpt.plan", "autopipe codegen gpt.plan")
MEASURED = (
    "autopipe profile gpt.onnx --source onnxruntime --seconds 0.1 --micro-batch-sizes 1 -o "
    "dlrm.onnx.costs"
)
DECODER = (
    "autopipe plan decoder.onnx --mode infer --dim sequence_length=1 --dim past_sequence_length=7"
)
SAMPLES = 4
PREPARED: dict[str, tuple[str, ...]] = {
    "README.md": ("autopipe export classifier.py:factory -o model.onnx",),
    "guides/checkpoints.md": PROGRAM,
    "guides/data.md": PROGRAM,
    "guides/clusters.md": (GPT,),
    "methods/graphpipe.md": (
        "autopipe zoo build candle-uno -o candle.onnx --set loss=true --set weights=none",
    ),
    "guides/measured-costs.md": (GPT, MEASURED),
    "reference/commands.md": (
        *PROGRAM,
        MEASURED,
        f"{PLAN} 1f1b -o gpt.1f1b.plan",
        f"{PLAN} gpipe -o gpt.gpipe.plan",
        "autopipe zoo build llama -o llama.onnx --set loss=true",
        (
            "autopipe plan llama.onnx --gpus 2 --strategy grid --batch-size 4 --schedule 1f1b -o "
            "llama.plan"
        ),
        "autopipe schedule --shape v --devices 2 --micro-batches 4 -o schedule.json",
        f"{DECODER} --gpus 1 --strategy data_parallel --batch-size 2 -o decoder.plan",
    ),
    "methods/schedules.md": (GPT,),
    "guides/multi-node.md": PROGRAM,
    "guides/monitoring.md": PROGRAM,
    "guides/cuda-graphs.md": PROGRAM,
    "methods/zero.md": (GPT,),
}
"""Commands that run before the commands of a page."""
ELSEWHERE = "autopipe bench tessel"
"""A command that ends with an error, since the benchmarks are in the checkout."""
FILES = {
    "classifier.py": """
import torch
from torch import nn

def factory():
    return nn.Linear(4, 2), torch.randn(4, 4), nn.functional.cross_entropy, torch.tensor([0, 1, 0, 1])
""",
    "prompts.json": "[[17, 4, 92], [5]]",
    "train.yaml": "strategy: {name: pipedream}\ncluster: {preset: cpu-local}\n",
    "placement.yaml": """
format: autopipe.placement/1
devices: 1
blocks: [{name: F, devices: [0], time: 1}, {name: B, devices: [0], time: 2, after: [F]}]
""",
}
"""Files that pages mention without their contents."""
SHORTER = {
    "-o infer.onnx": "-o infer.onnx --set layers=2 --set vocabulary=64 --set sequence=8",
    "size=70b": "layers=2",
    "size=3-70b": "layers=2",
    "sequence=8192": "sequence=16",
    # Automatic planning is the subject of other pages.
    "--batch-size 512": "--batch-size 8 --strategy grid",
    "--micro-batches 8 -o gpt.plan": (
        "--micro-batches 4 --strategy pipedream --schedule 1f1b --set strategy.replicate=false -o "
        "gpt.plan"
    ),
    "size=paper": "branches=2",
    "size=million": "classes=10",
    "layers=12 --set hidden=768 --set heads=12 --set sequence=256": "layers=1",
    "--gpus 8 --cluster h100-80gb --batch-size 256": f"--gpus 2 --batch-size {SAMPLES}",
    "--gpus 64": "--gpus 4",
    "--gpus 4096": "--gpus 16",
    "--batch-size 4096": "--batch-size 16",
    "--ranks 0,17,4095": "--ranks 0,1",
    "--rank 4095": "--rank 1",
    "--epochs 3": "--epochs 1",
    "--max-new-tokens 32": "--max-new-tokens 4",
    "--steps 2000": "--steps 4",
    "--steps 1000": "--steps 2",
    "--steps 100": "--steps 2",
    "--steps 10": "--steps 2",
    "--steps 300": "--steps 2",
    "--checkpoint-every 50": "--checkpoint-every 1",
    "--checkpoint-every 10": "--checkpoint-every 1",
    "--checkpoint-every 5": "--checkpoint-every 1",
    "--step 20": "--step 2",
    "--ranks 2": "--seconds 0.1 --micro-batch-sizes 1",  # exchanges are measured in test_profile.py
    "--device 3": "--device 1",
    "--rank 2": "--rank 1",
    "--stage 1": "--stage 0",  # the plan has one
    "--nnodes 2": "--nnodes 1",
    "10.0.0.1:29400": "127.0.0.1:0",
    "/models/gpt.onnx": "gpt.onnx",
}
"""Parts of commands, and smaller models, clusters and runs that replace them in the test."""


@pytest.mark.distributed
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page(
    here: None,
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo-output").mkdir()
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    Path("run.key").write_text("0" * 64, encoding="utf-8")
    Path("run.key").chmod(0o600)
    (np.arange(SAMPLES * 8 + 1) % 64).astype("<u2").tofile("train.bin")
    if "decoder.plan" in PAGES[page]:
        shutil.copy(decoder_file("gpt2"), "decoder.onnx")
    text = np.zeros((SAMPLES + 1, 8), np.int64)
    for name in ("train.npz", "held-out.npz"):
        np.savez(name, tokens=text, labels=text)
    for command in PREPARED.get(page, ()):
        typed(command, False, capfd)
    if Path("model.onnx").exists():
        inputs = read_model(Path("model.onnx"), batch=SAMPLES).graph.inputs
        np.savez(
            "batches.npz", **{each.name: np.ones(each.shape, each.dtype.value) for each in inputs}
        )
    for block in BLOCK.finditer(PAGES[page]):
        if block["kind"] == "yaml":
            if named := NAMED.match(block["text"]):
                Path(named["name"]).write_text(block["text"], encoding="utf-8")
            continue
        for found in COMMAND.finditer(block["text"] or block["indented"]):
            command = found["command"].replace("\\\n", " ")
            for part, small in SHORTER.items():
                command = re.sub(rf"(?<!\S){re.escape(part)}(?!\S)", small, command)
            failing = found["shown"].lstrip().startswith("error: ") or command == ELSEWHERE
            typed(command, failing, capfd)


def typed(command: str, failing: bool, capture: pytest.CaptureFixture[str]) -> None:
    """Run a command, and write its output to the file behind `>` if there is one."""
    line, _, file = command.partition(" > ")
    capture.readouterr()
    code = main(shlex.split(line, comments=True)[1:])
    out, err = capture.readouterr()
    assert bool(code) == failing, f"{command}: {err}"
    if file:
        Path(file.strip()).write_text(out, encoding="utf-8")
