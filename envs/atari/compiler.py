"""What XLA is asked for where it compiles the emulator: until jaxlib 0.10 is dropped, no AVX-512.

The compiler of jaxlib 0.10.2 makes wrong programs of the emulator for some numbers of environments (7, 8, 56, 57 of
those tried) on processors with AVX-512: objects of the picture at wrong places. Without AVX-512, at LLVM's level 0, and
with jaxlib 0.11.2 the same programs are right.
"""

from __future__ import annotations

import os
import platform
import warnings
from pathlib import Path
from typing import Any

import jax

from podium import xla

_ISA = "xla_cpu_max_isa"


def avoid_avx512() -> None:
    """Ask XLA to compile for CPUs without AVX-512, where it errs with it; warn where that comes too late.

    XLA reads its flags when JAX starts. A user's own `xla_cpu_max_isa` in XLA_FLAGS stays.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if not _errs() or _ISA in flags:
        return
    if not xla.has_started():
        os.environ["XLA_FLAGS"] = f"{flags} --{_ISA}=AVX2".strip()
    elif jax.default_backend() == "cpu":
        warnings.warn(
            "JAX had started before the first atari/ environment was made. Its compiler, that of jaxlib 0.10, makes "
            "wrong programs of the emulator for some numbers of environments on a CPU with AVX-512, as this one: make "
            f"the environment before anything starts JAX, set XLA_FLAGS=--{_ISA}=AVX2, or use JAX 0.11.",
            stacklevel=3,
        )


def careful_options(device: jax.Device) -> dict[str, Any]:
    """Return `xla.options`, and vectors so narrow that programs are right even where `avoid_avx512` comes too late."""
    narrow = {"xla_cpu_prefer_vector_width": 128} if device.platform == "cpu" and _errs() else {}
    return {**xla.options(device), **narrow}


def _errs() -> bool:
    """Say whether this compiler errs on this processor."""
    version = tuple(int(number) for number in jax.__version__.split(".")[:2])
    return version < (0, 11) and platform.machine() in ("x86_64", "AMD64") and _has_avx512()


def _has_avx512() -> bool:
    """Say whether the processor has AVX-512, as far as can be told."""
    try:
        return "avx512" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # No Linux.
