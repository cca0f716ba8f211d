"""Checkpoints: what goes in comes out, on any number of devices; which steps stay; what is refused, in which words."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from podium.checkpoint import CheckpointError, Checkpoints, arrays, leaves, params_sha256


class Learner(NamedTuple):
    params: Any
    opt_state: Any
    key: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Train:
    learner: Learner
    env_state: Any
    carry: Any = ()


def make_state(seed: int = 0) -> Train:
    key = jax.random.key(seed)
    params = {
        "Dense_0": {"kernel": jax.random.normal(key, (3, 4)), "bias": jnp.zeros(4, jnp.bfloat16)},
        "log_std": jnp.asarray(-1.5),
    }
    optimiser = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(1e-3, 0.0, 100)))
    env_state = {
        "position": jax.random.normal(key, (8, 5)),
        "keys": jax.random.split(key, 8),
        "done": jnp.arange(8) % 3 == 0,
        "empty": jnp.zeros((0, 3)),
        "rbg": jax.random.key(seed, impl="rbg"),
    }
    return Train(Learner(params, optimiser.init(params), key), env_state)


def shardings_of(state: Train, num_devices: int) -> Train:
    """Environments over the mesh, everything else on all of it."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",), axis_types=(AxisType.Auto,))

    def choose(leaf: Any) -> NamedSharding:
        split = leaf.ndim and leaf.shape[0] == 8
        return NamedSharding(mesh, PartitionSpec("data") if split else PartitionSpec())

    return jax.tree.map(choose, state)


def assert_same(actual: Any, expected: Any) -> None:
    """Same structure, types and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), (_, e) in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree_util.tree_leaves_with_path(expected), strict=True
    ):
        assert a.dtype == e.dtype and a.shape == e.shape, path
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes(), path


def test_comes_back_with_the_same_bits_and_types(tmp_path: Path):
    state = make_state()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(640, state, {"eval_return": 12.5, "updates": np.int32(5), "config": {"layers": (64, 64)}})
    restored, meta, step = checkpoints.restore(jax.eval_shape(lambda: state))
    assert_same(restored, state)
    assert isinstance(restored, Train) and isinstance(restored.learner, Learner) and restored.carry == ()
    assert meta == {"eval_return": 12.5, "updates": 5, "config": {"layers": [64, 64]}} and step == 640
    assert checkpoints.steps() == [640]
    checkpoints.verify(640)
    checkpoints.close()


@pytest.mark.parametrize("num_devices", [8, 2, 1])
def test_restores_on_another_number_of_devices(tmp_path: Path, num_devices: int):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    state = make_state()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, jax.device_put(state, shardings_of(state, 8)))
    shardings = shardings_of(state, num_devices)
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
    restored, _, _ = checkpoints.restore(target)
    assert_same(restored, state)
    for leaf, sharding in zip(jax.tree.leaves(restored), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_the_target_may_be_arrays_numpy_or_numbers_and_keeps_weak_types(tmp_path: Path):
    state = {"array": jnp.arange(3), "numpy": np.arange(3), "number": 4, "flag": True, "weak": jnp.asarray(1.5)}
    assert state["weak"].weak_type
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    restored, _, _ = checkpoints.restore(state)
    assert isinstance(restored["array"], jax.Array) and not restored["array"].committed
    assert isinstance(restored["numpy"], np.ndarray) and restored["numpy"].dtype == np.int64
    assert restored["number"] == 4 and type(restored["number"]) is int and restored["flag"] is True
    assert restored["weak"].weak_type and restored["weak"] == 1.5


def test_a_restored_state_runs_the_same_compiled_program(tmp_path: Path):
    state = make_state()
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x, state))
    state = advance(state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    advance(checkpoints.restore(state)[0])
    assert advance._cache_size() == 1


def test_the_caller_may_donate_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make = arrays.checkpointer

    def slow():
        time.sleep(0.2)  # The write starts long after the donated buffers were overwritten.
        return make()

    monkeypatch.setattr(arrays, "checkpointer", slow)
    state = {"weights": jnp.arange(200_000.0), "more": jnp.arange(200_000)}
    if jax.device_count() >= 8:
        mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
        state["spread"] = jax.device_put(jnp.arange(80_000.0), NamedSharding(mesh, PartitionSpec("data")))
    expected = jax.tree.map(np.array, state)
    target = jax.eval_shape(lambda: state)
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 7, state), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path)
    start = time.perf_counter()
    checkpoints.save(1, state)
    assert time.perf_counter() - start < 0.15
    for _ in range(3):
        state = jax.block_until_ready(overwrite(state))
    assert_same(checkpoints.restore(target)[0], expected)


def test_what_is_saved_shares_no_memory_with_the_state(tmp_path: Path):
    """Jaxlib does copy a donated buffer that NumPy looks at, but documents no such promise."""
    state = {"jax": jnp.arange(5.0), "numpy": np.arange(5.0)}
    for leaf in state.values():
        assert not np.shares_memory(np.asarray(leaf), leaves.to_host(leaf))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    state["numpy"][:] = -7
    assert checkpoints.restore(state)[0]["numpy"].tolist() == [0, 1, 2, 3, 4]


def test_a_vector_and_the_arrays_that_make_it_up_are_read_for_one_another(tmp_path: Path):
    """An optimiser's moments are one or the other, by how the State lies over devices."""
    parts = {"b": jnp.arange(2.0), "w": jnp.arange(2.0, 8.0).reshape(2, 3), "z": jnp.float32(8.0)}
    joined, apart = {"mu": jnp.arange(9.0), "x": jnp.zeros(3)}, {"mu": parts, "x": jnp.zeros(3)}
    for number, (saved, wanted) in enumerate([(joined, apart), (apart, joined)]):
        checkpoints = Checkpoints(tmp_path / str(number))
        checkpoints.save(1, saved)
        assert_same(checkpoints.restore(jax.eval_shape(lambda wanted=wanted: wanted))[0], wanted)
        assert_same(checkpoints.restore(wanted["mu"], prefix="mu")[0], wanted["mu"])
        other = {"mu": jnp.arange(10.0)} if saved is apart else {"mu": {**parts, "more": jnp.zeros(1)}}
        with pytest.raises(CheckpointError, match="was saved but is not expected"):
            checkpoints.restore({**other, "x": jnp.zeros(3)})


