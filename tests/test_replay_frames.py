"""Frames kept once: what is sampled is what was written, to the bit."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import assert_close

import everywhere
import podium
from podium import envs, replay
from podium.envs import wrappers
from podium.film import stacks_of
from podium.replay import Estimate, Transition

LENGTH, ROWS = 4, 24


class Player:
    """Environments whose frames are drawn at random, a few values each so that stacks often look alike."""

    def __init__(self, seed: int, num_envs: int, num_frames: int, resets_in_next_step: bool, values: int = 3):
        self.rng, self.num_envs, self.num_frames = np.random.default_rng(seed), num_envs, num_frames
        self.in_next, self.values = resets_in_next_step, values
        self.over = np.zeros(num_envs, bool)
        self.obs = np.stack([self._begin() for _ in range(num_envs)])

    def _frame(self) -> np.ndarray:
        return self.rng.integers(0, self.values, (3, 2, 1), np.uint8)

    def _begin(self) -> np.ndarray:
        return np.concatenate([self._frame()] * self.num_frames, -1)

    def rollout(self, length: int, end: float) -> Transition:
        rows = [self._step(end) for _ in range(length)]
        return Transition(*(None if x[0] is None else jnp.asarray(np.stack(x)) for x in zip(*rows, strict=True)))

    def skip(self, steps: int) -> None:
        """Play on without being seen."""
        self.rollout(steps, 0.0)

    def _step(self, end: float) -> tuple[Any, ...]:
        obs, reward = self.obs, self.rng.normal(size=self.num_envs).astype(np.float32)
        ended = self.rng.random(self.num_envs) < end
        cut = ended & (self.rng.random(self.num_envs) < 0.5)
        after = np.stack([np.concatenate([x[..., 1:], self._frame()], -1) for x in obs])
        begun = np.stack([self._begin() for _ in range(self.num_envs)])
        if not self.in_next:
            self.obs = np.where(ended[:, None, None, None], begun, after)
            return obs, np.zeros(self.num_envs, np.int32), reward, ended & ~cut, cut, after, None
        # A row after an end is no transition, and leads to what begins then.
        valid, ended, cut = ~self.over, ended & ~self.over, cut & ~self.over
        self.obs = np.where(self.over[:, None, None, None], begun, after)
        self.over = ended
        return obs, np.zeros(self.num_envs, np.int32), reward * valid, ended & ~cut, cut, self.obs, valid


def both(make: Any, num_envs: int, num_lanes: int, num_frames: int, length: int, valid: bool, extras: Any = ()) -> Any:
    """Return a replay's functions, and two empty states: of whole stacks, and of frames."""
    buffer = make()
    stack = jnp.zeros((3, 2, num_frames), jnp.uint8)
    item = Transition(
        stack, jnp.int32(0), jnp.float32(0), jnp.zeros((), bool), jnp.zeros((), bool), stack,
        jnp.zeros((), bool) if valid else None, extras,
    )  # fmt: skip
    sizes = item, num_envs, num_lanes, length
    add = jax.jit(lambda state, items, gap: buffer.add(buffer.cut(state, gap), items))
    return add, jax.jit(buffer.sample), buffer.init(*sizes), buffer.init(*sizes, stacks=num_frames)


MAKES = {
    "uniform": functools.partial(replay.uniform, n_step=1),
    "three steps": functools.partial(replay.uniform, n_step=3),
    "prioritized": functools.partial(replay.prioritized, n_step=3),
    "sequences": functools.partial(replay.sequences, sequence_length=8, burn_in=2, sequence_period=4),
}


