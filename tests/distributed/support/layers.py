"""What layers mean that devices compute together, by torch and written apart from the product."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.ir.graph import Node


def _batch_norm(node: Node, x: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    scale, bias, mean, variance = vectors
    others = [axis for axis in range(x.dim()) if axis != 1]
    kept = node.number("momentum", 0.9)
    y = F.batch_norm(x, None, None, scale, bias, training=True)
    own = x.detach().mean(others), x.detach().var(others, correction=0)
    return y, *(
        kept * old + (1 - kept) * new for old, new in zip((mean, variance), own, strict=True)
    )


def _lstm(
    node: Node, x: Tensor, weight: Tensor, recurrence: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    """Gates in ONNX's order: input, output, forget, cell."""
    hidden = cell = x.new_zeros(x.shape[1], recurrence.shape[2])
    found = []
    for step in x:
        gates = step @ weight[0].T + hidden @ recurrence[0].T + sum(bias[0].chunk(2))
        enter, leave, keep, new = gates.chunk(4, 1)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(new)
        hidden = torch.sigmoid(leave) * torch.tanh(cell)
        found.append(hidden)
    return torch.stack(found)[:, None], hidden[None], cell[None]


def _gru(node: Node, x: Tensor, weight: Tensor, recurrence: Tensor) -> tuple[Tensor, ...]:
    """Gates in ONNX's order: update, reset, hidden; the reset comes before the product."""
    hidden = x.new_zeros(x.shape[1], recurrence.shape[2])
    found = []
    for step in x:
        update_x, reset_x, new_x = (step @ weight[0].T).chunk(3, 1)
        update_h, reset_h, new_h = recurrence[0].chunk(3, 0)
        update = torch.sigmoid(update_x + hidden @ update_h.T)
        reset = torch.sigmoid(reset_x + hidden @ reset_h.T)
        hidden = (1 - update) * torch.tanh(new_x + (reset * hidden) @ new_h.T) + update * hidden
        found.append(hidden)
    return torch.stack(found)[:, None], hidden[None]


def _rms_norm(node: Node, x: Tensor, scale: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale


def _attention(node: Node, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = [
        each.unflatten(2, (node.integer("q_num_heads"), -1)).transpose(1, 2)
        for each in (query, key, value)
    ]
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)


def _loss(node: Node, scores: Tensor, labels: Tensor, *weight: Tensor) -> Tensor:
    ignored = node.integer("ignore_index", -100)
    return F.cross_entropy(
        scores, labels, *(each.detach() for each in weight), ignore_index=ignored
    )


LAYERS: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": lambda node, x, scale, bias: F.instance_norm(
        x, weight=scale, bias=bias
    ),
    "GroupNormalization": lambda node, x, scale, bias: F.group_norm(
        x, node.integer("num_groups"), scale, bias
    ),
    "LayerNormalization": lambda node, x, scale, bias: F.layer_norm(
        x, scale.shape, scale, bias, 1e-5
    ),
    "RMSNormalization": _rms_norm,
    "LpNormalization": lambda node, x: x / x.square().sum(-1, keepdim=True).sqrt(),
    "Gemm": lambda node, x, weight, bias: x @ weight + bias,
    "LSTM": _lstm,
    "GRU": _gru,
    "Attention": _attention,
    "ReduceL2": lambda node, x, axes: x.square().sum(axes.tolist()).sqrt(),
    "ReduceMin": lambda node, x, axes: x.amin(axes.tolist()),
    "ReduceLogSumExp": lambda node, x, axes: torch.logsumexp(x, axes.tolist()),
    "SoftmaxCrossEntropyLoss": _loss,
}
