"""The replay against a deque and a loop, its uniformity, its cost, and what it leaves in a compiled program."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxprs import equations

from podium import replay
from podium.replay import Batch, ReplayState, Transition
from podium.replay.steps import draw_below

GAMMA = 0.9
ITEM = Transition(
    obs=jax.ShapeDtypeStruct((3,), np.uint8),
    action=jax.ShapeDtypeStruct((), np.int32),
    reward=jax.ShapeDtypeStruct((), np.float32),
    terminated=jax.ShapeDtypeStruct((), bool),
    truncated=jax.ShapeDtypeStruct((), bool),
    next_obs=jax.ShapeDtypeStruct((3,), np.uint8),
)


def steps(rng: np.random.Generator, start: int, num_steps: int, num_envs: int, masked: bool) -> Transition:
    """Return steps [T, B] whose first obs byte is the environment and whose others are the time."""
    time, env = np.meshgrid(np.arange(start, start + num_steps), np.arange(num_envs), indexing="ij")
    obs = np.stack([env, time % 256, time // 256], -1).astype(np.uint8)
    ended = rng.random((2, num_steps, num_envs)) < 0.2
    # Both flags, each alone and together, at the first and at the last step of a write.
    ended[:, 0, :4] = ended[:, -1, :4] = [[True, False, True, False], [False, True, True, False]]
    return Transition(
        obs=obs,
        action=(1000 * env + time).astype(np.int32),
        reward=rng.normal(size=time.shape).astype(np.float32),
        terminated=ended[0],
        truncated=ended[1],
        next_obs=255 - obs,
        valid=rng.random(time.shape) < 0.8 if masked else None,
    )


def slow_transition(window: list[Transition]) -> tuple[float, float, np.ndarray, float]:
    """Return reward, discount, next_obs and weight of the steps of one window, by a loop."""
    total, factor = 0.0, 1.0
    for i, step in enumerate(window):
        total += factor * float(step.reward)
        factor *= GAMMA
        last = step.terminated or step.truncated
        following_is_none = i + 1 < len(window) and step.valid is not None and not window[i + 1].valid
        if last or following_is_none:
            break
    weight = 1.0 if window[0].valid is None else float(window[0].valid)
    return total, 0.0 if step.terminated else factor, step.next_obs, weight


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n_step", [1, 3])
def test_every_sample_is_what_a_deque_and_a_loop_give(n_step: int, masked: bool) -> None:
    num_lanes, num_envs, time, batch_size = 2, 8, 4, 512
    buffer = replay.uniform(100, batch_size, 1, n_step=n_step, gamma=GAMMA)  # 100 // 32 * 4 = 12 rows.
    item = ITEM._replace(valid=jax.ShapeDtypeStruct((), bool)) if masked else ITEM
    state = buffer.init(item, num_envs, num_lanes, time)
    assert state.items.obs.shape == (2, 12, 4, 3) and state.items.obs.dtype == np.uint8
    add, sample = jax.jit(buffer.add), jax.jit(buffer.sample)
    rings = [deque(maxlen=12) for _ in range(num_envs)]
    rng = np.random.default_rng(0)

    for number in range(8):
        items = steps(rng, number * time, time, num_envs, masked)
        state = add(state, items)
        for t in range(time):
            for env in range(num_envs):
                rings[env].append(jax.tree.map(lambda x, t=t, env=env: x[t, env], items))
        assert bool(buffer.can_sample(state))
        minibatch, indices = sample(jax.random.key(number), state)
        assert indices.shape == (num_lanes, batch_size // num_lanes)
        assert minibatch.reward.shape == minibatch.action.shape == (batch_size,)
        assert minibatch.obs.shape == (batch_size, 3) and minibatch.obs.dtype == np.uint8

        expected = {}
        for ring in rings:
            ring = list(ring)
            for start in range(len(ring) - n_step + 1):
                expected[int(ring[start].action)] = ring[start], slow_transition(ring[start : start + n_step])
        rows = [np.asarray(x) for x in minibatch[:5]]
        for obs, action, reward, discount, next_obs in zip(*rows, strict=True):
            step, (slow_reward, slow_discount, slow_next_obs, _) = expected[int(action)]
            np.testing.assert_array_equal(obs, step.obs)
            np.testing.assert_array_equal(next_obs, slow_next_obs)
            np.testing.assert_allclose([reward, discount], [slow_reward, slow_discount], rtol=1e-5, atol=1e-6)
        if masked:
            weights = [expected[int(action)][1][3] for action in minibatch.action]
            np.testing.assert_array_equal(minibatch.weight, weights)
        else:
            assert minibatch.weight is None
        # Lane by lane: the first half of the rows is of the first half of the environments. Indices point at `obs`.
        lane_of_row = np.asarray(minibatch.obs[:, 0]) // 4
        np.testing.assert_array_equal(lane_of_row, np.repeat([0, 1], batch_size // 2))
        flat = np.asarray(state.items.action).reshape(num_lanes, -1)
        np.testing.assert_array_equal(np.take_along_axis(flat, np.asarray(indices), 1).reshape(-1), minibatch.action)
    assert int(state.filled) == 12 and int(state.position) == 8 * time % 12


@pytest.mark.parametrize("num_adds", [2, 7])
def test_sampling_is_uniform_over_starts_and_environments(num_adds: int) -> None:
    num_lanes, num_envs, time, n_step = 2, 8, 4, 3
    buffer = replay.uniform(96, 8192, 1, n_step=n_step, gamma=GAMMA)
    state = buffer.init(ITEM, num_envs, num_lanes, time)
    rng = np.random.default_rng(1)
    add = jax.jit(buffer.add)
    for number in range(num_adds):
        state = add(state, steps(rng, number * time, time, num_envs, False))
    sample = jax.jit(buffer.sample)
    drawn = np.concatenate([sample(jax.random.key(i), state)[0].action for i in range(10)])
    starts = min(num_adds * time, 12) - n_step + 1
    counts = np.unique(drawn, return_counts=True)[1]
    cells = starts * num_envs
    assert counts.shape == (cells,)
    mean = drawn.size / cells
    chi_square = float(np.sum((counts - mean) ** 2) / mean)
    # Mean cells - 1, standard deviation sqrt(2 (cells - 1)); four deviations either way.
    assert abs(chi_square - (cells - 1)) < 4 * math.sqrt(2 * (cells - 1))


def test_sampling_depends_on_the_key_and_lanes_draw_apart() -> None:
    buffer = replay.uniform(64, 64, 1)
    state = buffer.init(ITEM, 8, 2, 4)._replace(filled=jnp.int32(8))
    sample = jax.jit(buffer.sample)
    first, again, other = (sample(jax.random.key(i), state)[1] for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[0], first[1])


def test_an_item_may_be_a_pytree_and_keeps_its_types() -> None:
    obs = {"image": jax.ShapeDtypeStruct((2, 2), np.uint8), "speed": jax.ShapeDtypeStruct((), np.float16)}
    item = ITEM._replace(obs=obs, next_obs=obs, action=jax.ShapeDtypeStruct((2,), np.float32))
    buffer = replay.uniform(64, 8, 1)
    state = buffer.init(item, 4, 2, 4)
    state = jax.jit(buffer.add)(state, jax.tree.map(lambda x: np.ones((4, 4, *x.shape), x.dtype), item))
    minibatch = jax.jit(buffer.sample)(jax.random.key(0), state)[0]
    assert minibatch.obs["image"].shape == (8, 2, 2) and minibatch.obs["image"].dtype == np.uint8
    assert minibatch.next_obs["speed"].shape == (8,) and minibatch.next_obs["speed"].dtype == np.float16
    assert minibatch.action.shape == (8, 2)


def test_can_sample_waits_for_min_replay_size_and_for_a_whole_window() -> None:
    def counts(min_replay_size: int, n_step: int) -> list[bool]:
        buffer = replay.uniform(64, 8, 1, min_replay_size=min_replay_size, n_step=n_step)
        state = buffer.init(ITEM, 4, 2, 2)
        return [bool(buffer.can_sample(state._replace(filled=jnp.int32(i)))) for i in range(6)]

    assert counts(1, 1) == [False, True, True, True, True, True]
    assert counts(1, 3) == [False, False, False, True, True, True]
    assert counts(13, 1) == [False, False, False, False, True, True]  # 4 environments: 12 steps, then 16.


@pytest.mark.parametrize("largest", [1_000, (1 << 22) + 1])
def test_draws_are_uniform_below_their_bound(largest: int) -> None:
    bound, size = 1_000, 200_000
    drawn = jax.jit(lambda key: draw_below(key, size, jnp.int32(bound), largest))(jax.random.key(0))
    counts = np.bincount(np.asarray(drawn), minlength=bound)
    assert counts.size == bound and drawn.dtype == jnp.int32
    # Chi-square with 999 degrees of freedom: 5 deviations of sqrt(2 * 999) above its mean.
    assert ((counts - size / bound) ** 2 / (size / bound)).sum() < 999 + 5 * np.sqrt(2 * 999)


def test_seeds_batch_under_vmap() -> None:
    buffer = replay.uniform(64, 32, 1, n_step=2, gamma=GAMMA)
    rng = np.random.default_rng(2)
    rollouts = [[steps(rng, 4 * i, 4, 4, False) for i in range(5)] for _ in range(3)]
    states = [buffer.init(ITEM, 4, 2, 4) for _ in range(3)]
    keys = jax.random.split(jax.random.key(0), 3)
    stack = lambda trees: jax.tree.map(lambda *x: np.stack(x), *trees)
    together = stack(states)
    add, add_all, sample = jax.jit(buffer.add), jax.jit(jax.vmap(buffer.add)), jax.jit(buffer.sample)
    for i in range(5):
        states = [add(state, rollout[i]) for state, rollout in zip(states, rollouts, strict=True)]
        together = add_all(together, stack([rollout[i] for rollout in rollouts]))
    apart = [sample(key, state)[0] for key, state in zip(keys, states, strict=True)]
    batched = jax.jit(jax.vmap(buffer.sample))(keys, together)[0]
    jax.tree.map(np.testing.assert_array_equal, stack(apart), batched)


def abstract_state(buffer: replay.Replay, num_envs: int, num_lanes: int, time: int) -> ReplayState:
    return jax.eval_shape(lambda: buffer.init(ITEM, num_envs, num_lanes, time))


def abstract_items(num_envs: int, time: int) -> Transition:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((time, num_envs, *x.shape), x.dtype), ITEM)


def num_bytes(tree: object) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("buffer_capacity", [50_000, 1_000_000])
def test_add_writes_in_place(buffer_capacity: int) -> None:
    buffer = replay.uniform(buffer_capacity, 256, 1)
    state, items = abstract_state(buffer, 16, 8, 16), abstract_items(16, 16)
    analysis = jax.jit(buffer.add, donate_argnums=0).lower(state, items).compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= num_bytes(state)
    assert analysis.temp_size_in_bytes <= 4 * num_bytes(items)


@pytest.mark.parametrize("buffer_capacity", [50_000, 1_000_000])
def test_a_fold_of_updates_never_copies_the_buffer(buffer_capacity: int) -> None:
    buffer = replay.uniform(buffer_capacity, 256, 1, n_step=3)
    state, items = abstract_state(buffer, 16, 8, 16), abstract_items(16, 16)

    def iteration(state: ReplayState, items: Transition, key: jax.Array) -> tuple[ReplayState, jax.Array]:
        state = buffer.add(state, items)

        def update(total: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
            return total + jnp.sum(buffer.sample(key, state)[0].reward), None

        learn = lambda total: jax.lax.scan(update, total, jax.random.split(key, 4))[0]
        return state, jax.lax.cond(buffer.can_sample(state), learn, lambda total: total, jnp.zeros(()))

    def two_iterations(state: ReplayState, items: Transition, key: jax.Array) -> tuple[ReplayState, jax.Array]:
        return jax.lax.scan(lambda state, key: iteration(state, items, key), state, jax.random.split(key, 2))

    key = jax.eval_shape(lambda: jax.random.key(0))
    analysis = jax.jit(two_iterations, donate_argnums=0).lower(state, items, key).compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= num_bytes(state)
    assert analysis.temp_size_in_bytes < 300_000 < num_bytes(state)


def result_sizes(jaxpr: Any) -> list[int]:
    """Return the number of elements of everything a program computes, programs inside it included."""
    return [math.prod(v.aval.shape) for equation in equations(jaxpr) for v in equation.outvars]


def test_sampling_costs_the_same_whatever_the_buffer_holds() -> None:
    key = jax.eval_shape(lambda: jax.random.key(0))
    work = []
    for buffer_capacity in (50_000, 1_000_000):
        buffer = replay.uniform(buffer_capacity, 64, 1, n_step=3)
        state = abstract_state(buffer, 16, 8, 16)
        sizes = result_sizes(jax.make_jaxpr(buffer.sample)(key, state).jaxpr)
        assert max(sizes) == 64 * 3 * 2  # The (row, environment) pairs of the windows.
        work.append(sum(sizes))
    assert work[0] == work[1]


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices; tests/conftest.py makes them")
def test_lanes_on_a_mesh_stay_local_and_give_the_same_numbers() -> None:
    buffer = replay.uniform(1024, 64, 1, n_step=3, gamma=GAMMA)
    mesh = jax.make_mesh((8,), ("env",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(3)
    rollouts = [steps(rng, 4 * i, 4, 16, False) for i in range(5)]
    by_lane = lambda x: NamedSharding(mesh, PartitionSpec("env") if x.ndim else PartitionSpec())
    by_env = NamedSharding(mesh, PartitionSpec(None, "env"))

    @jax.jit
    def add_and_sample(state: ReplayState, items: Transition, key: jax.Array) -> tuple[ReplayState, Batch]:
        state = buffer.add(state, items)
        return state, buffer.sample(key, state)[0]

    one = buffer.init(ITEM, 16, 8, 4)
    many = jax.tree.map(lambda x: jax.device_put(x, by_lane(x)), one)
    for i, rollout in enumerate(rollouts):
        one, expected = add_and_sample(one, rollout, jax.random.key(i))
        many, minibatch = add_and_sample(many, jax.device_put(rollout, by_env), jax.random.key(i))
    jax.tree.map(np.testing.assert_array_equal, (many, minibatch), (one, expected))
    assert all(x.sharding.is_equivalent_to(by_lane(x), x.ndim) for x in jax.tree.leaves((many, minibatch)))
    text = add_and_sample.lower(many, jax.device_put(rollouts[0], by_env), jax.random.key(0)).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer_capacity": 0}, "buffer_capacity=0"),
        ({"buffer_capacity": 2**31}, "buffer_capacity=2147483648"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_updates": 1.5}, "num_updates=1.5"),
        ({"min_replay_size": 0}, "min_replay_size=0"),
        ({"min_replay_size": 2000}, "min_replay_size=2000 is more than buffer_capacity=1000"),
        ({"n_step": 0}, "n_step=0"),
        ({"gamma": 1.1}, "gamma=1.1"),
        ({"gamma": float("nan")}, "gamma=nan"),
    ],
)
def test_bad_arguments_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay.uniform(**{"buffer_capacity": 1000, "batch_size": 8, "num_updates": 1, **change})


def test_shapes_that_do_not_fit_are_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="batch_size=20 is not divisible by num_lanes=8; use 16 or 24"):
        replay.uniform(1000, 20, 1).init(ITEM, 8, 8, 4)
    with pytest.raises(ValueError, match="num_envs=6 is not divisible by num_lanes=4"):
        replay.uniform(1000, 8, 1).init(ITEM, 6, 4, 4)
    with pytest.raises(ValueError, match="buffer_capacity=63 holds 4 .* use 64 or more"):
        replay.uniform(63, 8, 1).init(ITEM, 8, 8, 4)
    assert replay.uniform(64, 8, 1).init(ITEM, 8, 8, 4).items.reward.shape == (8, 8, 1)
    with pytest.raises(ValueError, match="min_replay_size=95 is more than the 64 steps .* use 64 or less"):
        replay.uniform(95, 8, 1, min_replay_size=95).init(ITEM, 8, 8, 4)
    buffer = replay.uniform(64, 8, 1)
    with pytest.raises(ValueError, match="3 steps does not divide the 8 rows"):
        buffer.add(buffer.init(ITEM, 8, 8, 4), steps(np.random.default_rng(0), 0, 3, 8, False))
