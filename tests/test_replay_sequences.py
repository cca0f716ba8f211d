"""The replay of sequences against lists of steps: which windows there are, what they hold, how they are drawn; cost."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from podium import replay
from podium.replay import SequenceState, Transition

ALPHA, BETA, SMALLEST = 0.9, 0.6, 0.01
LANES, ENVS = 2, 6
SHARE = ENVS // LANES


def make(capacity: int, length: int, burn_in: int, period: int, batch_size: int = 16, **options: Any) -> replay.Replay:
    settings = {"priority_exponent": ALPHA, "importance_exponent": BETA, "smallest_priority": SMALLEST} | options
    return replay.sequences(capacity, batch_size, 1, length, burn_in, period, **settings)


def item(masked: bool = False) -> Transition:
    number, flag, obs = (jax.ShapeDtypeStruct(*x) for x in (((), np.float32), ((), bool), ((2,), np.int32)))
    memory = jax.ShapeDtypeStruct((2,), np.float32), jax.ShapeDtypeStruct((), np.int32)
    return Transition(
        obs, jax.ShapeDtypeStruct((), np.int32), number, flag, flag, obs, flag if masked else None, memory
    )


def steps(rng: np.random.Generator, start: int, time: int, masked: bool, envs: int = ENVS) -> Transition:
    """Return steps [T, B] that all differ: of their environment and time."""
    when, env = np.meshgrid(np.arange(start, start + time), np.arange(envs), indexing="ij")
    ended = rng.random((2, time, envs)) < 0.15
    obs = np.stack([env, when], -1).astype(np.int32)
    return Transition(
        obs,
        rng.integers(0, 5, when.shape).astype(np.int32),
        rng.normal(size=when.shape).astype(np.float32),
        *ended,
        obs + 1000,
        rng.random(when.shape) < 0.8 if masked else None,
        (rng.normal(size=(*when.shape, 2)).astype(np.float32), (100 * env + when).astype(np.int32)),
    )


class SlowReplay:
    """Every step that was ever inserted, in a list an environment, and the weights of windows by where they begin."""

    def __init__(self, rows: int, length: int, period: int):
        self.rows, self.length, self.period = rows, length, period
        self.steps: list[list[Transition]] = [[] for _ in range(ENVS)]
        self.gaps: list[set[int]] = [set() for _ in range(ENVS)]
        self.weights: dict[tuple[int, int], float] = {}
        self.largest = np.ones(LANES)

    def cut(self, gap: np.ndarray) -> None:
        for env in np.flatnonzero(gap):
            self.gaps[env].add(len(self.steps[env]))

    def add(self, items: Transition) -> None:
        for t in range(items.reward.shape[0]):
            for env in range(ENVS):
                self.steps[env].append(jax.tree.map(lambda x, t=t, env=env: x[t, env], items))
                start = len(self.steps[env]) - self.length
                inside = range(start + 1, start + self.length)
                if start >= 0 and start % self.period == 0 and not self.gaps[env].intersection(inside):
                    self.weights[env, start] = (self.largest[env // SHARE] + SMALLEST) ** ALPHA
        # What was written over is gone.
        self.weights = {key: x for key, x in self.weights.items() if key[1] >= len(self.steps[0]) - self.rows}

    def rank(self, places: list[tuple[int, int]], priorities: np.ndarray) -> None:
        for place in set(places):
            most = max(p for other, p in zip(places, priorities, strict=True) if other == place)
            if place in self.weights:
                self.weights[place] = (most + SMALLEST) ** ALPHA
        for (env, _), priority in zip(places, priorities, strict=True):
            self.largest[env // SHARE] = max(self.largest[env // SHARE], priority)

    def table(self) -> np.ndarray:
        """Return the weights [environments, rows / period]."""
        weights = np.zeros((ENVS, self.rows // self.period))
        for (env, start), weight in self.weights.items():
            weights[env, start % self.rows // self.period] = weight
        return weights


# Rollout length, length of a window, burn-in, period, rows.
SHAPES = [(4, 6, 2, 2, 16), (4, 5, 0, 4, 12), (1, 6, 3, 3, 12), (12, 4, 1, 3, 24), (6, 6, 2, 6, 12)]
LONG = (2, 7, 6, 4, 16)  # Of small parts: many insertions.


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("time", "length", "burn_in", "period", "rows"), [*SHAPES, pytest.param(*LONG, marks=pytest.mark.slow)]
)
def test_random_insertions_cuts_ends_and_samples_against_lists(
    time: int, length: int, burn_in: int, period: int, rows: int, masked: bool
) -> None:
    buffer = make(rows * ENVS, length, burn_in, period)
    state = buffer.init(item(masked), ENVS, LANES, time)
    assert state.ring.items.reward.shape[1] == rows
    add, cut, sample, update = map(jax.jit, (buffer.add, buffer.cut, buffer.sample, buffer.update_priorities))
    slow, rng = SlowReplay(rows, length, period), np.random.default_rng(0)
    number = rows // period
    drawn = 0
    for turn in range(250):
        if rng.random() < 0.3:
            gap = rng.random(ENVS) < 0.3
            slow.cut(gap)
            state = cut(state, jnp.asarray(gap))
        items = steps(rng, turn * time, time, masked)
        slow.add(items)
        state = add(state, items)
        table = np.asarray(state.priorities.levels[0])[:, : number * SHARE].reshape(LANES, number, SHARE)
        np.testing.assert_allclose(np.moveaxis(table, 2, 1).reshape(ENVS, number), slow.table(), rtol=1e-5)
        np.testing.assert_allclose(np.asarray(state.priorities.levels[-1]).sum(-1), table.sum((1, 2)), rtol=1e-5)
        assert bool(buffer.can_sample(state)) == (len(slow.steps[0]) >= length)
        if not buffer.can_sample(state) or not (table.sum((1, 2)) > 0).all():
            continue
        windows, indices = sample(jax.random.key(turn), state)
        places = check(slow, windows, np.asarray(indices), number)
        drawn += len(places)
        priorities = rng.exponential(size=len(places)).astype(np.float32)
        slow.rank(places, priorities)
        state = update(state, indices, jnp.asarray(priorities))
    assert drawn > 1000


def check(slow: SlowReplay, windows: Any, indices: np.ndarray, number: int) -> list[tuple[int, int]]:
    """Hold a minibatch against the lists; returns environments and starts."""
    windows = jax.device_get(windows)
    env = (np.arange(LANES)[:, None] * SHARE + indices % SHARE).reshape(-1)
    shares = []
    for i in range(env.size):
        start = int(windows.obs[i, 0, 1])
        assert start % slow.rows // slow.period == indices.reshape(-1)[i] // SHARE
        assert (env[i], start) in slow.weights
        expected = slow.steps[env[i]][start : start + slow.length]
        for t, step in enumerate(expected):
            for field in ("obs", "action", "reward", "terminated", "truncated", "next_obs", "valid"):
                if getattr(step, field) is not None:
                    np.testing.assert_array_equal(getattr(windows, field)[i, t], getattr(step, field))
            before = expected[t - 1]
            over = before.terminated or before.truncated or (before.valid is not None and not before.valid)
            assert windows.first[i, t] == (t > 0 and over)
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), windows.start, expected[0].extras)
        lane = [w for (e, _), w in slow.weights.items() if e // SHARE == env[i] // SHARE]
        shares.append(slow.weights[env[i], start] / sum(lane))
    weight = np.array(shares) ** -BETA
    np.testing.assert_allclose(windows.weight, weight / weight.max(), rtol=1e-4)
    return [(int(e), int(start)) for e, start in zip(env, windows.obs[:, 0, 1], strict=True)]


def test_windows_are_drawn_in_proportion_to_their_weights() -> None:
    buffer = make(24 * ENVS, 6, 2, 2, batch_size=4096)
    state, rng = buffer.init(item(), ENVS, LANES, 4), np.random.default_rng(1)
    for turn in range(6):
        state = buffer.add(state, steps(rng, 4 * turn, 4, False))
    number = 24 // 2
    index = jnp.broadcast_to(jnp.arange(number * SHARE), (LANES, number * SHARE))
    state = buffer.update_priorities(state, index, jnp.asarray(rng.exponential(size=LANES * number * SHARE)))
    weights = np.asarray(state.priorities.levels[0])[:, : number * SHARE]
    assert (weights > 0).sum() == ENVS * (24 - 6 + 2) // 2
    sample = jax.jit(buffer.sample)
    drawn = np.concatenate([np.asarray(sample(jax.random.key(i), state)[1]) for i in range(20)], axis=1)
    for lane in range(LANES):
        counts = np.bincount(drawn[lane], minlength=number * SHARE)
        expected = drawn.shape[1] * weights[lane] / weights[lane].sum()
        # Stratified draws vary less than those of a multinomial.
        assert (np.abs(counts - expected) <= 5 * np.sqrt(expected) + 1).all()


def test_a_lane_without_windows_counts_nothing() -> None:
    buffer = make(16 * ENVS, 6, 2, 2)
    state, rng = buffer.init(item(), ENVS, LANES, 4), np.random.default_rng(2)
    for turn in range(3):
        state = buffer.cut(state, jnp.arange(ENVS) < SHARE)
        state = buffer.add(state, steps(rng, 4 * turn, 4, False))
    windows, _ = buffer.sample(jax.random.key(0), state)
    assert (windows.weight[:8] == 0).all() and (windows.weight[8:] > 0).all()


def test_windows_of_one_step_are_the_transitions_of_a_prioritised_replay() -> None:
    """Every row a window of its own: the same are drawn by the same keys, with the same weights."""
    options = {"priority_exponent": ALPHA, "importance_exponent": BETA, "smallest_priority": SMALLEST}
    ours = make(16 * ENVS, 1, 0, 1)
    theirs = replay.prioritized(16 * ENVS, 16, 1, 1, 1, 0.9, **options)
    plain = item()._replace(extras=())
    states = ours.init(plain, ENVS, LANES, 4), theirs.init(plain, ENVS, LANES, 4)
    rng = np.random.default_rng(3)
    for turn in range(7):
        items = steps(rng, 4 * turn, 4, False)._replace(extras=())
        states = ours.add(states[0], items), theirs.add(states[1], items)
        key = jax.random.key(turn)
        (windows, index), (batch, other) = ours.sample(key, states[0]), theirs.sample(key, states[1])
        np.testing.assert_array_equal(index, other)
        np.testing.assert_array_equal(windows.obs[:, 0], batch.obs)
        np.testing.assert_allclose(windows.weight, batch.weight, rtol=1e-6)
        errors = jnp.asarray(rng.exponential(size=16), jnp.float32)
        states = ours.update_priorities(states[0], index, errors), theirs.update_priorities(states[1], index, errors)
        np.testing.assert_allclose(states[0].priorities.levels[0], states[1].priorities.levels[0], rtol=1e-6)


def test_priorities_of_windows() -> None:
    """Errors 1, -3 and 2, the last of which does not count: 0.9 * 3 + 0.1 * 2; and nothing counts."""
    error = jnp.array([[1.0, 1.0], [-3.0, 1.0], [2.0, 1.0]])
    valid = jnp.array([[True, False], [True, False], [False, False]])
    np.testing.assert_allclose(replay.window_priority(error, valid), [0.9 * 3 + 0.1 * 2, 0.0])
    np.testing.assert_allclose(replay.window_priority(error, max_weight=0.0), [2.0, 1.0])


def test_memory_is_kept_at_starts_only() -> None:
    buffer = make(1_000 * 16, 80, 40, 40, batch_size=8)
    state = jax.eval_shape(lambda: buffer.init(item(), 16, 8, 40))
    assert [x.shape for x in jax.tree.leaves(state.starts)] == [(8, 25, 2, 2), (8, 25, 2)]
    assert state.ring.items.extras == ()
    assert buffer.steps_per_item == 40 and buffer.steps_per_batch == 320


def num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("time", [1, 16])
def test_every_write_is_in_place(time: int) -> None:
    buffer = make(1_000_000, 16, 8, 8, batch_size=64)
    state = jax.eval_shape(lambda: buffer.init(item(), 16, 8, time))
    items = jax.tree.map(lambda x: jax.ShapeDtypeStruct((time, 16, *x.shape), x.dtype), item())
    index, errors = jax.ShapeDtypeStruct((8, 8), np.int32), jax.ShapeDtypeStruct((64,), np.float32)
    for function, arguments in ((buffer.add, (items,)), (buffer.update_priorities, (index, errors))):
        analysis = jax.jit(function, donate_argnums=0).lower(state, *arguments).compile().memory_analysis()
        assert analysis.alias_size_in_bytes >= num_bytes(state)
        assert analysis.temp_size_in_bytes < 150_000 < num_bytes(state.priorities.levels)


def test_seeds_batch_under_vmap() -> None:
    buffer = make(16 * ENVS, 6, 2, 2)
    state, rng = buffer.init(item(), ENVS, LANES, 4), np.random.default_rng(4)
    for turn in range(3):
        state = buffer.add(state, steps(rng, 4 * turn, 4, False))
    items = steps(rng, 12, 4, False)

    def step(state: SequenceState, key: jax.Array) -> Any:
        state = buffer.add(state, items)
        windows, index = buffer.sample(key, state)
        return buffer.update_priorities(state, index, jnp.abs(windows.reward[:, 0])), windows

    keys = jax.random.split(jax.random.key(0), 2)
    apart = [jax.jit(step)(state, key) for key in keys]
    together = jax.jit(jax.vmap(step, in_axes=(None, 0)))(state, keys)
    for i in range(2):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, rtol=1e-5), together, apart[i])


@pytest.mark.parametrize("time", [1, 4])
def test_lanes_on_a_mesh_exchange_one_number_and_give_the_same(time: int) -> None:
    buffer = make(1024, 6, 2, 2, batch_size=64)
    mesh = jax.make_mesh((8,), ("env",), axis_types=(AxisType.Auto,))
    by_lane = lambda x: NamedSharding(mesh, PartitionSpec("env") if x.ndim else PartitionSpec())
    by_env = NamedSharding(mesh, PartitionSpec(None, "env"))

    @jax.jit
    def step(state: SequenceState, items: Transition, key: jax.Array, gap: jax.Array) -> Any:
        assert buffer.cut is not None and buffer.update_priorities is not None
        state = buffer.add(buffer.cut(state, gap), items)
        windows, index = buffer.sample(key, state)
        return buffer.update_priorities(state, index, jnp.abs(windows.reward[:, 0])), windows

    one, rng = buffer.init(item(), 16, 8, time), np.random.default_rng(3)
    many = jax.tree.map(lambda x: jax.device_put(x, by_lane(x)), one)
    for i in range(24 // time):
        rollout, gap = steps(rng, time * i, time, False, envs=16), jnp.asarray(rng.random(16) < 0.03)
        one, expected = step(one, rollout, jax.random.key(i), gap)
        many, windows = step(many, jax.device_put(rollout, by_env), jax.random.key(i), gap)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), (many, windows), (one, expected))
    assert all(x.sharding.is_equivalent_to(by_lane(x), x.ndim) for x in jax.tree.leaves(many))
    gap = jax.device_put(gap, NamedSharding(mesh, PartitionSpec("env")))
    text = step.lower(many, jax.device_put(rollout, by_env), jax.random.key(0), gap).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    assert len([line for line in text.splitlines() if "all-reduce(" in line and "f32[]" in line]) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"burn_in": 8}, "burn_in=8 leaves nothing to learn from in a window of sequence_length=8; use 7 or less"),
        ({"burn_in": -1}, "burn_in=-1 must be an integer of 0 or more; 40 is usual"),
        ({"sequence_length": 0}, "sequence_length=0 must be an integer of 1 or more"),
        ({"sequence_period": 1.5}, "sequence_period=1.5 must be an integer of 1 or more"),
        ({"buffer_capacity": 2**31}, "buffer_capacity=2147483648 must be at most 2**31 - 1"),
        ({"buffer_capacity": 7}, "buffer_capacity=7 is less than a window of sequence_length=8"),
        ({"buffer_capacity": 7, "sequence_period": 5}, "use 15 times num_envs, or more where rollouts are longer"),
        ({"sequence_length": 2**31}, "sequence_length=2147483648 must be at most 2**31 - 1, the largest int32; use le"),
        ({"min_replay_size": 1_001}, "min_replay_size=1001 is more than buffer_capacity=1000"),
        ({"priority_exponent": 1.1}, "priority_exponent=1.1 must be between 0 and 1"),
        ({"smallest_priority": 0.0}, "smallest_priority=0.0 must be finite and greater than 0"),
    ],
)
def test_bad_arguments_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"sequence_length": 8, "burn_in": 4, "sequence_period": 4, "buffer_capacity": 1_000}
    with pytest.raises(ValueError, match=re.escape(message)):
        replay.sequences(**{**arguments, "batch_size": 8, "num_updates": 1, **change})


@pytest.mark.parametrize(
    ("capacity", "period", "time", "envs", "message"),
    [
        (960, 4, 6, 8, "sequence_period=4 and rollout_length=6: one must divide the other.*use sequence_period=3, or"),
        (960, 6, 4, 8, "sequence_period=6 and rollout_length=4: .*use sequence_period=4 or 8, or another rollout_len"),
        (95, 4, 4, 8, "buffer_capacity=95 holds 8 steps of each of num_envs=8 .*sequence_length=8 and 4 more .*use 96"),
        (960, 4, 4, 7, "num_envs=7 is not divisible by num_lanes=2"),
    ],
)
def test_what_does_not_fit_is_refused_before_tracing(
    capacity: int, period: int, time: int, envs: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(capacity, 8, 4, period).init(item(), envs, 2, time)


def test_a_capacity_as_asked_for_is_enough() -> None:
    make(8 * 15, 8, 4, 5).init(item(), 8, 2, 5)
