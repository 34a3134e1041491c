"""Files whose nodes and values change names, merge and vanish while they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.passes.frontend.building import floats, model, node, saved


def feed_forward(folder: Path, samples: int | str = 8) -> Path:
    """A Gelu spelled out, a Dropout and an Identity that vanish, equal nodes, nodes without names,
    tied operands.
    """
    nodes = [
        node("MatMul", "x w", "up"),
        node("Dropout", "up", "dropped"),
        node("Add", "dropped bias", "biased"),
        node("Div", "biased root", "a"),
        node("Erf", "a", "b"),
        node("Add", "b one", "c"),
        node("Mul", "biased c", "d"),
        node("Mul", "d half", "bent"),
        node("MatMul", "bent v", "down"),
        node("Relu", "down", "left"),
        node("Relu", "down", "right"),
        node("Add", "left right", "both"),
        node("Add", "both x", "sum"),
        node("Softmax", "sum", "soft", axis=-1),
        node("Identity", "soft", "y"),
        node("ReduceMean", "sum axes", "mean", keepdims=0),
    ]
    for each in nodes[:4]:
        each.name = ""
    numbers = {"root": 2**0.5, "one": 1.0, "half": 0.5}
    held = {name: np.array(number, dtype=np.float32) for name, number in numbers.items()}
    held |= {
        "w": floats(16, 32),
        "bias": floats(32),
        "v": floats(32, 16),
        "axes": np.array([2], dtype=np.int64),
    }
    return saved(model(nodes, {"x": [samples, 4, 16]}, "y mean", held), folder)
