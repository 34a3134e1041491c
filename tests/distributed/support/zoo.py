"""Small models of the zoo, as graphs to be placed by hand, and what one device computes of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from autopipe.configs.zoo import MODELS, Settings, build, configure
from autopipe.ir.graph import Graph
from autopipe.passes.frontend import read_model
from tests.distributed.support.pool import Pools
from tests.distributed.support.trained import MICRO_BATCHES, Trained, trained

SIZES: Mapping[str, Settings] = {
    "alexnet": {"hidden": "24", "classes": "12"},
    "bert": {"layers": "1", "hidden": "24", "heads": "6", "vocabulary": "48", "sequence": "12"},
    "candle-uno": {"branches": "3", "hidden": "24", "features": "12"},
    "dlrm": {"rows": "24", "hidden": "24", "features": "12", "dense_branches": "2", "sparse_branches": "2"},
    "flava": {
        "text_layers": "1", "image_layers": "1", "cross_layers": "1", "hidden": "24", "heads": "6",
        "vocabulary": "48", "sequence": "12", "image": "24",
    },
    "gpt": {"layers": "2", "hidden": "24", "heads": "6", "vocabulary": "48", "sequence": "12"},
    "inceptionv3": {"classes": "12"},
    "llama": {
        "layers": "2", "hidden": "48", "heads": "12", "key_value_heads": "6", "feed_forward": "24",
        "vocabulary": "48", "sequence": "12",
    },
    "mmt": {"branches": "2", "layers": "1", "hidden": "24", "heads": "6", "feed_forward": "48", "classes": "12",
            "sequence": "12", "embedding": "12"},
    "moe": {"layers": "1", "hidden": "24", "heads": "6", "vocabulary": "48", "sequence": "12"},
    "mt5": {"layers": "1", "hidden": "24", "heads": "6", "vocabulary": "48", "source": "12", "target": "12"},
    "rnnlm": {"hidden": "24", "vocabulary": "48", "sequence": "6"},
    "transformer": {
        "layers": "1", "hidden": "24", "heads": "6", "feed_forward": "48", "vocabulary": "48", "sequence": "12",
    },
    "two-branch": {"repeats": "1", "hidden": "24", "heads": "6", "feed_forward": "48", "classes": "12",
                   "sequence": "12"},
    "unet": {"classes": "4"},
    "vgg19": {"classes": "12", "hidden": "24"},
    "wide-resnet": {"classes": "12", "stages": (1, 1)},
}  # fmt: skip
"""What makes each model small, and its extents divisible by 2, 3 and 4 where it lets them be."""

assert SIZES.keys() == MODELS.keys()

SAMPLES = 12


class SmallModels:
    """The models, each with its step on one device, as tests ask for them."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._known: dict[tuple[str, int, int], Trained] = {}

    def of(self, name: str, samples: int = SAMPLES, micro_batches: int = MICRO_BATCHES) -> Trained:
        """The model called `name` with so many samples a micro-batch."""
        key = name, samples, micro_batches
        if key not in self._known:
            graph, loss = small_graph(name, samples)
            self._known[key] = trained(self._pools, name, graph, loss, micro_batches=micro_batches)
        return self._known[key]


@lru_cache
def small_graph(name: str, samples: int = SAMPLES) -> tuple[Graph, str]:
    """The graph of training a small model on a micro-batch, parameters to be drawn, and its loss."""
    settings = {**SIZES[name], "loss": "true", "weights": "none"}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        build(configure(name, settings)).save(path)
        model = read_model(path, batch=samples)
    return model.graph, model.loss
