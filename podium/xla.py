"""What XLA is asked for: how many CPU devices to start with, and what its compiler does on CPUs."""

from __future__ import annotations

import os
import platform
import warnings
from typing import Any

import jax

_ISA = "xla_cpu_max_isa"
_LATE = False


def set_cpu_devices(number: int) -> bool:
    """Set how many CPU devices JAX starts with; False if it has started with another number."""
    try:
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:
        return False
    return True


def has_started() -> bool:
    """Say whether JAX has started: it then refuses to change its number of devices."""
    now = getattr(jax.config, "jax_num_cpu_devices", -1)
    if not set_cpu_devices(now + 1000):
        return True
    set_cpu_devices(now)
    return False


def options(device: jax.Device) -> dict[str, Any] | None:
    """Return how to compile what runs on this device: as JAX does, but on CPUs with LLVM's first level.

    That gave the same bits at the same rate as its third (PPO and DQN on CartPole and Breakout-MinAtar, Pong emulated),
    and took a fifth less of the compiler's time.
    """
    return {"xla_backend_optimization_level": 1} if device.platform == "cpu" else None


def careful_options(device: jax.Device) -> dict[str, Any] | None:
    """Return `options`, and vectors so narrow that programs are right even where `avoid_avx512` comes too late."""
    narrow = {"xla_cpu_prefer_vector_width": 128} if device.platform == "cpu" and _miscompiles() else {}
    return {**(options(device) or {}), **narrow} or None


def one_by_one(device: jax.Device) -> dict[str, Any] | None:
    """Return how to compile a program of many small operations that others wait for: on CPUs, run them in turn.

    XLA else gives operations that do not depend on each other to several threads, which costs more than they take:
    acting for 16 with two hidden layers of 64 took 55 microseconds in place of 100. An operation that is large is still
    shared among threads. For rollouts and learning as one program this was no gain, or a loss.
    """
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if device.platform == "cpu" else None


def avoid_avx512() -> None:
    """Ask XLA to compile for CPUs without AVX-512, where its compiler is one that errs with it.

    That of jaxlib 0.10.2 makes wrong programs of the Atari emulator for some numbers of environments (7, 8, 56, 57 of
    those tried): objects of the picture at wrong places. Without AVX-512, at LLVM's level 0, and with jaxlib 0.11.2 the
    same programs are right. XLA reads its flags when JAX starts: for a process where it has, see `warn_of_avx512`. A
    user's own `xla_cpu_max_isa` in XLA_FLAGS stays.
    """
    global _LATE
    flags = os.environ.get("XLA_FLAGS", "")
    if _miscompiles() and _ISA not in flags:
        _LATE = has_started()
        os.environ["XLA_FLAGS"] = f"{flags} --{_ISA}=AVX2".strip()


def warn_of_avx512() -> None:
    """Warn where `avoid_avx512` came too late and programs run on the CPU."""
    if _LATE and jax.default_backend() == "cpu":
        warnings.warn(
            "JAX had started before podium was imported. Its compiler, that of jaxlib 0.10, makes wrong programs of "
            "the Atari emulator for some numbers of environments on a CPU with AVX-512: import podium first, set "
            f"XLA_FLAGS=--{_ISA}=AVX2, or use JAX 0.11.",
            stacklevel=3,
        )


def _miscompiles() -> bool:
    version = tuple(int(number) for number in jax.__version__.split(".")[:2])
    return version < (0, 11) and platform.machine() in ("x86_64", "AMD64")
