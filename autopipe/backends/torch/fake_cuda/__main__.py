"""Command `LIBRARY FILE.py ARGUMENT...`: load the simulated CUDA device in LIBRARY, then run
FILE.py as the main program of this process with the arguments.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from autopipe.backends.torch import fake_cuda

_, library, *sys.argv = sys.argv
fake_cuda.load(Path(library))
runpy.run_path(sys.argv[0], run_name="__main__")
