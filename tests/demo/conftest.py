"""Lets the tests use what those of core have for plugins."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
