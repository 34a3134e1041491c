"""Training on a file of tokens by epochs: shuffled, a last batch filled up, and resumed under other
plans.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.backends.torch.checkpoint import committed_steps
from autopipe.cli.main import main
from tests.distributed.support.launching import launch, launch_here

pytestmark = pytest.mark.distributed

SAMPLES = 11
LENGTH = 4
VOCABULARY = 32
SIZES = {
    "layers": 1,
    "hidden": 16,
    "heads": 2,
    "vocabulary": VOCABULARY,
    "sequence": LENGTH,
    "loss": "true",
}


def autopipe(*words: object) -> None:
    assert main(list(map(str, words))) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT whose loss ignores labels of -100, and tokens for 11 samples."""
    found = tmp_path_factory.mktemp("epochs")
    autopipe(
        "zoo",
        "build",
        "gpt",
        "-o",
        found / "gpt.onnx",
        *(f"--set={name}={size}" for name, size in SIZES.items()),
    )
    model = onnx.load(found / "gpt.onnx")
    (loss,) = (node for node in model.graph.node if node.op_type == "SoftmaxCrossEntropyLoss")
    loss.attribute.append(onnx.helper.make_attribute("ignore_index", -100))
    onnx.save(model, found / "gpt.onnx")
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, SAMPLES * LENGTH + 1)
    tokens.astype("<u2").tofile(found / "tokens.bin")
    (found / "data.yaml").write_text(
        "data: {path: tokens.bin, shuffle: true, epochs: 2, last_batch: pad}\n"
    )
    return found


def program(folder: Path, gpus: int, batch: int, micro_batches: int) -> Path:
    plan = folder / f"{gpus}x{batch}.plan"
    flags = (
        f"--gpus={gpus} --batch-size={batch} --micro-batches={micro_batches} --cluster=cpu-local "
        "--strategy=grid"
    )
    learning = (f"--set=strategy.pipeline={gpus}", "--set=optimizer={name: sgd, lr: 0.5}")
    autopipe(
        "plan",
        folder / "gpt.onnx",
        "-o",
        plan,
        *flags.split(),
        *learning,
        "--config",
        folder / "data.yaml",
        "-q",
    )
    autopipe("codegen", plan, "-q")
    return plan / "program"


def test_epochs_on_two_ranks_are_those_of_batches_of_just_their_samples(
    here: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 11 samples the second batch of 8 has 3: in micro-batches of 2, one whole, one half, two
    empty. A run that goes on under a plan of 3 samples a batch takes just these in its place.
    """
    padded = program(folder, 2, 8, 4)
    exact = program(folder, 1, 3, 1)
    whole = launch_here(capsys, padded, "--json")
    assert whole.code == 0, whole.stderr
    assert (
        "11 samples are 2 batches of 8, the last of 3, filled up with samples that count nothing"
        in whole.stderr
    )
    assert "4 steps go on into epoch 2" in whole.stderr
    saved = "--json", "--checkpoint", folder / "saved"
    first = launch_here(capsys, padded, *saved, "--steps", 1)
    second = launch_here(capsys, exact, *saved, "--steps", 2, "--resume")
    third = launch_here(capsys, padded, *saved, "--steps", 4, "--resume")
    assert [first.code, second.code, third.code] == [0, 0, 0], (
        first.stderr + second.stderr + third.stderr
    )
    ended = launch_here(capsys, padded, *saved, "--resume")
    assert (
        ended.code == 0
        and ended.losses == []
        and "is after 4 steps, and training ends after 4" in ended.stderr
    )
    assert len(whole.losses) == 4
    assert whole.losses == pytest.approx([*first.losses, *second.losses, *third.losses], abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda loss: loss.ClearField("attribute"),
            "the loss, SoftmaxCrossEntropyLoss .*, has no ignore_index",
        ),
        (
            lambda loss: loss.attribute[0].__setattr__("s", b"sum"),
            "is not an unweighted mean over labels",
        ),
    ],
)
def test_losses_that_would_count_what_fills_up_are_refused(
    folder: Path, change: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = onnx.load(folder / "gpt.onnx")
    (loss,) = (node for node in model.graph.node if node.op_type == "SoftmaxCrossEntropyLoss")
    change(loss)  # type: ignore[operator]
    onnx.save(model, folder / "other.onnx")
    flags = "--gpus", "1", "--cluster", "cpu-local", "--config", str(folder / "data.yaml")
    assert main(["plan", str(folder / "other.onnx"), "-o", str(folder / "other.plan"), *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


BATCHES = """
import numpy as np

def batches(seed, batch_size):
    for count in (batch_size, 3):
        tokens = np.random.default_rng(seed).integers(0, 32, (count, 5))
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
"""


def test_epochs_of_a_function_end_with_it_and_what_was_trained_is_saved(folder: Path) -> None:
    """Two epochs of a whole batch and one of 3 samples; how many steps that makes only the function
    knows.
    """
    padded = program(folder, 2, 8, 4)
    (padded.parent / "given.py").write_text(BATCHES)
    saved = folder / "function"
    ended = launch(
        padded,
        "--json",
        "--data",
        "given:batches",
        "--epochs",
        2,
        "--no-shuffle",
        "--checkpoint",
        saved,
    )
    assert ended.code == 0, ended.stderr
    assert len(ended.losses) == 4
    assert committed_steps(saved) == [4]


def test_errors_of_data_come_before_any_rank(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And before torch is imported, which takes longer than all checks."""
    padded = program(folder, 2, 8, 4)
    tokens = np.fromfile(folder / "tokens.bin", "<u2")
    tokens[30] = VOCABULARY
    tokens.tofile(folder / "wrong.bin")
    cases = {
        ("--data", str(folder / "wrong.bin")): "'tokens' row 7 contains 32, expected from 0 to 31",
        ("--data", str(folder / "nothing.bin")): "cannot be read: No such file or directory",
        ("--data", str(folder / "gpt.onnx")): "has an unknown format",
    }
    program_text = "import sys; from autopipe.cli.main import main; code = main(sys.argv[1:]); "
    program_text += "assert 'torch' not in sys.modules; sys.exit(code)"
    for words, message in cases.items():
        command = [
            sys.executable,
            "-c",
            program_text,
            "launch",
            str(padded),
            "--device",
            "cpu",
            *words,
        ]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
        assert message in ended.stderr
    assert main(["launch", str(padded), "--epochs", "2", "--steps", "3"]) == 2
    assert "--steps already sets the end" in capsys.readouterr().err
