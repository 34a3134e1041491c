"""From a model to a program folder to its verification, the ranks run on the tests' own
processes.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from autopipe.api import verification
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from tests.distributed.support.dropping import save_with_batch_statistics, save_with_dropout
from tests.distributed.support.launching import finish, start
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import report_lines
from tests.distributed.support.verifying import verified
from tests.distributed.support.zoo import SIZES
from tests.passes.loss_cases import LOSSES, exported

pytestmark = pytest.mark.distributed

SETTINGS = {"layers": "2", "hidden": "16", "heads": "2", "sequence": "8", "vocabulary": "32"}
OF_TRAINING = {
    "loss of the ranks",
    "gradients of the ranks",
    "parameters after 2 updates",
    "outputs of one device",
}


def generated(folder: Path, *flags: str, loss: bool = True, layers: int = 2) -> Path:
    """The program of a small GPT planned with these flags, by pipedream where they name no
    strategy.
    """
    model = folder / "gpt.onnx"
    flags = flags if "--strategy" in flags else (*flags, "--strategy", "pipedream")
    build(configure("gpt", SETTINGS | {"loss": str(loss).lower(), "layers": str(layers)})).save(
        model
    )
    assert main(["plan", str(model), *flags, "-o", str(folder / "plan"), "-q"]) == 0
    assert main(["codegen", str(folder / "plan"), "-q"]) == 0
    return folder / "plan" / "program"


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus", "2", "--batch-size", "8", "--micro-batches", "4"),
        ("--gpus", "2", "--batch-size", "4", "--micro-batches", "4", "--schedule", "gpipe"),
        ("--gpus", "2", "--batch-size", "8", "--micro-batches", "2", "--strategy", "data_parallel"),
    ],
)
def test_training(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    code, checks = verified(generated(tmp_path, *flags), capsys)
    assert code == 0
    assert set(checks) == OF_TRAINING
    model = read_manifest(tmp_path / "plan" / "program")
    trained = sum(entry.trainable for entry in model.parameters)
    assert checks["gradients of the ranks"]["tensors"] == trained
    assert checks["parameters after 2 updates"]["tensors"] == trained
    assert checks["outputs of one device"]["tensors"] == 1


@pytest.mark.parametrize("sizes", [("8", "4"), ("4", "4")])
def test_inference(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: tuple[str, str]
) -> None:
    """Micro-batches of two samples, and of one."""
    flags = ("--gpus", "2", "--batch-size", sizes[0], "--micro-batches", sizes[1])
    code, checks = verified(generated(tmp_path, *flags, loss=False), capsys)
    assert code == 0
    assert set(checks) == {"outputs of the ranks", "outputs of one device"}
    assert all(check["tensors"] == 1 for check in checks.values())


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_dropout_is_compared_as_it_is_drawn(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    """With ONNX Runtime, which draws other numbers, without it; at inference there is none."""
    model = tmp_path / "model.onnx"
    plan = str(tmp_path / "plan")
    save_with_dropout(model)
    flags = (
        "--gpus",
        "2",
        "--batch-size",
        "8",
        "--micro-batches",
        "2",
        "--strategy",
        "handcrafted",
        "--mode",
        mode,
    )
    assert main(["plan", str(model), *flags, "-o", plan, "-q"]) == 0
    assert main(["codegen", plan, "-q"]) == 0
    code, checks = verified(tmp_path / "plan" / "program", capsys)
    assert code == 0
    assert checks["outputs of one device without Dropout"]["tensors"] == 1
    assert ("gradients of the ranks" in checks) == (mode == "train")
    drops = "operators.dropout" in (tmp_path / "plan" / "program" / "stage_00.py").read_text(
        encoding="utf-8"
    )
    assert drops == (mode == "train")


@pytest.mark.parametrize("training", ["null", "false"])
def test_batch_statistics_are_the_batchs_or_the_running_ones(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], training: str
) -> None:
    model = tmp_path / "resnet.onnx"
    save_with_batch_statistics(model, weights="random")
    flags = ("--gpus", "2", "--batch-size", "8", "--micro-batches", "2", "--strategy", "pipedream")
    asked = ("--set", f"model.training={training}")
    assert main(["plan", str(model), *flags, *asked, "-o", str(tmp_path / "plan"), "-q"]) == 0
    capsys.readouterr()
    assert main(["codegen", str(tmp_path / "plan"), "-q"]) == 0
    code, checks = verified(tmp_path / "plan" / "program", capsys)
    assert code == 0, checks
    assert set(checks) == OF_TRAINING | {"buffers after a step"}
    text = (tmp_path / "plan" / "program" / "stage_00.py").read_text(encoding="utf-8")
    assert ("p.running" in text) == (training == "null")


@pytest.mark.parametrize(
    ("operator", "kind", "reason"),
    [
        ("RandomNormalLike", TensorProto.FLOAT, "RandomNormalLike draws other numbers there"),
        (
            "Erf",
            TensorProto.DOUBLE,
            (
                "ONNX Runtime lacks a kernel for an operator: Could not find an implementation for Erf(13) node "
                "with name 'noise'"
            ),
        ),
    ],
)
def test_numbers_of_other_kinds_are_not_compared_with_onnx_runtime(
    here: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    operator: str,
    kind: int,
    reason: str,
) -> None:
    tensors = {name: helper.make_tensor_value_info(name, kind, [4, 6]) for name in ("x", "y")}
    nodes = [
        helper.make_node(operator, ["x"], ["noise"], "noise"),
        helper.make_node("Add", ["x", "noise"], ["y"], "add"),
    ]
    graph = helper.make_graph(nodes, "noisy", [tensors["x"]], [tensors["y"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, str(tmp_path / "noisy.onnx"))
    flags = (
        "--gpus",
        "2",
        "--batch-size",
        "4",
        "--micro-batches",
        "2",
        "--strategy",
        "data_parallel",
    )
    assert (
        main(["plan", str(tmp_path / "noisy.onnx"), *flags, "-o", str(tmp_path / "plan"), "-q"])
        == 0
    )
    assert main(["codegen", str(tmp_path / "plan"), "-q"]) == 0
    code, checks = verified(tmp_path / "plan" / "program", capsys)
    assert code == 0
    assert checks["outputs of the ranks"]["relative_difference"] == 0
    assert checks["outputs of one device"]["worst"] == f"omitted: {reason}"


OWN_SIZES = """
batch_size: 8
micro_batch_size: 4
gpus: 4
strategy: {name: manual}
schedule: {name: kfkb}
constraints:
  - {match: "/branches.0/*", stage: 0, devices: [0], micro_batch_size: 1}
  - {match: "/branches.1/*", stage: 1, devices: [1]}
  - {match: "/Concat", stage: 2, devices: [3, 2], micro_batch_size: 2}
