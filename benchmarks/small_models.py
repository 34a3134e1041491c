"""Models of the zoo as small as they get."""

from __future__ import annotations

from collections.abc import Mapping

from autopipe.configs.zoo import Settings

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
