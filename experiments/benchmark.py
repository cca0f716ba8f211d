"""Measure: one JSON object a line on standard output, compile time apart, every repeat beside the median.

python experiments/benchmark.py anakin --agent ppo --env CartPole-v1
python experiments/benchmark.py paired --env CartPole-v1
python experiments/benchmark.py solve --env CartPole-v1 --threshold 475
python experiments/benchmark.py sebulba --env Pong-v5 --network negligible
python experiments/benchmark.py central --num-envs 64
python experiments/benchmark.py replay --env Pong-v5 --capacity 1000000
python experiments/benchmark.py search --env podium/ConnectFour
python experiments/benchmark.py sac --buffer-capacity 1000000
python experiments/benchmark.py atari --game Pong --num-envs 1024 --mode emulate
python experiments/benchmark.py tag --agents 10 100 1000
python experiments/benchmark.py env --env CartPole-v1 --num-envs 1024
python experiments/benchmark.py scaling --env CartPole-v1
python experiments/benchmark.py matmul
python experiments/benchmark.py gpu --part 1 --minutes 8 --out gpu
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import atari_rate
import central_rate
import evolution_rate
import gpu
import jax
import jax.numpy as jnp
import machine
import replay_rate
import sac_rate
import search_rate
import sebulba_rate
import sweep_rate
import tag_rate
import tyro

import podium
from podium import Agent, ArraySpec, DiscreteSpec, EnvSpec, request_cpu_threads, xla
from podium.agents import dqn, ppo, sac, td3
from podium.commands.console import guard, read_flags
from podium.env import auto_reset
from podium.evaluate import make_evaluator
from podium.ranges import check_positive
from podium.types import Array

OFF_POLICY: dict[str, Any] = {"sac": sac, "td3": td3}
"""Agents for continuous actions, whose gradient steps are counted by step."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedFlags:
    """Time PPO on one device beside a loop of PureJaxRL's structure (reference_loop.py), in turn, in one process."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolveFlags:
    """Time PPO from its first step until an evaluation reaches a threshold, one seed after another."""

    env: str = "CartPole-v1"
    """Environment, by a name of podium.envs.names()."""
    threshold: float = 475.0
    """Mean greedy return over 128 episodes that counts as solved."""
    runs: int = 5
    """Seeds: 0, 1, ..."""
    num_envs: int = 16
    """Environments side by side."""
    rollout_length: int = 64
    """Steps of every environment before each learning phase."""
    epochs: int = 4
    """Passes over each rollout."""
    minibatches: int = 4
    """Parts of one pass, a gradient step each."""
    learning_rate: float = 2.5e-3
    """Adam's step size."""
    eval_every: int = 16_384
    """Environment steps between evaluations."""
    num_steps: int = 500_000
    """Environment steps after which a seed counts as not solved."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvFlags:
    """Time bare stepping with random actions in one compiled scan: the bound of what an agent can reach."""

    env: str = "CartPole-v1"
    """Environment, by a name of podium.envs.names()."""
    num_envs: int = 64
    """Environments side by side."""
    num_steps: int = 10_000_000
    """Environment steps of a repeat; rounded down to whole steps of all environments."""
    repeats: int = 5
    """Timed repeats, after a warm-up that is not counted."""
    seed: int = 0
    """Fixes everything random."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulFlags:
    """Time float32 matrix products on one device: the machine's bound."""

    size: int = 1024
    """Rows and columns of the matrices."""
    repeats: int = 5
    """Timed repeats, after a warm-up that is not counted."""


def anakin(flags: AnakinFlags) -> dict[str, Any]:
    """Measure training; see `AnakinFlags`."""
    _check_positive(flags, "num_steps", "seeds", "repeats", "epochs", "minibatches")
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
        **_timing(steps, timings),
        "compile_seconds": program.compile_seconds,
        "warm_up_seconds": warm_up_seconds,
        "finite": bool(metrics["finite"].all()),
    }
    if flags.agent == "ppo" and flags.memory == "none":
        flops = ppo_flops_per_step(env.spec, flags.hidden_sizes, flags.epochs)
        bound = matmul_flops_per_second()
        row["flops_per_step"] = flops
        row["matmul_gflops_per_second"] = bound / 1e9
        row["share_of_matmul_bound"] = flops * row["steps_per_second"] / bound
    return {**row, **_circumstances()}


