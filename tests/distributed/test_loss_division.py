"""Steps of many losses in micro-batches on two devices are those of the whole batch in torch, or
are refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from autopipe.api.codegen import write_programs
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.ir.errors import InfeasibleError
from autopipe.passes.analysis.batch_forms import LossKind
from autopipe.passes.pipeline import Request, make_plan
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackward
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import Step, assert_equal_steps, run_step
from tests.passes.loss_cases import LOSSES, LossCase, Network, batch, exported

pytestmark = pytest.mark.distributed

SAMPLES = 16
MICRO_BATCHES = 4
TOLERANCE = 1e-5
DIVISIBLE = tuple(case for case in LOSSES if case.kind in (LossKind.MEAN, LossKind.SUM))
RATIOS = tuple(case for case in LOSSES if case.kind is LossKind.RATIO)
MIXED = tuple(case for case in LOSSES if case.kind is LossKind.MIXED)


def planned_request(
    model: Path, micro_batches: int, normalize: str = "auto", replicas: int = 2
) -> Request:
    """Return the request for replicas on devices of their own."""
    cluster = build_cluster(cluster_preset("cpu-local"), replicas)
    return Request(
        model,
        cluster,
        DataParallel(),
        OneForwardOneBackward(),
        batch_size=SAMPLES,
        micro_batches=micro_batches,
        normalize=normalize,
    )


def step_of(pools: Pools, request: Request, folder: Path) -> Step:
    """Return the step of the program of a request."""
    write_programs(make_plan(request), folder)
    return run_step(pools, folder, batch(SAMPLES))


def step_by_torch(case: LossCase, program: Path, parts: int = 1) -> Step:
    """Return the step that torch computes, of the mean of the losses of equal parts of the
    batch.
    """
    torch.manual_seed(0)
    network = Network(case.function)
    data = [torch.from_numpy(each).chunk(parts) for each in batch(SAMPLES).values()]
    loss = torch.stack([network(*part) for part in zip(*data, strict=True)]).mean()
    loss.backward()
    named = dict(network.named_parameters())
    gradients = {}
    for index, entry in enumerate(read_manifest(program).parameters):
        gradient = named[entry.value.name].grad
        assert gradient is not None
        gradients[index] = gradient.numpy().reshape(entry.value.shape)
    return Step(loss.item(), gradients)


@pytest.mark.parametrize("case", DIVISIBLE, ids=lambda case: case.name)
def test_micro_batches_on_replicas_compute_the_loss_of_the_batch(
    case: LossCase, pools: Pools, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    found = step_of(pools, planned_request(exported(case, tmp_path), MICRO_BATCHES), program)
    assert_equal_steps(found, step_by_torch(case, program), TOLERANCE)


@pytest.mark.parametrize(("micro_batches", "replicas"), [(1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("case", RATIOS, ids=lambda case: case.name)
def test_micro_batches_add_up_the_totals_of_a_ratio(
    case: LossCase, micro_batches: int, replicas: int, pools: Pools, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    model = exported(case, tmp_path)
    planned = make_plan(planned_request(model, micro_batches, replicas=replicas))
    write_programs(planned, program)
    found = run_step(pools, program, batch(SAMPLES))
    assert_equal_steps(found, step_by_torch(case, program), TOLERANCE)
    assert bool(planned.problem.loss_division.divided) == (micro_batches > 1)
    if micro_batches > 1 and case.name != "root of a sum":
        average = step_by_torch(case, program, micro_batches)
        assert not np.isclose(found.loss, average.loss, rtol=1e-4)


def test_totals_are_of_the_size_of_a_mean(tmp_path: Path) -> None:
    """Gradients of a sum over all tokens of a batch are no numbers of float16."""
    case = next(each for each in LOSSES if each.name == "mean over chosen, at least one")
    division = make_plan(
        planned_request(exported(case, tmp_path), MICRO_BATCHES)
    ).problem.loss_division
    assert (division.weight, division.minimum) == (1 / SAMPLES, 1 / SAMPLES)


@pytest.mark.parametrize("case", MIXED, ids=lambda case: case.name)
def test_other_losses_need_one_micro_batch(case: LossCase, pools: Pools, tmp_path: Path) -> None:
    model = exported(case, tmp_path)
    with pytest.raises(
        InfeasibleError, match=r"4 micro-batches do not give the loss 'loss' of a batch of 16"
    ) as error:
        make_plan(planned_request(model, MICRO_BATCHES))
    assert "--micro-batches 1" in error.value.hint
    assert "loss.normalize: micro_batches" in error.value.hint
    program = tmp_path / "program"
    assert_equal_steps(
        step_of(pools, planned_request(model, 1), program), step_by_torch(case, program), TOLERANCE
    )


def test_losses_of_micro_batches_are_averaged_on_request(pools: Pools, tmp_path: Path) -> None:
    case = next(each for each in LOSSES if each.name == "log of a mean")
    program = tmp_path / "program"
    found = step_of(
        pools, planned_request(exported(case, tmp_path), MICRO_BATCHES, "micro_batches"), program
    )
    assert_equal_steps(found, step_by_torch(case, program, MICRO_BATCHES), TOLERANCE)
    assert not np.isclose(found.loss, step_by_torch(case, program).loss, rtol=1e-4)


def test_losses_of_micro_batches_are_added_up_on_request(pools: Pools, tmp_path: Path) -> None:
    case = next(each for each in LOSSES if each.name == "sum with decay")
    program = tmp_path / "program"
    found = step_of(pools, planned_request(exported(case, tmp_path), MICRO_BATCHES, "sum"), program)
    average = step_by_torch(case, program, MICRO_BATCHES)
    scaled = {index: gradient * MICRO_BATCHES for index, gradient in average.gradients.items()}
    assert_equal_steps(found, Step(average.loss * MICRO_BATCHES, scaled), TOLERANCE)


@pytest.mark.parametrize(
    ("name", "parts"),
    [("sum by batch size", 2), ("sum of squares", 0), ("mean square", 1), ("contrastive", 2)],
)
def test_a_file_that_fixes_the_batch_to_half_of_it(
    name: str, parts: int, pools: Pools, tmp_path: Path
) -> None:
    """A sum by the batch size of the file is the mean of two such losses, and so is a loss of the
    file as it is.
    """
    case = next(each for each in LOSSES if each.name == name)
    model = exported(case, tmp_path, SAMPLES // 2)
    program = tmp_path / "program"
    count = 2 if case.kind is LossKind.MIXED else MICRO_BATCHES
    planned = make_plan(planned_request(model, count))
    write_programs(planned, program)
    expected = step_by_torch(case, program, max(parts, 1))
    assert_equal_steps(run_step(pools, program, batch(SAMPLES)), expected, TOLERANCE)
    assert any(
        "to which the file fixes the batch: 8" in each for each in planned.model.warnings
    ) == (parts != 1)


@pytest.mark.parametrize("name", ["mean square", "sum of squares", "sum by batch size"])
def test_a_file_that_fixes_the_batch_to_one_sample(name: str, pools: Pools, tmp_path: Path) -> None:
    case = next(each for each in LOSSES if each.name == name)
    model = exported(case, tmp_path, 1)
    program = tmp_path / "program"
    write_programs(make_plan(planned_request(model, SAMPLES, replicas=1)), program)
    expected = step_by_torch(case, program, SAMPLES if name == "sum by batch size" else 1)
    assert_equal_steps(run_step(pools, program, batch(SAMPLES)), expected, TOLERANCE)


def test_a_loss_that_is_not_known_to_be_divisible_is_refused_or_told_of(tmp_path: Path) -> None:
    """A contrastive loss of one sample cannot be read on more: its labels are in the file."""
    case = next(each for each in LOSSES if each.name == "contrastive")
    fixed = make_plan(planned_request(exported(case, tmp_path, 1), SAMPLES, replicas=1))
    (told,) = [each for each in fixed.model.warnings if "cannot be read on 2 and 4 samples" in each]
    assert (
        "the mean of losses of the samples to which the file fixes the batch: 1 (loss.normalize: "
        in told
    )
    silent = make_plan(
        planned_request(exported(case, tmp_path, 1), SAMPLES, "micro_batches", replicas=1)
    )
    assert not any("cannot be read" in each for each in silent.model.warnings)


def test_labels_are_not_counted_over_micro_batches_that_mix_samples(tmp_path: Path) -> None:
    """Scores that are centred over a batch are others in micro-batches, however their losses are
    divided.
    """

    def centred(scores: torch.Tensor, labels: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores - scores.mean(0), labels)

    model = exported(LossCase("centred cross entropy", LossKind.MIXED, centred), tmp_path)
    with pytest.raises(InfeasibleError, match="Sub '/Sub'"):
        make_plan(planned_request(model, MICRO_BATCHES, "tokens"))
    plain = exported(next(each for each in LOSSES if each.name == "cross entropy"), tmp_path)
    assert (
        make_plan(planned_request(plain, MICRO_BATCHES, "tokens")).problem.micro_batches
        == MICRO_BATCHES
    )


def test_a_part_of_the_batch_that_the_file_fixes_is_refused(tmp_path: Path) -> None:
    case = next(each for each in LOSSES if each.name == "hard mining")
    with pytest.raises(
        InfeasibleError, match="TopK '/TopK' takes the samples of a batch together"
    ) as error:
        make_plan(planned_request(exported(case, tmp_path, SAMPLES // 2), MICRO_BATCHES))
    assert "--micro-batch-size 8" in error.value.hint
