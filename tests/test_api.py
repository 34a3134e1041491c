"""Planning, verifying and running from Python."""

from __future__ import annotations

import runpy
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopipe
from autopipe.configs.zoo import build, configure
from autopipe.ir.errors import ConfigurationError

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api") / "gpt.onnx"
    small = {
        "loss": "true",
        "layers": "2",
        "hidden": "32",
        "heads": "2",
        "vocabulary": "64",
        "sequence": "8",
    }
    build(configure("gpt", small)).save(path)
    return path


@pytest.mark.distributed
def test_the_example_trains_a_module_on_four_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ROOT / "examples" / "train_module.py"
    assert len(source.read_text(encoding="utf-8").splitlines()) <= 25
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(source), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(step) for step, _ in rows] == list(range(16))
    assert float(rows[-1][1]) < 0.8 * float(rows[0][1])


def test_a_plan_is_what_the_command_makes(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("gpus: 4\nstrategy: {name: grid, pipeline: 2}\n", encoding="utf-8")
    plan = autopipe.plan(
        model,
        {"preset": "cpu-local"},
        output=tmp_path / "plan",
        config=config,
        gpus=2,
        batch_size=4,
        schedule="1f1b",
    )
    assert (
        plan.summary.devices == 2 and plan.summary.stages == 2 and plan.summary.schedule == "1f1b"
    )
    again = autopipe.Plan.load(tmp_path / "plan")
    assert again.summary == plan.summary and again.result.digest == plan.result.digest
    assert [stage.devices for stage in again.placement.stages] == [(0,), (1,)]
    assert again.schedule == plan.schedule
    assert plan.codegen() == tmp_path / "plan" / "program"
    assert "alternatives" in plan.explain()
    assert plan.explain(device=1)["step_time_s"] == plan.summary.step_time_s


def test_mistakes_name_what_is_wrong(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="gpu"):
        autopipe.plan(model, "cpu-local", gpu=2)
    with pytest.raises(ConfigurationError, match="does not exist"):
        autopipe.Plan.load(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="loss and labels require each other"):
        autopipe.export(nn.Linear(2, 2), torch.ones(2, 2), loss=nn.functional.mse_loss)
    with pytest.raises(ConfigurationError, match="samples"):
        autopipe.export(nn.Bilinear(2, 2, 2), (torch.ones(2, 2), torch.ones(3, 2)))


def test_a_new_transformer_keeps_its_parameters_and_names(tmp_path: Path) -> None:
    """Those of a new module are equal in parts and zero in others, which no exporter may make one
    of.
    """
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    module = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    tokens = torch.arange(8).repeat(1, 1)
    path = autopipe.export(module, {"input_ids": tokens, "labels": tokens}, tmp_path / "gpt2.onnx")
    graph = onnx.load(path).graph
    assert [each.name for each in graph.input] == ["input_ids", "labels"]
    assert [each.name for each in graph.output] == ["loss"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param
    stored = {each.name for each in graph.initializer}
    tied = {"transformer.wte.weight", "lm_head.weight"}
    assert {name for name, _ in module.named_parameters()} - tied <= stored
    assert len(stored & tied) == 1
