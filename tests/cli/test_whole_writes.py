"""Results that a pipe takes in pieces."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

from autopipe.cli.main import stream_with_complete_writes

PROGRAM = "from autopipe.cli.main import main; raise SystemExit(main())"


class Pipe(io.RawIOBase):
    """Takes ten bytes at a time, as a pipe may that is full when a signal comes."""

    def __init__(self) -> None:
        self.taken = b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.taken += bytes(data[:10])
        return min(10, len(data))


def test_an_unbuffered_stream_writes_on_where_the_pipe_took_a_part() -> None:
    pipe = Pipe()
    text = "nine of ten bytes are not all of them ✓\n"
    unbuffered = io.TextIOWrapper(pipe, encoding="utf-8", write_through=True)  # type: ignore[type-var]
    stream_with_complete_writes(unbuffered).write(text)
    assert pipe.taken.decode("utf-8") == text


def test_a_buffered_stream_stays_what_it_is() -> None:
    stream = io.TextIOWrapper(io.BytesIO())
    assert stream_with_complete_writes(stream) is stream


def test_the_command_prints_its_result_whole_where_python_is_unbuffered() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "config", "show", "--json"],
        env=dict(os.environ) | {"PYTHONUNBUFFERED": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and json.loads(done.stdout)
