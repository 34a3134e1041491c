"""Clusters of several kinds of devices on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure

SITE = """\
name: site
groups:
  - {name: new, device: a100-80gb, count: 2}
  - {name: old, device: v100-32gb, count: 2}
levels: [{name: room, latency: 10us, bandwidth: 12.5GB/s}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    settings = {
        "layers": "2",
        "hidden": "32",
        "heads": "2",
        "sequence": "16",
        "vocabulary": "64",
        "loss": "true",
    }
    build(configure("gpt", settings)).save(tmp_path / "gpt.onnx")
    (tmp_path / "site.yaml").write_text(SITE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_kind_of_each_stage_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "--cluster",
        "./site.yaml",
        "--strategy",
        "pipedream",
        "--schedule",
        "1f1b",
        "-o",
        "mixed",
    )
    code, out, _ = run(capsys, "plan", "gpt.onnx", *asked)
    assert code == 0
    assert "on 4 devices of site: 2 A100-SXM4-80GB and 2 V100-SXM2-32GB" in out
    assert "of 73.1 GiB on A100-SXM4-80GB" in out and "of 28.5 GiB on V100-SXM2-32GB" in out
    stages = json.loads((folder / "mixed/plan.json").read_text())["placement"]["stages"]
    for text in (out, run(capsys, "show", "mixed")[1]):
        for index, stage in enumerate(stages):
            row = [line for line in text.splitlines() if line.startswith(f"{index} ")][-1]
            assert ("A100" in row, "V100" in row) == (
                stage["devices"][0] < 2,
                stage["devices"][0] >= 2,
            )
    assert run(capsys, "codegen", "mixed", "--json")[0] == 0
    assert run(capsys, "show", "mixed", "--html", "mixed.html", "-q")[0] == 0
    page = (folder / "mixed.html").read_text()
    assert "<th>kind</th>" in page and "<td>V100-SXM2-32GB</td>" in page


def test_the_first_devices_are_taken_and_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (
        "--cluster",
        "./site.yaml",
        "--strategy",
        "data_parallel",
        "--schedule",
        "1f1b",
        "--batch-size",
        "12",
    )
    code, out, _ = run(capsys, "plan", "gpt.onnx", *asked, "--gpus", "2")
    assert code == 0
    assert "on 2 devices of site: 2 A100-SXM4-80GB\n" in out and "kind" not in out
    code, _, err = run(capsys, "plan", "gpt.onnx", *asked, "--gpus", "3", "-o", "three")
    assert code == 4
    assert (
        "data_parallel would put one stage on devices of different kinds: 2 A100-SXM4-80GB and "
        "1 V100-SXM2"
    ) in err
    code, out, _ = run(
        capsys,
        "plan",
        "gpt.onnx",
        *asked,
        "--gpus",
        "3",
        "--set",
        "cluster.allow_mixed_stages=true",
        "-o",
        "three",
    )
    assert code == 0
    row = next(line for line in out.splitlines() if line.startswith("0 "))
    assert "0-2" in row and "2 A100-SXM4-80GB and 1 V100-SXM2-32GB" in row


def test_a_preset_has_a_line_for_each_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    _, out, _ = run(capsys, "config", "clusters")
    lines = out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("a100-v100"))
    assert "8 x A100-SXM4-80GB" in lines[first] and "300 / 12.5" in lines[first]
    assert "8 x V100-SXM2-32GB" in lines[first + 1] and "50 / 12.5" in lines[first + 1]
    _, out, _ = run(capsys, "config", "clusters", "--json")
    (found,) = [each for each in json.loads(out)["clusters"] if each["preset"] == "a100-v100"]
    assert [group["count"] for group in found["groups"]] == [8, 8]
    assert found["memory_bytes"] == 32 * 10**9
