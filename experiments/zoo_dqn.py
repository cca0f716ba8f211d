"""DQN on CartPole by the settings of RL Baselines3 Zoo: seeds of podium's beside seeds of Stable-Baselines3's own.

pip install stable-baselines3
python experiments/zoo_dqn.py --seeds 8

The zoo publishes one run of an algorithm; this says how far apart its seeds are. Stable-Baselines3 (Raffin et al. 2021)
is run where it is installed. What differs: epsilon, which here is that of a rollout's beginning, and the first weights
of networks, which `--weights pytorch` draws as there.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

import podium
from podium.agents import dqn
from podium.commands.console import guard, read_flags
from podium.ranges import check_fields
from podium.types import Key, PyTree

ENV, CAPACITY, LEARNT_FROM, RATE, GAMMA = "CartPole-v1", 100_000, 1_000, 2.3e-3, 0.99
STEPS_A_ROLLOUT, GRADIENTS_A_ROLLOUT, BATCH = 256, 128, 64
EXPLORED, LEAST_EPSILON, UNITS = 0.16, 0.04, (256, 256)
"""The zoo's hyperparams/dqn.yml."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Train both, play greedily at the end, and print JSON."""

    seeds: int = 8
    """Of each."""
    num_steps: int = 50_000
    """Environment steps of each seed."""
    episodes: int = 64
    """Greedy ones at the end, of which a seed's return is the mean."""
    weights: Literal["podium", "pytorch"] = "podium"
    """How podium's networks begin: orthogonal with a gain of sqrt(2), or as PyTorch's layers do."""
    sb3: bool = True
    """Whether Stable-Baselines3 is run too."""


def of_podium(flags: Flags) -> list[float]:
    """Return the return of every seed of podium's, all in one program."""
    config = dqn.Config(
        learning_rate=RATE,
        gamma=GAMMA,
        double=False,
        batch_size=BATCH,
        num_updates=GRADIENTS_A_ROLLOUT,
        buffer_capacity=-(-CAPACITY // STEPS_A_ROLLOUT) * STEPS_A_ROLLOUT,  # Whole rollouts.
        min_replay_size=LEARNT_FROM,
        target_update_period=GRADIENTS_A_ROLLOUT,  # Every 10 steps, none of which lies between a rollout's gradients.
        epsilon_end=LEAST_EPSILON,
        epsilon_decay_steps=int(EXPLORED * flags.num_steps),
        huber_delta=1.0,
        adam_eps=1e-8,
        hidden_sizes=UNITS,
    )
    network = config.network()
    if flags.weights == "pytorch":
        network = network._replace(init=lambda key, spec: as_pytorch(key, config.network().init(key, spec)))
    result = podium.train(
        dqn.make(config, network),
        ENV,
        num_steps=flags.num_steps,
        num_envs=1,
        rollout_length=STEPS_A_ROLLOUT,
        placement=podium.Anakin(1),
        seeds=flags.seeds,
        eval_every=0,
        eval_episodes=flags.episodes,
        progress=False,
    )
    return np.atleast_1d(result.summary["eval_return"]).tolist()


def as_pytorch(key: Key, params: PyTree) -> PyTree:
    """Return parameters of layers {kernel [inputs, outputs], bias}, uniform within 1 / sqrt(inputs) as in PyTorch."""
    if "kernel" not in params:
        return {name: as_pytorch(jax.random.fold_in(key, i), part) for i, (name, part) in enumerate(params.items())}
    bound = params["kernel"].shape[0] ** -0.5
    draw = lambda i, x: jax.random.uniform(jax.random.fold_in(key, i), x.shape, x.dtype, -bound, bound)
    return {name: draw(i, x) for i, (name, x) in enumerate(params.items())}


def of_sb3(flags: Flags, seed: int) -> float:
    """Return the return of a seed of Stable-Baselines3's."""
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    model = DQN(
        "MlpPolicy",
        make_vec_env(ENV, 1, seed=seed),
        learning_rate=RATE,
        gamma=GAMMA,
        batch_size=BATCH,
        buffer_size=CAPACITY,
        learning_starts=LEARNT_FROM,
        target_update_interval=10,
        train_freq=STEPS_A_ROLLOUT,
        gradient_steps=GRADIENTS_A_ROLLOUT,
        exploration_fraction=EXPLORED,
        exploration_final_eps=LEAST_EPSILON,
        policy_kwargs={"net_arch": list(UNITS)},
        seed=seed,
        device="cpu",
    )
    model.learn(flags.num_steps)
    return float(evaluate_policy(model, make_vec_env(ENV, 8, seed=1000 + seed), flags.episodes)[0])


def run(flags: Flags) -> int:
    """Train, and print a line of JSON a part."""
    check_fields(flags, counts=("seeds", "num_steps", "episodes"))
    _say("podium", of_podium(flags))
    if flags.sb3:
        try:
            _say("sb3", [of_sb3(flags, seed) for seed in range(flags.seeds)])
        except ImportError as error:
            raise ValueError(f"{error}; pip install stable-baselines3, or use --no-sb3.") from error
    return 0


def _say(who: str, returns: list[float]) -> None:
    row: dict[str, Any] = {"who": who, "mean": float(np.mean(returns)), "returns": returns}
    row["standard_error"] = float(np.std(returns, ddof=1) / len(returns) ** 0.5) if len(returns) > 1 else None
    print(json.dumps(row), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and return the exit code."""
    return guard(lambda: run(read_flags(Flags, sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