"""


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_stages_with_micro_batches_of_their_own(
    here: None, pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    """From the configuration to what a plan, a rank's file and the ranks say of them."""
    model = tmp_path / "model.onnx"
    plan = tmp_path / "plan"
    report = tmp_path / "report.jsonl"
    build(
        configure("two-branch", {**SIZES["two-branch"], "loss": str(mode == "train").lower()})
    ).save(model)
    (tmp_path / "own.yaml").write_text(OWN_SIZES)
    annotated = ("--annotate", str(tmp_path / "annotated.onnx"))
    assert (
        main(
            [
                "plan",
                str(model),
                "--config",
                str(tmp_path / "own.yaml"),
                "-o",
                str(plan),
                *annotated,
            ]
        )
        == 0
    )
    printed = capsys.readouterr()
    assert (
        "warning: annotations do not tell that stages have micro-batches of their own"
        in printed.err
    )
    assert re.search(
        r"stage +devices +micro-batch +nodes.*\n0 +0 +1 .*\n1 +1 +4 .*\n2 +3,2 +2 ", printed.out
    )
    assert main(["codegen", str(plan), "-q"]) == 0
    program = plan / "program"
    assert (
        "stages 0 (8 micro-batches of 1); kfkb, 2 micro-batches of 4"
        in (program / "rank_000.py").read_text()
    )
    code, checks = verified(program, capsys)
    assert code == 0
    assert checks["gradients of the ranks" if mode == "train" else "outputs of the ranks"][
        "tensors"
    ]
    pools.of(4).run(program, "--device", "cpu", "--report", report)
    summary = json.loads((plan / "plan.json").read_text(encoding="utf-8"))["summary"]
    assert report_lines(report)[0]["communication_bytes"] == summary["communication_bytes"]
    assert main(["show", str(plan), "--json"]) == 0
    assert [
        stage["micro_batch_size"] for stage in json.loads(capsys.readouterr().out)["stages"]
    ] == [1, 4, 2]