@pytest.mark.parametrize("in_next", [False, True], ids=["resets at once", "resets in the next step"])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("name", MAKES)
def test_minibatches_are_those_of_whole_stacks(name: str, length: int, in_next: bool) -> None:
    num_envs, num_lanes, num_frames = 6, 2, 4
    player = Player(0, num_envs, num_frames, in_next)
    make = functools.partial(MAKES[name], ROWS * num_envs, 32, 1)
    add, sample, whole, kept = both(make, num_envs, num_lanes, num_frames, length, in_next)
    no_gap = jnp.zeros(num_envs, bool)
    for round in range(96 // length):
        items = player.rollout(length, end=0.15)
        whole, kept = add(whole, items, no_gap), add(kept, items, no_gap)
        if round >= 12 // length:
            assert_same(*(sample(jax.random.key(round), state)[0] for state in (whole, kept)))


def assert_same(expected: Any, found: Any) -> None:
    if expected.valid is None if hasattr(expected, "valid") else expected.weight is None:
        absent = "valid" if hasattr(expected, "valid") else "weight"
        assert bool(getattr(found, absent).all())
        expected, found = expected._replace(**{absent: None}), found._replace(**{absent: None})
    jax.tree.map(np.testing.assert_array_equal, expected, found)


@pytest.mark.parametrize("in_next", [False, True], ids=["resets at once", "resets in the next step"])
@pytest.mark.parametrize("length", [1, 4])
def test_behind_a_gap_steps_are_left_out_whose_frames_were_never_written(length: int, in_next: bool) -> None:
    num_envs, num_frames = 4, 4
    player = Player(1, num_envs, num_frames, in_next, values=250)
    make = functools.partial(replay.uniform, ROWS * num_envs, 256, 1)
    add, sample, whole, kept = both(make, num_envs, 1, num_frames, length, in_next)
    rng, left_out = np.random.default_rng(0), []
    for round in range(60 + 100 // length):
        dropped = round > 0 and rng.random() < 0.1
        if dropped:
            player.skip(length)
        gap = jnp.full(num_envs, dropped)
        items = player.rollout(length, end=0.1)
        whole, kept = add(whole, items, gap), add(kept, items, gap)
        if round >= 12 // length and round % 3 == 0:
            expected, found = (sample(jax.random.key(round), state)[0] for state in (whole, kept))
            there = np.asarray(found.weight) > 0
            took_part = np.ones_like(there) if expected.weight is None else np.asarray(expected.weight) > 0
            assert not np.any(there & ~took_part)
            left_out.append(np.mean(took_part & ~there))
            take = lambda x, there=there: x[there]
            jax.tree.map(
                np.testing.assert_array_equal,
                jax.tree.map(take, expected._replace(weight=None)),
                jax.tree.map(take, found._replace(weight=None)),
            )
    # A gap costs three rows at most, and none where an episode begins behind it.
    assert 0 < np.mean(left_out) < 0.1 * 3 / length + 0.05


@pytest.mark.parametrize("in_next", [False, True], ids=["resets at once", "resets in the next step"])
@pytest.mark.parametrize("length", [1, 4])
def test_first_priorities_around_a_gap_are_those_of_whole_stacks(length: int, in_next: bool) -> None:
    num_envs, num_frames = 4, 4
    player, rng = Player(4, num_envs, num_frames, in_next, values=250), np.random.default_rng(4)
    make = functools.partial(replay.prioritized, ROWS * num_envs, 32, 1, n_step=3)
    number = Estimate(jnp.float32(0), jnp.float32(0))
    add, _, whole, kept = both(make, num_envs, 1, num_frames, length, in_next, number)
    shares = []
    for _ in range(60 + 100 // length):
        dropped = rng.random() < 0.1
        if dropped:
            player.skip(length)
        thought = Estimate(*jnp.asarray(rng.normal(size=(2, length, num_envs)), jnp.float32))
        items = player.rollout(length, end=0.2)._replace(extras=thought)
        whole, kept = (add(state, items, jnp.full(num_envs, dropped)) for state in (whole, kept))
        expected, found = (np.asarray(state.priorities.levels[0]) for state in (whole, kept))
        there = found > 0
        np.testing.assert_allclose(found[there], expected[there], rtol=1e-5)
        shares.append(there.sum() / max(np.sum(expected > 0), 1))
    assert 0.6 < np.mean(shares[6:]) < 1


def test_where_spare_places_run_out_only_cut_steps_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.replay.frames.SMALL", 0)
    num_envs, num_frames, length = 2, 4, 4
    player = Player(2, num_envs, num_frames, resets_in_next_step=False, values=250)
    make = functools.partial(replay.uniform, ROWS * num_envs, 256, 1)
    add, sample, whole, kept = both(make, num_envs, 1, num_frames, length, False)
    assert kept.items.obs.owner.shape[1] == 2
    seen = {"cut": 0, "left out": 0}
    for round in range(100):
        items, no_gap = player.rollout(length, end=0.3), jnp.zeros(num_envs, bool)
        whole, kept = add(whole, items, no_gap), add(kept, items, no_gap)
        (expected, index), (found, _) = (sample(jax.random.key(round), state) for state in (whole, kept))
        row, env = np.asarray(index[0]) // num_envs, np.asarray(index[0]) % num_envs
        truncated, there = np.asarray(whole.items.truncated)[0, row, env], np.asarray(found.weight) > 0
        assert truncated[~there].all()
        seen["cut"] += truncated.sum()
        seen["left out"] += (~there).sum()
        np.testing.assert_array_equal(np.asarray(expected.obs), np.asarray(found.obs))
        matters = there & (np.asarray(expected.discount) > 0)
        np.testing.assert_array_equal(np.asarray(expected.next_obs)[matters], np.asarray(found.next_obs)[matters])
    assert 0 < seen["left out"] < seen["cut"]


def test_stacks_of_another_kind_are_left_out_and_never_wrong() -> None:
    num_envs, num_frames, length = 2, 4, 4
    player = Player(3, num_envs, num_frames, resets_in_next_step=False, values=250)
    # An episode's first stack is of four different frames.
    player._begin = lambda: player.rng.integers(0, 250, (3, 2, num_frames), np.uint8)  # type: ignore[method-assign]
    make = functools.partial(replay.uniform, ROWS * num_envs, 256, 1)
    add, sample, whole, kept = both(make, num_envs, 1, num_frames, length, False)
    shares = []
    for round in range(50):
        items, no_gap = player.rollout(length, end=0.1), jnp.zeros(num_envs, bool)
        whole, kept = add(whole, items, no_gap), add(kept, items, no_gap)
        expected, found = (sample(jax.random.key(round), state)[0] for state in (whole, kept))
        there = np.asarray(found.weight) > 0
        shares.append(there.mean())
        for field in ("obs", "next_obs"):
            counts = there if field == "obs" else there & (np.asarray(expected.discount) > 0)
            pair = (np.asarray(getattr(x, field))[counts] for x in (expected, found))
            np.testing.assert_array_equal(*pair)
    assert 0.4 < np.mean(shares[6:]) < 1


def stacked_catch(num_frames: int = 4, says_so: bool = True) -> Any:
    env = wrappers.frame_stack(envs.make("podium/Catch"), num_frames)
    if says_so:
        return env
    return env._replace(spec=dataclasses.replace(env.spec, obs=dataclasses.replace(env.spec.obs, num_frames=1)))


@pytest.mark.parametrize("placement", ["anakin", "two devices", "sebulba"])
@pytest.mark.parametrize("agent", ["dqn", "apex"])
def test_agents_learn_the_same_of_frames_as_of_stacks(agent: str, placement: str) -> None:
    module = getattr(podium.agents, agent)
    made = module.make(module.Config(buffer_capacity=512, min_replay_size=64, batch_size=32))
    where = {**everywhere.PLACEMENTS, "anakin": everywhere.ONE_DEVICE}[placement]
    of_frames, of_stacks = (
        everywhere.state_under(where, made, stacked_catch(says_so=says_so), updates=12, rollout_length=4)
        for says_so in (True, False)
    )
    assert_close(of_frames, of_stacks, tolerance=1e-6, relative=0)


def test_a_replay_apart_keeps_frames() -> None:
    config = podium.agents.dqn.Config(buffer_capacity=512, min_replay_size=64, batch_size=32)
    placement = podium.DistributedActors(workers=1, replay_apart=True)
    program = placement.build(podium.agents.dqn.make(config), stacked_catch(), num_envs=8, rollout_length=4)
    try:
        _, metrics = program.chunk(program.init(0), 8)
    finally:
        program.close()
    assert metrics["finite"].all() and np.isfinite(metrics["loss"][-1])


def test_a_run_resumes_with_its_frames(tmp_path: Any) -> None:
    config = podium.agents.dqn.Config(buffer_capacity=512, min_replay_size=64, batch_size=32)

    def train(folder: str, num_steps: int, **more: Any) -> str:
        result = podium.train(
            podium.agents.dqn.make(config), stacked_catch(), num_steps=num_steps, num_envs=8, rollout_length=4,
            run_dir=tmp_path / folder, eval_every=512, checkpoint_every=512, progress=False, **more,
        )  # fmt: skip
        return result.summary["params_sha256"]

    whole = train("whole", 1024)
    train("halves", 512)
    assert train("halves", 1024, resume=True) == whole


def test_frames_are_kept_once_where_that_pays() -> None:
    small = wrappers.frame_stack(envs.make("CartPole-v1"), 4)
    zeros = lambda env: jax.tree.map(lambda spec: spec.zeros(), env.spec.obs)
    assert stacks_of(small.spec.obs, zeros(small)) is None
    assert stacks_of(stacked_catch().spec.obs, zeros(stacked_catch())) == 4
    # Of what is no whole observation, nothing is known.
    assert stacks_of(stacked_catch().spec.obs, jnp.zeros(3)) is None


def test_a_million_steps_of_pong_take_less_than_eight_gigabytes() -> None:
    stack = jax.ShapeDtypeStruct((84, 84, 4), np.uint8)
    flag, number = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), np.float32)
    item = Transition(stack, jax.ShapeDtypeStruct((), np.int32), number, flag, flag, stack, flag)
    buffer = replay.uniform(1_000_000, 32, 1)
    held = jax.eval_shape(lambda item: buffer.init(item, 8, 8, 4, stacks=4), item)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held)) < 7.6e9