def paired(flags: PairedFlags) -> dict[str, Any]:
    """Measure podium beside the reference loop; see `PairedFlags`."""
    import reference_loop  # Not above: gymnax makes arrays as it is imported, and JAX starts.

    _check_positive(flags, "num_envs", "rollout_length", "epochs", "minibatches", "updates", "repeats")
    sizes = flags.num_envs, flags.rollout_length, flags.epochs, flags.minibatches, flags.updates
    init, train = reference_loop.make(flags.env, *sizes)
    config = ppo.Config(num_epochs=flags.epochs, num_minibatches=flags.minibatches, value_clip=0.2)
    program = podium.Anakin(devices=1).build(
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
        "steps_per_second": steps / statistics.median(turns["podium"]),
        "reference_steps_per_second": steps / statistics.median(turns["reference"]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        **_circumstances(),
    }


def solve(flags: SolveFlags) -> dict[str, Any]:
    """Measure the time to a threshold; see `SolveFlags`."""
    _check_positive(flags, "runs", "eval_every", "num_steps")
    config = ppo.Config(learning_rate=flags.learning_rate, num_epochs=flags.epochs, num_minibatches=flags.minibatches)
    agent, env = ppo.make(config), podium.envs.make_pure(flags.env)
    updates = max(1, flags.eval_every // (flags.num_envs * flags.rollout_length))
    program = podium.Anakin(devices=1).build(
        agent, env, num_envs=flags.num_envs, rollout_length=flags.rollout_length, max_updates=updates
    )
    began = time.perf_counter()
    program.lower()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # As podium.train does.
        compiled = thread.submit(program.compile)
        state = program.init(0)
        evaluate = jax.jit(
            lambda key, state: make_evaluator(agent, env, 128)(key, agent.actor(state))["eval_return"],
            compiler_options=xla.options(program.devices[0]),
        )
        jax.block_until_ready(evaluate(jax.random.key(0), state.agent))
        compiled.result()
    compile_seconds = time.perf_counter() - began
    seconds, steps = [], []
    for seed in range(flags.runs):
        state = jax.block_until_ready(program.init(seed))
        began, solved = time.perf_counter(), False
        while not solved and program.update_count(state) * program.sizes.steps_per_update < flags.num_steps:
            state, _ = program.chunk(state, updates)
            solved = float(evaluate(jax.random.key(program.update_count(state)), state.agent)) >= flags.threshold
        seconds.append(time.perf_counter() - began if solved else None)
        steps.append(program.update_count(state) * program.sizes.steps_per_update)
    solved_in = [second for second in seconds if second is not None]
    return {
        "what": "solve",
        **dataclasses.asdict(flags),
        "seconds": seconds,
        "env_steps": steps,
        "solved": len(solved_in),
        "median_seconds": statistics.median(solved_in) if len(solved_in) == flags.runs else None,
        "compile_seconds": compile_seconds,
        **_circumstances(),
    }


def sebulba(flags: sebulba_rate.SebulbaFlags) -> dict[str, Any]:
    """Measure Sebulba beside its environments alone; see `sebulba_rate.SebulbaFlags`."""
    sizes = "num_envs", "rollout_length", "epochs", "minibatches", "actor_threads", "groups", "updates", "repeats"
    _check_positive(flags, *sizes)
    return {**sebulba_rate.measure(flags), **_circumstances()}


def central(flags: central_rate.CentralFlags) -> dict[str, Any]:
    """Measure central inference beside its stages alone; see `central_rate.CentralFlags`."""
    _check_positive(flags, "num_envs", "envs_per_actor", "rollout_length", "hidden_size", "updates", "repeats")
    return {**central_rate.measure(flags), **_circumstances()}


def atari(flags: atari_rate.AtariFlags) -> dict[str, Any]:
    """Measure Atari games on the device beside envpool's on the CPU; see `atari_rate.AtariFlags`."""
    _check_positive(flags, "num_envs", "steps", "repeats")
    if flags.devices is not None and (sentence := podium.request_devices(flags.devices)):
        print(sentence, file=sys.stderr)
    return {**atari_rate.measure(flags), **_circumstances()}


def evolution(flags: evolution_rate.EvolutionFlags) -> dict[str, Any]:
    """Measure evolution beside evosax; see `evolution_rate.EvolutionFlags`."""
    _check_positive(flags, "population", "generations", "repeats")
    return {**evolution_rate.measure(flags), **_circumstances()}


def sac_beside_a_peer(flags: sac_rate.SacFlags) -> dict[str, Any]:
    """Measure SAC beside a peer's; see `sac_rate.SacFlags`."""
    numbers = "num_envs", "updates_per_rollout", "batch_size", "buffer_capacity", "updates", "cpu_threads", "repeats"
    _check_positive(flags, *numbers)
    return {**sac_rate.measure(flags), **_circumstances()}


def replay(flags: replay_rate.ReplayFlags) -> dict[str, Any]:
    """Measure a replay; see `replay_rate.ReplayFlags`."""
    names = ("capacity", "num_envs", "rollout_length", "batch_size", "n_step", "recorded", "updates", "repeats")
    _check_positive(flags, *names)
    return {**replay_rate.measure(flags), **_circumstances()}


def search(flags: search_rate.SearchFlags) -> dict[str, Any]:
    """Measure searches beside mctx's own; see `search_rate.SearchFlags`."""
    _check_positive(flags, "num_simulations", "num_envs", "searches", "repeats")
    return {**search_rate.measure(flags), **_circumstances()}


def sweep(flags: sweep_rate.SweepFlags) -> dict[str, Any]:
    """Measure a sweep in one program beside other ways; see `sweep_rate.SweepFlags`."""
    names = ("settings", "seeds", "num_steps", "num_envs", "rollout_length", "num_epochs", "num_minibatches", "rounds")
    _check_positive(flags, *names, "eval_episodes")
    return {**sweep_rate.measure(flags), **_circumstances()}


def tag(flags: tag_rate.TagFlags) -> dict[str, Any]:
    """Measure Tag beside a loop in NumPy; see `tag_rate.TagFlags`."""
    _check_positive(flags, "total", "steps", "repeats")
    if not flags.agents or min(flags.agents) < 2:
        raise ValueError(f"agents={flags.agents} must be numbers of 2 or more: one tags and one runs.")
    return {**tag_rate.measure(flags), **_circumstances()}


def env_bound(flags: EnvFlags) -> dict[str, Any]:
    """Measure bare stepping; see `EnvFlags`."""
    _check_positive(flags, "num_envs", "num_steps", "repeats")
    env = auto_reset(podium.envs.make_pure(flags.env))
    length = flags.num_steps // flags.num_envs
    if not length:
        raise ValueError(f"num_steps={flags.num_steps} is less than num_envs={flags.num_envs}; use {flags.num_envs}.")
    act = random_action(env.spec.action)

    def body(state: tuple[Any, Array], key: Array) -> tuple[tuple[Any, Array], None]:
        env_state, total = state
        act_key, step_key = jax.random.split(key)
        action = act(act_key, flags.num_envs)
        env_state, timestep = jax.vmap(env.step)(jax.random.split(step_key, flags.num_envs), env_state, action)
        # What an agent would read has to be computed here too.
        seen = sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(timestep.obs))
        return (env_state, total + timestep.reward.sum() + 1e-9 * seen), None

    def rollout(key: Array, env_state: Any) -> tuple[Any, Array]:
        def step(t: Array, state: tuple[Any, Array]) -> tuple[Any, Array]:
            return body(state, jax.random.fold_in(key, t))[0]

        return jax.lax.fori_loop(0, length, step, (env_state, jnp.zeros(())))

    key = jax.random.key(flags.seed)
    env_state, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(key, flags.num_envs))
    began = time.perf_counter()
    compiled = jax.jit(rollout).lower(key, env_state).compile()
    compile_seconds = time.perf_counter() - began
    timings = _repeat(lambda: compiled(key, env_state), flags.repeats)
    return {
        "what": "env",
        "agent": "random",
        "env": flags.env,
        "num_envs": flags.num_envs,
        "devices": 1,
        "num_steps": length * flags.num_envs,
        **_timing(length * flags.num_envs, timings),
        "compile_seconds": compile_seconds,
        **_circumstances(),
    }


