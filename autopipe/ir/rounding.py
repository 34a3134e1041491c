"""How far two right results of a step may be apart: the roundings that follow one another, and the
bound they give.

A result that comes of n roundings in sequence, each of relative size at most u and of random sign,
is wrong by at most λ √n u with a probability that depends on λ and n alone, not by n u (Higham and
Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM Journal on Scientific
Computing 41(5), 2019, theorem 2.4). For norms of whole tensors λ = 1 holds in their experiments,
and here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from autopipe.ir.codec import Index, OmitDefault

UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of rounding one number."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """The most roundings that follow one another in a step, forwards and, in training, back.

    `accumulated` are those of sums and of operators' results in single precision (double, where all
    is). Where `dtype`, the coarsest type of a number, has 16 bits, results are rounded to it
    `narrowed` times, and `messages` between stages. What TF32 would round is not among them:
    whatever is verified is computed in IEEE precision.
    """

    dtype: Literal["float64", "float32", "float16", "bfloat16"] = "float32"
    accumulated: Index = 1
    narrowed: Annotated[Index, OmitDefault()] = 0
    messages: Annotated[Index, OmitDefault()] = 0

    @property
    def accumulator(self) -> str:
        """The type that sums are added up in."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def step(self) -> float:
        """The distance of neighbouring numbers, relative to them: one unit in the last place."""
        return 2 * UNIT_ROUNDOFF[self.dtype]

    @property
    def bound(self) -> float:
        """The largest relative difference, by norm, of two right results of a well-conditioned
        step.
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
