"""Emission of losses."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter
from autopipe.ir.dtype import DType
from autopipe.ir.ops.losses import reduction


def _operands(call: Call) -> str:
    """Scores, labels as torch wants them (int64), weights, and what differs from torch's defaults."""
    labels = call.arg(1) if call.operand(1).dtype is DType.INT64 else f"{call.arg(1)}.long()"
    words = [call.arg(0), labels]
    if call.present(2):
        words.append(call.arg(2))
    ignored = call.node.integer("ignore_index", -100)
    if ignored != -100:
        words.append(f"ignore_index={ignored}")
    if reduction(call.signature) != "mean":
        words.append(f"reduction={reduction(call.signature)!r}")
    return ", ".join(words)


def _cross_entropy(call: Call) -> str:
    if call.is_split("c"):
        both = "_and_logarithms" if len(call.node.outputs) > 1 else ""
        return f"operators.cross_entropy{both}_part({_operands(call)}, group=p.group)"
    if len(call.node.outputs) == 1:
        return f"F.cross_entropy({_operands(call)})"
    return f"operators.cross_entropy({_operands(call)})"


def _likelihood(call: Call) -> str:
    if call.is_split("c"):
        return f"operators.nll_part({_operands(call)}, group=p.group)"
    return f"F.nll_loss({_operands(call)})"


LOSSES: dict[str, Emitter] = {
    "SoftmaxCrossEntropyLoss": _cross_entropy,
    "NegativeLogLikelihoodLoss": _likelihood,
}
