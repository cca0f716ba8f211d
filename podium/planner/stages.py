"""The stages of an iteration, timed each alone on this machine: what the models predict from.

Everything is compiled, and run once, before its clock starts. Each cost is measured once and remembered, because
several placements are made of the same.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podium import keys
from podium.agent import Agent, fresh_carry
from podium.env import Env
from podium.episodes import Ended
from podium.host import HostEnv, HostEnvs, on_host
from podium.learn import Learned
from podium.networks import batch_groups
from podium.placement import program
from podium.placement.acting import Acting, Compiled, complete
from podium.placement.cut import cut as make_cut
from podium.placement.devices import make_mesh
from podium.placement.evolution import EvolutionProgram, HostEvolutionProgram
from podium.placement.fused import trajectory_specs
from podium.placement.program import Sizes
from podium.placement.single import SingleProgram
from podium.placement.table import in_bytes, nbytes
from podium.planner.models import Cost, Stage, Turn, act_on_host, split
from podium.rollout import RolloutState, begin, rollout
from podium.types import Key, PyTree, Trajectory

SINGLE_STEPS = 4
"""Of a rollout in Python's loops; the rest is taken to cost the same."""

FILL_SECONDS = 30.0
"""At most, until a replay can be learnt from."""


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_got(seconds: float) -> float:
    """Return how many cores this process gets, of those it may use, where others work on the same machine."""
    block = bytes(1 << 20)
    # Hashing keeps a core busy, and no lock.
    cost = clock_together([lambda: hashlib.sha256(block)] * num_cores(), seconds)
    return min(float(num_cores()), num_cores() * cost.cores / cost.seconds)


def clock(work: Callable[[], Any], seconds: float) -> Cost:
    """Return the cost of `work`, which waits for what it starts: the median of repeats, after one that is not counted.

    It is repeated for about `seconds`, at least twice.
    """
    work()
    passed: list[float] = []
    began, cores = time.perf_counter(), time.process_time()
    while len(passed) < 2 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        work()
        passed.append(time.perf_counter() - start)
    # The clock of a process ticks for all of its threads.
    return Cost(statistics.median(passed), (time.process_time() - cores) / len(passed))


