"""What a command says of a run: what is about to happen, and how it ended."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from podium import agents, distributed
from podium import placement as placements
from podium.commands.options import Options
from podium.env import Env
from podium.host import HostEnvFactory, frames_per_step
from podium.loop import Result
from podium.placement.contract import Program
from podium.schedule import Schedule, cut_in_words
from podium.types import DiscreteSpec


def plan(options: Options, program: Program, schedule: Schedule, run_dir: Path) -> str:
    """Return in lines what is about to happen."""
    train, devices, sizes, per_update = options.train, program.devices, program.sizes, schedule.steps_per_update
    by_seed = sizes.seeds > 1 and sizes.seeds % len(devices) == 0
    steps, frames = schedule.total * per_update, frames_per_step(program.env)
    counted = f" ({steps * frames:,} frames)" if frames > 1 else ""
    rounded = "" if steps == train["num_steps"] else f", rounded down from {train['num_steps']:,} to whole rollouts"
    share = f"{sizes.seeds // len(devices)} whole runs" if by_seed else f"{sizes.num_envs // len(devices)} environments"
    processes = distributed.num_processes()
    rows = {
        "agent": program.agent.name,
        "environment": options.setup.env + "".join(f" {option}" for option in options.setup.env_options),
        "actions": _actions(program.env),
        "placement": options.subject.placement,
        "preset": options.preset,
        "devices": f"{len(devices)} {devices[0].platform} ({devices[0].device_kind}), {share} on each",
        **({"processes": f"{processes}, {sizes.num_envs // processes} environments in each"} if processes > 1 else {}),
        "seeds": str(sizes.seeds) + (f" independent runs from seed {train['seed']}" if sizes.seeds > 1 else ""),
        "environments": f"{sizes.num_envs} x {sizes.rollout_length} steps a rollout, in {sizes.num_lanes} lanes",
        "steps": f"{steps:,}{counted}{' a seed' if sizes.seeds > 1 else ''}{rounded}",
        "updates": f"{schedule.total:,} rollouts of {per_update:,} steps",
        **_learning(options, program),
        "evaluations": schedule.evaluations_in_words() + _protocol(program.env),
        "checkpoints": f"{schedule.times(schedule.checkpoint)}, keeping {train['keep_checkpoints']} and the best",
        "run folder": f"{run_dir}{' (resumed)' if train['resume'] else ''}",
    }
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {text}" for name, text in rows.items()]
    return "\n".join([*lines, "", *(f"  {line}" for line in program.explain().splitlines()), ""])


def closing(result: Result) -> str:
    """Return in lines how a run ended and how to look at it."""
    summary = result.summary
    episodes, cut = summary.get("eval_episodes"), cut_in_words(summary)
    played = f", {episodes} episodes" if episodes else ""
    sampled = summary.get("eval_return_sampled")
    rows = {
        "eval return": f"{_mean(summary['eval_return'])}, greedy, at {summary['env_steps']:,} steps{played}"
        + (f", {cut}" if cut else ""),
        **({} if sampled is None else {"sampled": f"{_mean(sampled)}, as it acts in training, from the same starts"}),
        "speed": f"{summary['steps_per_second']:,.0f} steps/s" if summary["steps_per_second"] else "nothing left to do",
        "time": f"{summary['wall_seconds']:.1f} s, of which {summary['compile_seconds']:.1f} s compiling",
        "files": f"{result.run_dir}: summary.json, metrics.jsonl, curve.png, checkpoints/",
        "replay": f"python -m podium replay {shlex.quote(str(result.run_dir))}",
    }
    return "\n".join(f"  {name:<11}  {text}" for name, text in rows.items())


def _learning(options: Options, program: Program) -> dict[str, str]:
    """Return what an update learns from; nothing where it is not the agent's functions that learn."""
    if placements.get(options.subject.placement).whole_episodes:
        return {}
    describe = agents.get(options.subject.agent).describe
    return dict(describe(program.agent.config, program.sizes.num_envs, program.sizes.rollout_length))


def _actions(env: Env | HostEnvFactory) -> str:
    action = env.spec.action
    return f"{action.num_values} discrete" if isinstance(action, DiscreteSpec) else f"{action.shape} continuous"


def _protocol(env: Env | HostEnvFactory) -> str:
    """Say how episodes of an evaluation are played, where that needs saying."""
    task = (env.evaluation or env) if isinstance(env, HostEnvFactory) else None
    return f"; {task.protocol}" if task and task.protocol else ""


def _mean(value: Any) -> str:
    if isinstance(value, list):
        return f"{sum(value) / len(value):.4g} mean of {len(value)} seeds ({min(value):.4g} to {max(value):.4g})"
    return f"{value:.4g}"
