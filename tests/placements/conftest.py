"""What several tests of placements look at environments on the host with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import podium
from podium.env import Env
from podium.host import HostEnvFactory, on_host


def _watched(at_step: Callable[[int], Any] = lambda number: None) -> tuple[HostEnvFactory, list[int], list[Any]]:
    catch = podium.envs.make("podium/Catch")
    assert isinstance(catch, Env)
    envs, seeds, closed, steps = on_host(catch), [], [], [0]

    class Watched:
        def __init__(self, inner: Any):
            self.inner, self.spec, self.num_envs = inner, inner.spec, inner.num_envs
            self.reset, self.send = inner.reset, inner.send

        def recv(self) -> Any:
            steps[0] += 1
            at_step(steps[0])
            return self.inner.recv()

        def close(self) -> None:
            closed.append(self)
            self.inner.close()

    def make(num_envs: int, seed: int, first_index: int) -> Any:
        seeds.append(seed)
        return Watched(envs.make(num_envs, seed, first_index))

    return dataclasses.replace(envs, make=make), seeds, closed


@pytest.fixture
def watched() -> Callable[..., tuple[HostEnvFactory, list[int], list[Any]]]:
    """Return a function that makes Catch on the host, whose steps call `at_step` with their number.

    It returns the environments, and lists that grow: the seeds of what was made, and what was closed.
    """
    return _watched
