"""`autopipe verify` of the zoo in small: right programs pass, and programs with a fault are
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from autopipe.backends.torch.runtime.manifest import read_manifest
from tests.distributed.support.verifying import generated, verified
from tests.distributed.support.zoo import SIZES

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("here")]

STRATEGIES = ("pase", "tepdist", "grid")


def passes(name: str, strategy: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = generated(name, folder, "--strategy", strategy)
    code, checks = verified(program, capsys)
    assert code == 0
    # A factor of 1.001 is never taken for a rounding.
    assert all(check["limit"] < 1e-3 for check in checks.values())


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("unet", "pase"),
        ("bert", "tepdist"),
        ("llama", "pase"),
        ("rnnlm", "tepdist"),
        ("moe", "grid"),
    ],
)
def test_right_programs_pass(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    strategy: str,
) -> None:
    passes(name, strategy, tmp_path, capsys)


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", SIZES)
def test_every_model_passes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    strategy: str,
) -> None:
    passes(name, strategy, tmp_path, capsys)


def without_all_reduce(program: Path) -> None:
    """Each rank keeps the gradients of its own samples."""
    path = program / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for rank in manifest["ranks"]:
        for shard in rank["shards"]:
            shard["ranks"] = [rank["rank"]]
    path.write_text(json.dumps(manifest), encoding="utf-8")


def with_a_gradient_twice(program: Path) -> None:
    """A matrix's gradient is counted twice where it is first read."""
    parameters = enumerate(read_manifest(program).parameters)
    matrices = [
        number for number, each in parameters if each.trainable and len(each.value.shape) > 1
    ]
    content = f"w{matrices[-1]}"
    for path in program.glob("stage_*.py"):
        text = path.read_text(encoding="utf-8")
        attributes = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        for name, held in attributes["attributes"].items():
            # The function of a layer reads its parameters without the list and the number of the
            # layer.
            word = "p." + re.sub(r"^\w+\.\d+\.", "", name)
            if held == content:
                text = re.sub(rf"{re.escape(word)}\b", f"(2 * {word} - {word}.detach())", text)
        path.write_text(text, encoding="utf-8")


def with_a_scale_too_small(program: Path) -> None:
    """The loss is divided by the number of ranks once more."""
    for path in program.glob("rank_*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"weight=([\d.e-]+)", r"weight=\1 / 4", text), encoding="utf-8")


def with_a_wrong_block(program: Path) -> None:
    """Rank 0 has rank 1's block of the data that it is given first, or of a parameter."""
    first, second = (
        (program / f"rank_{rank:03d}.py").read_text(encoding="utf-8") for rank in (0, 1)
    )
    blocks = [re.findall(r"runtime\.Data\(.*\)", text) for text in (first, second)]
    for mine, other in zip(*blocks, strict=False):
        if mine != other:
            (program / "rank_000.py").write_text(first.replace(mine, other), encoding="utf-8")
            return
    path = program / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    other_blocks = {shard["parameter"]: shard for shard in manifest["ranks"][1]["shards"]}
    for shard in manifest["ranks"][0]["shards"]:
        other_shard = other_blocks.get(shard["parameter"], shard)
        if other_shard["starts"] != shard["starts"]:
            shard["starts"], shard["stops"] = other_shard["starts"], other_shard["stops"]
            path.write_text(json.dumps(manifest), encoding="utf-8")
            return
    pytest.fail("no block differs between ranks 0 and 1")


FAULTS: tuple[Callable[[Path], None], ...] = (
    without_all_reduce,
    with_a_gradient_twice,
    with_a_scale_too_small,
    with_a_wrong_block,
)


def refused(
    name: str, fault: Callable[[Path], None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = generated(name, folder, "--strategy", "pase")
    fault(program)
    code, checks = verified(program, capsys)
    failed = [
        check for check in checks.values() if not check["relative_difference"] <= check["limit"]
    ]
    assert code == 5
    assert failed, checks
    for check in failed:
        assert check["worst"] in [each["tensor"] for each in check["above"]]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.__name__))
def test_faults_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fault: Callable[[Path], None],
) -> None:
    refused("gpt", fault, tmp_path, capsys)


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.__name__))
@pytest.mark.parametrize("name", SIZES)
def test_faults_of_every_model_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    fault: Callable[[Path], None],
) -> None:
    refused(name, fault, tmp_path, capsys)
