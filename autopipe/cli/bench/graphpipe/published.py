"""What the paper states as numbers: Jeon et al., "GraphPipe" (ASPLOS 2025), section 7 and appendix A.

Figures 6, 7 and 9 are charts: of them only what the text says in numbers is here.
"""

from __future__ import annotations

from typing import Final

DEVICES: Final = (4, 8, 16, 32)

BATCH: Final = {
    "mmt": (64, 128, 256, 512),
    "dlrm": (256, 512, 1024, 2048),
    "candle-uno": (4096, 8192, 16384, 32768),
}
"""Samples of a step, by `DEVICES`."""

MODELS: Final = tuple(BATCH)

SEARCH_S: Final[dict[str, dict[str, tuple[float, ...]]]] = {
    "mmt": {
        "graphpipe": (0.12, 0.76, 3.00, 10.11),
        "pipedream": (2.57, 11.9, 44.3, 151.0),
        "piper": (52.9, 126.0, 304.0, 745.0),
    },
    "dlrm": {"graphpipe": (0.33, 2.73, 13.28, 54.6), "pipedream": (6.39, 31.3, 131.0, 505.0)},
    "candle-uno": {"graphpipe": (0.19, 1.43, 6.14, 22.37), "pipedream": (3.84, 17.0, 66.10, 234.0)},
}
"""Table 1, by `DEVICES`; Piper's search does not end on the models that are missing."""

LARGEST_SPEEDUP: Final = 1.61
"""Over the better sequential pipeline, up to, 32 devices (abstract, section 7.4)."""

PARALLEL_SPEEDUP: Final = (1.12, 1.40)
"""Figure 9, 32 devices: stages beside one another with PipeDream's micro-batches, over PipeDream; least and most."""

FULL_SPEEDUP: Final = (1.25, 1.61)
"""Figure 9, 32 devices: with larger micro-batches too."""

BRANCHES_SPEEDUP: Final = {16: 2.0}
"""Figure 7, over PipeDream by number of branches of CANDLE-Uno, up to."""

CASE_STUDY: Final = {"depth": (8, 4), "micro_batch_size": (2, 4)}
"""Section 7.5, eight devices: of the sequential pipeline and of GraphPipe's."""

CASE_STUDY_SPEEDUP: Final = {"depth": 1.10, "micro_batch_size": 1.10, "both": 1.20}

SEQUENTIAL_THROUGHPUT: Final = {
    "piper": (113.94, 187.92, 286.83, 609.76),
    "pipedream": (113.2, 190.1, 277.0, 592.4),
    "graphpipe": (113.6, 189.5, 287.52, 608.82),
}
"""Appendix A.3: samples a second of a transformer with one branch, by `DEVICES`."""

IN_FLIGHT: Final = {(1, 2, 4): 10, (4, 4, 4): 12}
"""Figure 5: samples that the first of three stages keeps, by their micro-batches."""
