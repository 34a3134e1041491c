"""Which micro-batches of a stage something is for, where a neighbour has micro-batches of another size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatchSlice:
    """Every `of`-th micro-batch of a stage, from number `index` on: those of which a channel carries something."""

    index: int = 0
    of: int = 1

    def has(self, micro_batch: int) -> bool:
        """True if it is one of them."""
        return micro_batch % self.of == self.index

    def message(self, micro_batch: int) -> int:
        """The number of the message that carries something of this micro-batch."""
        return micro_batch // self.of

    def micro_batch(self, message: int) -> int:
        """The micro-batch that a message carries something of."""
        return message * self.of + self.index


EVERY = MicroBatchSlice()
"""All of them."""
