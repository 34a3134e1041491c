"""Emission of losses."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter
from autopipe.ir.graph import DType
from autopipe.ir.ops.normalization import label_axes, reduction, weighs_labels


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


def _shared(call: Call, name: str) -> str:
    """The loss of classes, of labels, or of both, of which this rank has a part; "" where it has all that matters."""
    words = [_operands(call)]
    classes = call.is_split("c")
    if classes:
        words.append(f"group={call.group('c')}")
    labels = label_axes(call.signature)
    if weighs_labels(call.signature) and any(map(call.is_split, labels)):
        words.append(f"batch={call.group(*labels)}")
    if len(words) == 1:
        return ""
    return f"operators.{name}_{'part' if classes else 'share'}({', '.join(words)})"


def _cross_entropy(call: Call) -> str:
    both = len(call.node.outputs) > 1
    alone = f"operators.cross_entropy({_operands(call)})" if both else f"F.cross_entropy({_operands(call)})"
    return _shared(call, "cross_entropy_and_logarithms" if both else "cross_entropy") or alone


def _likelihood(call: Call) -> str:
    return _shared(call, "nll") or f"F.nll_loss({_operands(call)})"


LOSSES: dict[str, Emitter] = {
    "SoftmaxCrossEntropyLoss": _cross_entropy,
    "NegativeLogLikelihoodLoss": _likelihood,
}
