"""`autopipe inspect` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import onnx.helper as oh
import pytest
from click.testing import CliRunner

from autopipe.cli.inspect import inspect
from autopipe.cli.main import main
from autopipe.ir.ops import OPERATORS
from tests.passes.frontend.building import INT64, floats, model, node, saved
from tests.passes.frontend.test_branches import towers


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """One product, one loss, a symbolic batch and width."""
    nodes = [
        node("Identity", "x", "i"),
        node("MatMul", "i w", "logits"),
        node("SoftmaxCrossEntropyLoss", "logits labels", "loss"),
    ]
    proto = model(
        nodes, {"x": ["batch", "width"], "labels": (INT64, ["batch"])}, "loss", {"w": floats(16, 5)}
    )
    return saved(proto, tmp_path)


def run(*words: str) -> str:
    result = CliRunner().invoke(inspect, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_object_says_what_the_model_is(classifier: Path) -> None:
    shown = json.loads(run(str(classifier), "--dim", "width=16", "--dim", "batch=4", "--json"))
    assert shown["inputs"] == [
        {"name": "x", "type": "float32", "shape": [4, 16]},
        {"name": "labels", "type": "int64", "shape": [4]},
    ]
    assert (shown["mode"], shown["loss"], shown["batch"], shown["batch_axes"]) == (
        "train", "loss", 4, {"x": 0, "labels": 0},
    )  # fmt: skip
    assert (shown["parameters"], shown["parameter_bytes"], shown["buffer_tensors"]) == (80, 320, 0)
    assert shown["initial_values"] == {"stored": 1}
    assert (shown["nodes_before"], shown["nodes"]) == (3, 2)
    assert shown["operators"] == {"MatMul": 1, "SoftmaxCrossEntropyLoss": 1}
    product = 2 * 4 * 16 * 5
    assert shown["forward_flops"] >= product and shown["forward_flops"] < 2 * product
    assert shown["unsupported"] == shown["branches"] == shown["warnings"] == []


def test_the_screen_shows_the_same(classifier: Path) -> None:
    text = run(str(classifier), "--dim", "width=16")
    for words in (
        "'x' float32[1, 16], samples on axis 0",
        "80 in 1 tensor, 320 bytes",
        "2 of 3",
        "loss 'loss'",
    ):
        assert words in text
    assert text.count("\n") <= 24


def test_how_parameters_begin(tmp_path: Path) -> None:
    """Of a model without weights, by what reads them."""
    nodes = [
        node("Gather", "table x", "e"),
        node("LayerNormalization", "e scale offset", "n"),
        node("LSTM", "n w r", "y"),
    ]
    nodes[2].attribute.append(oh.make_attribute("hidden_size", 4))
    types = {"table": [11, 4], "scale": [4], "offset": [4], "w": [1, 16, 4], "r": [1, 16, 4]}
    path = saved(model(nodes, {"x": (INT64, [2, 3])}, "y", types=types), tmp_path)  # type: ignore[arg-type]
    shown = json.loads(run(str(path), "--json"))
    assert shown["initial_values"] == {"uniform ±0.5": 2, "normal 0.02": 1, "ones": 1, "zeros": 1}
    assert "initial values  2 uniform ±0.5, 1 normal 0.02, 1 ones, 1 zeros" in run(str(path))


def test_operators_without_a_row_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(OPERATORS, "HardSwish")
    nodes = [node("HardSwish", "x", "a"), node("HardSwish", "a", "y")]
    path = saved(model(nodes, {"x": [2, 3]}, "y"), tmp_path)
    shown = json.loads(run(str(path), "--json"))
    assert shown["unsupported"] == [
        {
            "operator": "HardSwish",
            "count": 2,
            "node": "hardswish_a",
            "reason": "an operator of ONNX that autopipe does not define",
        }
    ]
    assert shown["forward_flops"] is None
    assert "HardSwish (2), first at 'hardswish_a'" in " ".join(run(str(path)).split())


def test_errors_are_one_line_with_the_right_code(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(classifier)]) == 2
    assert "add --dim width=SIZE" in capsys.readouterr().err
    assert main(["inspect", str(classifier), "--dim", "width"]) == 2
    assert "expected NAME=SIZE" in capsys.readouterr().err
    nothing = tmp_path / "nothing.onnx"
    nothing.write_bytes(b"")
    assert main(["inspect", str(nothing)]) == 3
    assert "nothing.onnx: the model file is empty" in capsys.readouterr().err
    foreign = onnx.ModelProto.FromString(classifier.read_bytes())
    foreign.opset_import.add(domain="org.example", version=1)
    foreign.graph.node.append(
        oh.make_node("Magic", ["logits"], ["m"], name="wand", domain="org.example")
    )
    assert (
        main(["inspect", str(saved(foreign, tmp_path, "foreign.onnx")), "--dim", "width=16"]) == 3
    )
    error = capsys.readouterr().err
    assert "org.example.Magic (1)" in error and "'wand'" in error and "Traceback" not in error


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """Two products and a normalization with statistics."""
    nodes = [
        node("MatMul", "x enc.w", "h"), node("BatchNormalization", "h s o m v", "n"),
        node("MatMul", "n dec.w", "logits"), node("SoftmaxCrossEntropyLoss", "logits labels", "loss"),
    ]  # fmt: skip
    held = {
        "enc.w": floats(4, 5),
        "dec.w": floats(5, 3),
        "s": floats(5),
        "o": floats(5),
        "m": floats(5),
    }
    held["v"] = abs(floats(5, seed=1)) + 1
    return saved(model(nodes, {"x": [2, 4], "labels": (INT64, [2])}, "loss", held), tmp_path)


def test_what_is_trained_is_said_in_three_lines_at_most_and_whole_when_asked(layers: Path) -> None:
    lines = [
        line.strip()
        for line in run(str(layers)).splitlines()
        if line.startswith(("trained", "not trained"))
    ]
    assert [" ".join(line.split()) for line in lines] == [
        "trained 45 elements in 4 tensors: 45 by its use",
        "not trained 10 elements in 2 tensors: 10 a running statistic",
    ]
    text = run(str(layers), "-v")
    assert "'enc.w' 4×5, 20: by its use" in text and "'m' 5, 5: a running statistic" in text
    tensors = {each["name"]: each for each in json.loads(run(str(layers), "--json"))["tensors"]}
    assert tensors["enc.w"] == {
        "name": "enc.w", "shape": [4, 5], "elements": 20, "trained": True, "why": "by its use", "doubtful": False,
    }  # fmt: skip


SIGNATURE = (
    "# inputs\np_enc_w: PARAMETER target='enc.w'\np_dec_w: PARAMETER target='dec.w'\nx: "
    "USER_INPUT\n"
)


RECORDS = {
    "torch's older exporter": (
        "pytorch",
        False,
        False,
        ["detach", "padding_idx", "no_grad", "requires_grad=False"],
    ),
    "torch's newer exporter": ("pytorch", True, False, ["no_grad", "requires_grad=False"]),
    "autopipe export": ("pytorch", True, True, []),
    "another program": ("", False, False, []),
}
"""By the writer of a file: its producer, whether it has a signature and a list of frozen
parameters, and what it does not record of a module's gradients.
"""


@pytest.mark.parametrize(
    ("producer", "signed", "frozen", "unrecorded"), RECORDS.values(), ids=RECORDS
)
def test_what_a_file_does_not_record_of_gradients_is_said(
    producer: str,
    signed: bool,
    frozen: bool,
    unrecorded: list[str],
    layers: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    proto = onnx.load(layers)
    proto.producer_name = producer
    if signed:
        proto.metadata_props.add(
            key="pkg.torch.export.ExportedProgram.graph_signature", value=SIGNATURE
        )
    if frozen:
        proto.metadata_props.add(key="autopipe.frozen", value="[]")
    onnx.save(proto, layers)
    assert json.loads(run(str(layers), "--json"))["unrecorded"] == unrecorded
    text = " ".join(run(str(layers)).split())
    assert ("gradients unknown" in text) == bool(unrecorded)
    told = f"the file records no {', '.join(unrecorded)} (autopipe export does)"
    assert told in text or not unrecorded
    words = [
        "plan",
        str(layers),
        "--gpus",
        "1",
        "--cluster",
        "cpu-local",
        "-o",
        str(layers.with_suffix(".plan")),
    ]
    assert main(words) == 0
    assert (told in " ".join(capsys.readouterr().out.split())) == bool(unrecorded)


def test_inspect_imports_no_solver_and_nothing_that_runs_models(tmp_path: Path) -> None:
    """The model has heavy branches side by side, which `inspect` looks for."""
    path = saved(towers(2, 3), tmp_path)
    text = (
        f"import sys\nfrom autopipe.cli.main import main\ncode = main(['inspect', {str(path)!r}])\n"
    )
    text += "print(*sys.modules, sep='\\n', file=sys.stderr)\nsys.exit(code)\n"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert "matmul_t1_0" in done.stdout
    assert {"scipy", "ortools", "pulp", "torch", "onnxruntime"}.isdisjoint(done.stderr.split())


def test_outputs_that_can_each_be_the_loss_are_listed(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "x w", "y"),
        node("ReduceMean", "y", "a", keepdims=0),
        node("ReduceMax", "y", "b", keepdims=0),
    ]
    path = saved(model(nodes, {"x": [2, 8]}, "a b", {"w": floats(8, 4)}), tmp_path)
    assert json.loads(run(str(path), "--json"))["loss_choices"] == ["a", "b"]
    assert "2 outputs can be the loss ('a', 'b'): name one by --set loss=NAME to train" in " ".join(
        run(str(path)).split()
    )
