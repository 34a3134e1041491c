"""Proof that a program can run: its ranks never wait in a circle, and use nothing that has not arrived."""

from __future__ import annotations

from autopipe.passes.lower.proof.run import prove

__all__ = ["prove"]
