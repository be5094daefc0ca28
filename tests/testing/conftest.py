"""Lets the tests, and the processes that they start, import the recipes that stand beside them, and
core's plugins."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE),
    str(HERE.parent / "integration" / "third_party" / "src"),
    str(HERE.parent / "core"),
]
