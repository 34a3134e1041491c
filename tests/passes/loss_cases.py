"""Losses of a small network, each with how the loss of a batch depends on the losses of its
parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopipe.passes.analysis.batch_forms import LossKind

WIDTH = 6
CLASSES = 4
MEAN = LossKind.MEAN
SUM = LossKind.SUM
RATIO = LossKind.RATIO
MIXED = LossKind.MIXED

Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function from the scores [samples, classes], the labels [samples], the targets [samples, classes]
and a weight of the network to a loss.
"""


@dataclass(frozen=True, slots=True)
class LossCase:
    name: str
    kind: LossKind
    function: Function


def _hard_triplets(scores: Tensor, labels: Tensor) -> Tensor:
    """Triplet loss with the farthest sample of each label and the nearest one of other labels."""
    squares = (scores * scores).sum(1, keepdim=True)
    distances = squares + squares.t() - 2 * scores @ scores.t()
    alike = (labels[:, None] == labels[None, :]).float()
    farthest = (distances * alike).max(1).values
    nearest = (distances + 1e3 * alike).min(1).values
    return torch.relu(farthest - nearest + 1).mean()


def _contrastive(scores: Tensor, targets: Tensor) -> Tensor:
    """InfoNCE of two views of the samples."""
    products = F.normalize(scores, dim=1) @ F.normalize(targets, dim=1).t() / 0.1
    return F.cross_entropy(products, torch.arange(scores.shape[0]))


def _dice(scores: Tensor, targets: Tensor, axes: tuple[int, ...]) -> Tensor:
    found = scores.sigmoid()
    wanted = targets.sigmoid()
    return (
        1 - (2 * (found * wanted).sum(axes) + 1) / (found.sum(axes) + wanted.sum(axes) + 1)
    ).mean()


