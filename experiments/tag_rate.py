"""Time Tag among 10 to 1,000 agents, compiled by podium and as a loop in NumPy; see `benchmark.py tag`."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import podium
from podium.env import auto_reset
from podium.ranges import check_fields

NUM_SEEN, MAX_STEPS = 2, 100
REACH, SIGHT, TAGGER_SPEED, RUNNER_SPEED = 0.25, 8.0, 0.3, 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class TagFlags:
    """Count steps of agents a second of `podium/Tag`, beside a loop in NumPy over the same game, in turn.

    A fifth of the agents tag; all act at random. Environments begin anew where they end. Both have arrays of all
    environments and agents, and see the nearest agents in every step; compiling does not count.
    """

    agents: tuple[int, ...] = (10, 100, 1000)
    """Agents in an environment; each number is measured alone."""
    total: int = 10_000
    """Agents side by side, over all environments."""
    steps: int = 100
    """Steps of every environment, a repeat."""
    repeats: int = 5
    """Turns of each way; the rates are medians."""


class Crowd(NamedTuple):
    """E environments of N agents, taggers first: arrays [E, N, ...], and the `time` [E]."""

    position: np.ndarray
    heading: np.ndarray
    speed: np.ndarray
    playing: np.ndarray
    time: np.ndarray


class NumpyTag:
    """Tag as `podium.envs.games.tag` has it, in NumPy over all environments at once."""

    def __init__(self, num_taggers: int, num_runners: int):
        self.taggers, self.number = num_taggers, num_taggers + num_runners
        self.side = float(np.sqrt(4 * self.number))
        self.is_tagger = np.arange(self.number) < num_taggers
        self.fastest = np.where(self.is_tagger, TAGGER_SPEED, RUNNER_SPEED).astype(np.float32)

    def reset(self, generator: np.random.Generator, num_envs: int) -> Crowd:
        """Return the start of episodes."""
        shape = num_envs, self.number
        return Crowd(
            generator.random((*shape, 2), np.float32) * np.float32(self.side),
            generator.random(shape, np.float32) * np.float32(2 * np.pi),
            np.zeros(shape, np.float32),
            np.ones(shape, bool),
            np.zeros(num_envs, np.int32),
        )

    def step(self, crowd: Crowd, action: np.ndarray) -> tuple[Crowd, np.ndarray, np.ndarray, np.ndarray]:
        """Return the next crowd, what each sees, its reward, and which episodes ended [E]."""
        turned = crowd.heading + crowd.playing * np.float32(np.pi / 8) * (action % 3 - 1).astype(np.float32)
        heading = np.mod(turned, np.float32(2 * np.pi))
        speed = crowd.speed + np.float32(0.05) * (action // 3 - 1).astype(np.float32)
        speed = np.clip(speed, 0, self.fastest) * crowd.playing
        move = np.stack([np.cos(heading), np.sin(heading)], -1) * speed[..., None]
        position = np.clip(crowd.position + move, 0, np.float32(self.side))
        apart = _distance(position[:, : self.taggers], position[:, self.taggers :])
        runs = crowd.playing[:, self.taggers :]
        tagged = (apart.min(1) < REACH**2) & runs
        by = (apart.argmin(1)[:, None] == np.arange(self.taggers)[:, None]) & tagged[:, None]
        playing = crowd.playing.copy()
        playing[:, self.taggers :] &= ~tagged
        reward = np.concatenate([by.sum(2), np.where(tagged, -1, playing[:, self.taggers :] / MAX_STEPS)], 1)
        new = Crowd(position, heading, speed * playing, playing, crowd.time + 1)
        ended = ~playing[:, self.taggers :].any(1) | (new.time >= MAX_STEPS)
        return new, self.see(new), reward, ended

    def see(self, crowd: Crowd) -> np.ndarray:
        """Return what each agent sees, [E, N, 7 + 10 * NUM_SEEN]."""
        direction = np.stack([np.cos(crowd.heading), np.sin(crowd.heading)], -1)
        itself = np.stack(
            [
                2 * crowd.position[..., 0] / self.side - 1,
                2 * crowd.position[..., 1] / self.side - 1,
                direction[..., 0],
                direction[..., 1],
                crowd.speed / self.fastest,
                np.broadcast_to(self.is_tagger, crowd.speed.shape),
                np.broadcast_to(1 - crowd.time[:, None] / MAX_STEPS, crowd.speed.shape),
            ],
            -1,
        )
        kinds = slice(0, self.taggers), slice(self.taggers, self.number)
        seen = [itself, *(self._nearest(crowd, direction, who) for who in kinds)]
        return (np.concatenate(seen, -1).clip(-1, 1) * crowd.playing[..., None]).astype(np.float32)

    def _nearest(self, crowd: Crowd, direction: np.ndarray, who: slice) -> np.ndarray:
        apart = _distance(crowd.position, crowd.position[:, who])
        others = np.arange(self.number)[who]
        apart[(np.arange(self.number)[:, None] == others) | ~crowd.playing[:, None, who]] = np.inf
        count = min(NUM_SEEN, len(others))
        near = np.argpartition(apart, count - 1, -1)[..., :count]
        order = np.argsort(np.take_along_axis(apart, near, -1), -1)
        near = np.take_along_axis(near, order, -1)
        there = np.take_along_axis(apart, near, -1) < SIGHT**2
        envs = np.arange(len(apart))[:, None, None]
        towards = (crowd.position[:, who][envs, near] - crowd.position[:, :, None]) / SIGHT
        moving = ((direction * crowd.speed[..., None])[:, who] / TAGGER_SPEED)[envs, near]
        parts = [there[..., None], _turned(towards, direction), _turned(moving, direction)]
        seen = np.concatenate(parts, -1) * there[..., None]
        missing = np.zeros((*seen.shape[:2], NUM_SEEN - count, 5), seen.dtype)
        return np.concatenate([seen, missing], 2).reshape(*seen.shape[:2], -1)


def measure(flags: TagFlags) -> dict[str, Any]:
    """Return the rates of both ways for each number of agents."""
    check_fields(flags, counts=("total", "steps", "repeats"))
    if not flags.agents or min(flags.agents) < 2:
        raise ValueError(f"agents={flags.agents} must be numbers of 2 or more: one tags and one runs.")
    return {"rows": [_row(flags, number) for number in flags.agents]}


def _row(flags: TagFlags, number: int) -> dict[str, Any]:
    num_taggers, num_envs = max(number // 5, 1), max(flags.total // number, 1)
    began = time.perf_counter()
    ways = {
        "podium": _podium(num_taggers, number - num_taggers, num_envs, flags.steps),
        "numpy": _numpy(num_taggers, number - num_taggers, num_envs, flags.steps),
    }
    compiled = time.perf_counter() - began
    steps = flags.steps * num_envs * number
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(flags.repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    rates = {name: steps / statistics.median(each) for name, each in seconds.items()}
    ratio = statistics.median(b / a for a, b in zip(seconds["podium"], seconds["numpy"], strict=True))
    return {
        "agents": number,
        "num_envs": num_envs,
        "agent_steps_per_second": rates,
        "times_numpy": ratio,
        "first_call_seconds": compiled,
        "seconds": seconds,
    }


def _podium(num_taggers: int, num_runners: int, num_envs: int, steps: int) -> Callable[[], None]:
    """Return what steps podium's Tag, compiled."""
    tag = podium.envs.make_pure("podium/Tag", num_taggers=num_taggers, num_runners=num_runners)
    env = auto_reset(tag)
    shape = num_envs, num_taggers + num_runners

    def body(carry: Any, key: Any) -> Any:
        state, total = carry
        act_key, step_key = jax.random.split(key)
        action = jax.random.randint(act_key, shape, 0, 9)
        state, timestep = jax.vmap(env.step)(jax.random.split(step_key, num_envs), state, action)
        # All that an agent is handed must be computed, or the compiler leaves it out.
        return (state, total + timestep.obs.sum() + timestep.next_obs.sum() + timestep.reward.sum()), None

    @jax.jit
    def play(state: Any, key: Any) -> Any:
        return jax.lax.scan(body, (state, jnp.float32(0)), jax.random.split(key, steps))[0]

    held = [jax.vmap(env.reset)(jax.random.split(jax.random.key(0), num_envs))[0]]
    keys = iter(range(1, 1_000_000))

    def run() -> None:
        held[0], total = play(held[0], jax.random.key(next(keys)))
        jax.block_until_ready(total)

    run()
    return run


def _numpy(num_taggers: int, num_runners: int, num_envs: int, steps: int) -> Callable[[], None]:
    """Return what steps the same in NumPy."""
    tag, generator = NumpyTag(num_taggers, num_runners), np.random.default_rng(0)
    held = [tag.reset(generator, num_envs)]

    def run() -> None:
        for _ in range(steps):
            action = generator.integers(0, 9, (num_envs, tag.number))
            crowd, obs, _, ended = tag.step(held[0], action)
            if ended.any():
                fresh = tag.reset(generator, int(ended.sum()))
                for old, new in zip(crowd, fresh, strict=True):
                    old[ended] = new
                obs[ended] = tag.see(fresh)
            held[0] = crowd

    run()
    return run


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = (a[:, :, None, i] - b[:, None, :, i] for i in range(2))
    return x * x + y * y


def _turned(vector: np.ndarray, direction: np.ndarray) -> np.ndarray:
    ahead = (vector * direction[:, :, None]).sum(-1)
    left = vector[..., 1] * direction[:, :, None, 0] - vector[..., 0] * direction[:, :, None, 1]
    return np.stack([ahead, left], -1)
