"""Writing of arrays to a file in the format of `numpy.savez`, with bytes that do not depend on the
version of Python.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_ZIP64_VERSION = 45
"""Version 4.5 of the zip format, the first with sizes of eight bytes (PKWARE, APPNOTE.TXT,
4.4.3.2).
"""


class _Zip64Entry(zipfile.ZipInfo):
    """A file in a zip archive whose header always stores sizes in eight bytes. The class writes the
    header itself, because Python 3.11.4 changed the header of such files.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # The number 3 means Unix. By default, zipfile writes a number that depends on the operating
        # system, so archives of equal contents would differ.
        self.create_system = 3
        self.create_version = self.extract_version = _ZIP64_VERSION

    def FileHeader(self, zip64: bool | None = None) -> bytes:
        """Return the bytes of the header. `zip64` is ignored, because sizes always have eight
        bytes.
        """
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
    """Write arrays to the file `path`, which `numpy.load` reads. The names of the arrays must be
    ASCII.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(_Zip64Entry(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)
