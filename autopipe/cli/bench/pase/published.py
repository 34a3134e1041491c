"""What the paper states as numbers: Elango, "PaSE: Parallelization Strategies for Efficient DNN Training" (IPDPS 2021).

It states no costs: least costs are those that its public prototype finds with its own cost model, and where that does
not finish those on which two independent exact solvers agree.
"""

from __future__ import annotations

from typing import Final

MODELS: Final = ("alexnet", "inceptionv3", "rnnlm", "transformer")

DEVICES: Final = (4, 8, 16, 32, 64)

BATCH: Final = {"alexnet": 128, "inceptionv3": 128, "rnnlm": 64, "transformer": 64}
"""Section IV."""

SEARCH_S: Final = {
    "alexnet": (0.226, 0.253, 0.295, 0.361, 0.475),
    "inceptionv3": (14.398, 20.018, 39.791, 86.039, 196.253),
    "rnnlm": (0.057, 0.086, 0.069, 0.131, 0.215),
    "transformer": (9.752, 28.798, 130.882, 553.022, 1883.187),
}
"""Table I, the paper's method, by `DEVICES`."""

BREADTH_FIRST_S: Final = {
    "alexnet": (0.234, 0.260, 0.303, 0.385, 0.485),
    "rnnlm": (0.070, 0.084, 0.109, 0.167, 0.271),
}
"""Table I, breadth-first order; on the other two models it runs out of memory."""

FLEXFLOW_S: Final = {
    "alexnet": (2.540, 2.770, 6.980, 7.920, 257.300),
    "inceptionv3": (69.210, 146.510, 365.820, 937.96, 2237.04),
    "rnnlm": (107.070, 164.290, 432.190, 668.220, 1041.980),
}
"""Table I, FlexFlow's random walk with costs measured on devices; it does not have Transformer."""

LEAST_COST: Final = {
    "alexnet": (148215719552, 97098296512, 70320712672, 53136349552, 41120456048),
    "inceptionv3": (986757044608, 782140602432, 673045949344, 602425599824, 553203648656),
    "rnnlm": (6866837733376, 4024963186688, 2476066881536, 1491938058240, 935818633216),
    "transformer": (2189181321216, 1421082828800, 1004992614400, 727566614528, 521017024512),
}
"""Operations, by `DEVICES`."""

SPEEDUP_AT_32: Final = {"alexnet": 1.44, "inceptionv3": 1.09, "rnnlm": 1.41, "transformer": 1.51}
"""Figure 6a: over data parallelism on 32 GeForce GTX 1080 Ti."""

LARGEST_SPEEDUP: Final = {"1080ti-pcie": 1.85, "2080ti-pcie": 4.0}
"""Section IV-B, "up to", over all models and numbers of devices."""

STRATEGIES: Final[dict[str, dict[str, dict[str, int]]]] = {
    "alexnet": {
        "/conv1/Conv": {"b": 32},
        "/conv2/Conv": {"b": 32},
        "/conv3/Conv": {"b": 32},
        "/conv4/Conv": {"b": 32},
        "/conv5/Conv": {"c": 2},
        "/fc6/Gemm": {"n": 4, "k": 8},
        "/fc7/Gemm": {"n": 8, "k": 4},
        "/fc8/Gemm": {"n": 4, "k": 8},
    },
    "inceptionv3": {"/mixed_a.0/one.0/conv/Conv": {}, "/mixed_e.1/one.0/conv/Conv": {}, "/classifier/Gemm": {}},
    "rnnlm": {
        "/embedding/Gather": {"v": 32},
        "/layers.0/LSTM": {"l": 2, "b": 4, "n": 2, "k": 2},
        "/projection/MatMul": {},
    },
    "transformer": {
        "/source_embedding/Gather": {},
        "/encoder.1/attention/MatMul_1": {},
        "/encoder.1/feed_forward/up/MatMul": {},
        "/encoder.1/feed_forward/down/MatMul": {},
        "/projection/MatMul": {},
    },
}
"""Table II and section IV-C, 32 GeForce GTX 1080 Ti: parts of a layer's axes where they are known to us.

Axes: b samples, c and k inputs, n outputs, l layers, v vocabulary."""
