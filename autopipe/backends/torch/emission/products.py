"""Emission of products."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Emitter

PRODUCTS: dict[str, Emitter] = {"MatMul": lambda call: f"torch.matmul({call.arg(0)}, {call.arg(1)})"}
