"""The SHA-256 of the golden vectors of first-party recipes."""

import json
from pathlib import Path

#: A recipe and its options, ``"mxfp8 scale_rounding=floor"`` for example -> the SHA-256 of the file
#: that ``ottava vectors`` writes.
HASHES: dict[str, str] = json.loads((Path(__file__).parent / "hashes.json").read_text())
