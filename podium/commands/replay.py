"""`podium replay`: print the return of every episode, and draw an animated GIF where the environment can."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import tyro

import podium
from podium.commands import cache, plugins
from podium.commands.console import check_file, read_flags
from podium.env import Env
from podium.episodes import gained
from podium.evaluate import Episodes, Policy, longest_episode
from podium.files import write_atomic
from podium.host import HostEnvFactory
from podium.load import load_env
from podium.pictures import check_fps, gif
from podium.ranges import check_seed
from podium.runs import RunFolder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Play the policy of a run, greedily."""

    run_dir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Folder of the run."""
    episodes: int = 5
    """Episodes to play."""
    best: bool = False
    """Play the checkpoint with the highest evaluation in place of the newest."""
    step: int | None = None
    """Environment steps of the checkpoint to play; None takes the newest."""
    policy: int = 0
    """Which of a run's seeds to play, from 0."""
    seed: int = 0
    """Of resets and of the environment's chances, 0 or more."""
    greedy: bool = True
    """Take the best action; --no-greedy samples."""
    max_steps: int | None = None
    """Steps after which an episode is cut; None takes the environment's own limit, or 10,000."""
    gif: Path | None = None
    """Picture to write; None takes RUN_DIR/replay.gif."""
    fps: int = 30
    """Frames a second, 1 to 50."""
    max_frames: int = 1000
    """Frames of the picture at most; episodes follow one another in it until then."""
    plugins: tuple[str, ...] = ()
    """Modules to import first, which register agents or environments of your own."""


class Episode(NamedTuple):
    """One episode: the return, its length in steps, how it ended, and the states gone through (on the host).

    Environments on the CPU have no states to keep.
    """

    episode_return: float
    length: int
    ending: str
    states: list[Any]


def play(
    policy: Policy,
    env: Env | HostEnvFactory,
    episodes: int,
    seed: int = 0,
    max_steps: int | None = None,
    greedy: bool = True,
) -> list[Episode]:
    """Play episodes side by side, and keep the states before every action and at the end.

    Returns are those of `podium.evaluate`: of agents that act together their mean; where two take turns, that of who
    moved first.

    Args:
      policy: to act.
      env: a pure one that does not reset itself, or one on the CPU.
      episodes: N.
      seed: of everything random.
      max_steps: bound of an episode; None takes the environment's own, or 10,000.
      greedy: take the best action instead of sampling.

    Raises:
      ValueError: for numbers that are not positive.
    """
    max_steps = longest_episode(env.spec) if max_steps is None else max_steps
    for name, value in (("episodes", episodes), ("max_steps", max_steps)):
        if value < 1:
            raise ValueError(f"{name}={value} must be a positive integer.")
    if isinstance(env, HostEnvFactory):
        return _play_on_host(policy, env, episodes, seed, max_steps, greedy)
    return _play(policy, env, episodes, seed, max_steps, greedy)


def _play(policy: Policy, env: Env, episodes: int, seed: int, max_steps: int, greedy: bool) -> list[Episode]:
    reset_key, play_key = jax.random.split(jax.random.key(seed))
    env_state, timestep = jax.jit(jax.vmap(env.reset))(jax.random.split(reset_key, episodes))

    @jax.jit
    def step(t: Any, env_state: Any, obs: Any, carry: Any, first: Any) -> Any:
        act_key, step_key = jax.random.split(jax.random.fold_in(play_key, t))
        action, carry = policy.act(obs, carry, first, act_key, greedy)
        env_state, timestep = jax.vmap(env.step)(jax.random.split(step_key, episodes), env_state, action)
        return env_state, timestep, carry

    carry, first = policy.carry(episodes), np.ones(episodes, bool)
    obs, history = timestep.obs, [jax.device_get(env_state)]
    returns, lengths = np.zeros(episodes), np.zeros(episodes, int)
    endings = ["cut"] * episodes
    running, sign = np.ones(episodes, bool), np.ones(episodes)
    for t in range(max_steps):
        env_state, timestep, carry = step(t, env_state, obs, carry, first)
        obs, first = timestep.obs, np.zeros(episodes, bool)
        history.append(jax.device_get(env_state))
        reward, sign = gained(timestep, sign)
        returns += np.where(running, reward, 0.0)
        lengths += running
        terminated = np.asarray(timestep.terminated)
        ended = np.asarray(timestep.info.get("episode_end", timestep.last))
        for i in np.flatnonzero(running & ended):
            endings[i] = "terminated" if terminated[i] else "truncated"
        running &= ~ended
        if not running.any():
            break
    return [
        Episode(float(returns[i]), int(lengths[i]), endings[i], _states(history, i, int(lengths[i])))
        for i in range(episodes)
    ]


