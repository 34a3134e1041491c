"""Which stages may be captured as CUDA graphs, the line that a run says of them, and static
gradients.
"""

from __future__ import annotations

import pytest
import torch

from autopipe.backends.torch.runtime.step.capture import capture_summary
from autopipe.backends.torch.runtime.step.cuda_graphs import (
    StaticGradients,
    names_in_source,
    reason_not_captured,
)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("torch.tanh", "p.w0", "p.weight_grads", "p.running.batch_norm", "recompute"), ""),
        (("p.group.all_reduce",), "its ranks communicate within it"),
    ],
)
def test_which_stages_may_be_captured(names: tuple[str, ...], reason: str) -> None:
    assert reason_not_captured(names) == reason


def test_names_of_a_text() -> None:
    names = names_in_source(
        "@recompute\ndef segment_0(p, x0):\n    return p.group.along((2, "
        "1)).all_reduce(F.relu(x0)), ()\n"
    )
    assert {"recompute", "p.group", "F.relu"} <= names


@pytest.mark.parametrize(
    ("stages", "by_rank", "line"),
    [
        (
            2,
            [{"0": "", "update": ""}, {"1": "", "update": ""}],
            "CUDA graphs: 2 of 2 stages captured, and the update",
        ),
        (2, [{"0": ""}, {"1": ""}], "CUDA graphs: 2 of 2 stages captured"),
        (
            4,
            [
                {"0": "", "1": "its ranks communicate within it", "update": ""},
                {
                    "1": "its ranks communicate within it",
                    "2": "",
                    "update": "its optimizer takes the learning rate from the host",
                },
                {"3": "its ranks communicate within it"},
            ],
            "CUDA graphs: 2 of 4 stages captured; stages 1, 3 eager: its ranks "
            "communicate within it; "
            "the update eager: its optimizer takes the learning rate from the host",
        ),
        (
            3,
            [
                {
                    "0": "the plan is not bound by the host",
                    "1": "",
                    "2": "one of its operators waits for the device",
                }
            ],
            "CUDA graphs: 1 of 3 stages captured; stage 0 eager: the plan is not bound by the "
            "host; stage 2 eager: one of its operators waits for the device",
        ),
        (
            1,
            [{"0": "the plan is not bound by the host"}],
            (
                "no CUDA graphs: the plan is not bound by the host (--cuda-graphs captures its "
                "stages nevertheless)"
            ),
        ),
    ],
)
def test_a_run_says_in_one_line_what_is_captured(
    stages: int, by_rank: list[dict[str, str]], line: str
) -> None:
    assert capture_summary(stages, by_rank) == line


def test_static_gradients_hold_what_gradients_held() -> None:
    gradients = StaticGradients()
    parameters = [torch.ones(2, requires_grad=True) for _ in range(3)]
    own = torch.full((2,), 3.0)
    parameters[1].grad = own
    gradients.gradient_of(parameters[0]).fill_(5.0)  # From the step before.
    gradients.set_as_gradients(parameters[:2])
    assert [each.grad is gradients.gradient_of(each) for each in parameters[:2]] == [True, True]
    assert parameters[0].grad is not None
    assert parameters[1].grad is not None
    assert parameters[0].grad.tolist() == [0.0, 0.0]
    assert parameters[1].grad.tolist() == [3.0, 3.0]
    assert parameters[2].grad is None
    parameters[1].grad += 1
    gradients.set_as_gradients(parameters[:2])
    assert parameters[1].grad.tolist() == [4.0, 4.0], (
        "another stage of the step has placed it before"
    )
    assert own.tolist() == [3.0, 3.0]