def test_a_dry_run_counts_the_messages_of_all_turns(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    plan = tmp_path / "plan"
    build(configure("two-branch", {**SIZES["two-branch"], "loss": "true"})).save(model)
    (tmp_path / "own.yaml").write_text(OWN_SIZES)
    assert (
        main(["plan", str(model), "--config", str(tmp_path / "own.yaml"), "-o", str(plan), "-q"])
        == 0
    )
    assert main(["codegen", str(plan), "-q"]) == 0
    found = finish(start(plan / "program", "--dry-run", "--rank", 0, "--json")).result
    assert [task for task in found["tasks"] if "F" in task] == [
        f"0F{number}" for number in range(8)
    ]
    activations = 8 * 12 * 24 * 4  # eight samples of (12, 24) numbers, each to one of the two ranks
    assert (
        found["sent_bytes"]
        == found["received_bytes"]
        == {"2": activations // 2, "3": activations // 2}
    )


def test_a_wrong_program_is_found(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = generated(tmp_path, "--gpus", "2", "--batch-size", "4", "--micro-batches", "2")
    stage = program / "stage_00.py"
    text = stage.read_text(encoding="utf-8")
    head, _, result = text.rpartition("    return (")
    name = result.partition(",")[0].rstrip(")\n")
    stage.write_text(f"{head}    {name} = {name} * 1.001\n    return ({result}", encoding="utf-8")
    capsys.readouterr()
    assert main(["verify", str(program), "--device", "cpu", "--json", "-q"]) == 5
    document, error = map(json.loads, capsys.readouterr().out.splitlines())
    checks = {check["compared"]: check for check in document["checks"]}
    gradients = checks["gradients of the ranks"]
    assert float(str(gradients["relative_difference"])) > 1e-4 > float(str(gradients["limit"]))
    assert float(str(checks["outputs of one device"]["relative_difference"])) < 1e-5
    named = error["error"]["hint"].partition(": ")[2]
    assert named == "Add '/layers.0/Add_1', stage 0, rank 0"


def save_with_long_sums(path: Path) -> None:
    """Write a convolution of volumes, less its mean over 32^3 positions, pooled: ONNX Runtime adds
    them one by one.
    """
    random = np.random.default_rng(0)
    constants = {
        "kernel": random.normal(0, 0.2, (4, 1, 3, 3, 3)).astype(np.float32),
        "dense": random.normal(0, 1, (4, 4)).astype(np.float32),
        "shape": np.array([0, 4, -1]),
        "positions": np.array([2]),
        "start": np.array([8192]),
        "stop": np.array([24576]),
    }
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["convolved"], "convolve", pads=[1] * 6),
        helper.make_node("Exp", ["convolved"], ["positive"], "exponential"),
        helper.make_node("Reshape", ["positive", "shape"], ["flat"], "flatten"),
        helper.make_node("ReduceMean", ["flat", "positions"], ["mean"], "mean"),
        helper.make_node("Sub", ["flat", "mean"], ["centered"], "center"),
        helper.make_node("Slice", ["centered", "start", "stop", "positions"], ["cropped"], "crop"),
        helper.make_node("ReduceMean", ["cropped", "positions"], ["pooled"], "pool", keepdims=0),
        helper.make_node("MatMul", ["pooled", "dense"], ["y"], "dense"),
    ]
    graph = helper.make_graph(
        nodes,
        "volumes",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, 32, 32, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9),
        str(path),
    )


