"""From a plan to a `Program`: local operators, communication, and each rank's order."""

from __future__ import annotations

from autopipe.passes.lower.assemble import lower

__all__ = ["lower"]
