"""A bound of the difference between two correct results of a step, from the number of sequential
roundings.

After n sequential roundings with relative errors of at most u and random signs, the relative error
is at most λ √n u, with a probability that depends only on λ and n (Higham and Mary, "A New Approach
to Probabilistic Rounding Error Analysis", SIAM Journal on Scientific Computing 41(5), 2019, theorem
2.4). This module uses λ = 1, with which the bound holds for norms of tensors in the experiments of
that paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from autopipe.ir.codec import Index, OmitDefault

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff u of each element type: the maximum relative error of rounding one number."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Maximum number of sequential roundings in a step, on any path through forward and, in
    training, backward.

    Roundings to TF32 do not count, because `verify` computes matmuls in full fp32 precision.
    """

    dtype: Literal["float64", "float32", "float16", "bfloat16"] = "float32"
    """Element type with the largest unit roundoff."""
    accumulated: Index = 1
    """Number of roundings, of sums and of results of operators, to fp32 (to fp64 if `dtype` is
    float64).
    """
    narrowed: Annotated[Index, OmitDefault()] = 0
    """Number of roundings of results of operators to `dtype`, if it has 16 bits."""
    messages: Annotated[Index, OmitDefault()] = 0
    """Number of roundings to `dtype`, if it has 16 bits, in P2P messages between stages."""

    @property
    def accumulator(self) -> str:
        """Element type in which sums are computed."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def step(self) -> float:
        """Relative distance between neighbouring numbers of `dtype`, one unit in the last place."""
        return 2 * UNIT_ROUNDOFF[self.dtype]

    @property
    def bound(self) -> float:
        """Maximum relative difference between two correct results of a well-conditioned step, as
        norms of tensors.
        """
        sums = UNIT_ROUNDOFF[self.accumulator] * math.sqrt(self.accumulated)
        return math.hypot(
            sums, UNIT_ROUNDOFF[self.dtype] * math.sqrt(self.narrowed + self.messages)
        )

    def __str__(self) -> str:
        text = (
            f"{UNIT_ROUNDOFF[self.accumulator]:.1e} ({self.accumulator}) x sqrt({self.accumulated} "
            "roundings)"
        )
        if not self.narrowed + self.messages:
            return text
        of_messages = f" and {self.messages} of messages" if self.messages else ""
        unit = f"{UNIT_ROUNDOFF[self.dtype]:.1e} ({self.dtype})"
        return f"{unit} x sqrt({self.narrowed} roundings{of_messages}), and {text}"
