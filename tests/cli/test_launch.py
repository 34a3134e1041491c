"""What `autopipe launch` refuses before it starts anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from autopipe.backends.torch.launcher import LaunchConfig, local_ranks, read_reports
from autopipe.backends.torch.runtime.job import Endpoint, parse_endpoint
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.cli.main import main
from autopipe.ir.errors import ConfigurationError
from tests.distributed.support.launching import write_chain


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chain(
        tmp_path_factory.mktemp("launch") / "program", groups=((0,), (1,), (2,), (3,))
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--resume"], "--resume requires a checkpoint folder"),
        (["--checkpoint-every", "2"], "--checkpoint-every requires a checkpoint folder"),
        (["--outputs", "x.npz"], "for training cannot write outputs"),
        (
            ["--trace", "/nonexistent/trace.json"],
            "the file /nonexistent/trace.json cannot be written",
        ),
        (["--rank", "1"], "--rank requires --dry-run"),
        (["--device", "meta"], "--device meta computes no values and requires --dry-run"),
        (["--dry-run", "--blocking"], "--dry-run measures no times: omit --blocking"),
        (["--dry-run", "--compile"], "--dry-run measures no times: omit --compile"),
        (["--dry-run", "--rank", "4"], "rank 4 does not exist"),
        (["--nnodes", "two"], "neither a number nor MIN:MAX"),
        (["--nnodes", "3:2"], "MIN at most MAX"),
        (["--nnodes", "0"], "at least 1"),
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank is 2, but the number of nodes is 2"),
        (["--nnodes", "3"], "4 ranks cannot be divided over 3 nodes"),
        (["--nproc-per-node", "3"], "4 ranks cannot be divided over 1 node with 3 ranks each"),
        (["--nnodes", "2"], "a run on several nodes requires a rendezvous endpoint"),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "here:1"],
            "a run on several nodes requires a rendezvous key",
        ),
        (["--rdzv-key", "/nonexistent/key"], "the rendezvous key cannot be read"),
        (["--steps", "0"], "--steps"),
        (["--log", "/dev/null/log"], "the metrics log cannot be written"),
        (["--profile", "3"], "--profile requires --log DIR"),
        (["--log", "log", "--profile", "5-3"], "'5-3' is neither a step nor steps such as 3-5"),
        (["--log", "log", "--profile", "x"], "'x' is neither a step nor steps such as 3-5"),
        (["--log", "log", "--steps", "3", "--profile", "3-5"], "the first profiled step is 3"),
    ],
)
def test_flags_that_make_no_sense(
    program: Path, flags: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", str(program), "--device", "cpu", *flags]) == 2
    assert words in capfd.readouterr().err


def test_a_folder_that_is_no_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(tmp_path)]) == 2
    assert "not a program folder" in capfd.readouterr().err


def test_an_earlier_run_is_not_written_over(
    program: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step_00000012").mkdir()
    assert main(["launch", str(program), "--device", "cpu", "--checkpoint", str(tmp_path)]) == 2
    error = capfd.readouterr().err
    assert "after 12 steps" in error and "--resume" in error


def test_inference_has_nothing_to_save(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = write_chain(tmp_path / "program", train=False)
    assert (
        main(["launch", str(program), "--device", "cpu", "--checkpoint", str(tmp_path / "saved")])
        == 2
    )
    assert "no state to save" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("gang", "expected"),
    [
        (LaunchConfig(), (1, 4)),
        (LaunchConfig((2, 2), rendezvous_endpoint="x:1", rendezvous_key=b"k"), (2, 2)),
        (LaunchConfig((1, 4), 2, "x:1", rendezvous_key=b"k"), (2, 2)),
        (LaunchConfig((1, 4), rendezvous_endpoint="x:1", rendezvous_key=b"k"), (4, 1)),
        (LaunchConfig((1, 4), 4), (1, 4)),
    ],
)
def test_ranks_are_shared_among_nodes(
    program: Path, gang: LaunchConfig, expected: tuple[int, int]
) -> None:
    assert local_ranks(read_manifest(program), gang) == expected


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("0" * 64, 0o640, "other users can read the rendezvous key"),
        ("0" * 31, 0o600, "the rendezvous key has 31 bytes"),
    ],
)
def test_a_key_that_keeps_nobody_out(
    program: Path,
    tmp_path: Path,
    text: str,
    mode: int,
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    key = tmp_path / "key"
    key.write_text(text)
    key.chmod(mode)
    assert main(["launch", str(program), "--device", "cpu", "--rdzv-key", str(key)]) == 2
    assert words in capfd.readouterr().err


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("nowhere", "expected HOST:PORT"),
        ("host:port", "expected HOST:PORT"),
        ("host:65536", "expected HOST:PORT"),
        ("0.0.0.0:1", "which other machines cannot reach"),
        (
            "no.such.host.invalid:1",
            "the address of rendezvous host 'no.such.host.invalid' is unknown",
        ),
    ],
)
def test_a_meeting_point_that_is_none(endpoint: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        parse_endpoint(endpoint)


def test_an_endpoint_of_this_machine_is_known_as_such() -> None:
    assert (
        parse_endpoint("127.0.0.1:7")
        == parse_endpoint("localhost:7")
        == Endpoint("127.0.0.1", 7, "127.0.0.1")
    )


def test_nodes_outside_the_limits_are_refused(program: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be divided"):
        local_ranks(read_manifest(program), LaunchConfig((3, 4), 2, "x:1"))


def test_a_step_done_again_is_reported_once(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    path.write_text('{"step": 0, "loss": 1}\n{"step": 1, "loss": 2}\n{"step": 1, "loss": 3}\n')
    assert read_reports(path) == [{"step": 0, "loss": 1}, {"step": 1, "loss": 3}]
    assert read_reports(tmp_path / "none") == []


@pytest.mark.parametrize("command", ["launch", "verify"])
def test_data_is_looked_at_before_anything_heavy_is_loaded(tmp_path: Path, command: str) -> None:
    """In one line, by a process that has not even loaded torch."""
    folder = write_chain(tmp_path / "program", groups=((0,),))
    np.savez(tmp_path / "rows.npz", in0=np.zeros((3, 4)))
    text = "import sys\nfrom autopipe.cli.main import main\n"
    text += (
        f"code = main([{command!r}, {str(folder)!r}, '--data', {str(tmp_path / 'rows.npz')!r}])\n"
    )
    text += "print(code, 'torch' in sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.splitlines()[0].endswith(
        "rows.npz: the data have 3 samples, fewer than a batch of 12"
    )
