from __future__ import annotations

import sys
from pathlib import Path

# The example is a script with a package beside it, not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
