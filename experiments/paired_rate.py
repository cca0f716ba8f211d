"""The rate of PPO under Anakin beside a loop of PureJaxRL's structure, in turn, in one process."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax

import podium
from podium.agents import ppo
from podium.devices import num_cores
from podium.ranges import check_fields, largest_divisor


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedFlags:
    """Time PPO beside a loop of PureJaxRL's structure (reference_loop.py), in turn, in one process."""

    env: str = "CartPole-v1"
    """Environment of gymnax with discrete actions."""
    num_envs: int = 64
    """Environments side by side."""
    rollout_length: int = 128
    """Steps of every environment before each learning phase."""
    epochs: int = 4
    """Passes over each rollout."""
    minibatches: int = 4
    """Parts of one pass, a gradient step each."""
    updates: int = 20
    """Rollouts in one timed turn."""
    repeats: int = 9
    """Turns of each, after one that is not counted."""
    devices: int | None = None
    """Devices that podium shares the environments among; the loop knows one, and has every core. None takes one a core
    of a CPU, up to eight and where they divide the environments, and one of other kinds."""


def measure(flags: PairedFlags) -> dict[str, Any]:
    """Measure podium beside the reference loop; see `PairedFlags`."""
    numbers = "num_envs", "rollout_length", "epochs", "minibatches", "updates", "repeats"
    check_fields(flags, counts=numbers)
    devices = _devices(flags)
    import reference_loop  # Not above: gymnax makes arrays as it is imported, and JAX starts.

    sizes = flags.num_envs, flags.rollout_length, flags.epochs, flags.minibatches, flags.updates
    init, train = reference_loop.make(flags.env, *sizes)
    config = ppo.Config(num_epochs=flags.epochs, num_minibatches=flags.minibatches, value_clip=0.2)
    program = podium.Anakin(devices=devices).build(
        ppo.make(config),
        podium.envs.make_pure(flags.env),
        num_envs=flags.num_envs,
        rollout_length=flags.rollout_length,
        max_updates=flags.updates,
    )
    program.compile()
    theirs, ours = init(jax.random.key(0)), program.init(0)
    timings: dict[str, list[float]] = {"reference": [], "podium": []}
    for _ in range(flags.repeats + 1):
        began = time.perf_counter()
        theirs = jax.block_until_ready(train(theirs))
        timings["reference"].append(time.perf_counter() - began)
        began = time.perf_counter()
        ours, _ = program.chunk(ours, flags.updates)
        timings["podium"].append(time.perf_counter() - began)
    turns = {name: values[1:] for name, values in timings.items()}
    steps = flags.num_envs * flags.rollout_length * flags.updates
    ratios = [a / b for a, b in zip(turns["reference"], turns["podium"], strict=True)]
    return {
        "what": "paired",
        **dataclasses.asdict(flags),
        "devices": devices,
        "steps_per_second": steps / statistics.median(turns["podium"]),
        "reference_steps_per_second": steps / statistics.median(turns["reference"]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def _devices(flags: PairedFlags) -> int:
    """Return how many devices podium takes, and ask for them, before anything starts JAX."""
    if flags.devices is not None:
        podium.request_devices(flags.devices)
        return flags.devices
    one_a_core = largest_divisor(flags.num_envs, min(8, num_cores()))
    podium.request_devices(one_a_core)
    return min(one_a_core, jax.device_count()) if jax.default_backend() == "cpu" else 1
