"""Detectors that end in rows of the boxes that are kept, as exports of YOLO and of networks of two
stages have them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopipe.backends.torch.runtime import operators
from tests.exports.recent_torch import Convolution, Yolo
from tests.exports.with_loss import BATCH, WithLoss

SIZE = 32
WIDTH = 8
CLASSES = 3
SIDE = 3
STRIDE = 4


class Kept(torch.autograd.Function):
    """Rows [image, class, box]; what torch has no operator for, exporters of YOLO write so."""

    @staticmethod
    def forward(
        ctx: Any, boxes: torch.Tensor, scores: torch.Tensor, most: int, overlap: float
    ) -> torch.Tensor:
        kept = operators.suppressed(boxes, scores, most, overlap, 0.05, corners=True)
        return operators.rows_kept(kept, int((kept >= 0).sum()))

    @staticmethod
    def symbolic(g: Any, boxes: Any, scores: Any, most: int, overlap: float) -> Any:
        numbers = torch.tensor([most]), torch.tensor([overlap]), torch.tensor([0.05])
        return g.op(
            "NonMaxSuppression",
            boxes,
            scores,
            *(g.op("Constant", value_t=each) for each in numbers),
        )


class Aligned(torch.autograd.Function):
    """Regions of images."""

    @staticmethod
    def forward(
        ctx: Any, images: torch.Tensor, regions: torch.Tensor, owners: torch.Tensor
    ) -> torch.Tensor:
        return operators.roi_align(
            images,
            regions,
            owners,
            size=(SIDE, SIDE),
            samples=2,
            scale=1 / STRIDE,
            half_pixel=True,
            largest=False,
        )

    @staticmethod
    def symbolic(g: Any, images: Any, regions: Any, owners: Any) -> Any:
        settings = {
            "output_height_i": SIDE,
            "output_width_i": SIDE,
            "sampling_ratio_i": 2,
            "spatial_scale_f": 1 / STRIDE,
        }
        return g.op("RoiAlign", images, regions, owners, **settings)


def corners(places: torch.Tensor, limit: float) -> torch.Tensor:
    """Boxes as two corners within an image, of their centers and extents."""
    center, extent = places.chunk(2, dim=-1)
    return torch.cat([center - extent / 2, center + extent / 2], dim=-1).clamp(0, limit)


class EndToEnd(nn.Module):
    """YOLO with its suppression: a row of image, box, class and score for each box that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Yolo()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found = self.network(image)
        places = found[:, :4].transpose(1, 2).sigmoid() * SIZE
        scores = found[:, 4:].sigmoid()
        boxes = corners(places, SIZE)
        rows = Kept.apply(boxes, scores, 6, 0.4)
        images = rows[:, 0]
        classes = rows[:, 1]
        numbers = rows[:, 2]
        scored = scores.transpose(1, 2)[images, numbers, classes]
        parts = [
            images[:, None].float(),
            boxes[images, numbers],
            classes[:, None].float(),
            scored[:, None],
        ]
        return torch.cat(parts, dim=1)


class TwoStages(nn.Module):
    """Regions that may hold something, read from the image's features and classified: Faster R-CNN
    (arXiv:1506.01497)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(Convolution(3, WIDTH, 3, 2), Convolution(WIDTH, WIDTH, 3, 2))
        self.proposals = nn.Conv2d(WIDTH, 5, 3, padding=1)
        self.head = nn.Linear(WIDTH * SIDE * SIDE, 16)
        self.kinds = nn.Linear(16, CLASSES + 1)
        self.moves = nn.Linear(16, 4)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        features = self.trunk(image)
        proposed = self.proposals(features).flatten(2)
        boxes = corners(proposed[:, :4].transpose(1, 2).sigmoid() * SIZE, SIZE)
        rows = Kept.apply(boxes, proposed[:, 4:].sigmoid(), 5, 0.7)
        images = rows[:, 0]
        regions = boxes[rows[:, 0], rows[:, 2]]
        read = Aligned.apply(features, regions, images)
        hidden = F.relu(self.head(read.flatten(1)))
        scores = self.kinds(hidden).softmax(dim=1)[:, 1:]
        moved = (regions + self.moves(hidden)).clamp(0, SIZE)
        apart = moved + images[:, None].float() * 2 * SIZE  # No box overlaps one of another image.
        last = Kept.apply(apart[None], scores.t()[None], 4, 0.5)
        kept = last[:, 2]
        return (
            images[kept],
            torch.cat([moved[kept], scores[kept, last[:, 1]][:, None]], dim=1),
            last[:, 1],
        )


def _image() -> dict[str, torch.Tensor]:
    return {"image": torch.randn(BATCH, 3, SIZE, SIZE)}


DETECTORS: dict[str, WithLoss] = {
    "yolo_rows": WithLoss(lambda: nn.Sequential(EndToEnd()), _image),
    "two_stages": WithLoss(TwoStages, _image),
}
"""By name."""
