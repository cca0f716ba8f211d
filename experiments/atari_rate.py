"""Measure Atari games emulated on the device, beside envpool's on the CPU; `benchmark.py atari`."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import podium
from podium import Env, HostEnvFactory
from podium.agents import ppo
from podium.devices import resolve_devices
from podium.ranges import check_fields
from podium.types import Array, PyTree

FRAMES = 4
"""Emulated in a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtariFlags:
    """Time steps of four frames of an emulated game: emulation alone, with pictures, with acting, or PPO's training."""

    game: str = "Pong"
    """Game, as ALE writes it without its version."""
    num_envs: int = 1024
    """Environments side by side; the devices must divide it."""
    mode: Literal["emulate", "render", "inference", "train"] = "emulate"
    """emulate: observations are the console's memory; render: pictures of 84 x 84; inference: a Nature CNN acts on
    them; train: PPO, 3 passes over 4 minibatches."""
    backend: Literal["xla", "pallas"] | None = None
    """What runs the console; None: the kernel on a GPU, and XLA elsewhere."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the Nature CNN computes in."""
    steps: int = 8
    """Steps of a repeat, of four frames each; when training, of a rollout."""
    repeats: int = 3
    """Timed repeats, after a warm-up that is not counted."""
    devices: int | None = None
    """Number of devices; None takes all there are. On a CPU, more than there are makes virtual ones."""
    noop_max: int = 30
    """Frames of waiting before an episode; 0 lets all environments begin in the same state."""
    envpool_seconds: float = 3.0
    """Seconds for which envpool's environments are stepped; 0 leaves them out."""
    seed: int = 0
    """Fixes everything random."""


def measure(flags: AtariFlags) -> dict[str, Any]:
    """Measure; see `AtariFlags`."""
    check_fields(flags, counts=("num_envs", "steps", "repeats"))
    if flags.devices is not None and (sentence := podium.request_devices(flags.devices)):
        print(sentence, file=sys.stderr)
    name = f"atari/{flags.game}"
    observation = "ram" if flags.mode == "emulate" else "pixels"
    began = time.perf_counter()
    env = podium.envs.make(name, observation=observation, backend=flags.backend, noop_max=flags.noop_max)
    assert isinstance(env, Env)
    made = time.perf_counter() - began
    prepare = _training if flags.mode == "train" else _stepping
    compile_seconds, devices, memory, turn = prepare(flags, env)
    turn()
    timings = []
    for _ in range(flags.repeats):
        began = time.perf_counter()
        turn()
        timings.append(time.perf_counter() - began)
    seconds = statistics.median(timings)
    frames = flags.num_envs * flags.steps * FRAMES
    row: dict[str, Any] = {
        "what": "atari",
        **dataclasses.asdict(flags),
        "devices": devices,
        "frames": frames,
        "seconds": seconds,
        "repeat_seconds": timings,
        "frames_per_second": frames / seconds,
        "steps_per_second": frames / FRAMES / seconds,
        "compile_seconds": compile_seconds,
        "make_seconds": made,
        "state_bytes_per_env": _bytes(jax.eval_shape(env.reset, jax.random.key(0))[0]),
        "program_bytes_per_env": memory / flags.num_envs if memory else None,
    }
    if flags.envpool_seconds:
        row["envpool_frames_per_second"] = _envpool_rate(flags)
    return row


Prepared = tuple[float, int, float | None, Callable[[], Any]]
"""Seconds of compiling, number of devices, bytes of the program where it tells, and a turn to time."""


def _stepping(flags: AtariFlags, env: Env) -> Prepared:
    """Random actions, or those of an untrained Nature CNN, on every device a part of the environments."""
    devices = resolve_devices(flags.devices)
    mesh = jax.sharding.Mesh(np.array(devices), ("env",))
    agent = _agent(flags) if flags.mode == "inference" else None
    state = agent and agent.init(jax.random.key(flags.seed), env.spec)
    count = env.spec.action.num_values  # type: ignore[union-attr]

    def act(key: Array, obs: PyTree) -> Array:
        num = obs.shape[0]
        if agent is None:
            return jax.random.randint(key, (num,), 0, count)
        return agent.act(jax.random.split(key, num), agent.actor(state), (), obs, jnp.zeros(num, bool), False).action

    def rollout(key: Array, env_state: PyTree, obs: PyTree) -> tuple[PyTree, PyTree]:
        key = jax.random.fold_in(key[0], jax.lax.axis_index("env"))

        def step(t: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            act_key, step_key = jax.random.split(jax.random.fold_in(key, t))
            keys = jax.random.split(step_key, carry[1].shape[0])
            env_state, timestep = jax.vmap(env.step)(keys, carry[0], act(act_key, carry[1]))
            return env_state, timestep.obs

        return jax.lax.fori_loop(0, flags.steps, step, (env_state, obs))

    split, whole = jax.sharding.PartitionSpec("env"), jax.sharding.PartitionSpec()
    program = jax.jit(
        jax.shard_map(rollout, mesh=mesh, in_specs=(whole, split, split), out_specs=split, check_vma=False),
        donate_argnums=(1, 2),
    )
    keys = jax.random.split(jax.random.key(flags.seed), flags.num_envs)
    place = jax.NamedSharding(mesh, split)
    env_state, first = jax.jit(jax.vmap(env.reset), out_shardings=place)(keys)
    began = time.perf_counter()
    compiled = program.lower(keys[:1], env_state, first.obs).compile()
    seconds = time.perf_counter() - began
    carry = [env_state, first.obs]

    def turn() -> None:
        carry[:] = jax.block_until_ready(compiled(keys[:1], *carry))

    analysis = compiled.memory_analysis()
    memory = analysis and float(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes) * len(devices)
    return seconds, len(devices), memory, turn


def _training(flags: AtariFlags, env: Env) -> Prepared:
    """PPO under Anakin; a turn is one update."""
    program = podium.Anakin(devices=flags.devices).build(
        _agent(flags), env, num_envs=flags.num_envs, rollout_length=flags.steps, max_updates=1
    )
    program.compile()
    state = [program.init(flags.seed)]

    def turn() -> None:
        state[0] = jax.block_until_ready(program.chunk(state[0], 1)[0])

    return program.compile_seconds, len(program.devices), None, turn


def _agent(flags: AtariFlags) -> podium.Agent:
    network: dict[str, Any] = {
        "torso": "nature_cnn",
        "hidden_sizes": (512,),
        "activation": "relu",
        "dtype": flags.dtype,
    }
    return ppo.make(ppo.Config(num_epochs=3, num_minibatches=4, **network))


def _bytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _envpool_rate(flags: AtariFlags) -> float | None:
    """Return frames a second of envpool's Atari with all its threads and random actions; None without envpool."""
    try:
        envs = podium.envs.make(f"{flags.game}-v5")
    except ValueError:
        return None
    assert isinstance(envs, HostEnvFactory)
    env = envs.make(64, flags.seed, 0)
    actions = np.random.default_rng(flags.seed).integers(0, envs.spec.action.num_values, (64, 64))  # type: ignore[union-attr]
    try:
        env.reset()
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < flags.envpool_seconds:
            env.send(actions[count % 64].astype(np.int32))
            env.recv()
            count += 1
        return 64 * count * FRAMES / (time.perf_counter() - began)
    finally:
        env.close()
