"""Time a sweep of settings and seeds in one program beside the same runs in other ways; see `benchmark.py sweep`."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import machine

import podium
from podium.ranges import check_fields, largest_divisor


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """Time `podium.sweep` of PPO's rates beside one `podium.train(seeds=...)` a rate, and a loop under `vmap`.

    Each way is a process of its own, in turn, with no compilation cache; compiling counts, importing does not. The loop
    (reference_loop.py) has PureJaxRL's structure and, as its script for many rates, two `vmap`s; nothing evaluates
    but podium, `eval_episodes` a run at the end.
    """

    env: str = "CartPole-v1"
    """Environment of gymnax with discrete actions."""
    settings: int = 16
    """Rates, from 1e-5 to 1e-1."""
    seeds: int = 8
    """Runs of each rate."""
    num_steps: int = 100_000
    """Environment steps of a run."""
    num_envs: int = 64
    """Environments side by side, of a run."""
    rollout_length: int = 128
    """Steps of every environment before each learning phase."""
    num_epochs: int = 4
    """Passes over each rollout."""
    num_minibatches: int = 8
    """Parts of one pass, a gradient step each."""
    eval_episodes: int = 8
    """Episodes of podium's one evaluation, of each run."""
    devices: int | None = None
    """Devices of podium's ways; None takes what `podium sweep` does: on a CPU one a core."""
    rounds: int = 3
    """Turns of every way."""


WAYS = ("one program", "one after another", "vmapped loop")


def measure(flags: SweepFlags) -> dict[str, Any]:
    """Return the medians of seconds and steps a second of every way, and what one program is faster by."""
    numbers = (
        "settings",
        "seeds",
        "num_steps",
        "num_envs",
        "rollout_length",
        "num_epochs",
        "num_minibatches",
        "rounds",
        "eval_episodes",
    )
    check_fields(flags, counts=numbers)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(flags.rounds):
        for way in WAYS:
            seconds[way].append(_in_process(way, flags))
    steps = flags.settings * flags.seeds * flags.num_steps
    middle = {way: statistics.median(each) for way, each in seconds.items()}
    ratio = lambda way: statistics.median(a / b for a, b in zip(seconds[way], seconds[WAYS[0]], strict=True))
    return {
        "what": "sweep",
        **dataclasses.asdict(flags),
        "seconds": seconds,
        "median_seconds": middle,
        "steps_per_second": {way: steps / each for way, each in middle.items()},
        "faster_than_one_after_another": ratio(WAYS[1]),
        "faster_than_vmapped_loop": ratio(WAYS[2]),
    }


def _in_process(way: str, flags: SweepFlags) -> float:
    """Return the seconds that one way takes in a process of its own, compiling included."""
    command = [str(Path(__file__).resolve()), way, json.dumps(dataclasses.asdict(flags))]
    return float(machine.last_line_of(command, way, JAX_ENABLE_COMPILATION_CACHE="0"))


def _time(way: str, flags: SweepFlags) -> float:
    run = {WAYS[0]: _one_program, WAYS[1]: _one_by_one, WAYS[2]: _vmapped}[way](flags)
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _one_program(flags: SweepFlags) -> Callable[[], None]:
    _start(flags)
    space = {"learning_rate": podium.log_range(1e-5, 1e-1, flags.settings)}

    def run() -> None:
        podium.sweep(podium.agents.ppo, space, flags.env, config=_config(flags), seeds=flags.seeds, **_common(flags))

    return run


def _one_by_one(flags: SweepFlags) -> Callable[[], None]:
    _start(flags)
    config = _config(flags)
    devices = largest_divisor(flags.seeds, len(jax.devices()))

    def run() -> None:
        for rate in podium.log_range(1e-5, 1e-1, flags.settings):
            agent = podium.agents.ppo.make(dataclasses.replace(config, learning_rate=rate))
            podium.train(agent, flags.env, seeds=flags.seeds, placement=podium.Anakin(devices), **_common(flags))

    return run


def _vmapped(flags: SweepFlags) -> Callable[[], None]:
    import reference_loop  # Not above: gymnax makes arrays as it is imported, and JAX starts.

    rates = jnp.asarray(podium.log_range(1e-5, 1e-1, flags.settings))
    updates = flags.num_steps // (flags.num_envs * flags.rollout_length)

    def run() -> None:
        sweep = reference_loop.make_sweep(
            flags.env, flags.num_envs, flags.rollout_length, flags.num_epochs, flags.num_minibatches, updates
        )
        jax.block_until_ready(sweep(jax.random.split(jax.random.key(0), flags.seeds), rates))

    return run


def _start(flags: SweepFlags) -> None:
    """Start JAX with podium's devices, and load gymnax."""
    podium.request_devices(flags.devices or machine.cores())
    podium.envs.make(flags.env)


def _config(flags: SweepFlags) -> Any:
    return podium.agents.ppo.Config(num_epochs=flags.num_epochs, num_minibatches=flags.num_minibatches)


def _common(flags: SweepFlags) -> dict[str, Any]:
    return {
        "num_steps": flags.num_steps,
        "num_envs": flags.num_envs,
        "rollout_length": flags.rollout_length,
        "eval_every": 0,
        "eval_episodes": flags.eval_episodes,
        "progress": False,
    }


if __name__ == "__main__":
    print(_time(sys.argv[1], SweepFlags(**json.loads(sys.argv[2]))))
