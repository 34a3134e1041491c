"""What the paper states as numbers: Alibaba PAI, "TePDist" (2023), "Performance Experiment".

Its tables of sizes and its charts are pictures; of them only what the text says in numbers is here.
"""

from __future__ import annotations

from typing import Final

PEAK_FLOPS: Final = 15.6e12
"""Operations a second of a V100 in single precision, as the text counts it."""

BEST_SHARE: Final = {"gpt": 0.62, "moe": 0.58}
"""Share of the peak that is reached at best, on 1 to 16 devices."""

PICTURE: Final = "theirs published as a picture only"
"""Where there is no number."""
