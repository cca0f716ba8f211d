"""Measure how much of the rate of the environments alone is left to Sebulba; `benchmark.py sebulba`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
import unittest.mock
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from stacks import Stacks

import podium
from podium import DiscreteSpec, HostEnv, HostEnvFactory, networks, vision
from podium.agents import impala, ppo
from podium.ranges import check_fields
from podium.types import Array

WARM_UP = 4
"""Updates that are not counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SebulbaFlags:
    """Time Sebulba in turn with the same environments stepped by random actions: nothing acts, nothing learns."""

    env: str = "Pong-v5"
    """Environment on the CPU with discrete actions, by a name of podium.envs.names()."""
    agent: Literal["ppo", "impala"] = "ppo"
    """Agent to train."""
    network: Literal["negligible", "small_cnn", "nature_cnn", "impala_resnet"] = "negligible"
    """Network; negligible looks at every 12th pixel of the last frame and costs next to nothing."""
    convolution: Literal["podium", "lax"] = "podium"
    """Whose gradient convolutions have: podium.vision's, or that of jax.lax, which is slow inside loops on a CPU."""
    num_envs: int = 128
    """Environments side by side."""
    rollout_length: int = 16
    """Steps of every environment in an update."""
    epochs: int = 1
    """PPO's passes over each rollout."""
    minibatches: int = 1
    """PPO's parts of one pass, a gradient step each."""
    actor_threads: int = 1
    """Threads that act."""
    groups: int = 2
    """Batches that the environments of a thread form; one steps while another is acted for."""
    env_threads: int | None = None
    """Threads of envpool's for each batch under Sebulba; None for one a core, so that batches share the cores."""
    updates: int = 20
    """Updates in one timed turn, after a few that are not counted."""
    repeats: int = 3
    """Turns of each."""
    stacks: bool = False
    """Say in which lines the threads beside the learner's are, by looking at them all the time, which costs some."""


class EveryTwelfth(nn.Module):
    """Features [N, n] of frames [N, H, W, C]: a few pixels of the last one."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return the features."""
        return x[:, ::12, ::12, -1].reshape(x.shape[0], -1).astype(jnp.float32) / 255


def measure(flags: SebulbaFlags) -> dict[str, Any]:
    """Measure; see `SebulbaFlags`. Each turn of Sebulba stands between two of the environments alone."""
    numbers = "num_envs", "rollout_length", "epochs", "minibatches", "actor_threads", "groups", "updates", "repeats"
    check_fields(flags, counts=numbers)
    envs = podium.envs.make(flags.env)
    if not isinstance(envs, HostEnvFactory) or not isinstance(envs.spec.action, DiscreteSpec):
        raise ValueError(f"env={flags.env!r} must run on the CPU and have discrete actions, as Pong-v5.")
    acted = envs if flags.env_threads is None else podium.envs.make(flags.env, num_threads=flags.env_threads)
    assert isinstance(acted, HostEnvFactory)
    turns, alone, stacks = [], [_steps_alone(envs, flags)], Stacks()
    for _ in range(flags.repeats):
        lax = unittest.mock.patch.object(vision, "convolve", vision.lax_convolve)
        with lax if flags.convolution == "lax" else contextlib.nullcontext():
            turns.append(_turn(acted, flags, stacks if flags.stacks else contextlib.nullcontext()))
        alone.append(_steps_alone(envs, flags))
    around = [(before + after) / 2 for before, after in zip(alone, alone[1:], strict=False)]
    ratios = [turn["steps_per_second"] / rate for turn, rate in zip(turns, around, strict=True)]
    return {
        "what": "sebulba",
        **dataclasses.asdict(flags),
        **{name: statistics.median(turn[name] for turn in turns) for name in turns[0]},
        "environments_alone_steps_per_second": statistics.median(alone),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        **({"threads_are_in": stacks.shares()} if flags.stacks else {}),
    }


def _agent(flags: SebulbaFlags) -> podium.Agent:
    torso, sizes = (EveryTwelfth(), (8,)) if flags.network == "negligible" else (flags.network, (512,))
    network = networks.actor_critic(sizes, "relu", torso=torso)
    if flags.agent == "impala":
        return impala.make(network=network)
    return ppo.make(ppo.Config(num_epochs=flags.epochs, num_minibatches=flags.minibatches), network)


def _turn(envs: HostEnvFactory, flags: SebulbaFlags, timed: contextlib.AbstractContextManager[Any]) -> dict[str, float]:
    """Build, warm up until the queue is full, and time updates that follow one another without a pause."""
    placement = podium.Sebulba(actor_threads=flags.actor_threads, groups=flags.groups)
    sizes = {"num_envs": flags.num_envs, "rollout_length": flags.rollout_length}
    program = placement.build(_agent(flags), envs, max_updates=flags.updates, **sizes)
    try:
        state, _ = program.chunk(program.init(0), min(WARM_UP, flags.updates))
        memory = _resident_mib()
        with timed:
            began, spent = time.perf_counter(), time.process_time()
            _, metrics = program.chunk(state, flags.updates)
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - spent
        grown = _resident_mib() - memory  # Before the threads end and give theirs back.
        values: dict[str, np.ndarray] = {name: np.asarray(value) for name, value in metrics.items()}
    finally:
        program.close()
    busy = {name: float(values[name].sum()) for name in ("env_seconds", "inference_seconds", "learn_seconds")}
    idle = {name: float(values[name].mean()) for name in ("actor_idle", "learner_idle", "policy_lag_mean")}
    steps = flags.num_envs * flags.rollout_length * flags.updates
    return {
        "steps_per_second": steps / seconds,
        "seconds": seconds,
        "cpu_us_per_step": cpu_seconds / steps * 1e6,  # Of all threads; pinned to one core it varies less than seconds.
        **busy,
        **idle,
        "resident_mib": memory,
        "resident_mib_grown": grown,
    }


def _steps_alone(envs: HostEnvFactory, flags: SebulbaFlags) -> float:
    """Return the steps a second of one batch of all environments under random actions."""
    env = envs.make(flags.num_envs, 0, 0)
    assert isinstance(envs.spec.action, DiscreteSpec)
    actions = np.random.default_rng(0).integers(0, envs.spec.action.num_values, (64, flags.num_envs))
    steps = flags.rollout_length * flags.updates
    try:
        env.reset()
        _play(env, actions, 32)
        began = time.perf_counter()
        _play(env, actions, steps)
        return steps * flags.num_envs / (time.perf_counter() - began)
    finally:
        env.close()


def _play(env: HostEnv, actions: np.ndarray, steps: int) -> None:
    for step in range(steps):
        env.send(actions[step % len(actions)].astype(np.int32))
        env.recv()


def _resident_mib() -> float:
    """Return the memory of this process; 0 where /proc does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
