"""A cross-entropy that makes its scores itself: its splits, against torch's own of the product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from autopipe.backends.torch.codegen import normalization
from autopipe.backends.torch.runtime.operators import linear_cross_entropy
from autopipe.ir.graph import DType, Graph, Node, Value
from autopipe.ir.ops import operator_of, signature_of
from tests.ir.ops.splitting import Use, check, check_pairs

LABELS = (4, 6)
FEATURES = 3
CLASSES = 10
TENSORS = {
    "x": np.random.default_rng(0).standard_normal((*LABELS, FEATURES)),
    "labels": np.random.default_rng(1).integers(0, CLASSES, LABELS),
    "class_weight": np.random.default_rng(2).random(CLASSES) + 0.5,
    "weight": np.random.default_rng(3).standard_normal((FEATURES, CLASSES)),
    "bias": np.random.default_rng(4).standard_normal(CLASSES),
}


def use_of(*absent: str, transposed: bool = False, **attributes: Any) -> Use:
    arrays = {name: each for name, each in TENSORS.items() if name not in absent}
    if transposed:
        arrays["weight"] = np.ascontiguousarray(arrays["weight"].T)
    settings = (*attributes.items(), *([("transB", 1)] * transposed))
    inputs = tuple(name if name in arrays else "" for name in TENSORS)
    node = Node("loss", "LinearCrossEntropy", inputs, ("y",), settings, "autopipe")
    types = tuple(Value(name, DType(each.dtype.name), each.shape) for name, each in arrays.items())
    shape = LABELS if attributes.get("reduction") == "none" else ()
    return Use(
        Graph("loss", 23, types, (), (), (node,), ("y",), (Value("y", DType.FLOAT64, shape),)),
        node,
        arrays,
    )


@pytest.mark.parametrize(
    ("use", "line", "mixes"),
    [
        (use_of("class_weight", reduction="none"), "n d0 k!, n d0, ?, k! c&, c& -> n d0", False),
        (
            use_of("class_weight", "bias", reduction="sum", softcap=2.0),
            "n+ d0+ k!, n+ d0+, ?, k! c&, ? -> ",
            False,
        ),
        (use_of("class_weight", transposed=True), "n~ d0~ k!, n~ d0~, ?, c& k!, c& -> ", False),
        (use_of("bias", transposed=True), "n& d0& k!, n& d0&, 1, c& k!, ? -> ", True),
        (use_of("class_weight", ignore_index=3), "n& d0& k!, n& d0&, ?, k! c&, c& -> ", True),
    ],
    ids=["none", "sum", "mean", "weighted", "ignored"],
)
def test_it_is_shared_out_by_label_and_by_class(
    use: Use, line: str, mixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normalization, "MAX_CLASSES_PER_BLOCK", 4)
    assert str(use.space) == line
    operator = operator_of(use.node)
    assert operator is not None
    assert operator.mixes_samples(signature_of(use.graph, use.node)) is mixes
    assert check(use) == 3
    assert check_pairs(use) == 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings", [{}, {"reduction": "sum", "ignore_index": 3}, {"reduction": "none"}]
)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_it_is_the_loss_of_the_product(
    dtype: torch.dtype, settings: dict[str, Any], softcap: float
) -> None:
    x, weight, bias = (
        torch.from_numpy(TENSORS[name]).to(dtype).requires_grad_()
        for name in ("x", "weight", "bias")
    )
    labels, factors = (torch.from_numpy(TENSORS[name]) for name in ("labels", "class_weight"))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    scores = (x @ weight + bias).to(wide)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    expected = F.cross_entropy(scores.transpose(1, 2), labels, factors.to(wide), **settings)
    found = linear_cross_entropy(
        x, labels, weight.t(), bias, step=4, class_weight=factors, softcap=softcap, **settings
    )
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    gradients = (
        torch.autograd.grad(each.square().sum(), (x, weight, bias)) for each in (found, expected)
    )
    for ours, theirs in ((found, expected), *zip(*gradients, strict=True)):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


def test_scores_that_overflow_and_blocks_without_any_are_no_trouble() -> None:
    scores = torch.tensor([[1000.0, -1000.0, 999.0, 0.0]])
    bias = torch.tensor([-torch.inf, -torch.inf, 0.0, 0.0]).requires_grad_()
    labels = torch.tensor([2])
    x = torch.ones(1, 1, requires_grad=True)
    found = linear_cross_entropy(x, labels, scores.t(), bias, step=2)
    expected = F.cross_entropy(scores * x + bias, labels)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        *(torch.autograd.grad(each, (x, bias)) for each in (found, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
