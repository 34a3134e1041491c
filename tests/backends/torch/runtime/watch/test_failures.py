"""Which of several failing ranks is named, and how."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from autopipe.backends.torch.elastic_agent import first_failure
from autopipe.backends.torch.runtime.watch.failures import Failure, describe_failure, read_failure
from autopipe.backends.torch.runtime.watch.heartbeat import Heartbeat
from autopipe.ir.errors import ConfigurationError, LaunchError

LOST = RuntimeError(
    "[.../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
)


def process(folder: Path, rank: int, code: int, failure: Failure | None = None) -> ProcessFailure:
    """What elastic makes of a process that ended with `code`, and wrote `failure`."""
    file = folder / f"{rank}.json"
    if failure is not None:
        form = {"message": "m", "timestamp": 1, "autopipe": {**vars_of(failure)}}
        file.write_text(json.dumps(form))
    return ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file=str(file))


def vars_of(failure: Failure) -> dict[str, object]:
    return {name: getattr(failure, name) for name in Failure.__dataclass_fields__}


def test_the_cause_is_named_before_what_followed_it(tmp_path: Path) -> None:
    lost = describe_failure(LOST, 0, "0B1")
    cause = describe_failure(ValueError("bad row"), 1, "1F2")
    assert lost.time <= cause.time and lost.consequence and "lost another rank" in lost.message
    failures = {
        0: process(tmp_path, 0, 5, lost),
        1: process(tmp_path, 1, 5, cause),
        2: process(tmp_path, 2, -15),
    }
    found = first_failure(failures, tmp_path).error()
    assert str(found) == "rank 1, task 1F2: ValueError: bad row"


def test_a_rank_that_posts_a_message_to_a_lost_rank_names_it() -> None:
    heartbeat = Heartbeat()
    with pytest.raises(RuntimeError), heartbeat.record_peer_on_error(3, 5):
        raise LOST
    assert describe_failure(LOST, 0, "0B1", heartbeat.awaited).message.startswith(
        "lost rank 3 (channel 5): "
    )


def test_a_killed_rank_is_the_cause_of_lost_connections(tmp_path: Path) -> None:
    failures = {
        0: process(tmp_path, 0, 5, describe_failure(LOST, 0, "0B1")),
        3: process(tmp_path, 3, -9),
    }
    found = first_failure(failures, tmp_path)
    assert str(found.error()).startswith("rank 3: killed by SIGKILL") and not found.final


def test_a_rank_that_could_not_say_more_is_known_by_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "run" / "attempt_0" / "1"
    log.mkdir(parents=True)
    (log / "stderr.log").write_text("Traceback\nModuleNotFoundError: No module named 'torch'\n\n")
    found = first_failure({1: process(tmp_path, 1, 1)}, tmp_path)
    assert str(found.error()) == "rank 1: ModuleNotFoundError: No module named 'torch'"


def test_only_what_was_asked_wrongly_is_a_configuration_error() -> None:
    wrong = describe_failure(ConfigurationError("no array", "give one", "x.npz"), 2, "start")
    assert (
        isinstance(wrong.error(), ConfigurationError)
        and str(wrong.error()) == "x.npz: no array (give one)"
    )
    assert wrong.final
    ours = describe_failure(LaunchError("too short", where="model.onnx"), 2, "start")
    assert str(ours.error()) == "rank 2, task start: model.onnx: too short"


NCCL = "NCCL error in: ProcessGroupNCCL.cpp:1, {}, NCCL version 2.27.3"


@pytest.mark.parametrize(
    "words",
    [
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process "
            "exiting prematurely."
        ),
        "remote process exited or there was a network error",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=RECV)",
        "NCCL communicator was aborted on rank 0.",
    ],
)
def test_a_peer_that_nccl_lost_is_named_with_the_channel(words: str) -> None:
    failure = describe_failure(dist.DistBackendError(NCCL.format(words)), 0, "0B1", (3, 17))
    assert failure.message.startswith("lost rank 3 (channel 17): ") and failure.consequence


@pytest.mark.parametrize(
    "words", ["unhandled cuda error", "invalid usage", "unhandled system error"]
)
def test_other_errors_of_nccl_are_the_ranks_own(words: str) -> None:
    failure = describe_failure(dist.DistBackendError(NCCL.format(words)), 0, "0B1", (3, 17))
    assert "lost" not in failure.message and not failure.consequence
    assert "NCCL_DEBUG=INFO" in failure.hint


def test_the_machine_is_named_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-7")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (
        str(describe_failure(ValueError("bad"), 2, "1F2").error())
        == "rank 2, task 1F2: ValueError: bad"
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (
        str(describe_failure(ValueError("bad"), 2, "1F2").error())
        == "rank 2 on gpu-7, task 1F2: ValueError: bad"
    )


@pytest.mark.parametrize("error", [MemoryError(), KeyError("x"), ValueError("first\nsecond")])
def test_an_error_is_one_line_with_its_kind(error: Exception) -> None:
    before = time.time()
    failure = describe_failure(error, 0, "update")
    assert type(error).__name__ in failure.message and "\n" not in failure.message
    assert before <= failure.time <= time.time() and not failure.final and not failure.consequence


def test_error_files_of_other_programs_are_left_alone() -> None:
    assert read_failure({"message": {"message": "x", "extraInfo": {"timestamp": 1}}}) is None


CLOSED = (
    "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL "
    "version 2.28"
)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOST, True),
        (dist.DistBackendError(CLOSED), True),
        (
            dist.DistBackendError(
                "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"
            ),
            True,
        ),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (dist.DistStoreError("wait timeout after 100ms, keys: /0"), True),
        (
            dist.DistBackendError(
                "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.28"
            ),
            False,
        ),
        (
            dist.DistBackendError(
                "NCCL error in: x.cpp:7, invalid usage (run with NCCL_DEBUG=WARN)"
            ),
            False,
        ),
        (RuntimeError("NCCL was not built with this torch"), False),
        (NotImplementedError("gloo has no such operator"), False),
        (ValueError("Timeout is not a number"), False),
    ],
)
def test_only_errors_of_a_lost_connection_follow_from_another_rank(
    error: Exception, lost: bool
) -> None:
    found = describe_failure(error, 1, "0B2")
    assert found.consequence == lost and ("lost another rank" in found.message) == lost
