"""`autopipe launch`: reports, traces, errors of ranks, several nodes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
from pathlib import Path

import numpy as np
import pytest

from autopipe.backends.torch.verification import read_losses
from autopipe.ir.problem import Optimizer
from tests.distributed.support.launching import (
    BATCH,
    MICRO_BATCHES,
    finish,
    launch,
    launch_here,
    rank_pids,
    spell_data,
    start,
    wait_for,
    write_chain,
    write_key,
)
from tests.distributed.support.pool import Pools
from tests.test_no_pickle import GUARD

pytestmark = pytest.mark.distributed


def test_json_and_the_log_hold_every_step_and_the_trace_every_task(tmp_path: Path) -> None:
    program = write_chain(tmp_path / "program")
    trace = tmp_path / "trace.json"
    log = tmp_path / "runs" / "first"
    ended = launch(program, "--steps", 2, "--json", "--trace", trace, "--log", log, "--profile", 1)
    assert ended.code == 0, ended.stderr
    *lines, last = map(json.loads, ended.stdout.splitlines())
    steps = last["steps"]
    assert lines == steps
    assert [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()] == steps
    assert [step["step"] for step in steps] == [0, 1]
    assert all(
        math.isfinite(step["loss"]) and len(step["peak_memory_bytes"]) == 2 for step in steps
    )
    assert "2 ranks on the CPU, over gloo" in ended.stderr
    assert ended.stderr.count("the data are random") == 1
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    tasks = {(event["tid"], event["args"]["step"], event["name"]) for event in events}
    expected = {
        (rank, step, f"{rank}{phase}{index}")
        for rank in (0, 1)
        for step in (0, 1)
        for phase in "FB"
        for index in range(MICRO_BATCHES)
    }
    assert tasks == expected
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    assert "no predicted timeline: the plan of the program is not in" in ended.stderr
    timeline = json.loads((log / "profile" / "timeline.json").read_text())["traceEvents"]
    tasks = {
        (each["tid"], each["args"]["step"], each["name"])
        for each in timeline
        if each.get("cat") == "measured"
    }
    assert tasks == {(rank, step, name) for rank, step, name in expected if step == 1}
    late = {
        (each["tid"], each["args"]["task"], each["args"]["peer"])
        for each in timeline
        if each.get("cat") == "late message"
    }
    assert late <= {(1, f"1F{index}", 0) for index in range(MICRO_BATCHES)} | {
        (0, f"0B{index}", 1) for index in range(MICRO_BATCHES)
    }
    assert (1, "1F0", 0) in late and (0, "0B0", 1) in late
    for rank in (0, 1):
        profile = json.loads((log / "profile" / f"rank_{rank:03d}.json").read_text())["traceEvents"]
        marked = {each["name"] for each in profile if each.get("cat") == "user_annotation"}
        assert {name for number, _, name in expected if number == rank} <= marked
        assert any(each["name"] == "aten::mm" for each in profile)


def test_a_moved_program_prints_its_steps(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = write_chain(tmp_path / "program")
    moved = program.rename(tmp_path / "elsewhere")
    ended = launch_here(capsys, moved, "--steps", 2)
    assert ended.code == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["step", "0"], ["step", "1"]]
    assert "bubble" in lines[0] and "samples/s" in lines[0]
    assert lines[2].split() == ["predicted", "measured"]
    assert lines[3].split()[:3] == ["step", "100", "ms"]


def test_a_rank_that_raises_is_named_with_its_task(tmp_path: Path) -> None:
    program = write_chain(tmp_path / "program")
    data = spell_data(tmp_path, "if step == 1: raise ValueError('no more rows')")
    ended = launch(program, "--steps", 3, "--data", data)
    assert ended.code == 5
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert errors == ["error: rank 0, task 0F0: ValueError: no more rows"]
    assert "Traceback" not in ended.stderr and "torch" not in ended.stderr


def test_a_loss_that_is_no_number_names_rank_stage_and_micro_batch(tmp_path: Path) -> None:
    program = write_chain(tmp_path / "program")
    rows = np.ones((BATCH * MICRO_BATCHES, 4))
    rows[BATCH] = np.nan
    np.savez(tmp_path / "rows.npz", in0=rows)
    ended = launch(program, "--data", tmp_path / "rows.npz", "--max-restarts", 2)
    assert ended.code == 5
    assert "error: rank 1, stage 1, micro-batch 1: the loss at step" in ended.stderr
    assert "is infinite or NaN" in ended.stderr
    assert "starting all ranks again" not in ended.stderr


def test_a_mistake_found_by_a_rank_is_the_users_and_not_tried_again(tmp_path: Path) -> None:
    program = write_chain(tmp_path / "program")
    ended = launch(program, "--data", tmp_path / "absent.npz", "--max-restarts", 2, "--json")
    assert ended.code == 2
    assert ended.result["error"]["kind"] == "ConfigurationError"
    assert "absent.npz" in ended.result["error"]["where"]
    assert "starting all ranks again" not in ended.stderr


def test_a_rank_in_an_endless_loop_is_named_with_its_task_and_the_others_are_stopped(
    tmp_path: Path,
) -> None:
    program = write_chain(tmp_path / "program")
    loop = """if step == 1:
            (here / 'reached').write_text('')
            while True: pass"""
    process = start(
        program, "--steps", 3, "--data", spell_data(tmp_path, loop), "--step-timeout", 4, "--json"
    )
    wait_for((tmp_path / "reached").exists, process)
    pids = rank_pids(process.pid)
    ended = finish(process)
    assert ended.code == 5
    error = ended.result["error"]
    assert re.fullmatch(r"rank 0 hangs in task 0F0 for \d+ s", error["message"]), error
    logs = Path(error["hint"].split(" is in ")[1])
    assert "batch_source.py" in (next(logs.glob("*/attempt_0/0/stderr.log"))).read_text(), (
        "where it hangs is written down"
    )
    shutil.rmtree(logs)
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_interrupt_stops_all_ranks(tmp_path: Path) -> None:
    program = write_chain(tmp_path / "program")
    data = spell_data(tmp_path, "(here / 'reached').write_text('') if step == 2 else None")
    process = start(program, "--steps", 10**9, "--data", data)
    wait_for((tmp_path / "reached").exists, process)
    pids = rank_pids(process.pid)
    assert set(pids) == {0, 1}
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130
    assert "interrupted" in ended.stderr
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_interrupt_ends_a_launch_that_a_silent_process_keeps_waiting(tmp_path: Path) -> None:
    program = write_chain(tmp_path / "program")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        key = write_key(tmp_path)
        process = start(program, "--nnodes", 2, "--rdzv-endpoint", endpoint, "--rdzv-key", key)
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            ended = finish(process)
    assert ended.code == 130
    assert "interrupted" in ended.stderr


def test_two_nodes_meet_without_unpickling_and_compute_what_one_does(
    pools: Pools, tmp_path: Path
) -> None:
    program = write_chain(tmp_path / "program", groups=((0, 1), (2, 3)))
    alone = tmp_path / "alone.jsonl"
    pools.of(4).run(program, "--device", "cpu", "--steps", 2, "--report", alone)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ("--steps", 2, "--json", "--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(GUARD)
    path = (tmp_path / "path",)
    nodes = [start(program, *flags, "--rdzv-key", write_key(tmp_path), path=path) for _ in range(2)]
    ended = [finish(node) for node in nodes]
    assert [each.code for each in ended] == [0, 0], [each.stderr for each in ended]
    assert sorted((each.losses for each in ended), key=len) == [[], read_losses(alone)]


def test_a_dry_run_counts_what_a_rank_exchanges(tmp_path: Path) -> None:
    program = write_chain(tmp_path / "program", groups=((0, 1), (2,)))
    ended = launch(program, "--dry-run", "--rank", 0, "--json")
    assert ended.code == 0, ended.stderr
    report = ended.result
    half = BATCH // 2 * 4 * 8 * MICRO_BATCHES
    assert report["sent_bytes"] == {"2": half} and report["received_bytes"] == {"2": half}
    assert sorted(report["tasks"]) == sorted(
        f"0{phase}{index}" for phase in "FB" for index in range(MICRO_BATCHES)
    )
    moved = {kind: size for kind, size in report["communication_bytes"].items() if size}
    assert moved == {"gradient": report["parameter_bytes"], "send": half}
    assert report["parameter_bytes"] == report["parameters"] * 8


def test_inference_writes_its_outputs(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = write_chain(tmp_path / "program", train=False)
    ended = launch_here(capsys, program, "--mode", "infer", "--outputs", tmp_path / "out.npy")
    assert ended.code == 0, ended.stderr
    assert np.load(tmp_path / "out.npy").shape[0] == MICRO_BATCHES
    assert {path.name for path in tmp_path.iterdir()} == {"program", "out.npy"}


def test_inference_over_a_file_takes_all_of_it(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = write_chain(tmp_path / "program", train=False)
    np.savez(tmp_path / "rows.npz", in0=np.ones((BATCH * MICRO_BATCHES + BATCH + 1, 4)))
    ended = launch_here(
        capsys, program, "--data", tmp_path / "rows.npz", "--outputs", tmp_path / "out.npz"
    )
    assert ended.code == 0, ended.stderr
    assert re.findall(r"^step +(\d+) ", ended.stdout, re.M)[:2] == ["0", "1"]
    assert "17 samples are 2 batches of 12, the last of 5" in ended.stderr
    with np.load(tmp_path / "out.npz") as outputs:
        assert {name: array.shape for name, array in outputs.items()} == {
            "v9": (MICRO_BATCHES + 2,)
        }


def test_training_goes_into_a_next_epoch_and_says_so_once(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same losses, but for what was learnt, would come from the same samples: here nothing is
    learnt.
    """
    program = write_chain(tmp_path / "program", Optimizer(lr=0.0))
    np.savez(
        tmp_path / "rows.npz",
        in0=np.random.default_rng(0).normal(size=(2 * BATCH * MICRO_BATCHES + 5, 4)),
    )
    ended = launch_here(capsys, program, "--steps", 5, "--data", tmp_path / "rows.npz")
    assert ended.code == 0, ended.stderr
    losses = re.findall(r"loss (\S+)", ended.stdout)
    assert losses[0] == losses[2] == losses[4] and losses[1] == losses[3] and losses[0] != losses[1]
    said = [line for line in ended.stdout.splitlines() if "epoch" in line]
    assert said == [
        f"step 2 begins epoch 2 of {tmp_path / 'rows.npz'} "
        "(the last 5 samples, fewer than a batch, are skipped)"
    ]
    assert "29 samples are 2 batches of 12, the last 5 of each epoch left out" in ended.stderr
