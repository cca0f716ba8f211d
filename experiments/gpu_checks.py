"""Whether podium computes on this machine's accelerator what it computes on its CPU; pieces of `benchmark.py gpu`.

python experiments/gpu_checks.py parity     # one update of each agent, here and on the CPU
python experiments/gpu_checks.py traces     # memory of Atari games, here against gpu_traces.json
python experiments/gpu_checks.py backends   # the emulator's Pallas kernel against XLA
python experiments/gpu_checks.py record     # write gpu_traces.json, on a CPU on which the tests pass
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro

import podium
from podium import Agent, Env
from podium.agents import a2c, apex, dqn, impala, ppo
from podium.commands.console import guard, read_flags

TRACES = Path(__file__).resolve().parent / "gpu_traces.json"
GAMES = ("Pong", "Breakout", "Freeway", "SpaceInvaders")
TOLERANCE = 2e-4
"""Of parameters after one update; devices add in another order."""

AGENTS: dict[str, Callable[[], Agent]] = {
    "ppo": lambda: ppo.make(ppo.Config(hidden_sizes=(32,), normalize_obs=True, normalize_reward=True)),
    "ppo gru": lambda: ppo.make(ppo.Config(hidden_sizes=(32,), memory="gru")),
    "a2c": lambda: a2c.make(a2c.Config(hidden_sizes=(32,))),
    "impala": lambda: impala.make(impala.Config(hidden_sizes=(32,))),
    "dqn": lambda: dqn.make(dqn.Config(hidden_sizes=(32,), buffer_capacity=1024, batch_size=32, min_replay_size=64)),
    "apex": lambda: apex.make(apex.Config(hidden_sizes=(32,), buffer_capacity=1024, batch_size=32, min_replay_size=64)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Check something."""

    what: Annotated[Literal["parity", "parameters", "traces", "backends", "record"], tyro.conf.Positional]
    """parameters writes those of every agent after an update to `out`, which parity asks of another process."""
    small: bool = False
    """One agent, one game: to see that it runs."""
    out: Path | None = None
    """For parameters: the file."""


def parameters(small: bool) -> dict[str, list[np.ndarray]]:
    """Return each agent's parameters, that act, after one update of Catch on the first device."""
    found = {}
    for name, make in AGENTS.items():
        if small and name != "ppo":
            continue
        env = podium.envs.make_pure("podium/Catch")
        program = podium.Anakin(devices=1).build(make(), env, num_envs=16, rollout_length=16)
        state, _ = program.chunk(program.init(0), 1)
        params = program.agent.actor(program.agent_state(state))
        found[name] = [np.asarray(x, np.float32) for x in jax.tree.leaves(jax.device_get(params))]
    return found


def parity(flags: Flags) -> dict[str, Any]:
    """Compare parameters after an update with those of a process that has only the CPU."""
    jax.config.update("jax_default_matmul_precision", "highest")
    mine, worst = parameters(flags.small), {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parameters.npz"
        command = [sys.executable, __file__, "parameters", "--out", str(path), *(["--small"] if flags.small else [])]
        subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.DEVNULL)
        with np.load(path) as theirs:
            for name, leaves in mine.items():
                pairs = zip(leaves, [theirs[f"{name}/{i}"] for i in range(len(leaves))], strict=True)
                worst[name] = max(float(np.max(np.abs(a - b), initial=0.0)) for a, b in pairs)
    return {"largest_difference": worst, "tolerance": TOLERANCE, "ok": all(x <= TOLERANCE for x in worst.values())}


def trace(game: str, backend: str, steps: int, num_envs: int = 4) -> list[str]:
    """Return a hash of all environments' memory after every step, of actions that are the same everywhere."""
    env = podium.envs.make(f"atari/{game}", observation="ram", backend=backend, noop_max=0)
    assert isinstance(env, Env)
    actions = np.random.default_rng(7).integers(0, env.spec.action.num_values, (steps, num_envs))  # type: ignore[union-attr]
    keys = jax.random.split(jax.random.key(0), num_envs)
    state, timestep = jax.jit(jax.vmap(env.reset))(keys)
    step, hashes = jax.jit(jax.vmap(env.step)), []
    for action in actions:
        state, timestep = step(keys, state, action.astype(np.int32))
        ram = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(timestep.obs)])
        hashes.append(hashlib.sha256(ram.tobytes()).hexdigest()[:16])
    return hashes


def traces(flags: Flags) -> dict[str, Any]:
    """Compare games with what was recorded."""
    recorded = json.loads(TRACES.read_text())
    first_difference: dict[str, int | None] = {}
    for game in GAMES[: 1 if flags.small else None]:
        wanted = recorded[game][: 8 if flags.small else None]
        pairs = enumerate(zip(trace(game, "xla", len(wanted)), wanted, strict=True))
        first_difference[game] = next((step for step, (a, b) in pairs if a != b), None)
    return {"first_difference": first_difference, "ok": not any(x is not None for x in first_difference.values())}


def backends(flags: Flags) -> dict[str, Any]:
    """Compare the emulator's two back ends; on a CPU the kernel is interpreted, and slow."""
    steps, same = (2 if flags.small else 64), {}
    for game in GAMES[: 1 if flags.small else None]:
        same[game] = trace(game, "pallas", steps) == trace(game, "xla", steps)
    return {"same": same, "steps": steps, "ok": all(same.values())}


def check(flags: Flags) -> int:
    """Check, print JSON, and return the exit code: 1 for a difference."""
    if flags.what == "record":
        TRACES.write_text(json.dumps({game: trace(game, "xla", 128) for game in GAMES}, indent=1) + "\n")
        return 0
    if flags.what == "parameters":
        if flags.out is None:
            raise ValueError("parameters needs --out, the file to write.")
        jax.config.update("jax_default_matmul_precision", "highest")
        found = {f"{name}/{i}": x for name, leaves in parameters(flags.small).items() for i, x in enumerate(leaves)}
        np.savez(flags.out, **found)  # type: ignore[arg-type]
        return 0
    row = {"parity": parity, "traces": traces, "backends": backends}[flags.what](flags)
    device = jax.devices()[0]
    print(json.dumps({"what": flags.what, **row, "device": device.device_kind, "jax": jax.__version__}))
    if not row["ok"]:
        print(f"error: {flags.what} differs: {row}", file=sys.stderr)
    return 0 if row["ok"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Check, and return the exit code."""
    return guard(lambda: check(read_flags(Flags, sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
