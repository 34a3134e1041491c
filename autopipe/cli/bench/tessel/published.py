"""What the paper states as numbers: Lin et al., "Tessel" (HPCA 2024), section VI.

Four devices where nothing else is said.
"""

from __future__ import annotations

from typing import Final

BUBBLE_RATES: Final = {
    ("m/4", "1f1b"): 0.0,
    ("m/4", "chimera"): 0.20,
    ("m/4", "1f1b_plus"): 0.25,
    ("m/4", "tessel"): 0.0,
    ("nn/4", "1f1b"): 0.0,
    ("nn/4", "chimera"): 0.20,
    ("nn/4", "1f1b_plus"): 0.20,
    ("nn/4", "tessel"): 0.0,
    ("k/4", "1f1b"): 0.0,
    ("k/4", "chimera"): 0.20,
    ("k/4", "tessel"): 0.0,
}
"""Table II: by placement and schedule. 1F1B runs on a V and Chimera on an X whatever the row's placement."""

AVERAGE_SEARCH_S: Final = 147.3
"""Section VI-B, over all of its searches."""

TIME_OPTIMAL_V_16_S: Final = 3752.0
"""Figure 9: the whole schedule of a V with 16 micro-batches, by Z3."""

UNITS_FOR_ZERO_BUBBLE: Final = {"v/4": 4, "m/4": 6, "nn/4": 6}
"""Figure 11: micro-batches in a repetend from which the bubble is zero."""

GPT_SPEEDUP: Final = {"1f1b": 4.8, "1f1b_plus": 1.4}
"""Figure 13, "up to", over the named schedule."""

MT5_SPEEDUP: Final = {"1f1b": 5.5, "1f1b_plus": 1.4}
"""Figure 14, "up to"."""

FLAVA_THROUGHPUT: Final = {"tensor_parallel": 1.5, "1f1b": 2.0}
"""Figure 15: throughput over tensor parallelism, and over 1F1B for few micro-batches."""

FLAVA_LATENCY_REDUCTION: Final = 0.38
"""Figure 15: of one micro-batch, against 1F1B."""

FIGURE_2_IMBALANCE: Final = 3.4
"""Figure 2: slowest stage over fastest of 1F1B's placement at 40 layers."""
