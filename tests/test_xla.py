"""What XLA is asked for: no AVX-512 where its compiler errs with it, in time, and not against a user's word."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import jax
import pytest

from podium import xla

ASK = "import os, podium; print(os.environ.get('XLA_FLAGS')); podium.envs.make('podium/Catch'); print(podium.xla._LATE)"


def told(code: str, **environment: str) -> list[str]:
    """Run code in a process of its own, and return what it prints."""
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    return ran.stdout.split("\n")


@pytest.mark.skipif(not xla._miscompiles(), reason="this version of XLA, or this processor, does not err")
def test_avx512_is_avoided_before_jax_starts_and_only_then() -> None:
    assert told(ASK)[:2] == ["--xla_cpu_max_isa=AVX2", "False"]
    assert told("import jax; jax.devices(); " + ASK)[1] == "True"
    mine = "--xla_cpu_max_isa=SSE4_2"
    assert told(ASK, XLA_FLAGS=mine)[:2] == [mine, "False"]


def test_late_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "_LATE", True)
    with pytest.warns(UserWarning, match="import podium first"):
        xla.warn_of_avx512()


def test_careful_options_are_narrow_where_programs_may_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(xla, "_miscompiles", lambda: False)
    plain = xla.careful_options(cpu)
    assert plain == xla.options(cpu)
    monkeypatch.setattr(xla, "_miscompiles", lambda: True)
    assert xla.careful_options(cpu) == {**(plain or {}), "xla_cpu_prefer_vector_width": 128}


def test_programs_that_run_one_by_one_compute_the_same_bits() -> None:
    def sums(x: jax.Array) -> list[jax.Array]:
        return [(x @ x.T * number).sum() for number in range(8)]

    x, cpu = jax.random.normal(jax.random.key(0), (16, 16)), jax.devices("cpu")[0]
    lowered = jax.jit(sums).lower(x)
    assert lowered.compile(xla.one_by_one(cpu))(x) == lowered.compile()(x)
    other = types.SimpleNamespace(platform="gpu")
    assert xla.one_by_one(other) is None  # type: ignore[arg-type]
