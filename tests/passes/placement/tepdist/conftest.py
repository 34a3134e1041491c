"""Add this folder to the import path, so that tests can import `random_layers`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
