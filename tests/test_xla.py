"""What XLA is asked for: the same bits, however a program's operations are run."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from podium import xla
from podium.vision import convolve


def test_programs_that_run_one_by_one_compute_the_same_bits() -> None:
    def sums(x: jax.Array) -> list[jax.Array]:
        return [(x @ x.T * number).sum() for number in range(8)]

    x, cpu = jax.random.normal(jax.random.key(0), (16, 16)), jax.devices("cpu")[0]
    lowered = jax.jit(sums).lower(x)
    assert lowered.compile(xla.one_by_one(cpu))(x) == lowered.compile()(x)
    other = types.SimpleNamespace(platform="gpu")
    assert xla.one_by_one(other) == {}  # type: ignore[arg-type]


def test_no_convolution_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """YNNPACK's do, however many frames there are; Eigen's compute the same."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    cpu = jax.devices("cpu")[0]
    x, kernel = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(8, 84, 84, 4), (8, 8, 4, 32)]))
    lowered = jax.jit(lambda x, kernel: convolve(x, kernel, 4)).lower(x, kernel)
    compiled = lowered.compile(xla.usual(cpu))
    assert "ynn_fusion" not in compiled.as_text()
    np.testing.assert_allclose(compiled(x, kernel), lowered.compile()(x, kernel), rtol=1e-4, atol=1e-4)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
    assert xla.usual(cpu) == {}


def test_an_option_that_this_xla_does_not_know_is_left_out() -> None:
    assert xla.known("xla_cpu_no_such_option", "1") == {}
    assert xla.known("xla_cpu_scheduler_type", "NO_SUCH_SCHEDULER") == {}
    assert xla.known("xla_backend_optimization_level", "1") == {"xla_backend_optimization_level": "1"}