def clock_together(works: Sequence[Callable[[], Any]], seconds: float) -> Cost:
    """Return the cost of one of `works` while threads repeat all of them at once, for about `seconds`.

    What they take from one another (cores, memory, the interpreter's lock) is in it.
    """
    # Threads begin and end at different times; what all did in the time that all were at it counts.
    ready, stop = threading.Barrier(len(works) + 1), threading.Event()
    done: list[int] = []
    failed: list[BaseException] = []

    def repeat(work: Callable[[], Any]) -> None:
        try:
            work()
            ready.wait()
            number = 0
            while not stop.is_set() or number < 2:
                work()
                number += 1
            done.append(number)
        except BaseException as error:  # Whatever it is, the caller must hear of it.
            failed.append(error)
            ready.abort()

    threads = [threading.Thread(target=repeat, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        ready.wait()
        began, cores = time.perf_counter(), time.process_time()
        time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    if failed:
        raise next((error for error in failed if not isinstance(error, threading.BrokenBarrierError)), failed[0])
    passed, worked = time.perf_counter() - began, time.process_time() - cores
    return Cost(passed * len(works) / sum(done), worked / sum(done))


class Bench:
    """Measures the stages of one agent in one environment.

    Args:
      agent: to measure.
      env: a pure one, or one on the host.
      num_envs: B, of the whole batch.
      rollout_length: T.
      seconds: that a stage is repeated for, about.
      seed: of everything random.
      say: called with a line about what is being measured.

    Attributes:
      measured: costs by what was measured.
      fill: iterations until a replay could be learnt from; 1 where there is none.
    """

    def __init__(
        self,
        agent: Agent,
        env: Env | HostEnvs,
        num_envs: int,
        rollout_length: int,
        seconds: float,
        seed: int = 0,
        say: Callable[[str], None] = lambda line: None,
    ):
        self.agent, self.num_envs, self.length = agent, num_envs, rollout_length
        self.host = env if isinstance(env, HostEnvs) else on_host(env)
        self.env = None if isinstance(env, HostEnvs) else program.prepare(env)
        self.spec = env.spec
        self.measured: dict[str, Cost] = {}
        self.fill = 1
        self._seconds, self._key, self._seed, self._say = seconds, jax.random.key(seed), seed, say
        self._state = jax.jit(lambda key: agent.init(key, env.spec))(self._key)

    def _clock(self, name: str, work: Callable[[], Any]) -> Cost:
        self._say(name)
        self.measured[name] = clock(work, self._seconds)
        return self.measured[name]

    def _clock_together(self, name: str, works: Sequence[Callable[[], Any]]) -> Cost:
        if len(works) == 1:
            return self._clock(name, works[0])
        self._say(f"{name}, {len(works)} at once")
        cost = self.measured[f"{name}, {len(works)} at once"] = clock_together(works, self._seconds)
        return cost

    # Pure environments.

    def rollout(self, num_envs: int, devices: tuple[jax.Device, ...]) -> tuple[Stage, ...]:
        """Return "environment" and "inference" of a rollout fused into one program over `devices`."""
        fused = self._rollout(num_envs, devices)
        return split(("environment", "inference"), fused, self._parts(num_envs, devices))

    @functools.cache  # noqa: B019 - a bench lives as long as what it measured is asked for
    def _rollout(self, num_envs: int, devices: tuple[jax.Device, ...]) -> Cost:
        def play(key: Key, params: PyTree, state: RolloutState) -> Any:
            return rollout(key, self.agent, self._pure, params, state, self.length, jnp.zeros((), jnp.int32))

        rows: Any = P(None, "env")
        play = self._over(
            devices, play, (P(), P(), P("env")), (P("env"), trajectory_specs("env"), Ended(rows, rows, rows))
        )
        return self._clock(
            f"fused rollout of {num_envs} environments{_on(devices)}", self._repeat(play, num_envs, devices)
        )

    @functools.cache  # noqa: B019
    def _parts(self, num_envs: int, devices: tuple[jax.Device, ...]) -> tuple[Cost, Cost]:
        """Return what environments alone and inference alone cost in compiled loops."""

        def step_all(key: Key, params: PyTree, state: RolloutState) -> Any:
            def step(state: RolloutState, step_keys: tuple[Key, Key]) -> Any:
                action = jax.vmap(self.spec.action.sample)(step_keys[0])
                env_state, timestep = jax.vmap(self._pure.step)(step_keys[1], state.env_state, action)
                return state._replace(env_state=env_state, obs=timestep.obs), (timestep.reward, timestep.last)

            return jax.lax.scan(step, state, self._step_keys(key, state))

        def act_all(key: Key, params: PyTree, state: RolloutState) -> Any:
            def act(state: RolloutState, act_keys: Key) -> Any:
                output = self.agent.act(act_keys, params, state.carry, state.obs, state.first, False)
                # Other observations every time, so that nothing can be moved out of the loop.
                obs = jax.tree.map(lambda x: jnp.roll(x, 1, 0), state.obs)
                return state._replace(obs=obs, carry=output.carry), (output.action, output.extras)

            return jax.lax.scan(act, state, self._step_keys(key, state)[0])

        rows: Any = P(None, "env")
        given, made = (P(), P(), P("env")), (P("env"), rows)
        names = "environments alone", "inference alone"
        costs = [
            self._clock(
                f"{name}, {num_envs} in compiled loops{_on(devices)}",
                self._repeat(self._over(devices, work, given, made), num_envs, devices),
            )
            for name, work in zip(names, (step_all, act_all), strict=True)
        ]
        return costs[0], costs[1]

    @property
    def _pure(self) -> Env:
        assert self.env is not None
        return self.env

    def _step_keys(self, key: Key, state: RolloutState) -> tuple[Key, Key]:
        act_keys = keys.at_times(keys.environment_keys(key, state.index), jnp.zeros_like(state.time), self.length)
        return act_keys, keys.at_times(jax.random.wrap_key_data(state.env_keys), state.time, self.length)

    def _over(self, devices: tuple[jax.Device, ...], work: Callable[..., Any], given: Any, made: Any) -> Any:
        if len(devices) == 1:
            return jax.jit(work)
        return jax.jit(jax.shard_map(work, mesh=_mesh(devices), in_specs=given, out_specs=made, check_vma=False))

    def _repeat(self, play: Callable[..., Any], num_envs: int, devices: tuple[jax.Device, ...]) -> Callable[[], Any]:
        """Return a function without arguments that plays on from where it stood."""
        where = NamedSharding(_mesh(devices), P("env"))
        carry = fresh_carry(self.agent, self.spec, jnp.arange(num_envs))
        start = jax.jit(lambda key: begin(key, self._pure, jnp.arange(num_envs), carry), out_shardings=where)
        key, params = jax.device_put((self._key, self._params()), NamedSharding(_mesh(devices), P()))
        state = start(key)

        def once() -> None:
            nonlocal state
            state, *rest = jax.block_until_ready(play(key, params, state))

        return once

    # Learning.

    @functools.cache  # noqa: B019
    def update(self, num_envs: int, devices: tuple[jax.Device, ...]) -> Stage:
        """Return "update": learning from one rollout of `num_envs` environments, over `devices`."""
        lanes = program.lanes_of_plan(self.agent, self._plan(num_envs), num_envs, len(devices), None)
        sizes = Sizes(num_envs, self.length, 1, lanes)
        once, split_envs = (NamedSharding(_mesh(devices), x) for x in (P(), P("env")))
        # Copied: what is donated must not be what others read, and on a mesh `device_put` may share it all the same.
        state = jax.device_put(jax.tree.map(jnp.copy, self._state), once)
        replay = self._empty_replay(sizes)
        where = jax.tree.map(lambda x: split_envs if x.ndim else once, replay)
        replay = jax.device_put(replay, where)
        specs = jax.tree.map(lambda x: NamedSharding(_mesh(devices), x), trajectory_specs("env"), is_leaf=_is_spec)
        trajectory = _put(self._trajectory(num_envs), specs)
        made: Any = Learned(once, where, None)  # type: ignore[arg-type]
        learn: Any = jax.jit(program.make_learn(self.agent, sizes), donate_argnums=(1, 2), out_shardings=made)
        with batch_groups(len(devices)):
            learn = learn.lower(self._key, state, replay, trajectory).compile()
        key = jax.device_put(self._key, once)

        def once_more() -> PyTree:
            nonlocal state, replay
            state, replay, _ = jax.block_until_ready(learn(key, state, replay, trajectory))
            return replay

        self.fill = max(self.fill, self._until_ready(once_more))
        return Stage("update", self._clock(f"update from {num_envs} environments{_on(devices)}", once_more))

    def _until_ready(self, work: Callable[[], PyTree]) -> int:
        """Return how often `work`, which returns a replay, was done until that could be learnt from."""
        began, number = time.perf_counter(), 1
        while self.agent.replay is not None and not bool(self.agent.replay.can_sample(work())):
            number += 1
            if time.perf_counter() - began > FILL_SECONDS:
                raise ValueError(
                    f"the replay of {self.agent.name} holds too little to learn from after {FILL_SECONDS:g} s; give "
                    "the agent a smaller min_replay_size to plan with."
                )
        return number

    def _plan(self, num_envs: int) -> Any:
        return jax.eval_shape(lambda: self.agent.plan(self._key, self._state, self._trajectory(num_envs)))

    def _empty_replay(self, sizes: Sizes) -> PyTree:
        plan = lambda key: self.agent.plan(key, self._state, self._trajectory(1, 1))  # noqa: E731
        return program.empty_replay(self.agent, sizes, plan)

    def _params(self) -> PyTree:
        return self.agent.actor(self._state)

    def _trajectory(self, num_envs: int, length: int | None = None) -> Trajectory:
        """Return a rollout of zeros."""
        return complete(self._blank(num_envs, length))

    def _blank(self, num_envs: int, length: int | None = None) -> Trajectory:
        """Return a rollout of zeros as it travels."""
        return self._acting(num_envs, length).blank_trajectory(self._params())

    def _acting(self, num_envs: int, length: int | None = None) -> Acting:
        next_step = self.host.resets_in_next_step
        return Acting(self.agent, self.spec, num_envs, length or self.length, next_step)

    # Gradients that a server applies.

    @functools.cache  # noqa: B019
    def gradients(self, num_envs: int, workers: int, device: jax.Device) -> tuple[tuple[Stage, ...], Stage]:
        """Return what an iteration of one of `workers`, with `num_envs` of its own, is made of.

        Returns:
          its own stages, and the server's for it.
        """
        lanes = program.lanes_of_plan(self.agent, self._plan(num_envs), num_envs, 1, None)
        sizes = Sizes(num_envs, self.length, 1, lanes)
        cut = make_cut(self.agent, self.host if self.env is None else self.env, sizes, workers)
        play = jax.jit(cut.play, donate_argnums=cut.shapes().donated)
        take, apply, observe = jax.jit(cut.take), jax.jit(cut.apply), jax.jit(cut.observe)
        mine, wait = (self._key, np.int32(0), np.int32(0), np.int32(0)), jax.block_until_ready
        state, stands = jax.device_put(self._state, device), self._stands(num_envs)
        made = [jax.device_put((stands(), self._empty_replay(sizes)), device) for _ in range(workers)]
        played: list[Any] = [None] * workers
        # On the host `play` is given what stepping brought, and no number of the State.
        given = mine[:3] if self.env is None else mine

        def play_once(worker: int) -> PyTree:
            stands, replay = made[worker]
            played[worker] = now = wait(play(*given, state, stands, replay))
            made[worker] = stands if self.env is None else now.rollout, now.replay
            return now.replay

        each = range(workers)
        for worker in each:
            self.fill = max(self.fill, workers * self._until_ready(lambda worker=worker: play_once(worker)))  # type: ignore[misc]
        playing = self._clock_together(
            f"rollout of a worker with {num_envs} environments", [functools.partial(play_once, x) for x in each]
        )
        # Of one worker, for all: what is read is not used up.
        learnt_from = state, played[0].replay, played[0].plan
        _, steps = cut.gradients(*learnt_from)
        taking = self._clock_together("gradient of a worker", [lambda: wait(take(*mine, *learnt_from))] * workers)
        gradient, weight = take(*mine, *learnt_from).gradient, np.float32(1)
        applying = self._clock("applying a gradient", lambda: wait(apply(state, gradient, weight)))
        observing = self._clock("observing a rollout", lambda: wait(observe(state, played[0].trajectory)))
        server = Cost(*(a * steps + b for a, b in zip(applying, observing, strict=True)))
        own: tuple[Stage, ...]
        if self.env is None:
            acting, turn = self.acting(num_envs, device, workers), self.stepping(num_envs, workers)
            own = *act_on_host(self.length, acting, turn), Stage("planning", playing)
        else:
            # In the proportion that they have in the whole batch, to compile no more than that takes.
            own = split(("environment", "inference"), playing, self._parts(self.num_envs, (device,)))
        return (*own, Stage("gradients", taking.times(steps))), Stage("server", server)

    def _stands(self, num_envs: int) -> Callable[[], Any]:
        """Return what gives what a worker begins with: environments, or a rollout where they are on the host."""
        if self.env is None:
            return lambda: self._blank(num_envs)
        carry = fresh_carry(self.agent, self.spec, jnp.arange(num_envs))
        start = jax.jit(lambda key: begin(key, self._pure, jnp.arange(num_envs), carry))
        return lambda: start(self._key)

    # Environments on the host.

    @functools.cache  # noqa: B019
    def acting(self, num_envs: int, device: jax.Device, threads: int) -> Cost:
        """Return what acting for a batch on the host costs each of `threads` a step, uploads and downloads included."""
        params = jax.device_put(self._params(), device)
        compiled = Compiled(self._acting(num_envs), params, device)
        obs, first, came = self._host_rows(num_envs)

        def once() -> None:
            start = carry = compiled.carry(np.int32(0))
            step_keys = compiled.step_keys(self._key, np.int32(0), np.int32(0))
            rows = compiled.blank()
            for step in range(self.length):
                rows, carry, action = compiled.step(
                    rows, params, step_keys, np.int32(step), np.int32(0), carry, obs, first, came
                )
                np.asarray(action)
            rows = compiled.end(rows, np.int32(0), obs, came)
            jax.block_until_ready(compiled.finish(rows, [start], [carry], np.int32(0)))

        name = f"{self.length} steps of inference for {num_envs} environments on the host"
        return self._clock_together(name, [once] * threads).times(1 / self.length)

    def _host_rows(self, num_envs: int) -> Any:
        """Return an observation, a first and a result, [E, ...], as the host has them."""
        rows = self._acting(num_envs, 1).blank(self._params())
        return jax.tree.map(lambda x: np.asarray(x[0]), (rows.obs, rows.first, rows.result))

    def stepping(self, num_envs: int, batches: int) -> Turn:
        """Return how so many batches of `num_envs` step under random actions, each in a thread of its own."""
        return Turn(self._cycle(num_envs, batches), self._cycle(num_envs, 1).seconds)

    def _make(self, num_envs: int, first: int) -> HostEnv:
        return self.host.make(num_envs, self._seed, first)

    def _actions(self, num_envs: int) -> np.ndarray:
        return np.asarray(jax.vmap(self.spec.action.sample)(jax.random.split(self._key, num_envs)))

    @functools.cache  # noqa: B019
    def _cycle(self, num_envs: int, batches: int) -> Cost:
        """Return what a step of one batch costs while all step theirs."""
        action = self._actions(num_envs)
        envs = [self._make(num_envs, i * num_envs) for i in range(batches)]

        def step(env: HostEnv) -> None:
            env.send(action)
            env.recv()

        try:
            for env in envs:
                env.reset()
            name = f"a step of {num_envs} environments on the host"
            return self._clock_together(name, [functools.partial(step, env) for env in envs])
        finally:
            for env in envs:
                env.close()

    @functools.cache  # noqa: B019
    def transfer(self, num_envs: int, source: jax.Device, devices: tuple[jax.Device, ...]) -> Cost:
        """Return what bringing a rollout to learning `devices`, and parameters back, costs."""
        trajectory, params = jax.device_put((self._blank(num_envs), self._params()), source)
        target = jax.tree.map(lambda x: NamedSharding(_mesh(devices), x), trajectory_specs("env"), is_leaf=_is_spec)

        def once() -> None:
            jax.block_until_ready(_put(trajectory, target, may_alias=False))
            jax.block_until_ready(jax.device_put(params, source, may_alias=False))

        return self._clock(f"moving {in_bytes(nbytes((trajectory, params)))}, a rollout and parameters", once)

    @functools.cache  # noqa: B019
    def dispatch(self) -> Cost:
        """Return what a compiled call costs that does nothing."""
        nothing, x = jax.jit(lambda x: x + 1), jnp.zeros(())
        return self._clock("a compiled call", lambda: jax.block_until_ready(nothing(x)))

    # Placements that are timed as they are.

    def single(self, readable: SingleProgram) -> tuple[Stage, ...]:
        """Return the stages of an iteration in Python's loops; of a rollout in them a few steps are timed."""
        device, steps = readable.devices[0], min(SINGLE_STEPS, self.length)
        if self.env is None:
            inference, stepping = self.acting(self.num_envs, device, 1), self.stepping(self.num_envs, 1)
            return *act_on_host(self.length, inference, stepping), self._single_update(readable)
        state = readable.init(self._seed)
        params, zero = self.agent.actor(state.agent), jnp.zeros((), jnp.int32)

        def play() -> None:
            jax.block_until_ready(readable.collect(self._key, params, state.rollout, zero, steps))

        cost = self._clock(f"{steps} steps in Python's loops", play).times(self.length / steps)
        return Stage("rollout", cost), self._single_update(readable)

    def _single_update(self, readable: SingleProgram) -> Stage:
        """Return "update" in Python's loops; as if it were compiled where those take too long to fill a replay."""
        state, trajectory = readable.init(self._seed), self._trajectory(self.num_envs)
        held = state.agent, state.replay

        def once() -> PyTree:
            nonlocal held
            learned = jax.block_until_ready(readable.learn(self._key, *held, trajectory))
            held = learned.state, learned.replay
            return learned.replay

        try:
            self._until_ready(once)
        except ValueError:
            return self.update(self.num_envs, (readable.devices[0],))
        return Stage("update", self._clock("update in Python's loops", once))

    def generation(
        self, small: EvolutionProgram | HostEvolutionProgram, members: int
    ) -> tuple[tuple[Stage, ...], float]:
        """Return the stage of a generation of `members`, from a smaller one, and the steps that it plays."""
        small.compile()
        state, played = small.init(self._seed), []

        def once() -> None:
            nonlocal state
            state, metrics = small.chunk(state, 1)
            played.append(float(np.sum(metrics["valid_steps"])))

        scale = members / small.sizes.num_envs
        cost = self._clock(f"a generation of {small.sizes.num_envs} members", once).times(scale)
        return (Stage("episodes", cost),), statistics.median(played) * scale


def _mesh(devices: tuple[jax.Device, ...]) -> Mesh:
    return make_mesh(devices, "env")


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _put(trajectory: Trajectory, shardings: Trajectory, **options: Any) -> Trajectory:
    """Put each field where its sharding says; a field may be a tree, or None."""
    fields = {
        name: jax.tree.map(lambda x, s=sharding: jax.device_put(x, s, **options), getattr(trajectory, name))
        for name, sharding in shardings._asdict().items()
    }
    return Trajectory(**fields)


def _on(devices: tuple[jax.Device, ...]) -> str:
    return "" if len(devices) == 1 else f" on {len(devices)} devices"
