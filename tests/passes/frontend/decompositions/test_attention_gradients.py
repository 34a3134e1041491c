"""Gradients of ONNX Runtime's attention operators equal those of plain attention in torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.backends.torch.runtime import operators
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import read_model
from tests.conformance.adapter import forward_of, stage_of, to_tensor
from tests.passes.frontend.building import floats
from tests.passes.frontend.evaluated import node_file

BATCH = 2
TOKENS = 5
HEADS = 4
GROUPS = 2
SIZE = 16
LENGTHS = torch.tensor([5, 3])
VISIBLE = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & (
    torch.arange(TOKENS) < LENGTHS[:, None, None, None]
)


def plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sink: torch.Tensor | None
) -> torch.Tensor:
    """Return causal attention of [batch, tokens, heads · features] tensors over keys that are not
    padding, perhaps with attention sinks.
    """
    words = [each.unflatten(2, (-1, SIZE)).transpose(1, 2) for each in (query, key, value)]
    key, value = (each.repeat_interleave(HEADS // each.shape[1], 1) for each in words[1:])
    scores = (words[0] @ key.mT / SIZE**0.5).masked_fill(~VISIBLE, -torch.inf)
    if sink is not None:
        scores = torch.cat(
            (scores, sink.reshape(1, HEADS, 1, 1).expand(BATCH, HEADS, TOKENS, 1)), -1
        )
    result = scores.softmax(-1)[..., :TOKENS] @ value
    return result.transpose(1, 2).flatten(2)


def multi_head(tensors: list[torch.Tensor]) -> torch.Tensor:
    biases = tensors[3].chunk(3)
    query, key, value = (each + bias for each, bias in zip(tensors, biases, strict=False))
    return plain(query, key, value, None)


FORMS: dict[str, tuple[list[np.ndarray | None], dict[str, Any], Any]] = {
    "MultiHeadAttention": (
        [floats(BATCH, TOKENS, HEADS * SIZE, seed=seed) for seed in range(3)]
        + [
            floats(3 * HEADS * SIZE),
            (np.arange(TOKENS) < LENGTHS.numpy()[:, None]).astype(np.int32),
        ],
        {"num_heads": HEADS, "unidirectional": 1, "known": [3]},
        multi_head,
    ),
    "GroupQueryAttention": (
        [
            *(floats(BATCH, TOKENS, each * SIZE, seed=each) for each in (HEADS, GROUPS, GROUPS)),
            *(None, None, LENGTHS.numpy().astype(np.int32) - 1, np.array([TOKENS], np.int32)),
            *(None, None, None, None, floats(HEADS)),
        ],
        {"num_heads": HEADS, "kv_num_heads": GROUPS, "known": [6, 11]},
        lambda tensors: plain(*tensors),
    ),
}


@pytest.mark.parametrize("op", FORMS)
def test_gradients(op: str, tmp_path: Path) -> None:
    arrays, settings, spelled = FORMS[op]
    path, feeds = node_file(tmp_path, op, arrays, **settings)
    graph = read_model(path, mode=Mode.INFER).graph
    floating = [
        f"i{place}"
        for place, array in enumerate(arrays)
        if array is not None and array.dtype == np.float32
    ]
    ours = {name: to_tensor(array) for name, array in feeds.items()}
    ours |= {f"i{place}": to_tensor(arrays[place]) for place in settings["known"]}
    theirs = {name: ours[name].clone().requires_grad_() for name in floating}
    for name in floating:
        ours[name].requires_grad_()
    held = {f"w{index}": ours[each.value.name] for index, each in enumerate(graph.parameters)}
    held |= {f"c{index}": to_tensor(each.array) for index, each in enumerate(graph.constants)}
    place = SimpleNamespace(device=torch.device("cpu"), **held)
    result = forward_of(emit_forward(stage_of(graph)).text)(
        place, *(ours[value.name] for value in graph.inputs)
    )
    result = result[0] if isinstance(result, tuple) else result
    result.square().sum().backward()
    spelled([theirs[name] for name in floating]).square().sum().backward()
    for name in floating:
        found = ours[name].grad
        wanted = theirs[name].grad
        assert found is not None and wanted is not None
        assert (found - wanted).norm() < 1e-5 * wanted.norm(), name


def test_padded_queries_do_not_affect_gradients_of_other_rows() -> None:
    """All scores of a padded query are the smallest number. torch's kernel then uses probability 1,
    not 1 / keys, for each key in backward, so the gradients of values are too large by that factor;
    here the loss ignores padded queries.
    """
    query, key, value = (
        torch.from_numpy(floats(1, HEADS, TOKENS, SIZE, seed=seed)) for seed in range(3)
    )
    mask = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)
    mask[0] = mask[0, 1]
    leaves = [each.requires_grad_() for each in (query, key, value)]
    fused = operators.fused_attention(*leaves, mask)
    unfused = (query @ key.mT / SIZE**0.5 + mask).softmax(-1) @ value
    assert (fused - unfused).norm() < 1e-6 * unfused.norm()
    counted, padded = (
        [
            torch.autograd.grad(each[:, :, rows].sum(), leaves, retain_graph=True)
            for each in (fused, unfused)
        ]
        for rows in (slice(1, None), slice(1))
    )
    for ours, theirs in (*zip(*counted, strict=True), (padded[0][2], TOKENS * padded[1][2])):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
