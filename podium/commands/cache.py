"""Where compiled programs are kept between commands."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def use_compilation_cache() -> Path | None:
    """Let JAX keep compiled programs in a folder of this user alone, and return it; None where it cannot be made.

    Whoever can write the folder can run code here, so it is made with mode 0700, refused if it is somebody else's,
    and never part of a run folder.
    """
    base = os.environ.get("PODIUM_CACHE")
    if base:
        folder = Path(base) / "jax"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "podium" / "jax"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return None
        folder.chmod(0o700)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder
