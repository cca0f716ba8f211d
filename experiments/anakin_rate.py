"""The rate of Anakin: training as one compiled program, on one number of devices or on several."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import bounds
import jax
import machine

import podium
from podium import Agent, ArraySpec, DiscreteSpec, EnvSpec, request_cpu_threads
from podium.agents import dqn, ppo, sac, td3
from podium.ranges import check_fields

OFF_POLICY: dict[str, Any] = {"sac": sac, "td3": td3}
"""Agents for continuous actions, whose gradient steps are counted by step."""

COUNTS = "num_steps", "seeds", "repeats", "epochs", "minibatches"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    agent: Literal["ppo", "dqn", "sac", "td3"] = "ppo"
    """Which agent trains."""
    env: str = "CartPole-v1"
    """Environment, by a name of podium.envs.names()."""
    num_envs: int | None = None
    """Environments side by side; None takes 64 for ppo, 10 for dqn and 1 for sac and td3."""
    rollout_length: int | None = None
    """Steps of every environment before each learning phase; None takes 128 for ppo and 1 for others."""
    epochs: int = 4
    """Passes over each rollout (ppo)."""
    minibatches: int = 4
    """Parts of one pass, a gradient step each (ppo)."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Units of each hidden layer."""
    activation: str | None = None
    """Nonlinearity; None takes the agent's own."""
    memory: Literal["none", "gru", "lstm"] = "none"
    """Recurrent memory (ppo)."""
    buffer_capacity: int = 50_000
    """Steps the replay holds (all but ppo)."""
    batch_size: int | None = None
    """Transitions in a minibatch; None takes 100 for dqn and 256 for sac and td3."""
    num_updates: int = 5
    """Minibatches learnt a rollout (dqn)."""
    updates_per_step: float = 1.0
    """Gradient steps for each environment step (sac, td3)."""
    cpu_threads: int | None = None
    """Threads that a CPU computes on; None takes one a core for ppo and one for others, whose arrays are small."""
    num_steps: int = 1_000_000
    """Environment steps of a repeat, of each seed; rounded down to whole rollouts."""
    seeds: int = 1
    """Independent runs in the one program; steps_per_second counts all of them."""
    repeats: int = 5
    """Timed repeats, after a warm-up that is not counted."""
    seed: int = 0
    """Fixes everything random."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnakinFlags(Sizes):
    """Time the compiled training, without run folder, evaluation and checkpoints."""

    devices: int | None = None
    """Number of devices; None takes all there are. On a CPU, more than there are makes virtual ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingFlags(Sizes):
    """Time the compiled training on several numbers of devices, each in a process of its own."""

    device_counts: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of devices; the first is what efficiency is relative to."""


def measure(flags: AnakinFlags) -> dict[str, Any]:
    """Measure training; see `AnakinFlags`."""
    check_fields(flags, counts=COUNTS)
    cpu_threads = 1 if flags.cpu_threads is None and flags.agent != "ppo" else flags.cpu_threads
    if cpu_threads is not None and request_cpu_threads(cpu_threads):
        cpu_threads = None  # Too late, as in a test: the row says what was, not what was asked for.
    if flags.devices is not None and (sentence := podium.request_devices(flags.devices)):
        print(sentence, file=sys.stderr)
    num_envs, rollout_length = _sizes(flags)
    agent, env = _make_agent(flags), podium.envs.make_pure(flags.env)
    per_update = num_envs * rollout_length
    updates = flags.num_steps // per_update
    if not updates:
        raise ValueError(f"num_steps={flags.num_steps} is less than one rollout of {per_update}; use {per_update}.")
    # A replay must be learnt from while the clock runs.
    warm_up = 1 if agent.replay is None else -(-agent.config.min_replay_size // per_update) + 1
    program = podium.Anakin(devices=flags.devices).build(
        agent,
        env,
        num_envs=num_envs,
        rollout_length=rollout_length,
        seeds=flags.seeds,
        max_updates=max(updates, warm_up),
    )
    program.compile()
    state = jax.block_until_ready(program.init(flags.seed))
    began = time.perf_counter()
    state, _ = program.chunk(state, warm_up)
    warm_up_seconds = time.perf_counter() - began
    timings = []
    for _ in range(flags.repeats):
        began = time.perf_counter()
        state, metrics = program.chunk(state, updates)
        jax.block_until_ready(state)
        timings.append(time.perf_counter() - began)
    steps = updates * per_update * flags.seeds
    row = {
        "what": "anakin",
        "agent": flags.agent,
        "env": flags.env,
        "num_envs": num_envs,
        "rollout_length": rollout_length,
        "epochs": flags.epochs if flags.agent == "ppo" else None,
        "minibatches": flags.minibatches if flags.agent == "ppo" else None,
        "buffer_capacity": None if agent.replay is None else flags.buffer_capacity,
        "batch_size": None if agent.replay is None else agent.replay.batch_size,
        "num_updates": flags.num_updates if flags.agent == "dqn" else None,
        "updates_per_step": flags.updates_per_step if flags.agent in OFF_POLICY else None,
        "hidden_sizes": list(flags.hidden_sizes),
        "activation": agent.config.activation,
        "memory": flags.memory,
        "seeds": flags.seeds,
        "num_lanes": program.sizes.num_lanes,
        "devices": len(program.devices),
        "cpu_threads": cpu_threads,
        "num_steps": steps,
        **machine.timing(steps, timings),
        "compile_seconds": program.compile_seconds,
        "warm_up_seconds": warm_up_seconds,
        "finite": bool(metrics["finite"].all()),
    }
    if flags.agent == "ppo" and flags.memory == "none":
        flops = ppo_flops_per_step(env.spec, flags.hidden_sizes, flags.epochs)
        bound = bounds.matmul_flops_per_second()
        row["flops_per_step"] = flops
        row["matmul_gflops_per_second"] = bound / 1e9
        row["share_of_matmul_bound"] = flops * row["steps_per_second"] / bound
    return row


def scale(flags: ScalingFlags) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of devices; see `ScalingFlags`."""
    check_fields(flags, counts=COUNTS)
    if not flags.device_counts or min(flags.device_counts) < 1:
        raise ValueError(f"device_counts={flags.device_counts} must be positive integers.")
    num_envs, _ = _sizes(flags)
    for number in flags.device_counts:
        if num_envs % number:
            raise ValueError(f"num_envs={num_envs} is not divisible by device_counts={number}.")
    base = flags.device_counts[0]
    for work in ("fixed_total", "fixed_per_device"):
        one: float | None = None
        for number in flags.device_counts:
            times = number // base if work == "fixed_per_device" else 1
            row = _in_process(flags, number, num_envs * times, flags.num_steps * times, _batch_size(flags) * times)
            one = row["steps_per_second"] if one is None else one
            yield {**row, "what": "scaling", "work": work, "speed_up": row["steps_per_second"] / one}


def ppo_flops_per_step(spec: EnvSpec, hidden_sizes: Sequence[int], epochs: int) -> int:
    """Return the floating point operations of matrix products that PPO needs for one environment step.

    One forward to act; then in each epoch a forward and a backward, which is two forwards (one for the gradient of
    the inputs, one for that of the weights). A forward is 2 * inputs * outputs of every layer, of actor and critic.
    """
    leaves = jax.tree.leaves(spec.obs, is_leaf=lambda x: isinstance(x, ArraySpec | DiscreteSpec))
    width = sum(x.num_values if isinstance(x, DiscreteSpec) else math.prod(x.shape) for x in leaves)
    actions = spec.action.num_values if isinstance(spec.action, DiscreteSpec) else math.prod(spec.action.shape)
    torso = [width, *hidden_sizes]
    layers = sum(a * b for a, b in zip(torso, torso[1:], strict=False))
    forward = 2 * (2 * layers + torso[-1] * (actions + 1))
    return forward * (1 + 3 * epochs)


def _sizes(flags: Sizes) -> tuple[int, int]:
    """Return environments and steps of a rollout."""
    usual = {"ppo": (64, 128), "dqn": (10, 1)}.get(flags.agent, (1, 1))
    num_envs = usual[0] if flags.num_envs is None else flags.num_envs
    rollout_length = usual[1] if flags.rollout_length is None else flags.rollout_length
    if num_envs < 1 or rollout_length < 1:
        raise ValueError(f"num_envs={num_envs} and rollout_length={rollout_length} must be positive integers.")
    return num_envs, rollout_length


def _make_agent(flags: Sizes) -> Agent:
    shared: dict[str, Any] = {"hidden_sizes": flags.hidden_sizes}
    if flags.activation is not None:
        shared["activation"] = flags.activation
    if flags.agent == "ppo":
        epochs, minibatches = flags.epochs, flags.minibatches
        return ppo.make(ppo.Config(num_epochs=epochs, num_minibatches=minibatches, memory=flags.memory, **shared))
    algorithm = {"dqn": dqn, **OFF_POLICY}[flags.agent]
    own = {"num_updates": flags.num_updates} if flags.agent == "dqn" else {"updates_per_step": flags.updates_per_step}
    config = algorithm.Config(
        buffer_capacity=flags.buffer_capacity,
        batch_size=_batch_size(flags),
        min_replay_size=min(algorithm.Config.min_replay_size, flags.buffer_capacity),
        **own,
        **shared,
    )
    return algorithm.make(config)


def _batch_size(flags: Sizes) -> int:
    usual = 100 if flags.agent == "dqn" else 256
    return usual if flags.batch_size is None else flags.batch_size


def _in_process(flags: ScalingFlags, devices: int, num_envs: int, num_steps: int, batch_size: int) -> dict[str, Any]:
    """Measure one number of devices in a new process: JAX fixes the number when it starts."""
    changed = {"devices": devices, "num_envs": num_envs, "num_steps": num_steps, "batch_size": batch_size}
    values = {field.name: getattr(flags, field.name) for field in dataclasses.fields(Sizes)} | changed
    command = [str(Path(__file__).resolve().with_name("benchmark.py")), "anakin"]
    for name, value in values.items():
        if value is not None:
            parts = value if isinstance(value, tuple) else (value,)
            command += [f"--{name.replace('_', '-')}", *map(str, parts)]
    return dict(json.loads(machine.last_line_of(command, f"devices={devices}")))
