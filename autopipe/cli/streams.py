"""The stream that results go to."""

from __future__ import annotations

import io
from typing import TextIO


def whole_writes(stream: TextIO) -> TextIO:
    """The stream, such that each write is written whole.

    Unbuffered, as PYTHONUNBUFFERED asks for in most containers, Python drops what a pipe did not take at once when a
    signal comes meanwhile: a long result would end in the middle, and the command in success. The stream itself has to
    be kept by somebody: what is made here closes it when it ends.
    """
    raw = getattr(stream, "buffer", None)
    if isinstance(raw, io.RawIOBase):
        return io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True
        )
    return stream