def scaling(flags: ScalingFlags) -> int:
    """Measure training on several numbers of devices; print a line for each, and return the exit code."""
    _check_positive(flags, "num_steps", "seeds", "repeats", "epochs", "minibatches")
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
            _print({**row, "what": "scaling", "work": work, "speed_up": row["steps_per_second"] / one})
    return 0


def matmul(flags: MatmulFlags) -> dict[str, Any]:
    """Measure matrix products; see `MatmulFlags`."""
    _check_positive(flags, "size", "repeats")
    began = time.perf_counter()
    timings, flops, compile_seconds = _time_matmul(flags.size, flags.repeats)
    return {
        "what": "matmul",
        "size": flags.size,
        "devices": 1,
        "seconds": statistics.median(timings),
        "repeats": timings,
        "compile_seconds": compile_seconds,
        "gflops_per_second": flops / statistics.median(timings) / 1e9,
        "wall_seconds": time.perf_counter() - began,
        **_circumstances(),
    }


def matmul_flops_per_second(size: int = 1024, repeats: int = 5) -> float:
    """Return the median rate of float32 matrix products on one device."""
    timings, flops, _ = _time_matmul(size, repeats)
    return flops / statistics.median(timings)


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


def random_action(spec: DiscreteSpec | ArraySpec) -> Callable[[Array, int], Array]:
    """Return a function `(key, B) -> actions [B, ...]`, uniform between the bounds (within 1 where there are none)."""
    if isinstance(spec, DiscreteSpec):
        return lambda key, batch: jax.random.randint(key, (batch,), 0, spec.num_values)
    low, high = (
        jnp.nan_to_num(jnp.broadcast_to(x, spec.shape), neginf=-1.0, posinf=1.0) for x in (spec.low, spec.high)
    )
    return lambda key, batch: jax.random.uniform(key, (batch, *spec.shape), spec.dtype, low, high)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    return guard(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    modes = (
        Annotated[AnakinFlags, tyro.conf.subcommand("anakin")]
        | Annotated[PairedFlags, tyro.conf.subcommand("paired")]
        | Annotated[SolveFlags, tyro.conf.subcommand("solve")]
        | Annotated[sebulba_rate.SebulbaFlags, tyro.conf.subcommand("sebulba")]
        | Annotated[central_rate.CentralFlags, tyro.conf.subcommand("central")]
        | Annotated[evolution_rate.EvolutionFlags, tyro.conf.subcommand("evolution")]
        | Annotated[sac_rate.SacFlags, tyro.conf.subcommand("sac")]
        | Annotated[sweep_rate.SweepFlags, tyro.conf.subcommand("sweep")]
        | Annotated[search_rate.SearchFlags, tyro.conf.subcommand("search")]
        | Annotated[replay_rate.ReplayFlags, tyro.conf.subcommand("replay")]
        | Annotated[atari_rate.AtariFlags, tyro.conf.subcommand("atari")]
        | Annotated[tag_rate.TagFlags, tyro.conf.subcommand("tag")]
        | Annotated[EnvFlags, tyro.conf.subcommand("env")]
        | Annotated[ScalingFlags, tyro.conf.subcommand("scaling")]
        | Annotated[MatmulFlags, tyro.conf.subcommand("matmul")]
        | Annotated[gpu.GpuFlags, tyro.conf.subcommand("gpu")]
    )
    flags = read_flags(modes, argv, description="Measure; one JSON object a line.")
    if isinstance(flags, ScalingFlags):
        return scaling(flags)
    measure: dict[type, Callable[[Any], dict[str, Any]]] = {
        AnakinFlags: anakin,
        PairedFlags: paired,
        SolveFlags: solve,
        sebulba_rate.SebulbaFlags: sebulba,
        central_rate.CentralFlags: central,
        evolution_rate.EvolutionFlags: evolution,
        sac_rate.SacFlags: sac_beside_a_peer,
        sweep_rate.SweepFlags: sweep,
        search_rate.SearchFlags: search,
        replay_rate.ReplayFlags: replay,
        atari_rate.AtariFlags: atari,
        tag_rate.TagFlags: tag,
        EnvFlags: env_bound,
        MatmulFlags: matmul,
        gpu.GpuFlags: gpu.measure,
    }
    _print(measure[type(flags)](flags))
    return 0


def _sizes(flags: Sizes) -> tuple[int, int]:
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
    command = [str(Path(__file__).resolve()), "anakin"]
    for name, value in values.items():
        if value is not None:
            parts = value if isinstance(value, tuple) else (value,)
            command += [f"--{name.replace('_', '-')}", *map(str, parts)]
    return dict(json.loads(machine.last_line_of(command, f"devices={devices}")))


def _time_matmul(size: int, repeats: int) -> tuple[list[float], float, float]:
    """Return seconds of every repeat, operations of one, and seconds of compiling."""
    times = max(1, round(2e10 / (2 * size**3)))
    matrix = jax.random.normal(jax.random.key(0), (size, size)) / math.sqrt(size)

    def products(matrix: Array) -> Array:
        return jax.lax.fori_loop(0, times, lambda _, x: x @ matrix, matrix)

    began = time.perf_counter()
    compiled = jax.jit(products).lower(matrix).compile()
    return _repeat(lambda: compiled(matrix), repeats), 2.0 * size**3 * times, time.perf_counter() - began


def _repeat(work: Callable[[], Any], repeats: int) -> list[float]:
    """Return the seconds of each repeat after a first one that is not counted."""
    timings = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(work())
        timings.append(time.perf_counter() - began)
    return timings[1:]


def _timing(steps: int, timings: list[float]) -> dict[str, Any]:
    seconds = statistics.median(timings)
    return {"seconds": seconds, "steps_per_second": steps / seconds, "repeats": timings}


def _circumstances() -> dict[str, Any]:
    return {"versions": _versions(), "hardware": _hardware()}


def _versions() -> dict[str, str]:
    import jaxlib

    return {
        "podium": podium.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
    }


def _hardware() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "cpu": machine.cpu(),
        "cores": machine.cores(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
    }


def _check_positive(flags: Any, *names: str) -> None:
    check_positive(**{name: getattr(flags, name) for name in names})


def _print(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
