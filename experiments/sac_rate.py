"""Time podium's SAC beside a peer's, of the same work: a mode of `benchmark.py`."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import podium
from podium.agents import sac
from podium.ranges import check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class SacFlags:
    """Time SAC on one device in turn with a peer's (without the peer, alone), in one process.

    Brax's work: --beside brax --env brax/fast --num-envs 128 --updates-per-rollout 8 --batch-size 512 --normalize-obs
    --hidden-sizes 256 256 --updates 400.
    """

    beside: Literal["rejax", "brax", "sbx"] = "rejax"
    """The peer: rejax (`pip install rejax`), Brax's own trainer (`podium[brax]`), or SBX (`pip install sbx-rl`, which
    needs torch), whose environment is gymnasium's of this name."""
    env: str = "Pendulum-v1"
    """An environment with continuous actions that the peer has too."""
    num_envs: int = 1
    """Environments side by side."""
    updates_per_rollout: int = 1
    """Gradient steps after each step of all environments; of rejax's and SBX's one."""
    normalize_obs: bool = False
    """Whether observations are normalised; not by rejax and SBX."""
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


Turn = Callable[[], float]
"""Does all gradient steps of a turn, and returns the seconds that they took."""


def measure(flags: SacFlags) -> dict[str, Any]:
    """Measure; see `SacFlags`. Ratios are those of neighbours in time."""
    numbers = "num_envs", "updates_per_rollout", "batch_size", "buffer_capacity", "updates", "cpu_threads", "repeats"
    check_fields(flags, counts=numbers)
    if flags.beside != "brax" and (flags.updates_per_rollout > 1 or flags.normalize_obs):
        raise ValueError(
            f"--updates-per-rollout {flags.updates_per_rollout}, --normalize-obs {flags.normalize_obs}: {flags.beside} "
            "takes one gradient step after each step, of observations as they are; leave them out, or --beside brax."
        )
    if flags.beside == "brax" and not flags.env.startswith("brax/"):
        raise ValueError(f"--env {flags.env} is none that Brax's trainer has; use one of Brax's, such as brax/fast.")
    if flags.updates % flags.updates_per_rollout:
        raise ValueError(f"--updates {flags.updates} must be divisible by --updates-per-rollout.")
    podium.request_cpu_threads(flags.cpu_threads)
    turns: dict[str, Turn] = {"podium": _podium(flags)}
    other = PEERS[flags.beside](flags)
    if other is not None:
        turns[flags.beside] = other
    found: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(flags.repeats + 2):
        for name, turn in turns.items():
            found[name].append(turn())
    line: dict[str, Any] = {"what": "sac", **dataclasses.asdict(flags)}
    for name, seconds in found.items():
        line[f"{name}_updates_per_second"] = flags.updates / statistics.median(seconds[2:])
        line[f"{name}_seconds"] = seconds[2:]
    if other is not None:
        ratios = [a / b for a, b in zip(found[flags.beside][2:], found["podium"][2:], strict=True)]
        line |= {"ratio": statistics.median(ratios), "ratios": ratios}
    return line


def _podium(flags: SacFlags) -> Turn:
    config = sac.Config(
        hidden_sizes=flags.hidden_sizes,
        batch_size=flags.batch_size,
        buffer_capacity=flags.buffer_capacity,
        updates_per_step=flags.updates_per_rollout / flags.num_envs,
        normalize_obs=flags.normalize_obs,
        min_replay_size=flags.batch_size,
        warmup_steps=flags.batch_size,
    )
    rollouts = flags.updates // flags.updates_per_rollout
    sizes = {"num_envs": flags.num_envs, "rollout_length": 1, "max_updates": rollouts}
    program = podium.Anakin(devices=1).build(sac.make(config), podium.envs.make_pure(flags.env), **sizes)
    program.compile()
    state = program.init(0)

    def turn() -> None:
        nonlocal state
        state, _ = program.chunk(state, rollouts)

    return _timed(turn)


def _timed(turn: Callable[[], Any]) -> Turn:
    def timed() -> float:
        began = time.perf_counter()
        turn()
        return time.perf_counter() - began

    return timed


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

    return _timed(turn)


def _brax(flags: SacFlags) -> Turn | None:
    """Return a turn of Brax's own trainer, by its own clock of training, after what it compiles in; None if missing."""
    try:
        from brax import envs
        from brax.training.agents.sac import networks, train
    except ImportError:
        return None
    # Brax 0.14 still calls what JAX has removed.
    replicated: Any = lambda tree, devices: jax.tree.map(lambda x: jnp.stack([x] * len(devices)), tree)
    jax.device_put_replicated = replicated
    steps = flags.updates // flags.updates_per_rollout * flags.num_envs
    sizes: Any = flags.hidden_sizes

    def turn() -> float:
        rates: list[float] = []

        def progress(step: int, metrics: dict[str, Any]) -> None:
            if "training/sps" in metrics:
                rates.append(metrics["training/sps"])

        train.train(
            envs.get_environment(flags.env.removeprefix("brax/")),
            num_timesteps=3 * steps,
            episode_length=1000,
            num_envs=flags.num_envs,
            num_eval_envs=8,
            num_evals=4,
            learning_rate=3e-4,
            discounting=0.99,
            batch_size=flags.batch_size,
            grad_updates_per_step=flags.updates_per_rollout,
            min_replay_size=0,
            max_replay_size=flags.buffer_capacity,
            normalize_observations=flags.normalize_obs,
            network_factory=lambda *sees, **more: networks.make_sac_networks(*sees, hidden_layer_sizes=sizes, **more),
            progress_fn=progress,
        )
        return steps / float(np.median(rates[1:]))

    return turn


def _sbx(flags: SacFlags) -> Turn | None:
    """Return a turn of SBX's `learn`; None where it is missing."""
    try:
        import gymnasium
        from sbx import SAC
    except ImportError:
        return None
    model = SAC(
        "MlpPolicy",
        gymnasium.make(flags.env),
        policy_kwargs={"net_arch": list(flags.hidden_sizes)},
        batch_size=flags.batch_size,
        buffer_size=flags.buffer_capacity,
        learning_starts=flags.batch_size,
        train_freq=1,
        gradient_steps=1,
        seed=0,
    )
    model.learn(2 * flags.batch_size)
    return _timed(lambda: model.learn(flags.updates, reset_num_timesteps=False))


PEERS: dict[str, Callable[[SacFlags], Turn | None]] = {"rejax": _rejax, "brax": _brax, "sbx": _sbx}
