"""What XLA is asked for: the same bits, however a program's operations are run."""

from __future__ import annotations

import types

import jax

from podium import xla


def test_programs_that_run_one_by_one_compute_the_same_bits() -> None:
    def sums(x: jax.Array) -> list[jax.Array]:
        return [(x @ x.T * number).sum() for number in range(8)]

    x, cpu = jax.random.normal(jax.random.key(0), (16, 16)), jax.devices("cpu")[0]
    lowered = jax.jit(sums).lower(x)
    assert lowered.compile(xla.one_by_one(cpu))(x) == lowered.compile()(x)
    other = types.SimpleNamespace(platform="gpu")
    assert xla.one_by_one(other) is None  # type: ignore[arg-type]