def test_restores_a_part_and_a_raw_tree(tmp_path: Path):
    state = {"agent": make_state().learner, "replay": jnp.zeros((100, 4))}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state, {"note": "x"})
    params, meta, step = checkpoints.restore(state["agent"].params, prefix="agent/params")
    assert_same(params, state["agent"].params)
    assert (meta, step) == ({"note": "x"}, 3)
    raw, _, _ = checkpoints.restore_raw(prefix="agent/params")
    np.testing.assert_array_equal(raw["Dense_0"]["kernel"], state["agent"].params["Dense_0"]["kernel"])
    assert checkpoints.restore_raw()[0]["replay"].shape == (100, 4)
    with pytest.raises(CheckpointError, match="holds nothing under 'critic'"):
        checkpoints.restore_raw(prefix="critic")


def test_keeps_the_newest_and_the_best(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    returns = {10: 1.0, 20: 9.0, 30: float("nan"), 40: None, 50: 3.0, 60: float("inf")}
    for step, value in returns.items():
        checkpoints.save(step, {"step": jnp.asarray(step)}, {} if value is None else {"eval_return": value})
    checkpoints.finish()
    assert checkpoints.steps() == [20, 50, 60] and checkpoints.best_step() == 20
    best, meta, step = checkpoints.restore({"step": jnp.asarray(0)}, step=checkpoints.best_step())
    assert best["step"] == 20 and meta["eval_return"] == 9.0 and step == 20
    assert checkpoints.restore_raw(60)[1] == {"eval_return": None}


def test_keeps_only_the_newest_when_asked(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=False)
    for step, value in ((0, 5.0), (10, 2.0), (20, 1.0)):
        checkpoints.save(step, {"x": jnp.ones(2)}, {"eval_return": value})
    checkpoints.finish()
    assert checkpoints.steps() == [20]


def test_a_second_save_at_a_step_replaces_the_first(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, {"x": jnp.zeros(2)})
    checkpoints.save(5, {"x": jnp.ones(2)}, {"eval_return": 1})
    state, meta, _ = checkpoints.restore({"x": jnp.zeros(2)})
    assert state["x"].sum() == 2 and meta == {"eval_return": 1} and checkpoints.steps() == [5]


def test_saving_after_a_rewind_drops_the_old_future(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    for step in (10, 20, 30):
        checkpoints.save(step, {"x": jnp.full(2, step)}, {"eval_return": step})
    with pytest.raises(ValueError, match="env_steps=15 is before the newest checkpoint, 30"):
        checkpoints.save(15, {"x": jnp.zeros(2)})
    again = Checkpoints(tmp_path)
    again.restore({"x": jnp.zeros(2, int)}, step=10)
    assert again.steps() == [10, 20, 30]
    again.save(15, {"x": jnp.full(2, 15)}, {"eval_return": 1})
    again.finish()
    assert again.steps() == [10, 15] and again.best_step() == 10


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"w": jnp.zeros((2, 4)), "b": jnp.zeros(3)}, r"w is float32\[2, 3\] there and float32\[2, 4\] here"),
        ({"w": jnp.zeros((2, 3), int), "b": jnp.zeros(3)}, r"w is float32\[2, 3\] there and int32\[2, 3\] here"),
        ({"w": jnp.zeros((2, 3))}, "b was saved but is not expected"),
        ({"w": jnp.zeros((2, 3)), "b": jnp.zeros(3), "c": {"d": 1}}, "c/d is expected but was not saved"),
        ({"w": jax.random.key(0), "b": jnp.zeros(3)}, r"w is float32\[2, 3\] there and key<fry>\[\] here"),
        ([1, 2, 3, 4, 5], "and 4 more"),
    ],
)
def test_says_in_one_sentence_which_leaf_differs(tmp_path: Path, target: Any, message: str):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)})
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoints.restore(target)
    assert len(str(caught.value)) < 400 and "checkpoint 7 does not fit" in str(caught.value)


