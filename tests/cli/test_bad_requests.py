"""Requests that do not fit the model: what `plan` and `inspect` refuse once they know it, and with
which exit code.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.command_line import CommandLine
from tests.passes.frontend.building import floats, model, node, saved

MODEL = "model.onnx"


def perceptron(batch: int | str = "batch", width: int = 8, trains: bool = False) -> onnx.ModelProto:
    """[batch, width] → MatMul → Relu → MatMul → Relu → y; with `trains` also its mean, `loss`."""
    nodes = [
        node("MatMul", "x w0", "a"), node("Relu", "a", "b"), node("MatMul", "b w1", "c"), node("Relu", "c", "y"),
    ]  # fmt: skip
    held = {"w0": floats(width, 16), "w1": floats(16, 4)}
    if not trains:
        return model(nodes, {"x": [batch, width]}, "y", held)  # type: ignore[list-item]
    held["axes"] = np.array([0, 1])
    nodes.append(node("ReduceMean", "y axes", "loss", keepdims=0))
    return model(nodes, {"x": [batch, width]}, "y loss", held)  # type: ignore[list-item]


def sequences() -> onnx.ModelProto:
    """A model with a symbolic dimension besides the batch."""
    return model([node("MatMul", "x w", "y")], {"x": ["batch", "seq", 8]}, "y", {"w": floats(8, 4)})


def several_losses() -> onnx.ModelProto:
    """A model with two scalar outputs, of which none is called loss."""
    nodes = [
        node("MatMul", "x w", "y"),
        node("ReduceMean", "y", "a", keepdims=0),
        node("ReduceMax", "y", "b", keepdims=0),
    ]
    return model(nodes, {"x": ["batch", 8]}, "a b", {"w": floats(8, 4)})


MANUAL = (
    "--strategy",
    "manual",
    "--gpus",
    "4",
    "--batch-size",
    "32",
    "--micro-batches",
    "4",
    "--set",
)
ONE_STAGE = "{match: 're:.*', stage: 0}"
HUGE = 10**30

REQUESTS: dict[str, tuple[onnx.ModelProto, int, tuple[str, ...], tuple[str, ...]]] = {
    "dimension without extent": (sequences(), 2, (), ("dimension 'seq'", "input 'x'", "--dim seq=SIZE")),
    "unknown dimension": (sequences(), 2, ("--dim", "seq=4", "--dim", "sec=4"), ("--dim sec", "'seq'")),
    "dimension of a static model": (perceptron(4), 2, ("--dim", "batch=3"), ("--dim batch", "all dimensions of the model's inputs are static")),
    "batch of the file": (
        perceptron(4), 2, ("--micro-batch-size", "3"), ("micro-batches of 3", "4 samples that the model fixes")
    ),
    "batch not divisible": (
        perceptron(), 2, ("--batch-size", "10", "--micro-batches", "4"), ("micro_batches 4", "batch_size 10", "such as 5")
    ),
    "batch that is too large": (perceptron(), 2, ("--batch-size", str(HUGE)), ("--batch-size", "at most")),
    "count that is too large": (perceptron(), 2, ("--micro-batches", str(HUGE)), ("--micro-batches", "at most")),
    "more micro-batches than a schedule can list": (
        perceptron(), 2, ("--batch-size", str(2**40), "--micro-batch-size", "1"), (f"{2**40} micro-batches", "65536")
    ),
    "extent that is too large": (perceptron(), 2, ("--dim", f"batch={HUGE}"), (f"--dim batch={HUGE}", "at most")),
    "train without a loss": (perceptron(), 2, ("--mode", "train"), ("lacks an output 'loss'", "--mode infer")),
    "several losses": (
        several_losses(), 2, (), ("several outputs can be the loss: 'a', 'b'", "--set loss=a", "--mode infer")
    ),
    "several losses to train": (several_losses(), 2, ("--mode", "train"), ("several outputs can be the loss", "loss=a")),
    "unknown loss": (perceptron(trains=True), 2, ("--set", "loss=lost"), ("loss names 'lost'", "'loss'")),
    "loss that is no number": (
        perceptron(), 2, ("--set", "loss=y"), ("output 'y'", "float32[1, 4]", "cross_entropy")
    ),
    "unknown logits": (
        perceptron(), 2, ("--set", "loss={cross_entropy: {logits: yy, labels: t}}"), ("logits 'yy'", "'y'")
    ),
    "labels of another shape": (
        perceptron(), 2, ("--set", "loss={cross_entropy: {logits: y, labels: x}}"), ("labels 'x'", "float32[1, 8]")
    ),
    "unknown batch axis": (perceptron(), 2, ("--set", "model.batch_axes={z: 0}"), ("'z', which is not an input", "'x'")),
    "batch axis out of range": (perceptron(), 2, ("--set", "model.batch_axes={x: 2}"), ("sets axis 2 for input 'x'", "has 2 dimensions")),
    "constraint on no node": (
        perceptron(), 2, ("--set", "constraints=[{match: matmul_aa, stage: 0}]"), ("'matmul_aa'", "'matmul_a'")
    ),
    "constraints that contradict": (
        perceptron(), 2, ("--set", f"constraints=[{ONE_STAGE}, {{match: relu_b, stage: 1}}]"),
        ("'re:.*'", "'relu_b'", "different stages"),
    ),
    "constraints against the order": (
        perceptron(), 2, ("--set", "constraints=[{match: matmul_a, stage: 1}, {match: relu_y, stage: 0}]"), ("stage",)
    ),
    "device that is not there": (
        perceptron(), 2, ("--cluster", "cpu-local", "--gpus", "2", "--set", "constraints=[{match: '*', devices: [2]}]"),
        ("device 2", "number of devices is 2"),
    ),
    "splits that contradict": (
        perceptron(), 2, (*MANUAL, "constraints=[{match: '*', split: {b: 2}}, {match: matmul_a, split: {n: 2}}]"),
        ("'*'", "'matmul_a'", "different splits"),
    ),
    "a split along no axis": (
        perceptron(), 2, (*MANUAL, "constraints=[{match: matmul_a, split: {b: 2, s: 2}}]"),
        ("'matmul_a'", "axis 's', but none of the matching nodes has", "m, k, n"),
    ),
    "a split that no degree divides": (
        perceptron(width=6), 2, (*MANUAL, "constraints=[{match: matmul_a, split: {k: 4}}]"),
        ("'matmul_a'", "axis 'k' into 4 parts", "size 6", "3 devices"),
    ),
    "a split into more parts than devices": (
        perceptron(), 2, (*MANUAL, "constraints=[{match: matmul_a, split: {b: 4, n: 2}}]"),
        ("'matmul_a'", "8 parts (m:4, n:2)", "4 devices of stage 0"),
    ),
    "a group that is larger than the cluster": (
        perceptron(), 2, (*MANUAL, "constraints=[{match: '*', devices: [0, 1, 2, 3, 4, 5, 6, 7]}]"),
        ("device 7", "number of devices is 4", "0 to 3"),
    ),
    "an axis that must stay whole": (
        model([node("CumSum", "x axis", "y")], {"x": ["batch", 4]}, "y", {"axis": np.array(1)}), 2,
        (*MANUAL, "constraints=[{match: '*', split: {d1: 2}}]"), ("'cumsum_y'", "'d1'", "cannot be split"),
    ),
    "manual without constraints": (perceptron(), 2, ("--strategy", "manual"), ("constraint",)),
    "more devices than the cluster has": (
        perceptron(), 4, ("--gpus", "3", "--set", "cluster={preset: summit, nodes: 1, devices_per_node: 2}"),
        ("summit consists of 2 devices", "1 fewer than the requested 3"),
    ),
    "memory": (
        perceptron(trains=True), 4, ("--gpus", "2", "--strategy", "pipedream", "--memory-limit", "1KiB"),
        ("stage 0 of 2 needs 2.19 KiB", "1.19 KiB over the limit of 1.00 KiB"),
    ),
    "memory of data parallelism": (
        perceptron(trains=True), 4, ("--gpus", "2", "--strategy", "data_parallel", "--memory-limit", "1KiB"),
        ("stage 0 of 1 needs", "over the limit of 1.00 KiB"),
    ),
    "memory of manual stages": (
        perceptron(trains=True), 4,
        ("--gpus", "1", "--strategy", "manual", "--set", f"constraints=[{ONE_STAGE}]", "--memory-limit", "1KiB"),
        ("stage 0 of 1 needs", "over the limit of 1.00 KiB"),
    ),
    "a search of no time": (
        perceptron(), 2, ("--set", "schedule={name: tessel, time_limit: 0}"), ("time_limit is 0", "above 0")
    ),
    "costs from a file": (perceptron(), 2, ("--costs", "./costs.json"), ("costs.json", "No such file")),
    "unknown pass": (perceptron(), 2, ("--dump-after", "place"), ("'place'", "pipedream")),
}  # fmt: skip
"""A model, the exit code, the words, and what is said."""


@pytest.mark.parametrize("name", REQUESTS)
def test_a_plan_that_cannot_be(command_line: CommandLine, name: str) -> None:
    proto, code, words, says = REQUESTS[name]
    saved(proto, command_line.folder)
    command_line.refuses(code, ("plan", MODEL, *words), *says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), ("dimension 'seq'", "--dim seq=SIZE")),
        (("--dim", "sec=4"), ("--dim", "'seq'")),
        (("--dim", "seq"), ("--dim is 'seq'", "NAME=SIZE")),
        (("--batch-axis", "x=7"), ("model.batch_axes", "axis 7")),
        (("--dim", "seq=-1"), ("--dim seq=-1", "at least 0")),
        (("--dim", "seq=1e3"), ("--dim seq=1e3", "whole number")),
        (("--dim", f"seq={HUGE}"), (f"--dim seq={HUGE}",)),
    ],
    ids=str,
)
def test_dimensions_of_an_inspection(
    command_line: CommandLine, words: tuple[str, ...], says: tuple[str, ...]
) -> None:
    saved(sequences(), command_line.folder)
    command_line.refuses(2, ("inspect", MODEL, *words), *says)


def test_dimensions_that_make_a_value_too_large(command_line: CommandLine) -> None:
    saved(sequences(), command_line.folder)
    command_line.refuses(
        4,
        ("plan", MODEL, "--strategy", "pipedream", "--dim", f"seq={2**40}"),
        "stage 0 of 1",
        "GiB over the limit",
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("gtp",), ("'gtp'", "did you mean 'gpt'?")),
        (("gpt", "--set", "layer=2"), ("--set layer=2", "did you mean 'layers'?")),
        (("gpt", "--set", "layers"), ("--set is 'layers'", "KEY=VALUE")),
        (("gpt", "--set", "layers=0"), ("--set layers=0", "at least 1")),
        (("gpt", "--set", "layers=two"), ("--set layers=two", "whole number")),
        (("gpt", "--set", "size=12b"), ("'12b'", "did you mean '24b'?")),
        (
            ("gpt", "--set", "hidden=10", "--set", "heads=4"),
            ("hidden = 10", "heads = 4", "multiple"),
        ),
        (("gpt", "--set", "weights=zeros"), ("'zeros'", "random, none")),
        (("gpt", "--set", "opset=999"), ("opset is 999", "at most 23")),
        (("gpt", "--set", f"layers={HUGE}"), ("too large",)),
        (
            ("gpt", "--set", "hidden=4611686018427387904"),
            ("hidden is 4611686018427387904", "at most"),
        ),
        (("gpt", "-o", "gone/gpt.onnx"), ("gone", "folder does not exist")),
        (("gpt", "-o", "."), ("folder",)),
        (("gpt", "-o", "here"), ("here", "folder")),
        (("gpt", "-o", "/proc/gpt.onnx"), ("/proc/gpt.onnx", "cannot be written")),
        (("gpt", "--set", "size=11b"), ("GiB are free", "weights=none")),
        ((), ("NAME",)),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_models_of_the_zoo_that_cannot_be_built(
    command_line: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    says: tuple[str, ...],
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 2**30}))
    Path("here").mkdir()
    command_line.refuses(2, ("zoo", "build", *words), *says)
