"""Try settings of an agent side by side: numbers vary within one compiled program, sizes from program to program.

sweep/sweep.json      what was asked for
sweep/program-0/      the run of the first program, a run folder as `podium.train` makes it; and so on
sweep/table.json      one object a setting, best first; written anew after every program
sweep/sweep.png       returns while training, and the last ones against every field that varies
sweep/best.txt        the best setting, as flags and as a preset
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podium.agent import Agent
from podium.devices import Devices, resolve_devices
from podium.env import Env
from podium.files import to_jsonable, write_atomic, write_json
from podium.host import HostEnvFactory
from podium.loop import Result
from podium.placement.anakin import Anakin
from podium.placement.contract import nbytes
from podium.ranges import check_positive, largest_divisor, nearest_multiples
from podium.runs import CONFIG, check_new_folder
from podium.sinks import interval, save_figure
from podium.space import Setting, Space, settings_of
from podium.train import resolve_env, train, usual_length
from podium.varied import varied

RECORD = "sweep.json"

LEGEND = 6
"""Settings that are named beside the curves, the best ones."""

SHARE_OF_MEMORY = 0.5
"""Of what is free, that the runs of a program may take."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a sweep found.

    Attributes:
      table: one dict a setting, best first: the fields that vary by name; `eval_return`, the mean over seeds of the
        last greedy evaluation, `eval_returns` of each seed, `interval` (Student's, 95%) and `median`;
        `steps_to_threshold`, environment steps until the mean first reached it, None where it did not or none was asked
        for; `diverged`, how many seeds became NaN or infinite and were kept at zeros; `env_steps`; `curve`, [steps,
        mean] of evaluations; `program`, the folder in `run_dir`, and `first_seed`, of which of its runs the setting's
        begin: `podium.load(run_dir / row["program"], seed=row["first_seed"])` is a policy of it.
      fields: names of those that vary.
      run_dir: the folder, or None.
      interrupted: the signal that ended it early, or None; settings that were not tried are not in the table then.
    """

    table: list[dict[str, Any]]
    fields: tuple[str, ...]
    run_dir: Path | None = None
    interrupted: str | None = None

    @property
    def best(self) -> Setting:
        """The fields of the best setting."""
        return {name: self.table[0][name] for name in self.fields}


@dataclasses.dataclass(frozen=True)
class _Group:
    """Settings that one program tries: `fixed` for all of them, and of each the numbers that vary."""

    fixed: Setting
    numbers: list[dict[str, float]]


def sweep(
    make: Any,
    space: Space,
    env: Env | str,
    *,
    num_steps: int,
    seeds: int = 8,
    config: Any = None,
    samples: int | None = None,
    seed: int = 0,
    at_once: int | None = None,
    devices: Devices = None,
    threshold: float | None = None,
    num_envs: int = 64,
    rollout_length: int | None = None,
    eval_every: int | None = None,
    eval_episodes: int | None = None,
    run_dir: Path | str | None = None,
    resume: bool = False,
    progress: bool = True,
    env_options: Mapping[str, Any] | None = None,
) -> Sweep:
    """Train an agent with every setting of a space, each with the same seeds.

    Settings that differ in numbers (rates, gamma, clips, coefficients) are one program, and so are their seeds; those
    that differ in sizes, names or switches, and a number that is 0, which may switch something off, are programs of
    their own, one after the other. So are settings that do not fit in memory together.

    Args:
      make: a module with `make` and `Config`, as `podium.agents.ppo`; or `(config) -> Agent`, with `config`.
      space: by field of the configuration a sequence of values, such as `podium.log_range`, or `podium.Draws`.
      env: a pure environment, or a name for `podium.envs.make`.
      num_steps: environment steps of each setting and seed.
      seeds: of each setting.
      config: what all settings share; None is `make.Config()`.
      samples: settings to draw of the space; None tries every one of a grid.
      seed: fixes everything random.
      at_once: settings of a program at most; None takes as many as fit in half of the memory that is free.
      devices: as of `podium.Anakin`; None takes as many as share the runs of a program evenly. Each has whole runs.
      threshold: return whose first reaching is counted.
      num_envs: environments side by side of each run.
      rollout_length: steps of each an iteration; None takes the agent's own.
      eval_every: environment steps between evaluations; see `podium.train`, also for what None means.
      eval_episodes: of an evaluation of each run; likewise.
      run_dir: folder for the runs, the table and the picture; None writes nothing.
      resume: resume the sweep in `run_dir`, exactly: what it has done is read, not done again.
      progress: say after every evaluation how far it is, and which setting is best.
      env_options: of `podium.envs.make`, where `env` is a name.

    Returns:
      a `Sweep`.

    Raises:
      ValueError: for anything out of range, before anything is compiled or written.
    """
    make, config = _resolve(make, config)
    check_positive(seeds=seeds, **({} if at_once is None else {"at_once": at_once}))
    if resume and run_dir is None:
        raise ValueError("resume=True needs run_dir, the folder of the sweep to resume.")
    _check_fields(space, config)
    settings = settings_of(space, samples, seed)
    agents = [_made(make, config, setting) for setting in settings]
    made, env_record = resolve_env(env, env_options)
    if isinstance(made, HostEnvFactory):
        raise ValueError(f"{made.spec.name} runs on the CPU, outside compiled programs; a sweep takes pure ones.")
    length = usual_length(Anakin(), agents[0], made) if rollout_length is None else rollout_length
    path = None if run_dir is None else Path(run_dir)
    before = _recorded(path) if path and resume else {}
    if at_once is None:  # What fits may be other than it was, but a program's runs may not.
        at_once = before.get("at_once")
    at_once = _at_once(agents[0], made, num_envs, length, seeds, len(settings), at_once)
    groups = _grouped(make, config, settings, at_once)
    places = [_devices(devices, len(group.numbers), seeds) for group in groups]
    asked = to_jsonable(
        {
            "agent": {"name": agents[0].name, "config": config},
            "settings": settings,
            "at_once": at_once,
            "env": env_record,
            "seeds": seeds,
            "seed": seed,
            "num_envs": num_envs,
            "rollout_length": length,
        }
    )
    if path and resume:
        _check_same(path, before, asked)
    elif path:
        check_new_folder(path)
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / RECORD, asked)
    rows: list[dict[str, Any]] = []
    interrupted = None
    for number, (group, place) in enumerate(zip(groups, places, strict=True)):
        folder = path / f"program-{number}" if path else None
        say = _Progress(rows, group, seeds, f"program {number + 1} of {len(groups)}", num_steps) if progress else None
        agent = varied(make, dataclasses.replace(config, **group.fixed), group.numbers)
        result = train(
            agent,
            env,
            env_options=env_options,
            num_steps=num_steps,
            num_envs=num_envs,
            rollout_length=length,
            placement=Anakin(place),
            seed=seed,
            seeds=seeds * len(group.numbers),
            eval_every=eval_every,
            eval_episodes=eval_episodes,
            run_dir=folder,
            resume=bool(folder and (folder / CONFIG).exists()),
            keep_checkpoints=1,
            progress=False,
            sinks=[say] if say else [],
        )
        if interrupted := result.interrupted:
            break
        rows += _rows(group, f"program-{number}", result, seeds, threshold)
        rows.sort(key=lambda row: -row["eval_return"])
        if path:
            _write(path, rows, tuple(space), agents[0].name, env_record["name"])
    return Sweep(rows, tuple(space), path, interrupted)


def _resolve(make: Any, config: Any) -> tuple[Callable[[Any], Agent], Any]:
    if hasattr(make, "make") and hasattr(make, "Config"):
        return make.make, make.Config() if config is None else config
    if not callable(make) or not dataclasses.is_dataclass(config):
        raise ValueError(
            f"make={make!r} must be a module with make and Config, as podium.agents.ppo, or a function of a "
            "configuration; then give config, a dataclass, too."
        )
    return make, config


def _check_fields(space: Space, config: Any) -> None:
    known = [field.name for field in dataclasses.fields(config)]
    if not space:
        raise ValueError("space={} varies nothing; give a field of the configuration and its values.")
    for name in space:
        if name not in known:
            raise ValueError(
                f"{name!r} is no field of {type(config).__module__}.{type(config).__qualname__}, so it cannot vary; "
                f"these can: {', '.join(known)}."
            )


def _made(make: Callable[[Any], Agent], config: Any, setting: Setting) -> Agent:
    try:
        return make(dataclasses.replace(config, **setting))
    except TypeError as error:
        raise ValueError(f"{setting} is no setting of {type(config).__qualname__}: {error}.") from error


def _may_be_traced(make: Callable[[Any], Agent], config: Any, name: str) -> bool:
    """Say whether a field may vary within a program: whether the agent can be made while its number is traced."""

    def trial(x: Any) -> Any:
        make(dataclasses.replace(config, **{name: x}))
        return x

    try:
        jax.eval_shape(trial, jax.ShapeDtypeStruct((), np.float32))
    except (ValueError, TypeError, jax.errors.JAXTypeError):
        return False
    return True


def _grouped(make: Callable[[Any], Agent], config: Any, settings: Sequence[Setting], at_once: int) -> list[_Group]:
    """Return the settings by program: alike in all that is no number, and at most `at_once` in each."""
    traced = {
        name
        for name in settings[0]
        if all(_is_number(setting[name]) for setting in settings) and _may_be_traced(make, config, name)
    }
    groups: list[_Group] = []
    for setting in settings:
        # Where 0 switches something off, a number that is not 0 is another program.
        numbers = {name: float(setting[name]) for name in setting if name in traced and setting[name] != 0}
        fixed = {name: value for name, value in setting.items() if name not in numbers}
        same = lambda group, fixed=fixed, numbers=numbers: (
            group.fixed == fixed and group.numbers[0].keys() == numbers.keys() and len(group.numbers) < at_once
        )
        group = next(filter(same, groups), None) if numbers else None
        if group:
            group.numbers.append(numbers)
        else:
            groups.append(_Group(fixed, [numbers]))
    return groups


def _at_once(agent: Agent, env: Env, num_envs: int, length: int, seeds: int, settings: int, asked: int | None) -> int:
    """Return how many of so many settings a program may have, from the bytes of one run and of what is free.

    Raises:
      ValueError: fewer fit than are asked for, or not even one does.
    """
    program = Anakin(1).build(agent, env, num_envs=num_envs, rollout_length=length)
    obs = nbytes(jax.tree.map(lambda spec: spec.zeros(), env.spec.obs, is_leaf=lambda x: hasattr(x, "zeros")))
    # A rollout has each observation twice, and learning about as much again beside it.
    one = seeds * (nbytes(program.loop.abstract_state()) + 2 * num_envs * length * (2 * obs + 32))
    free = _free_bytes()
    fit = int(SHARE_OF_MEMORY * free / one)
    wanted = 1 if asked is None else min(asked, settings)
    if fit < wanted:
        use = f"at_once={fit}" if fit else "fewer seeds, environments or steps of a rollout, or a smaller replay"
        raise ValueError(
            f"at_once={asked}: {wanted} setting(s) of {seeds} seeds take {wanted * one / 1e9:.3g} GB together, and "
            f"half of the {free / 1e9:.3g} GB that are free holds {fit}; use {use}."
        )
    return min(fit, settings) if asked is None else wanted


def _free_bytes() -> int:
    """Return the memory that the first device can still give."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _devices(asked: Devices, settings: int, seeds: int) -> list[jax.Device]:
    """Return the devices that share the runs of a program evenly.

    Raises:
      ValueError: those asked for do not.
    """
    runs, available = settings * seeds, resolve_devices(asked)
    if asked is None:
        return available[: largest_divisor(runs, len(available))]
    if runs % len(available):
        raise ValueError(
            f"devices={len(available)} do not share {runs} runs evenly ({settings} settings of a program x {seeds} "
            f"seeds); use seeds={nearest_multiples(seeds, len(available))}, or leave devices out."
        )
    return available


def _recorded(path: Path) -> dict[str, Any]:
    """Return what a sweep was asked for."""
    try:
        return dict(json.loads((path / RECORD).read_text()))
    except (OSError, ValueError):
        raise ValueError(f"run_dir={path} has no {RECORD} that can be read, so it is no sweep to resume.") from None


def _check_same(path: Path, before: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        if before.get(name) != value:
            raise ValueError(
                f"{path} is a sweep with {name}={before.get(name)}, not {value}; give the same again, or another "
                "folder."
            )


def _listed(value: Any) -> list[float]:
    """Return what a run says of each of its seeds, one or several; NaN where it says nothing."""
    listed: list[float] = np.ravel(np.asarray(value, float)).tolist()
    return listed


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rows(group: _Group, program: str, result: Result, seeds: int, threshold: float | None) -> list[dict[str, Any]]:
    last = _listed(result.summary["eval_return"])
    diverged = np.ravel(np.asarray(result.state.diverged))
    evaluated = [row for row in result.metrics if "eval_return" in row]
    curves = [(row["env_steps"], _listed(row["eval_return"])) for row in evaluated]
    rows = []
    for index, numbers in enumerate(group.numbers):
        mine = slice(index * seeds, (index + 1) * seeds)
        returns = last[mine]
        curve = [[steps, float(np.mean(values[mine]))] for steps, values in curves]
        reached = [] if threshold is None else [steps for steps, mean in curve if mean >= threshold]
        rows.append(
            {
                **group.fixed,
                **numbers,
                "eval_return": float(np.mean(returns)),
                "interval": list(interval(returns)),
                "median": float(np.median(returns)),
                "eval_returns": returns,
                "steps_to_threshold": reached[0] if reached else None,
                "diverged": int(diverged[mine].sum()),
                "env_steps": result.summary["env_steps"],
                "program": program,
                "first_seed": index * seeds,
                "curve": curve,
            }
        )
    return rows


class _Progress:
    """A sink that says after every evaluation how far a program is, and which setting is best so far."""

    def __init__(self, rows: list[dict[str, Any]], group: _Group, seeds: int, where: str, num_steps: int):
        self._rows, self._group, self._seeds, self._where, self._num_steps = rows, group, seeds, where, num_steps

    def write(self, row: Mapping[str, Any]) -> None:
        if "eval_return" not in row:
            return
        returns = np.reshape(_listed(row["eval_return"]), (len(self._group.numbers), -1)).mean(1)
        tried = [({**self._group.fixed, **self._group.numbers[i]}, float(x)) for i, x in enumerate(returns)]
        names = tried[0][0]
        tried += [({name: each[name] for name in names}, each["eval_return"]) for each in self._rows]
        setting, best = max(tried, key=lambda each: each[1])
        done = min(1.0, row["env_steps"] / self._num_steps)
        print(f"{self._where}, {done:.0%}: best so far {words_of(setting)} ({best:.4g})", file=sys.stderr, flush=True)

    def close(self, summary: Mapping[str, Any]) -> None:
        pass


def words_of(setting: Mapping[str, Any]) -> str:
    """Return a setting as people read it."""
    say = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(f"{name}={say(value)}" for name, value in setting.items())


def _write(path: Path, rows: Sequence[Mapping[str, Any]], fields: tuple[str, ...], agent: str, env: str) -> None:
    write_json(path / "table.json", rows)
    best = {name: rows[0][name] for name in fields}
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in best.items())
    text = f"podium train --agent {agent} --env {env} {flags}\n\nPreset({env!r}, 'podium sweep', {best!r})\n"
    write_atomic(path / "best.txt", text.encode())
    draw(rows, fields, path / "sweep.png")


def draw(rows: Sequence[Mapping[str, Any]], fields: Sequence[str], path: Path) -> None:
    """Draw the mean return of every setting while it was trained, and the last ones against every field."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * (1 + len(fields)), 3.6), layout="constrained")
    axes = figure.subplots(1, 1 + len(fields), squeeze=False)[0]
    colors = colormaps["viridis"](np.linspace(0.95, 0, len(rows)))  # Best first, brightest.
    for row, color in zip(reversed(rows), reversed(colors), strict=True):
        axes[0].plot(*np.array(row["curve"]).T, color=color, linewidth=1)
    axes[0].set(xlabel="environment steps", ylabel="return of greedy play, mean over seeds")
    named = [words_of({name: row[name] for name in fields}) for row in rows[:LEGEND]]
    axes[0].legend(axes[0].lines[::-1][:LEGEND], named, fontsize="x-small")
    for axis, name in zip(axes[1:], fields, strict=True):
        values = [row[name] for row in rows]
        is_number = all(map(_is_number, values))
        at = values if is_number else [str(value) for value in values]
        spread = [np.abs(np.array(row["interval"]) - row["eval_return"]) for row in rows]
        axis.errorbar(at, [row["eval_return"] for row in rows], np.array(spread).T, fmt="o", color="C0", alpha=0.7)
        if is_number and min(values) > 0 and max(values) >= 10 * min(values):
            axis.set_xscale("log")
        axis.set(xlabel=name, ylabel="return, 95% interval over seeds")
    for axis in axes:
        axis.grid(alpha=0.3)
    save_figure(figure, path, dpi=90, metadata={"Software": None})
