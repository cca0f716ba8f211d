"""The prioritised replay against loops over lists: first priorities, sampling, weights, new priorities, cost."""

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
from podium.ops import sum_tree
from podium.replay import Estimate, PrioritizedState, Transition

GAMMA, ALPHA, BETA, SMALLEST = 0.9, 0.6, 0.4, 0.01
LANES, ENVS, ROWS = 2, 8, 12
SHARE = ENVS // LANES


def make(batch_size: int = 64, n_step: int = 3, capacity: int = ROWS * ENVS, **options: Any) -> replay.Replay:
    settings = {"priority_exponent": ALPHA, "importance_exponent": BETA, "smallest_priority": SMALLEST} | options
    return replay.prioritized(capacity, batch_size, 1, 1, n_step, GAMMA, **settings)


def item(masked: bool = False, estimated: bool = True) -> Transition:
    number, flag, obs = (jax.ShapeDtypeStruct(*x) for x in (((), np.float32), ((), bool), ((3,), np.uint8)))
    action = jax.ShapeDtypeStruct((), np.int32)
    extras = Estimate(number, number) if estimated else ()
    return Transition(obs, action, number, flag, flag, obs, flag if masked else None, extras)


def steps(
    rng: np.random.Generator, start: int, time: int, masked: bool, estimated: bool, envs: int = ENVS
) -> Transition:
    """Return steps [T, B]; an action is 1000 times the environment plus the time; every kind of end at both ends."""
    when, env = np.meshgrid(np.arange(start, start + time), np.arange(envs), indexing="ij")
    ended = rng.random((2, time, envs)) < 0.2
    ended[:, 0, :4] = [[True, False, True, False], [False, True, True, False]]
    ended[:, -1, 4:8] = [[True, False, True, False], [False, True, True, False]]
    draw = lambda: rng.normal(size=when.shape).astype(np.float32)
    obs = np.stack([env, when % 256, when // 256], -1).astype(np.uint8)
    return Transition(
        obs,
        (1000 * env + when).astype(np.int32),
        draw(),
        *ended,
        255 - obs,
        rng.random(when.shape) < 0.8 if masked else None,
        Estimate(draw(), draw()) if estimated else (),
    )


def slow_error(window: list[Transition], n_step: int) -> float:
    """Return the TD error of the steps of a window, by what acting thought in them and in the one after."""
    total, factor = 0.0, 1.0
    for i in range(n_step):
        total += factor * float(window[i].reward)
        factor *= GAMMA
        ended = window[i].terminated or window[i].truncated
        following_is_none = i + 1 < n_step and window[0].valid is not None and not window[i + 1].valid
        if ended or following_is_none:
            break
    if window[i].terminated:
        best = 0.0
    elif window[i].truncated and (window[0].valid is None or window[i + 1].valid):
        # What came after was never acted on; where resets wait, the row that shows it is no transition.
        best = float(window[i].extras.best)
    else:
        best = float(window[i + 1].extras.best)
    return total + factor * best - float(window[0].extras.value)


class SlowRing:
    """What the replay holds of every environment, as lists of rows; a row's weight stands beside it."""

    def __init__(self, n_step: int):
        self.n_step, self.position = n_step, 0
        self.steps: list[deque] = [deque(maxlen=ROWS) for _ in range(ENVS)]
        self.weights = np.zeros((ENVS, ROWS))

    def add(self, items: Transition, largest: float) -> None:
        time, estimated = items.reward.shape[0], isinstance(items.extras, Estimate)
        late = self.n_step if estimated else self.n_step - 1
        for t in range(time):
            for env, ring in enumerate(self.steps):
                ring.append(jax.tree.map(lambda x, t=t, env=env: x[t, env], items))
                self.weights[env, self.position] = 0
                if len(ring) > late:
                    window = list(ring)[-1 - late :]
                    error = slow_error(window, self.n_step) if estimated else largest
                    counts = window[0].valid is None or bool(window[0].valid)
                    weight = (abs(error) + SMALLEST) ** ALPHA if counts else 0
                    self.weights[env, (self.position - late) % ROWS] = weight
            self.position = (self.position + 1) % ROWS


def weights_of(state: PrioritizedState) -> np.ndarray:
    """Return the weights [environments, rows]."""
    rows = state.ring.items.reward.shape[1]
    lanes = np.asarray(state.priorities.levels[0])[:, : rows * SHARE].reshape(-1, rows, SHARE)
    return np.concatenate([lane.T for lane in lanes])


def assert_sums_are_right(levels: sum_tree.Levels) -> None:
    for below, level in zip(levels[:-1], levels[1:], strict=True):
        sums = np.asarray(below).reshape(LANES, -1, sum_tree.FANOUT).sum(-1)
        np.testing.assert_allclose(np.asarray(level)[:, : sums.shape[1]], sums, rtol=1e-5, atol=1e-7)


WRITES = [(4, 3, False), (4, 3, True), (1, 3, False), (1, 1, True), (4, 6, False)]
QUICK = [(4, 3, False, True), (1, 3, False, True), (4, 3, True, False)]


@pytest.mark.parametrize(
    ("time", "n_step", "masked", "estimated"),
    [
        pytest.param(*write, estimated, marks=[pytest.mark.slow] * ((*write, estimated) not in QUICK))
        for write in WRITES
        for estimated in (True, False)
    ],
)
def test_first_priorities_are_what_a_loop_gives(time: int, n_step: int, masked: bool, estimated: bool) -> None:
    buffer = make(n_step=n_step)
    state = buffer.init(item(masked, estimated), ENVS, LANES, time)
    add, sample, update = (jax.jit(f) for f in (buffer.add, buffer.sample, buffer.update_priorities))
    slow, rng = SlowRing(n_step), np.random.default_rng(0)
    for number in range(40 // time):
        items = steps(rng, number * time, time, masked, estimated)
        state = add(state, items)
        slow.add(items, 1.0 if number < 5 else 3.0)
        np.testing.assert_allclose(weights_of(state), slow.weights, rtol=1e-4, atol=1e-6)
        assert_sums_are_right(state.priorities.levels)
        held = min((number + 1) * time, ROWS)
        assert bool(buffer.can_sample(state)) == (held > (n_step if estimated else n_step - 1))
        if number == 4:  # From here on the largest error that any lane has met is 3; weights become what they were.
            index = jnp.zeros((LANES, 32), jnp.int32)
            ranked = update(state, index, jnp.full(64, 3.0))
            state = state._replace(priorities=ranked.priorities._replace(levels=state.priorities.levels))
        if buffer.can_sample(state):
            minibatch, indices = sample(jax.random.key(number), state)
            lane = np.arange(LANES)[:, None]
            env, row = lane * SHARE + np.asarray(indices) % SHARE, np.asarray(indices) // SHARE
            assert (slow.weights[env, row] > 0).all()
            np.testing.assert_array_equal(np.asarray(minibatch.action) // 1000, env.reshape(-1))


def filled(batch_size: int, n_step: int = 3, **options: Any) -> tuple[replay.Replay, PrioritizedState]:
    buffer = make(batch_size, n_step, **options)
    state, rng = buffer.init(item(), ENVS, LANES, 4), np.random.default_rng(2)
    for number in range(5):
        state = jax.jit(buffer.add)(state, steps(rng, 4 * number, 4, False, True))
    return buffer, state


def test_frequencies_and_weights_are_those_of_the_paper() -> None:
    """P(i) = p_i / (L * the lane's sum), w_i = (N P(i)) ** -beta over the largest; chi-square over 40,960 draws."""
    buffer, state = filled(4096)
    weights = weights_of(state)
    lanes = weights.reshape(LANES, -1).sum(1)
    assert lanes[0] / lanes[1] > 1.02 or lanes[1] / lanes[0] > 1.02, "lanes alike would hide what they are divided by"
    probability = (weights.reshape(LANES, -1) / (LANES * lanes[:, None])).reshape(weights.shape)
    sample, counts = jax.jit(buffer.sample), np.zeros(weights.shape)
    for number in range(10):
        minibatch, indices = sample(jax.random.key(number), state)
        env = (np.arange(LANES)[:, None] * SHARE + np.asarray(indices) % SHARE).reshape(-1)
        row = np.asarray(indices).reshape(-1) // SHARE
        np.add.at(counts, (env, row), 1)
        expected = (ENVS * ROWS * probability[env, row]) ** -BETA
        np.testing.assert_allclose(minibatch.weight, expected / expected.max(), rtol=1e-5)
        np.testing.assert_array_equal(np.asarray(minibatch.action) // 1000, env)
        assert minibatch.weight.max() == 1.0
    assert (counts[weights == 0] == 0).all()
    mean = (counts.sum() * probability)[weights > 0]
    chi_square, free = ((counts[weights > 0] - mean) ** 2 / mean).sum(), mean.size - LANES
    assert chi_square < free + 5 * math.sqrt(2 * free)


def test_weights_of_exponent_one_undo_the_sampling() -> None:
    """The mean of w * x over draws is, up to a factor, that of x over all that can be drawn; lanes differ a lot."""
    buffer, state = filled(8192, importance_exponent=1.0)
    weights = weights_of(state)
    skewed = [level.at[1].multiply(50.0) for level in state.priorities.levels]
    state = state._replace(priorities=state.priorities._replace(levels=tuple(skewed)))
    minibatch, _ = jax.jit(buffer.sample)(jax.random.key(0), state)
    env = np.asarray(minibatch.action) // 1000
    weighed = np.bincount(env, minibatch.weight, ENVS)
    np.testing.assert_allclose(weighed / weighed.sum(), (weights > 0).sum(1) / (weights > 0).sum(), atol=0.01)


def test_priority_exponent_zero_draws_uniformly_with_weights_of_one() -> None:
    buffer, state = filled(4096, priority_exponent=0.0)
    assert set(np.unique(weights_of(state))) == {0.0, 1.0}
    np.testing.assert_allclose(jax.jit(buffer.sample)(jax.random.key(0), state)[0].weight, 1.0)


def test_beta_rises_to_one_over_the_updates_asked_for() -> None:
    buffer, state = filled(64, annealing_updates=4)
    spread = []
    for _ in range(6):
        weight = np.asarray(jax.jit(buffer.sample)(jax.random.key(0), state)[0].weight)
        spread.append(np.log(weight.min()))
        priorities = state.priorities._replace(updates=state.priorities.updates + 1)
        state = state._replace(priorities=priorities)
    # The logarithm of a weight is beta times one that does not change: 0.4, 0.55, 0.7, 0.85, 1, 1.
    np.testing.assert_allclose(np.array(spread) / spread[-1], [0.4, 0.55, 0.7, 0.85, 1, 1], rtol=1e-4)


def test_new_priorities_are_written_and_duplicates_count_by_their_largest() -> None:
    buffer, state = filled(16)
    before = weights_of(state)
    levels = np.asarray(state.priorities.levels[0])
    drawable = [np.flatnonzero(lane) for lane in levels]
    never = [int(np.flatnonzero(lane[: ROWS * SHARE] == 0)[0]) for lane in levels]
    # Seven places, one of them twice more, and one that is never drawn, in each lane.
    index = np.stack([[*lane[:5], lane[0], lane[0], none] for lane, none in zip(drawable, never, strict=True)])
    errors = np.arange(1, 17, dtype=np.float32).reshape(2, 8)
    errors[:, 5] = 99.0
    results = []
    for order in (np.arange(8), np.array([6, 5, 7, 4, 3, 2, 1, 0])):
        ranked = jax.jit(buffer.update_priorities)(state, jnp.asarray(index[:, order]), errors[:, order].reshape(-1))
        jax.tree.map(np.testing.assert_array_equal, ranked.ring, state.ring)
        assert_sums_are_right(ranked.priorities.levels)
        results.append(weights_of(ranked))
    np.testing.assert_array_equal(*results)
    expected = before.reshape(LANES, SHARE, ROWS).transpose(0, 2, 1).reshape(LANES, -1).copy()
    for lane in range(LANES):
        expected[lane, index[lane, :5]] = (errors[lane, :5] + SMALLEST) ** ALPHA
        expected[lane, index[lane, 0]] = (99.0 + SMALLEST) ** ALPHA
    got = results[0].reshape(LANES, SHARE, ROWS).transpose(0, 2, 1).reshape(LANES, -1)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_array_equal(ranked.priorities.largest, [99.0, 99.0])
    assert int(ranked.priorities.updates) == 1


def test_errors_of_an_agent_that_diverged_leave_nothing_behind() -> None:
    """They count as the largest so far, which they do not change: what begins anew draws from all that is held."""
    buffer, state = filled(16)
    index = np.stack([np.flatnonzero(lane)[:8] for lane in np.asarray(state.priorities.levels[0])])
    errors = np.full((2, 8), 5.0, np.float32)
    errors[0, :4] = np.nan, np.inf, -np.inf, -3e38
    ranked = jax.jit(buffer.update_priorities)(state, jnp.asarray(index), jnp.asarray(errors.reshape(-1)))
    assert_sums_are_right(ranked.priorities.levels)
    weights = np.asarray(ranked.priorities.levels[0])
    np.testing.assert_allclose(weights[0, index[0, :4]], (1 + SMALLEST) ** ALPHA, rtol=1e-5)
    np.testing.assert_allclose(weights[0, index[0, 4:]], (5 + SMALLEST) ** ALPHA, rtol=1e-5)
    np.testing.assert_array_equal(ranked.priorities.largest, [5.0, 5.0])


def test_an_agent_without_priorities_is_refused() -> None:
    buffer, state = filled(16)
    with pytest.raises(ValueError, match="priorities=None from grad"):
        buffer.update_priorities(state, jnp.zeros((2, 8), jnp.int32), None)


def test_a_lane_of_which_nothing_counts_gives_rows_of_weight_zero() -> None:
    buffer = make(16)
    state = buffer.init(item(masked=True), ENVS, LANES, 4)
    for number in range(3):
        items = steps(np.random.default_rng(number), 4 * number, 4, True, True)
        state = jax.jit(buffer.add)(state, items._replace(valid=items.valid & (np.arange(ENVS) < SHARE)))
    minibatch, index = jax.jit(buffer.sample)(jax.random.key(0), state)
    assert (minibatch.weight[:8] > 0).all() and (minibatch.weight[8:] == 0).all()
    errors = jnp.full(16, 3.0).at[8:].set(50.0).at[9].set(jnp.nan)
    ranked = jax.jit(buffer.update_priorities)(state, index, errors)
    assert ranked.priorities.largest.tolist() == [3.0, 1.0], "what weighs nothing is no error that a lane has met"
    assert all((level[1] == 0).all() for level in ranked.priorities.levels)


def num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("capacity", [50_000, 1_000_000])
def test_every_write_is_in_place(capacity: int) -> None:
    buffer = make(256, capacity=capacity)
    state = jax.eval_shape(lambda: buffer.init(item(), 16, 8, 16))
    items = jax.tree.map(lambda x: jax.ShapeDtypeStruct((16, 16, *x.shape), x.dtype), item())
    index, errors = jax.ShapeDtypeStruct((8, 32), np.int32), jax.ShapeDtypeStruct((256,), np.float32)
    for function, arguments in ((buffer.add, (items,)), (buffer.update_priorities, (index, errors))):
        analysis = jax.jit(function, donate_argnums=0).lower(state, *arguments).compile().memory_analysis()
        assert analysis.alias_size_in_bytes >= num_bytes(state)
        assert analysis.temp_size_in_bytes < 150_000


def result_sizes(jaxpr: Any) -> list[int]:
    """Return the number of elements of everything a program computes; another shape of the same is not computed."""
    computes = [equation for equation in equations(jaxpr) if equation.primitive.name != "reshape"]
    return [math.prod(v.aval.shape) for equation in computes for v in equation.outvars]


def test_sampling_costs_almost_the_same_whatever_the_buffer_holds() -> None:
    key, work = jax.eval_shape(lambda: jax.random.key(0)), []
    for capacity in (50_000, 1_000_000):
        buffer = make(64, capacity=capacity)
        state = jax.eval_shape(lambda buffer=buffer: buffer.init(item(), 16, 8, 16))
        sizes = result_sizes(jax.make_jaxpr(buffer.sample)(key, state).jaxpr)
        assert max(sizes) == 64 * sum_tree.FANOUT
        work.append(sum(sizes))
    assert work[0] < work[1] < 1.4 * work[0]  # One level more.


def test_seeds_batch_under_vmap() -> None:
    buffer, state = filled(32)
    items = steps(np.random.default_rng(9), 20, 4, False, True)

    def step(state: PrioritizedState, key: jax.Array) -> Any:
        state = buffer.add(state, items)
        minibatch, index = buffer.sample(key, state)
        return buffer.update_priorities(state, index, jnp.abs(minibatch.reward)), minibatch

    keys = jax.random.split(jax.random.key(0), 2)
    apart = [jax.jit(step)(state, key) for key in keys]
    together = jax.jit(jax.vmap(step, in_axes=(None, 0)))(state, keys)
    for i in range(2):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, rtol=1e-5), together, apart[i])


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices; tests/conftest.py makes them")
def test_lanes_on_a_mesh_exchange_one_number_and_give_the_same() -> None:
    buffer = make(64, capacity=1024)
    mesh = jax.make_mesh((8,), ("env",), axis_types=(AxisType.Auto,))
    by_lane = lambda x: NamedSharding(mesh, PartitionSpec("env") if x.ndim else PartitionSpec())
    by_env = NamedSharding(mesh, PartitionSpec(None, "env"))

    @jax.jit
    def step(state: PrioritizedState, items: Transition, key: jax.Array) -> Any:
        state = buffer.add(state, items)
        minibatch, index = buffer.sample(key, state)
        return buffer.update_priorities(state, index, jnp.abs(minibatch.reward)), minibatch

    one, rng = buffer.init(item(), 16, 8, 4), np.random.default_rng(3)
    many = jax.tree.map(lambda x: jax.device_put(x, by_lane(x)), one)
    rollouts = [steps(rng, 4 * i, 4, False, True, envs=16) for i in range(5)]
    for i, rollout in enumerate(rollouts):
        one, expected = step(one, rollout, jax.random.key(i))
        many, minibatch = step(many, jax.device_put(rollout, by_env), jax.random.key(i))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), (many, minibatch), (one, expected))
    assert all(x.sharding.is_equivalent_to(by_lane(x), x.ndim) for x in jax.tree.leaves(many))
    text = step.lower(many, jax.device_put(rollouts[0], by_env), jax.random.key(0)).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    assert len([line for line in text.splitlines() if "all-reduce(" in line and "f32[]" in line]) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"priority_exponent": -0.1}, "priority_exponent=-0.1 must be between 0 and 1; 0.6 is usual"),
        ({"priority_exponent": float("nan")}, "priority_exponent=nan"),
        ({"importance_exponent": 1.5}, "importance_exponent=1.5 must be between 0 and 1; 0.4 is usual"),
        ({"annealing_updates": -1}, "annealing_updates=-1 must be an integer of 0 or more"),
        ({"annealing_updates": 0.5}, "annealing_updates=0.5"),
        ({"smallest_priority": 0.0}, "smallest_priority=0.0 must be finite and greater than 0; 1e-6 is usual"),
        ({"smallest_priority": 1e-46}, "smallest_priority=1e-46 must be at least 1.18e-38"),
        ({"smallest_priority": 1.17e-38}, "smallest_priority=1.17e-38 must be at least 1.18e-38"),
        ({"smallest_priority": float("inf")}, "smallest_priority=inf"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_bad_arguments_are_refused_by_name_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**change)
