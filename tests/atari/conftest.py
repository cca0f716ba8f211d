"""Makes `atari`, this folder, importable as a package: its modules help its tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
