"""The model that ships with the package, so that every command runs without a download."""

from pathlib import Path

FOLDER = Path(__file__).parent / "weights"