def test_refuses_what_it_cannot_keep(tmp_path: Path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
    checkpoints = Checkpoints(tmp_path / "none")
    with pytest.raises(CheckpointError, match="No complete checkpoint in"):
        checkpoints.restore({})
    with pytest.raises(ValueError, match="env_steps=-1"):
        checkpoints.save(-1, {})
    with pytest.raises(ValueError, match=r"name is no array of numbers \(str\)"):
        checkpoints.save(1, {"name": "ppo"})
    with pytest.raises(ValueError, match="share the name"):
        checkpoints.save(1, {"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)})
    assert not (tmp_path / "none").exists()
    checkpoints.save(1, {"x": jnp.zeros(1)})
    with pytest.raises(CheckpointError, match=r"step=2 is no complete checkpoint.*there are \[1\]"):
        checkpoints.restore({"x": jnp.zeros(1)}, step=2)


def test_a_state_without_arrays_is_a_state(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, ((), {"none": None}))
    assert checkpoints.restore(((), {"none": None}))[0] == ((), {"none": None})


def test_params_sha256_sees_values_and_not_devices():
    params = make_state().learner.params
    digest = params_sha256(params)
    assert digest == params_sha256(dict(reversed(params.items()))) == params_sha256(jax.tree.map(np.asarray, params))
    if jax.device_count() >= 8:
        mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
        spread = NamedSharding(mesh, PartitionSpec("data"))
        x = jnp.arange(16.0)
        assert params_sha256({"x": x}) == params_sha256({"x": jax.device_put(x, spread)})
    assert digest != params_sha256({**params, "log_std": jnp.nextafter(params["log_std"], 0.0)})
    assert params_sha256({"a": jnp.zeros(2)}) != params_sha256({"b": jnp.zeros(2)})
    assert params_sha256({"a": jnp.zeros((2, 1))}) != params_sha256({"a": jnp.zeros((1, 2))})
    assert params_sha256({"k": jax.random.key(0)}) != params_sha256({"k": jax.random.key(1)})