def _focal(scores: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(scores, labels, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def _focal_sum(scores: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(scores, labels, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).sum()


def _smoothed(scores: Tensor, labels: Tensor) -> Tensor:
    logarithms = F.log_softmax(scores, 1)
    return 0.9 * F.nll_loss(logarithms, labels) - 0.1 * logarithms.mean()


def _smooth_absolute(scores: Tensor, targets: Tensor) -> Tensor:
    distance = (scores - targets).abs()
    return torch.where(distance < 1, 0.5 * distance * distance, distance - 0.5).mean()


def _class_balanced(scores: Tensor, labels: Tensor) -> Tensor:
    """Labels weigh less, the more samples of a batch have them."""
    counts = F.one_hot(labels, CLASSES).float().sum(0) + 1
    loss = F.cross_entropy(scores, labels, reduction="none")
    return (loss / counts[labels]).mean()


def _entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * probabilities.log()).sum()


def _shifted(targets: Tensor, axis: int) -> Tensor:
    """Targets that are moved by one along an axis behind a zero, as labels are that a decoder
    reads.
    """
    shifted = torch.zeros_like(targets)
    if axis == 0:
        shifted[1:] = targets[:-1]
    else:
        shifted[:, 1:] = targets[:, :-1]
    return shifted


def _every_second_zeroed(scores: Tensor) -> Tensor:
    zeroed = 2 * scores
    zeroed[:, ::2] = 0
    return zeroed


def _positions(scores: Tensor) -> Tensor:
    """The numbers of the classes, repeated for each sample."""
    return torch.arange(CLASSES).expand(scores.shape[0], CLASSES)


def _squares(scores: Tensor, targets: Tensor) -> Tensor:
    return (scores - targets) ** 2


_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 4.0])
LOSSES = (
    LossCase("mean square", MEAN, lambda z, y, t, w: _squares(z, t).mean()),
    LossCase("sum of squares", SUM, lambda z, y, t, w: _squares(z, t).sum()),
    LossCase("sum per sample", MEAN, lambda z, y, t, w: _squares(z, t).sum(1).mean()),
    LossCase("half a sum", SUM, lambda z, y, t, w: 0.5 * _squares(z, t).sum()),
    LossCase("root mean square", RATIO, lambda z, y, t, w: _squares(z, t).mean().sqrt()),
    LossCase("root per sample", MEAN, lambda z, y, t, w: _squares(z, t).mean(1).sqrt().mean()),
    LossCase("sum by batch size", MEAN, lambda z, y, t, w: _squares(z, t).sum() / z.shape[0]),
    LossCase("samples by batch size", MEAN, lambda z, y, t, w: (_squares(z, t).sum(1) / z.shape[0]).sum()),
    LossCase("sum by a constant", SUM, lambda z, y, t, w: _squares(z, t).sum() / 4),
    LossCase("mean times batch size", SUM, lambda z, y, t, w: _squares(z, t).mean() * z.shape[0]),
    LossCase("sum by batch size less one", MIXED, lambda z, y, t, w: _squares(z, t).sum() / (z.shape[0] - 1)),
    LossCase("unbiased variance", MIXED, lambda z, y, t, w: z.var(0).mean() + _squares(z, t).mean()),
    LossCase("standard deviation", MIXED, lambda z, y, t, w: z.std(0).mean() + _squares(z, t).mean()),
    LossCase("log of mean exp", MIXED, lambda z, y, t, w: torch.logsumexp(z[:, 0], 0) - np.log(2.0)),
    LossCase("log sum exp per sample", MEAN, lambda z, y, t, w: (torch.logsumexp(z, 1) - z[:, 0]).mean()),
    LossCase("log of a mean", MIXED, lambda z, y, t, w: _squares(z, t).mean().log()),
    LossCase("maximum", MIXED, lambda z, y, t, w: _squares(z, t).mean(1).max()),
    LossCase("minimum", MIXED, lambda z, y, t, w: _squares(z, t).mean(1).min()),
    LossCase("hard mining", MIXED, lambda z, y, t, w: F.cross_entropy(z, y, reduction="none").topk(1).values.mean()),
    LossCase("first sample", MIXED, lambda z, y, t, w: _squares(z, t)[0].mean()),
    LossCase("running sum", MIXED, lambda z, y, t, w: _squares(z, t).cumsum(0).mean()),
    LossCase("squared sum", MIXED, lambda z, y, t, w: (z - t).sum() ** 2),
    LossCase("product of means", MIXED, lambda z, y, t, w: _squares(z, t).mean() * (z * z).mean()),
    LossCase("centred", MIXED, lambda z, y, t, w: ((z - z.mean(0)) * t).abs().mean()),
    LossCase("softmax over samples", MIXED, lambda z, y, t, w: (torch.softmax(z, 0) * t).sum()),
    LossCase("contrastive", MIXED, lambda z, y, t, w: _contrastive(z, t)),
    LossCase("hard triplets", MIXED, lambda z, y, t, w: _hard_triplets(z, y)),
    LossCase("covariance", MIXED, lambda z, y, t, w: ((z.t() @ z) ** 2).mean()),
    LossCase("inner products", MEAN, lambda z, y, t, w: ((z.t() @ t) / z.shape[0]).mean()),
    LossCase("cross entropy", MEAN, lambda z, y, t, w: F.cross_entropy(z, y)),
    LossCase("sum of cross entropies", SUM, lambda z, y, t, w: F.cross_entropy(z, y, reduction="sum")),
    LossCase("smoothed cross entropy", MEAN, lambda z, y, t, w: _smoothed(z, y)),
    LossCase("weighted cross entropy", RATIO, lambda z, y, t, w: F.cross_entropy(z, y, _WEIGHTS)),
    LossCase(
        "sum of weighted cross entropies", SUM, lambda z, y, t, w: F.cross_entropy(z, y, _WEIGHTS, reduction="sum")
    ),
    LossCase("focal", MEAN, lambda z, y, t, w: _focal(z, y)),
    LossCase("class-balanced", MIXED, lambda z, y, t, w: _class_balanced(z, y)),
    LossCase("binary cross entropy", MEAN, lambda z, y, t, w: F.binary_cross_entropy_with_logits(z, t.sigmoid())),
    LossCase("smooth absolute", MEAN, lambda z, y, t, w: _smooth_absolute(z, t)),
    LossCase("divergence by batch size", MEAN, lambda z, y, t, w: F.kl_div(
        F.log_softmax(z, 1), F.softmax(t, 1), reduction="batchmean"
    )),
    LossCase("divergence", SUM, lambda z, y, t, w: F.kl_div(F.log_softmax(z, 1), F.softmax(t, 1), reduction="sum")),
    LossCase("dice over a batch", MIXED, lambda z, y, t, w: _dice(z, t, (0, 1))),
    LossCase("dice per sample", MEAN, lambda z, y, t, w: _dice(z, t, (1,))),
    LossCase("mean over chosen", RATIO, lambda z, y, t, w: (
        (_squares(z, t).mean(1) * (y > 1).float()).sum() / (y > 1).float().sum()
    )),
    LossCase("means by lengths", MEAN, lambda z, y, t, w: (_squares(z, t).sum(1) / (y + 1).float()).mean()),
    LossCase("two losses", MEAN, lambda z, y, t, w: F.softplus(-z).mean() + F.softplus(t * z).mean()),
    LossCase("mean with decay", MEAN, lambda z, y, t, w: _squares(z, t).mean() + 0.1 * (w * w).sum()),
    LossCase("sum with decay", MIXED, lambda z, y, t, w: _squares(z, t).sum() + 0.1 * (w * w).sum()),
    LossCase("sum with decay by batch size", SUM, lambda z, y, t, w: (
        _squares(z, t).sum() + 0.1 * z.shape[0] * (w * w).sum()
    )),
    LossCase("sum and mean", MIXED, lambda z, y, t, w: _squares(z, t).sum() + z.abs().mean()),
    LossCase("reconstruction and divergence", SUM, lambda z, y, t, w: (
        _squares(z, t).sum() - 0.5 * (1 + t - z * z - t.exp()).sum()
    )),
    LossCase("weighted cross entropy with ignored labels", RATIO, lambda z, y, t, w: F.cross_entropy(
        z, y, _WEIGHTS, ignore_index=1
    )),
    LossCase("mean by samples' weights", RATIO, lambda z, y, t, w: (
        (_squares(z, t).mean(1) * t[:, 0].exp()).sum() / t[:, 0].exp().sum()
    )),
    LossCase("mean over chosen, at least one", RATIO, lambda z, y, t, w: (
        (_squares(z, t).mean(1) * (y > 2)).sum() / (y > 2).sum().clamp(min=1)
    )),
    LossCase("focal by positives", RATIO, lambda z, y, t, w: _focal_sum(z, y) / ((y > 0).float().sum() + 1e-3)),
    LossCase("mean by means", RATIO, lambda z, y, t, w: (
        0.5 * (_squares(z, t) * (t > 0)).mean() / (t > 0).float().mean()
    )),
    LossCase("mean over chosen with decay", RATIO, lambda z, y, t, w: (
        (_squares(z, t).mean(1) * (y > 1)).sum() / (y > 1).sum() + 0.1 * (w * w).sum()
    )),
    LossCase("error by variation", RATIO, lambda z, y, t, w: 1 - _squares(z, t).sum() / (t * t).sum()),
    LossCase("root of a mean over chosen", RATIO, lambda z, y, t, w: (
        ((_squares(z, t).mean(1) * (y > 1)).sum() / (y > 1).sum()).sqrt()
    )),
    LossCase("root of a sum", RATIO, lambda z, y, t, w: (_squares(z, t).sum() + 1e-6 * z.shape[0]).sqrt()),
    LossCase("two means over chosen", MIXED, lambda z, y, t, w: (
        (_squares(z, t).mean(1) * (y > 1)).sum() / (y > 1).sum() + (z.abs().mean(1) * (y > 0)).sum() / (y > 0).sum()
    )),
    LossCase("mean by weights of the network", MIXED, lambda z, y, t, w: (
        (_squares(z, t).mean(1) * z[:, 0].exp()).sum() / z[:, 0].exp().sum()
    )),
    LossCase("mixed with the next sample", MIXED, lambda z, y, t, w: (
        0.7 * F.cross_entropy(z, y) + 0.3 * F.cross_entropy(z, torch.roll(y, 1, 0))
    )),
    LossCase("entropy of the mean prediction", MIXED, lambda z, y, t, w: _entropy(F.softmax(z, 1).mean(0))),
    LossCase("balance of experts", MIXED, lambda z, y, t, w: (
        F.cross_entropy(z, y) + (F.softmax(z, 1).mean(0) * F.softmax(4 * z, 1).mean(0)).sum()
    )),
    LossCase("distance of Gram matrices", MIXED, lambda z, y, t, w: ((z.t() @ z - t.t() @ t) ** 2).sum()),
    LossCase("sum of Gram matrices", SUM, lambda z, y, t, w: (z.t() @ z - t.t() @ t).sum()),
    LossCase("sorted distances", MIXED, lambda z, y, t, w: (z.sort(0).values - t.sort(0).values).abs().mean()),
    LossCase("scaled by the largest", MIXED, lambda z, y, t, w: (_squares(z, t) / _squares(z, t).max()).mean()),
    LossCase("distances of all pairs", MIXED, lambda z, y, t, w: ((z[:, None] - z[None]) ** 2).mean()),
    LossCase("shifted targets", MEAN, lambda z, y, t, w: _squares(z, _shifted(t, 1)).mean()),
    LossCase("shifted samples", MIXED, lambda z, y, t, w: _squares(z, _shifted(t, 0)).mean()),
    LossCase("sum of assigned scores", SUM, lambda z, y, t, w: _squares(_every_second_zeroed(z), t).sum()),
    LossCase("rows of each sample", MEAN, lambda z, y, t, w: _squares(w[_positions(z)].sum(2), z).mean()),
    LossCase("row by batch size", MIXED, lambda z, y, t, w: (
        _squares(z, t).mean() * w[z.shape[0] // 2 % CLASSES].sum()
    )),
    LossCase("cosine", MEAN, lambda z, y, t, w: (1 - F.cosine_similarity(z, t)).mean()),
)  # fmt: skip


class Network(nn.Module):
    """A small network that computes a loss."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(WIDTH, 5)
        self.second = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        scores = self.second(torch.tanh(self.first(x)))
        return self.function(scores, labels, targets, self.second.weight)


def exported(case: LossCase, folder: Path, samples: int | None = None) -> Path:
    """Return the ONNX file of the network with a loss; `samples` fixes the batch, None leaves it
    open.
    """
    torch.manual_seed(0)
    path = folder / f"{case.name.replace(' ', '-')}.onnx"
    names = ["x", "labels", "targets"]
    example = tuple(torch.from_numpy(each) for each in batch(samples or 2).values())
    torch.onnx.export(
        Network(case.function),
        example,
        path,
        dynamo=False,
        do_constant_folding=False,  # Constants stay as the module has them.
        opset_version=17,
        input_names=names,
        output_names=["loss"],
        dynamic_axes=None if samples else {name: {0: "N"} for name in names},
    )
    return path


def batch(samples: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random data."""
    drawn = np.random.default_rng(seed)
    labels = drawn.integers(0, CLASSES, samples)
    x, targets = (
        drawn.standard_normal((samples, width)).astype(np.float32) for width in (WIDTH, CLASSES)
    )
    return {"x": x, "labels": labels, "targets": targets}


def loss_of(path: Path, data: dict[str, np.ndarray]) -> float:
    """Return the loss by ONNX Runtime."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    read = {each.name for each in session.get_inputs()}
    (found,) = session.run(["loss"], {name: array for name, array in data.items() if name in read})
    return float(found)
