"""What XLA is asked for: how many CPU devices to start with, and what its compiler does on CPUs."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax

_LIBRARIES = "xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
"""What YNNPACK computes on CPUs: all that it does of itself, but for convolutions."""


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


def usual(device: jax.Device) -> dict[str, Any]:
    """Return how to compile anything for this device: as JAX does, but on CPUs with Eigen's convolutions.

    Since 0.10.2 JAX takes YNNPACK's, which use one thread however many frames there are: the first layer of `NatureCNN`
    takes 133 ms of 512 frames in place of 22, on two cores. Who names its own choice in XLA_FLAGS keeps it.
    """
    chosen = _LIBRARIES[0] in os.environ.get("XLA_FLAGS", "")
    return known(*_LIBRARIES) if device.platform == "cpu" and not chosen else {}


@functools.cache
def known(name: str, value: str) -> dict[str, Any]:
    """Return this option for compiling on a CPU; nothing where this XLA does not know it."""
    option = {name: value}
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        try:
            jax.jit(lambda: 0, compiler_options=option).lower().compile()
        except jax.errors.JaxRuntimeError:
            return {}
    return option


def options(device: jax.Device) -> dict[str, Any]:
    """Return how to compile what is large for this device: on CPUs with LLVM's first level.

    That gave the same bits at the same rate as its third (PPO and DQN on CartPole and Breakout-MinAtar, Pong emulated),
    and took a fifth less of the compiler's time. Who asks JAX for less still (`JAX_DISABLE_MOST_OPTIMIZATIONS`) has it.
    """
    fewest = jax.config.read("jax_disable_most_optimizations")
    level = {"xla_backend_optimization_level": 1} if device.platform == "cpu" and not fewest else {}
    return {**usual(device), **level}


def in_one_order(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Return how to compile a program over several devices of a CPU: each runs its operations in turn.

    Two sums that do not depend on each other may else both be under way, each holding a thread of every device that has
    come to it; with as many threads as devices, the last device finds none, and the process aborts after 40 seconds.
    """
    return one_by_one(devices[0]) if len(devices) > 1 else usual(devices[0])


def one_by_one(device: jax.Device) -> dict[str, Any]:
    """Return how to compile a program of many small operations that others wait for: on CPUs, run them in turn.

    XLA else gives operations that do not depend on each other to several threads, which costs more than they take:
    acting for 16 with two hidden layers of 64 took 55 microseconds in place of 100. An operation that is large is still
    shared among threads. For rollouts and learning as one program this was no gain, or a loss.
    """
    in_turn = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if device.platform == "cpu" else {}
    return {**usual(device), **in_turn}