def _play_on_host(
    policy: Policy, env: HostEnvFactory, episodes: int, seed: int, max_steps: int, greedy: bool
) -> list[Episode]:
    task = env.evaluation or env
    act = jax.jit(lambda obs, carry, first, key: policy.act(obs, carry, first, key, greedy))
    made = task.make(episodes, seed, 0)
    try:
        played, carry = Episodes(made), policy.carry(episodes)
        for t in range(max_steps):
            key = jax.random.fold_in(jax.random.key(seed), t)
            action, carry = act(played.obs, carry, np.full(episodes, t == 0), key)
            played.send(np.asarray(action))
            played.receive()
            if played.done.all():
                break
    finally:
        made.close()
    return [
        Episode(float(total), int(length), "ended" if done else "cut", [])
        for total, length, done in zip(played.total, played.length, played.done, strict=True)
    ]


def write_gif(path: Path, env: Env, episodes: Sequence[Episode], fps: int = 30, max_frames: int = 1000) -> int:
    """Write an animated GIF of episodes one after another, atomically; return its number of frames.

    Raises:
      ValueError: the environment has no renderer, or `fps` or `max_frames` is out of range.
      OSError: the file cannot be written.
    """
    if env.render is None:
        raise ValueError(f"{env.spec.name} has no renderer.")
    _check_picture(fps, max_frames)
    render, states = env.render, [state for episode in episodes for state in episode.states][:max_frames]
    write_atomic(path, gif([render(state) for state in states], fps))
    return len(states)


def run(argv: Sequence[str]) -> int:
    """Replay as the command line says.

    Raises:
      ValueError: a flag or its value is wrong, said in a sentence.
    """
    plugins.load(argv)
    flags = read_flags(Flags, argv, prog="podium replay")
    _check_picture(flags.fps, flags.max_frames)
    check_file("--gif", flags.gif)
    if flags.best and flags.step is not None:
        raise ValueError("--best and --step both choose a checkpoint; give one of them.")
    check_seed(flags.seed)
    cache.use_compilation_cache()
    env = load_env(RunFolder.open(flags.run_dir))
    policy = podium.load(flags.run_dir, step="best" if flags.best else flags.step, env=env, seed=flags.policy)
    episodes = play(policy, env, flags.episodes, flags.seed, flags.max_steps, flags.greedy)
    for number, episode in enumerate(episodes, start=1):
        print(f"episode {number}: return {episode.episode_return:.6g}, {episode.length} steps, {episode.ending}")
    returns = [episode.episode_return for episode in episodes]
    print(f"mean return {np.mean(returns):.6g} over {len(returns)} episodes")
    if isinstance(env, HostEnvFactory):
        print(f"{env.spec.name} runs on the CPU, whose states cannot be drawn, so there is no picture.")
        return 0
    if env.render is None:
        print(f"{env.spec.name} has no renderer, so there is no picture.")
        return 0
    path = flags.gif or flags.run_dir / "replay.gif"
    frames = write_gif(path, env, episodes, flags.fps, flags.max_frames)
    print(f"{path}: {frames} frames, {flags.fps} a second")
    return 0


def _check_picture(fps: int, max_frames: int) -> None:
    check_fps(fps)
    if max_frames < 1:
        raise ValueError(f"max_frames={max_frames} must be a positive integer.")


def _states(history: list[Any], index: int, length: int) -> list[Any]:
    return [jax.tree.map(lambda x: x[index], state) for state in history[: length + 1]]
