"""Time podium's SAC beside rejax's, of the same work: a mode of `benchmark.py`."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

import podium
from podium.agents import sac


@dataclasses.dataclass(frozen=True, kw_only=True)
class SacFlags:
    """Time SAC on one device in turn with rejax's (`pip install rejax`; without it, alone), in one process."""

    env: str = "Pendulum-v1"
    """An environment of gymnax with continuous actions."""
    num_envs: int = 1
    """Environments side by side; each step of all of them is followed by one gradient step."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Units of each hidden layer."""
    batch_size: int = 256
    """Transitions in a minibatch."""
    buffer_capacity: int = 10_000
    """Steps the replay holds."""
    updates: int = 2_000
    """Gradient steps of a turn."""
    cpu_threads: int = 1
    """Threads that a CPU computes on."""
    repeats: int = 7
    """Turns of each, after two that are not counted: rejax compiles in both."""


Turn = Callable[[], None]
"""Does all gradient steps of a turn, and waits for them."""


def measure(flags: SacFlags) -> dict[str, Any]:
    """Measure; see `SacFlags`. Ratios are those of neighbours in time."""
    podium.request_cpu_threads(flags.cpu_threads)
    turns: dict[str, Turn] = {"podium": _podium(flags)}
    other = _rejax(flags)
    if other is not None:
        turns["rejax"] = other
    found: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(flags.repeats + 2):
        for name, turn in turns.items():
            began = time.perf_counter()
            turn()
            found[name].append(time.perf_counter() - began)
    line: dict[str, Any] = {"what": "sac", **dataclasses.asdict(flags)}
    for name, seconds in found.items():
        line[f"{name}_updates_per_second"] = flags.updates / statistics.median(seconds[2:])
        line[f"{name}_seconds"] = seconds[2:]
    if other is not None:
        ratios = [a / b for a, b in zip(found["rejax"][2:], found["podium"][2:], strict=True)]
        line |= {"ratio": statistics.median(ratios), "ratios": ratios}
    return line


def _podium(flags: SacFlags) -> Turn:
    config = sac.Config(
        hidden_sizes=flags.hidden_sizes,
        batch_size=flags.batch_size,
        buffer_capacity=flags.buffer_capacity,
        updates_per_step=1 / flags.num_envs,
        min_replay_size=flags.batch_size,
        warmup_steps=flags.batch_size,
    )
    sizes = {"num_envs": flags.num_envs, "rollout_length": 1, "max_updates": flags.updates}
    program = podium.Anakin(devices=1).build(sac.make(config), podium.envs.make_pure(flags.env), **sizes)
    program.compile()
    state = program.init(0)

    def turn() -> None:
        nonlocal state
        state, _ = program.chunk(state, flags.updates)

    return turn


def _rejax(flags: SacFlags) -> Turn | None:
    """Return a turn of rejax's training loop, without its evaluations; None where it is missing."""
    try:
        from rejax import SAC
    except ImportError:
        return None
    import gymnax

    env, env_params = gymnax.make(flags.env)
    step = env.step

    def step_of_five(*arguments: Any) -> Any:
        """Return what gymnax did before 1.0, which rejax 0.1.3 still expects."""
        obs, state, reward, terminated, truncated, info = step(*arguments)
        return obs, state, reward, terminated | truncated, info

    env.step = step_of_five
    algorithm = SAC.create(
        env=env,
        env_params=env_params,
        num_envs=flags.num_envs,
        num_epochs=1,
        batch_size=flags.batch_size,
        buffer_size=flags.buffer_capacity,
        fill_buffer=flags.batch_size,
        agent_kwargs={"hidden_layer_sizes": flags.hidden_sizes},
        learning_rate=3e-4,
        normalize_observations=False,
        normalize_rewards=False,
    )

    @jax.jit
    def train(state: Any) -> Any:
        return jax.lax.fori_loop(0, flags.updates, lambda _, state: algorithm.train_iteration(state), state)

    state = algorithm.init_state(jax.random.key(0))

    def turn() -> None:
        nonlocal state
        state = jax.block_until_ready(train(state))

    return turn