def test_a_difference_that_onnx_runtime_has_from_itself_is_explained(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime is far from its results in float64. A wrong program still is not equal."""
    model = tmp_path / "model.onnx"
    plan = tmp_path / "plan"
    save_with_long_sums(model)
    flags = (
        "--gpus",
        "2",
        "--batch-size",
        "4",
        "--micro-batches",
        "2",
        "--mode",
        "infer",
        "--strategy",
        "pipedream",
    )
    assert main(["plan", str(model), "--cluster", "cpu-local", *flags, "-o", str(plan), "-q"]) == 0
    assert main(["codegen", str(plan), "-q"]) == 0
    program = plan / "program"
    code, checks = verified(program, capsys)
    assert code == 0, checks
    (above,) = checks["outputs of one device"]["above"]
    assert above["spread"]["float64"] > 1e-5
    assert above["difference"] > 4.9e-7 + 4 * above["response"], "the limit without the spread"
    assert above["difference"] <= above["limit"] < 2.5e-4
    stage = program / "forward" / "stage_00.py"
    text = stage.read_text(encoding="utf-8")
    assert ", p.w1)" in text
    for fault in (", p.w1.T)", ", p.w1 * 1.001)"):
        stage.write_text(text.replace(", p.w1)", fault), encoding="utf-8")
        code, checks = verified(program, capsys)
        assert code == 5
        assert checks["outputs of one device"]["relative_difference"] > 9e-4


def test_the_first_value_beside_onnx_runtime_is_named(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = generated(
        tmp_path, "--gpus", "2", "--batch-size", "4", "--micro-batches", "2", loss=False
    )
    stage = program / "forward" / "stage_00.py"
    text = stage.read_text(encoding="utf-8")
    assert "F.gelu(" in text
    stage.write_text(text.replace("F.gelu(", "1.01 * F.gelu(", 1), encoding="utf-8")
    capsys.readouterr()
    assert main(["verify", str(program), "--device", "cpu", "--json", "-q"]) == 5
    _, error = map(json.loads, capsys.readouterr().out.splitlines())
    assert "Gelu" in error["error"]["hint"]


def test_a_missing_all_reduce_is_found(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each replica keeps the gradient of its own samples."""
    flags = (
        "--gpus",
        "2",
        "--batch-size",
        "8",
        "--micro-batches",
        "2",
        "--strategy",
        "data_parallel",
    )
    program = generated(tmp_path, *flags)
    manifest = json.loads((program / "manifest.json").read_text(encoding="utf-8"))
    for rank in manifest["ranks"]:
        for shard in rank["shards"]:
            shard["ranks"] = [rank["rank"]]
    (program / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    code, checks = verified(program, capsys)
    assert code == 5
    gradients = checks["gradients of the ranks"]
    assert float(str(gradients["relative_difference"])) > 0.1 > float(str(gradients["limit"]))


def test_a_unet_split_by_pase(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "unet.onnx"
    plan = tmp_path / "plan"
    build(configure("unet", {"loss": "true", "weights": "random", "classes": "4"})).save(model)
    flags = ("--gpus", "4", "--batch-size", "8", "--micro-batches", "2", "--strategy", "pase")
    assert main(["plan", str(model), *flags, "-o", str(plan), "-q"]) == 0
    assert main(["codegen", str(plan), "-q"]) == 0
    code, checks = verified(plan / "program", capsys)
    assert code == 0
    assert all(float(str(check["limit"])) < 1e-3 for check in checks.values()), (
        "a factor of 1.001 would be found"
    )


class BrainFloats(torch.nn.Module):
    """Parameters, a table, numbers and a value without dimensions, all in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 50)
        self.register_buffer("table", torch.linspace(0.1, 1.0, 16))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(ids) * self.table) * 0.7 * scale
        return torch.nn.functional.cross_entropy(
            self.head(hidden).flatten(0, 1).float(), labels.flatten()
        )


@pytest.mark.parametrize("dynamo", [False, True])
def test_an_export_in_bfloat16(
    here: None, pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str], dynamo: bool
) -> None:
    """Launched, saved, exported, and verified against ONNX Runtime, which knows hardly an operator
    in bfloat16.
    """
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (4, 6))
    scale = torch.tensor(0.5, dtype=torch.bfloat16)
    model = tmp_path / "model.onnx"
    trained = tmp_path / "trained.onnx"
    plan = tmp_path / "plan"
    names = {"input_names": ["ids", "labels", "scale"], "output_names": ["loss"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            BrainFloats().bfloat16(), (ids, ids, scale), str(model), dynamo=dynamo, **names
        )  # type: ignore[arg-type]
    flags = ("--gpus", "2", "--batch-size", "16", "--micro-batches", "4", "--strategy", "pipedream")
    assert main(["plan", str(model), *flags, "-o", str(plan), "-q"]) == 0
    assert main(["codegen", str(plan), "-q"]) == 0
    saved = ("--checkpoint", tmp_path / "saved")
    pools.of(2).run(plan / "program", "--device", "cpu", "--steps", 2, *saved)
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "-o", str(trained), "-q"]) == 0
    before, after = (
        {each.name: each for each in onnx.load(str(path)).graph.initializer}
        for path in (model, trained)
    )
    weight = next(name for name in before if name.startswith("embedding"))
    assert before[weight].data_type == after[weight].data_type == onnx.TensorProto.BFLOAT16
    assert before[weight].raw_data != after[weight].raw_data
    code, checks = verified(plan / "program", capsys)
    assert code == 0
    assert all(float(str(check["limit"])) < 0.2 for check in checks.values())
    assert float(str(checks["outputs of one device"]["relative_difference"])) < 1e-2


def test_files_say_what_they_are(tmp_path: Path) -> None:
    program = generated(tmp_path, "--gpus", "2", "--batch-size", "8", "--micro-batches", "4")
    ranks = [path.read_text(encoding="utf-8") for path in sorted(program.glob("rank_*.py"))]
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text(encoding="utf-8"))
    assert len(ranks) == 2
    for rank, text in enumerate(ranks):
        assert text.startswith(
            f'"""Rank {rank} of 2: stages {rank}; tessel, 4 micro-batches of 2 (plan '
        )
        assert f"bubble {plan['summary']['bubble_rate']:.1%}" in text
        assert f"{rank}F0" in text
    stage = (program / "stage_01.py").read_text(encoding="utf-8")
    assert stage.startswith('"""Stage 1 of 2, on device 1: layer 1, head.\n')
    for name in (verification.REFERENCE_FOLDER, verification.FORWARD_FOLDER):
        assert read_manifest(program / name).world_size == 1


def test_seeds_below_zero_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("verify", "launch"):
        assert main([command, str(tmp_path), "--seed", "-1"]) == 2
        assert "--seed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "fixed"),
    [("sum of squares", None), ("sum by batch size", 8), ("mean square", None), ("half a sum", 4)],
)
def test_losses_of_micro_batches_are_compared_with_the_whole_batch(
    name: str, fixed: int | None, here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = exported(next(each for each in LOSSES if each.name == name), tmp_path, fixed)
    flags = (
        "--gpus",
        "2",
        "--batch-size",
        "8",
        "--micro-batches",
        "4",
        "--strategy",
        "data_parallel",
    )
    plan = tmp_path / "plan"
    assert main(["plan", str(model), "--cluster", "cpu-local", *flags, "-o", str(plan), "-q"]) == 0
    assert main(["codegen", str(plan), "-q"]) == 0
    capsys.readouterr()
    code, checks = verified(plan / "program", capsys)
    assert code == 0, checks
    if name == "mean square":
        return
    # With the weight of a mean, the loss is not that of the whole batch.
    manifest = plan / "program" / "manifest.json"
    text = json.loads(manifest.read_text(encoding="utf-8"))
    del text["loss_division"]
    manifest.write_text(json.dumps(text), encoding="utf-8")
    code, checks = verified(plan / "program", capsys)
    assert code != 0
    assert checks["outputs of one device"]["relative_difference"] > 0.1
