"""Weights of 4 bits are 4 bits in plans, and on ranks that have parts of them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from autopipe.cli.main import main
from autopipe.passes.frontend.read import read_model
from tests.exports.packed_llama import LLAMA_7B, SMALL, Builder


def test_seven_billion_parameters_take_four_bits_each_and_their_scales(tmp_path: Path) -> None:
    onnx.save(Builder(LLAMA_7B, numbers=False).model(), tmp_path / "model.onnx")
    graph = read_model(tmp_path / "model.onnx", batch=1).graph
    held = {each.value.dtype.value: 0 for each in graph.parameters}
    for each in graph.parameters:
        held[each.value.dtype.value] += each.value.bytes
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096
    assert held["uint8"] == matrices // 2 + matrices // 64  # and their zero points
    assert 3.5 * 2**30 < sum(held.values()) < 4.2 * 2**30


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["expert", pytest.param("pipedream", marks=pytest.mark.sweep)])
def test_a_64th_of_it_equals_onnxruntime_on_four_ranks(here: None, strategy: str, tmp_path: Path) -> None:
    onnx.save(Builder(SMALL, numbers=True).model(), tmp_path / "model.onnx")
    plan, program = str(tmp_path / "plan"), str(tmp_path / "program")
    for words in (
        ["plan", str(tmp_path / "model.onnx"), "--gpus", "4", "--batch-size", "4", "--strategy", strategy, "-o", plan],
        ["codegen", plan, "-o", program],
        ["launch", program, "--device", "cpu"],
        ["verify", program],
    ):
        assert main(words) == 0, words
