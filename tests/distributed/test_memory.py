"""The memory that a plan predicts is what its ranks take, and no rank keeps anything longer than it
is needed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.api.plan_folder import open_prediction
from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from autopipe.passes.frontend.fusion.cross_entropy import MIN_CLASSES
from tests.distributed.support.allocations import peak_of_rank

pytestmark = pytest.mark.distributed

TYPES = ("fp32", "bf16")


def gpt(folder: Path, hidden: int, **more: str) -> Path:
    path = folder / "gpt.onnx"
    settings = {"layers": "4", "heads": "4", "sequence": "64", "vocabulary": "256", "loss": "true"}
    build(configure("gpt", settings | {"hidden": str(hidden)} | more)).save(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt(tmp_path_factory.mktemp("memory"), 64)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt(tmp_path_factory.mktemp("wide"), 128)


def planned(model: Path, schedule: str, micro_batches: int, *more: str, stages: int = 2) -> Path:
    """The plan of a pipeline, and its program."""
    folder = model.parent / "_".join((schedule, str(micro_batches), *more))
    words = [
        "plan",
        model,
        "--gpus",
        stages,
        "--cluster",
        "cpu-local",
        "--schedule",
        schedule,
        "-o",
        folder,
        "-q",
    ]
    words += ["--batch-size", 2 * micro_batches, "--micro-batches", micro_batches]
    words += ["--strategy", "pipedream", "--set", "strategy.replicate=false"]
    words += [word for each in more for word in ("--set", each)]
    assert main([str(word) for word in words]) == 0
    assert main(["codegen", str(folder), "-q"]) == 0
    return folder


def test_the_peak_is_as_predicted(model: Path) -> None:
    folder = planned(model, "1f1b", 6)
    _, timeline = open_prediction(folder)
    for rank, predicted in enumerate(timeline.peak_memory):
        assert 0.9 <= peak_of_rank(folder / "program", rank) / predicted <= 1.05


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_micro_batch_in_flight_keeps_what_is_predicted(model: Path, precision: str) -> None:
    """Under autocast its own copies in 16 bits, too, of what products read. In a dry run its
    message is never gone.
    """
    few, many = (planned(model, "gpipe", count, f"precision={precision}") for count in (3, 6))
    plan, _ = open_prediction(many)
    counted = (peak_of_rank(many / "program", 0) - peak_of_rank(few / "program", 0)) / 3
    message = 2 * 64 * 64 * (precision == "bf16")
    assert 0.99 <= (counted - message) / plan.prediction.stages[0].kept_bytes <= 1.01


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_that_recompute_hold_copies_in_16_bits_where_memory_has_room(
    wide_model: Path, schedule: str
) -> None:
    # Kept scores would make the last stage the largest, whose peak has the copies in any case.
    how = "precision=bf16", "recompute=full", "loss.scores=recompute"
    plan, timeline = open_prediction(planned(wide_model, schedule, 6, *how))
    assert all(stage.holds_copies for stage in plan.placement.stages)
    limit = max(timeline.peak_memory) - 1
    folder = planned(wide_model, schedule, 6, *how, f"memory_limit={limit}")
    plan, timeline = open_prediction(folder)
    assert (
        not all(stage.holds_copies for stage in plan.placement.stages)
        and max(timeline.peak_memory) <= limit
    )
    for rank, predicted in enumerate(timeline.peak_memory):
        assert 0.95 <= peak_of_rank(folder / "program", rank) / predicted <= 1.05


def test_inference_holds_weights_of_products_in_16_bits_alone(wide_model: Path) -> None:
    plans = [
        open_prediction(planned(wide_model, "gpipe", 6, "mode=infer", f"precision={each}"))
        for each in TYPES
    ]
    (whole, _), (narrow, timeline) = plans
    table = 4 * 256 * 128  # Looked up, too, and so held in full.
    assert (
        narrow.prediction.stages[1].parameter_bytes
        < 0.55 * (whole.prediction.stages[1].parameter_bytes - table) + table
    )
    folder = planned(wide_model, "gpipe", 6, "mode=infer", "precision=bf16")
    for rank, predicted in enumerate(timeline.peak_memory):
        assert 0.9 <= peak_of_rank(folder / "program", rank) / predicted <= 1.1


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_under_autocast_is_as_predicted(wide_model: Path, recompute: str) -> None:
    folder = planned(wide_model, "1f1b", 6, "precision=bf16", f"recompute={recompute}")
    _, timeline = open_prediction(folder)
    for rank, predicted in enumerate(timeline.peak_memory):
        assert 0.95 <= peak_of_rank(folder / "program", rank) / predicted <= 1.05


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_scores_of_a_large_vocabulary_are_never_all_in_memory(
    precision: str, tmp_path: Path
) -> None:
    """Two samples of 64 tokens have 8 MiB of scores in single precision, of which there are 2 at a
    time.
    """
    model = gpt(tmp_path, 64, layers="1", vocabulary=str(MIN_CLASSES))
    settings = f"precision={precision}", "loss.scores=recompute"
    folders = [planned(model, "gpipe", count, *settings, stages=1) for count in (3, 6)]
    plan, timeline = open_prediction(folders[1])
    few, many = (peak_of_rank(folder / "program", 0) for folder in folders)
    kept = plan.prediction.stages[0].kept_bytes
    assert kept < 4 * 2 * 64 * MIN_CLASSES / 8
    # Tokens and labels of each micro-batch are held, too.
    assert 0.99 <= (many - few) / 3 / kept <= 1.02
    assert 0.95 <= many / timeline.peak_memory[0] <= 1.05


@pytest.mark.parametrize(
    ("strategy", "copies"),
    [
        (("data_parallel",), 4),
        (("grid", "--set", "strategy.pipeline=2", "--set", "strategy.data=2"), 2),
    ],
    ids=["replicas", "stages of replicas"],
)
def test_memory_falls_as_predicted_with_state_in_shares(
    model: Path, strategy: tuple[str, ...], copies: int
) -> None:
    """AdamW on four ranks: each keeps of two numbers a parameter a share (ZeRO-1)."""
    peaks = []
    predictions = []
    for stage in (0, 1):
        folder = model.parent / f"{strategy[0]}_{stage}"
        words = [
            "plan",
            model,
            "--gpus",
            4,
            "--cluster",
            "cpu-local",
            "-o",
            folder,
            "-q",
            "--schedule",
            "1f1b",
        ]
        words += ["--batch-size", 16, "--micro-batches", 4, "--strategy", *strategy]
        words += ["--set", "optimizer.name=adamw", "--set", f"optimizer.zero_stage={stage}"]
        assert main([str(word) for word in words]) == 0
        assert main(["codegen", str(folder), "-q"]) == 0
        plan, timeline = open_prediction(folder)
        peaks.append(peak_of_rank(folder / "program", 3))
        predictions.append(timeline.peak_memory[3])
        assert 0.98 <= peaks[-1] / predictions[-1] <= 1.02
    counted = peaks[0] - peaks[1]
    predicted = predictions[0] - predictions[1]
    assert abs(counted - predicted) < 0.01 * predicted
    # The table of the first stage and the head is one, and all four ranks hold it.
    tied = 4 * 256 * 64
    others = plan.prediction.stages[-1].parameter_bytes - tied
    assert abs(predicted - 2 * (others * (1 - 1 / copies) + tied * (1 - 1 / 4))) < 0.001 * predicted


def test_more_micro_batches_take_no_more_memory(model: Path) -> None:
    few, many = (peak_of_rank(planned(model, "1f1b", count) / "program", 0) for count in (6, 18))
    assert abs(many / few - 1) < 0.01


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_scores_that_are_kept_are_predicted(precision: str, tmp_path: Path) -> None:
    """Two samples of 64 tokens keep 8 MiB of logarithms of probabilities, in single precision
    whatever products are.
    """
    model = gpt(tmp_path, 64, layers="1", vocabulary=str(MIN_CLASSES))
    settings = f"precision={precision}", "loss.scores=keep"
    folders = [planned(model, "gpipe", count, *settings, stages=1) for count in (3, 6)]
    plan, timeline = open_prediction(folders[1])
    few, many = (peak_of_rank(folder / "program", 0) for folder in folders)
    kept = plan.prediction.stages[0].kept_bytes
    assert kept > 4 * 2 * 64 * MIN_CLASSES
    # Tokens and labels of each micro-batch are held, too.
    assert 0.99 <= (many - few) / 3 / kept <= 1.02
    assert 0.95 <= many / timeline.peak_memory[0] <= 1.05
