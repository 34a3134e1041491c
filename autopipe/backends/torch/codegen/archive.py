"""Write arrays to a file in the format of `numpy.savez`. The bytes are equal for all releases of
Python.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_ZIP64_VERSION = 45
"""Version of the format (4.5) that has sizes of eight bytes (PKWARE, APPNOTE.TXT, 4.4.3.2)."""


class _Zip64Entry(zipfile.ZipInfo):
    """A file of a zip archive whose sizes always have eight bytes. This class writes the header
    itself, because Python's header for such files changed in 3.11.4.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.create_system = 3  # Unix, on every operating system.
        self.create_version = self.extract_version = _ZIP64_VERSION

    def FileHeader(self, zip64: bool | None = None) -> bytes:
        name = self.filename.encode()
        nowhere = 0xFFFFFFFF
        sizes = struct.pack("<HHQQ", 1, 16, self.file_size, self.compress_size)
        year, month, day, hour, minute, second = self.date_time
        date = (year - 1980) << 9 | month << 5 | day
        time = hour << 11 | minute << 5 | second // 2
        fields = (
            _ZIP64_VERSION,
            0,
            self.flag_bits,
            self.compress_type,
            time,
            date,
            self.CRC,
            nowhere,
            nowhere,
        )
        return struct.pack("<4s2B4H3L2H", b"PK\3\4", *fields, len(name), len(sizes)) + name + sizes


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a file for `numpy.load`. Their names must be ASCII."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(_Zip64Entry(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)
