"""Where the emulator's compiler errs with AVX-512: avoided in time, for nobody else, and not against a user's word."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atari import oracle
from podium import envs, xla
from podium.envs.atari import compiler, machine
from podium.envs.atari.cartridges import Cartridge, Cartridges
from podium.envs.atari.controls import KNOB_CENTRE, controls
from podium.envs.atari.games import find

ASKED = "--xla_cpu_max_isa=AVX2"


def flags_after(code: str, **environment: str) -> str:
    """Return XLA_FLAGS after code ran in a process of its own, on a processor with which the compiler errs."""
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    errs = "from podium.envs.atari import compiler; compiler._errs = lambda: True"
    ask = "import os; print(os.environ.get('XLA_FLAGS', ''))"
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import podium; {errs}\n{code}\n{ask}"],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip()


def make(name: str) -> str:
    """Return code that makes an environment, or is told that an option is wrong, for which it needs no cartridge."""
    return f"""
try:
    podium.envs.make({name!r}{", stack=0" if name.startswith("atari/") else ""})
except ValueError as error:
    print(error) if "stack=0" not in str(error) else None
"""


def test_it_is_avoided_before_jax_starts_and_for_atari_only() -> None:
    assert flags_after(make("podium/Catch")) == ""
    assert flags_after(make("atari/Pong")) == ASKED
    assert flags_after(make("atari/Pong"), XLA_FLAGS="--xla_dump_to=") == f"--xla_dump_to= {ASKED}"
    mine = "--xla_cpu_max_isa=SSE4_2"
    assert flags_after(make("atari/Pong"), XLA_FLAGS=mine) == mine


def test_nothing_is_asked_for_where_the_compiler_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(compiler, "_has_avx512", lambda: False)
    with pytest.raises(ValueError, match="stack=0"):
        envs.make("atari/Pong", stack=0)
    assert "XLA_FLAGS" not in os.environ


def test_late_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(compiler, "_errs", lambda: True)
    with pytest.warns(UserWarning, match="before anything starts JAX"), pytest.raises(ValueError, match="stack=0"):
        envs.make("atari/Pong", stack=0)
    assert "XLA_FLAGS" not in os.environ


def test_careful_options_are_narrow_where_programs_may_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(compiler, "_errs", lambda: False)
    plain = compiler.careful_options(cpu)
    assert plain == xla.options(cpu)
    monkeypatch.setattr(compiler, "_errs", lambda: True)
    assert compiler.careful_options(cpu) == {**plain, "xla_cpu_prefer_vector_width": 128}


def test_what_a_console_does_is_the_same_in_every_number_of_them() -> None:
    """Seven and eight from the power switch, all alike, stand as one alone does."""
    pytest.importorskip("ale_py", reason='ale-py is in the extra: pip install "podium[atari]"')
    game = find("Alien")
    image = oracle.rom_path(game.rom).read_bytes()
    cartridges = Cartridges([Cartridge(image, game.bank, game.y_start, game.height, game.hmove_blanks)])

    def stand(number: int) -> Any:
        which = jnp.zeros(number, jnp.int32)
        held = controls(game, which, which, jnp.full_like(which, KNOB_CENTRE))
        console = machine.power_on(jnp.zeros((number, 128), jnp.uint8))
        state = machine.system_reset(console, cartridges, which, jnp.full_like(which, 50))
        frame = jax.jit(lambda x: machine.frame(cartridges, x, which, held, which == 0, jnp.ones((), bool)))
        for _ in range(3):
            state, screens = frame(state)
        return state, screens

    one = stand(1)
    for number in (7, 8):
        jax.tree.map(
            lambda x, alone: np.testing.assert_array_equal(x, np.broadcast_to(alone, x.shape)), stand(number), one
        )
