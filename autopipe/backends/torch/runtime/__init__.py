"""What generated programs import: this and torch, nothing else of autopipe."""

from __future__ import annotations

from autopipe.backends.torch.runtime.rank import Rank
from autopipe.backends.torch.runtime.wiring import Data, Loss, Receive, Send

__all__ = ["Data", "Loss", "Rank", "Receive", "Send"]
