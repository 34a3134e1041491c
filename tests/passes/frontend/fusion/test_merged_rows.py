"""Matrix products whose rows merge positions and samples: after the rule, samples can be split over
devices, and results are equal.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from autopipe.ir.batch import batch_axes_of
from autopipe.ir.graph import Graph
from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import floats, integers, model, node, saved
from tests.passes.frontend.reference import assert_close, random_feeds, run, run_read

POSITIONS = 5
HIDDEN = 8
BATCH = 4


def _splits_samples(graph: Graph) -> bool:
    """True if all nodes with a sample dimension can be split along it."""
    axes = batch_axes_of(graph)
    return all(axes.axis(index) is not None for index, found in enumerate(axes.nodes) if found)


def _merged(product: list[onnx.NodeProto], order: list[int], **held: np.ndarray) -> onnx.ModelProto:
    """Return a model: x [samples, positions, hidden] with axes in `order`, merged to rows, times a
    matrix (`p`), separated again (`y`).
    """
    nodes = [node("Transpose", "x", "t", perm=order), node("Reshape", "t rows", "r"), *product]
    lead = [BATCH if axis == 0 else POSITIONS for axis in order[:2]]
    shapes = {"rows": integers(BATCH * POSITIONS, HIDDEN), "apart": integers(*lead, -1)}
    return model(
        [*nodes, node("Reshape", "p apart", "y")],
        {"x": [BATCH, POSITIONS, HIDDEN]},
        "y",
        shapes | held,
    )


@pytest.mark.parametrize(
    ("product", "held"),
    [
        (node("MatMul", "r w", "p"), {"w": floats(HIDDEN, 3)}),
        (node("Gemm", "r w", "p"), {"w": floats(HIDDEN, 3)}),
        (node("Gemm", "r w b", "p", transB=1), {"w": floats(3, HIDDEN), "b": floats(3)}),
        (node("Gemm", "r w b", "p"), {"w": floats(HIDDEN, 3), "b": floats(3)}),
        (node("Gemm", "r w b", "p", alpha=0.5, beta=2.0), {"w": floats(HIDDEN, 3), "b": floats(3)}),
    ],
    ids=["MatMul", "Gemm", "transposed", "biased", "scaled"],
)
def test_a_product_of_merged_rows(
    tmp_path: Path, product: onnx.NodeProto, held: dict[str, np.ndarray]
) -> None:
    path = saved(_merged([product], [1, 0, 2], **held), tmp_path)
    read = read_model(path)
    feeds = random_feeds(read.graph)
    assert_close(run_read(read, feeds), run(path, feeds))
    is_scaled = any(each.name == "alpha" for each in product.attribute)
    assert _splits_samples(read.graph) != is_scaled


def test_rows_with_samples_first_stay_merged(tmp_path: Path) -> None:
    held = {"w": floats(HIDDEN, 3)}
    read = read_model(saved(_merged([node("MatMul", "r w", "p")], [0, 1, 2], **held), tmp_path))
    assert _splits_samples(read.graph)
    (product,) = (each for each in read.graph.nodes if each.op == "MatMul")
    assert read.graph.type_of(product.outputs[0]).shape == (BATCH * POSITIONS, 3)


class Network(torch.nn.Module):
    """A torch layer on sequences [samples, positions, hidden] or [positions, samples, hidden]."""

    def __init__(self, kind: str, batch_first: bool) -> None:
        super().__init__()
        self.kind = kind
        self.batch_first = batch_first
        if kind == "encoder":
            layer = torch.nn.TransformerEncoderLayer(
                HIDDEN, 2, 16, dropout=0.0, batch_first=batch_first
            )
            self.inner: torch.nn.Module = torch.nn.TransformerEncoder(
                layer, 1, enable_nested_tensor=False
            )
        elif kind == "decoder":
            self.inner = torch.nn.TransformerDecoderLayer(
                HIDDEN, 2, 16, dropout=0.0, batch_first=batch_first
            )
        else:
            self.inner = torch.nn.MultiheadAttention(
                HIDDEN, 2, bias=kind != "no bias", batch_first=batch_first
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequence = x if self.batch_first else x.transpose(0, 1)
        if self.kind == "encoder":
            found = self.inner(sequence)
        elif self.kind == "decoder":
            found = self.inner(sequence, sequence)
        else:
            found, _ = self.inner(sequence, sequence, sequence, need_weights=self.kind == "weights")
        result: torch.Tensor = found if self.batch_first else found.transpose(0, 1)
        return result


@pytest.mark.parametrize("batch_first", [True, False], ids=["samples first", "positions first"])
@pytest.mark.parametrize("kind", ["attention", "weights", "no bias", "encoder", "decoder"])
def test_multihead_attention_is_split_by_samples(
    tmp_path: Path, kind: str, batch_first: bool
) -> None:
    torch.manual_seed(0)
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Network(kind, batch_first).train(),
            (torch.randn(2, POSITIONS, HIDDEN),),
            str(path),
            input_names=["x"],
            dynamo=False,
            dynamic_axes={"x": {0: "samples"}},
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            opset_version=17,
        )
    read = read_model(path, batch=BATCH)
    assert _splits_samples(read.graph)
    feeds = random_feeds(read.graph)
    assert_close(run_read(read, feeds), run(path, feeds), tolerance=1e-4)
