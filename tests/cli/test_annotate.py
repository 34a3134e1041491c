"""`plan --annotate`: a plan written into its model, and planned again from there."""

from __future__ import annotations

import json

import onnx
import pytest

from autopipe.configs.zoo import build, configure
from tests.cli.command_line import CommandLine

SETTINGS = {
    "layers": "1",
    "hidden": "32",
    "heads": "2",
    "sequence": "16",
    "vocabulary": "64",
    "loss": "true",
}
CONSTRAINTS = """
strategy: {name: manual}
gpus: 8
batch_size: 16
micro_batches: 4
constraints:
- {match: "re:/layers.0/feed_forward.*", stage: 1, devices: [7, 6, 5, 4]}
- {match: "re:/(token|position).*", stage: 0, devices: [0, 1, 2, 3]}
- {match: "/layers.0/feed_forward/up/MatMul", split: {b: 2, n: 2}}
- {match: "/layers.0/feed_forward/down/MatMul", split: {k: 2}}
- {match: "/layers.0/attention/MatMul_1", split: {h: 2, b: 2}}
- {match: "/norm/LayerNormalization", split: {}}
"""
AGAIN = (
    "--strategy",
    "manual",
    "--cluster",
    "a100-80gb",
    "--gpus",
    8,
    "--batch-size",
    16,
    "--micro-batches",
    4,
)


@pytest.fixture
def annotated(command_line: CommandLine) -> CommandLine:
    """`gpt.onnx` planned by constraints into `a.plan` and annotated in `out.onnx`."""
    build(configure("gpt", SETTINGS)).save(command_line.folder / "gpt.onnx")
    (command_line.folder / "c.yaml").write_text(CONSTRAINTS)
    command_line.done(
        "plan",
        "gpt.onnx",
        "--config",
        "c.yaml",
        "--cluster",
        "a100-80gb",
        "--annotate",
        "out.onnx",
        "-o",
        "a.plan",
    )
    return command_line


def placement(command_line: CommandLine, plan: str) -> object:
    return json.loads((command_line.folder / plan / "plan.json").read_text())["placement"]


def test_annotations_are_followed_to_the_same_placement(annotated: CommandLine) -> None:
    shown = annotated.done("plan", "out.onnx", *AGAIN, "-o", "b.plan", "--annotate", "again.onnx")
    assert "annotated model in again.onnx" in shown.out
    assert shown.err == ""
    first = placement(annotated, "a.plan")
    assert first == placement(annotated, "b.plan")
    assert [stage["devices"] for stage in first["stages"]] == [[0, 1, 2, 3], [7, 6, 5, 4]]  # type: ignore[index]
    out, again = (onnx.load(annotated.folder / name) for name in ("out.onnx", "again.onnx"))
    assert out == again
    assert out.configuration[0].device[7] == "A100-SXM4-80GB:7"


def test_the_rest_of_the_way_takes_an_annotated_model(annotated: CommandLine) -> None:
    annotated.done("plan", "out.onnx", *AGAIN, "-o", "b.plan")
    annotated.done("codegen", "b.plan")
    assert json.loads(annotated.done("inspect", "out.onnx", "--json").out)["warnings"] == []


def test_what_does_not_fit_the_annotations_is_refused(annotated: CommandLine) -> None:
    fewer = ("plan", "out.onnx", "--strategy", "manual", "--gpus", 4)
    annotated.refuses(
        2, fewer, "other numbers of devices than 4: 'autopipe-8' for 8", "without annotations"
    )
    other = ("--set", "constraints=[{match: '/layers.0/feed_forward/up/MatMul', stage: 0}]")
    annotated.refuses(
        2,
        ("plan", "out.onnx", *AGAIN, *other),
        "up/MatMul'",
        "annotation of stage 1",
        "different stages",
    )
    for strategy in ("data_parallel", "pipedream", "tessel_shapes"):
        words = (
            "plan",
            "out.onnx",
            "--gpus",
            8,
            "--batch-size",
            32,
            "--micro-batches",
            4,
            "--strategy",
            strategy,
        )
        annotated.refuses(2, words, "use strategy manual, which follows all")


def test_the_annotated_model_is_written_where_it_can_be(annotated: CommandLine) -> None:
    words = ("plan", "gpt.onnx", "--gpus", 2, "--annotate")
    annotated.refuses(2, (*words, "gpt.onnx"), "gpt.onnx exists and is an input of this command")
    annotated.refuses(2, (*words, "gpt.onnx", "--force"), "gpt.onnx is the model itself")
    annotated.refuses(2, (*words, "a.plan"), "a.plan is a folder")
    annotated.refuses(2, (*words, "gone/out.onnx"), "gone", "folder does not exist")


def test_two_pipelines_have_no_annotations(annotated: CommandLine) -> None:
    words = (
        "plan",
        "gpt.onnx",
        "--gpus",
        2,
        "--batch-size",
        8,
        "--micro-batches",
        4,
        "--strategy",
        "tessel_shapes",
    )
    chimera = ("--set", "strategy.shape=x", "--annotate", "x.onnx")
    annotated.refuses(2, (*words, *chimera), "the number of pipelines is 2", "one pipeline")
