"""From a model to a program folder to its verification, the ranks run on the tests' own processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.backends.torch.runtime.manifest import Manifest, read_manifest
from autopipe.cli import verification
from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from tests.distributed.pool import Pools

pytestmark = pytest.mark.distributed

SETTINGS = {"layers": "2", "hidden": "16", "heads": "2", "sequence": "8", "vocabulary": "32"}


@pytest.fixture
def here(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs start on the pools instead of in processes of their own."""

    def launch(manifest: Manifest, arguments: list[str], *rest: object) -> None:
        pools.of(manifest.world_size).run(manifest.folder, *arguments)

    def alone(folder: Path, arguments: list[str]) -> None:
        pools.of(1).run(folder, *arguments)

    monkeypatch.setattr(verification, "launch_program", launch)
    monkeypatch.setattr(verification, "run_alone", alone)


def generated(folder: Path, *flags: str, loss: bool = True) -> Path:
    """The program of a small GPT planned with these flags."""
    model = folder / "gpt.onnx"
    build(configure("gpt", SETTINGS | {"loss": str(loss).lower()})).save(model)
    assert main(["plan", str(model), *flags, "-o", str(folder / "plan"), "-q"]) == 0
    assert main(["codegen", str(folder / "plan"), "-q"]) == 0
    return folder / "plan" / "program"


def verified(
    program: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, dict[str, object]]]:
    """Exit code, and the checks by what was compared."""
    capsys.readouterr()
    code = main(["verify", str(program), "--device", "cpu", "--json", "-q", *flags])
    document = json.loads(capsys.readouterr().out.splitlines()[0])
    return code, {check["compared"]: check for check in document["checks"]}


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus", "2", "--batch-size", "8", "--micro-batches", "4"),
        ("--gpus", "2", "--batch-size", "4", "--micro-batches", "4", "--schedule", "gpipe"),
        ("--gpus", "2", "--batch-size", "8", "--micro-batches", "2", "--strategy", "data_parallel"),
    ],
)
def test_training(here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    code, checks = verified(generated(tmp_path, *flags), capsys)
    assert code == 0
    assert set(checks) == {"loss of the ranks", "gradients of the ranks", "outputs of one device"}
    model = read_manifest(tmp_path / "plan" / "program")
    assert checks["gradients of the ranks"]["tensors"] == sum(entry.trainable for entry in model.parameters)
    assert checks["outputs of one device"]["tensors"] == 1


@pytest.mark.parametrize("sizes", [("8", "4"), ("4", "4")])
def test_inference(here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: tuple[str, str]) -> None:
    """Micro-batches of two samples, and of one."""
    flags = ("--gpus", "2", "--batch-size", sizes[0], "--micro-batches", sizes[1])
    code, checks = verified(generated(tmp_path, *flags, loss=False), capsys)
    assert code == 0
    assert set(checks) == {"outputs of the ranks", "outputs of one device"}
    assert all(check["tensors"] == 1 for check in checks.values())


def test_a_wrong_program_is_found(here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = generated(tmp_path, "--gpus", "2", "--batch-size", "4", "--micro-batches", "2")
    stage = program / "stage_00.py"
    text = stage.read_text(encoding="utf-8")
    head, _, result = text.rpartition("    return (")
    name = result.partition(",")[0].rstrip(")\n")
    stage.write_text(f"{head}    {name} = {name} * 1.001\n    return ({result}", encoding="utf-8")
    code, checks = verified(program, capsys)
    assert code != 0
    assert float(str(checks["gradients of the ranks"]["relative_difference"])) > 1e-4
    assert float(str(checks["outputs of one device"]["relative_difference"])) < 1e-5


def test_files_say_what_they_are(tmp_path: Path) -> None:
    program = generated(tmp_path, "--gpus", "2", "--batch-size", "8", "--micro-batches", "4")
    ranks = [path.read_text(encoding="utf-8") for path in sorted(program.glob("rank_*.py"))]
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text(encoding="utf-8"))
    assert len(ranks) == 2
    for rank, text in enumerate(ranks):
        assert text.startswith(f'"""Rank {rank} of 2: stages {rank}; tessel, 4 micro-batches of 2 (plan ')
        assert f"bubble {plan['summary']['bubble_rate']:.1%}" in text
        assert f"{rank}F0" in text
    assert "Stage 1 of 2, on device 1." in (program / "stage_01.py").read_text(encoding="utf-8")
    for name in (verification.REFERENCE, verification.FORWARD):
        assert read_manifest(program / name).world_size == 1


def test_seeds_below_zero_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("verify", "launch"):
        assert main([command, str(tmp_path), "--seed", "-1"]) == 2
        assert "--seed" in capsys.readouterr().err
