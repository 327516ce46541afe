"""Lets the tests and the ranks they start import `world` and what runs on ranks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
