"""Meetings of processes, against a coordination service that is a dict; and what `initialize` refuses."""

from __future__ import annotations

import json
import types
from typing import Any

import jax
import pytest

import podium
from podium import distributed
from podium.agents import ppo
from podium.distributed import PeerError, failing_together, from_first, gather, initialize


class Service:
    """What JAX's coordination service does for one process of two."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}

    def key_value_set(self, key: str, value: str) -> None:
        assert key not in self.told
        self.told[key] = value

    def key_value_delete(self, key: str) -> None:
        del self.told[key]

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        if key not in self.told:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: no such key")
        return self.told[key]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    """This is process 0 of two; the test plays process 1."""
    service = Service()
    monkeypatch.setattr(
        distributed, "global_state", types.SimpleNamespace(num_processes=2, process_id=0, client=service)
    )
    monkeypatch.setattr(distributed._Meetings, "number", 0)
    monkeypatch.setattr(distributed, "MEETING_SECONDS", 0.0)
    return service


def say(service: Service, meeting: int, told: dict[str, Any]) -> None:
    service.told[f"podium/meeting/{meeting}/1"] = json.dumps(told)


def test_one_process_meets_itself() -> None:
    value = object()
    assert gather(value) == [value] and from_first(value) is value
    assert distributed.is_first() and distributed.num_processes() == 1


def test_all_hear_what_each_brought_and_nothing_piles_up(service: Service) -> None:
    for meeting in range(20):
        say(service, meeting, {"value": {"x": meeting}})
    assert gather(1.5) == [1.5, {"x": 0}]
    assert from_first("a") == "a"
    for meeting in range(2, 20):
        assert gather(None)[1] == {"x": meeting}
    assert [key for key in service.told if key.endswith("/0")] == ["podium/meeting/19/0"]


def test_one_that_does_not_come_is_not_waited_for_without_end(service: Service) -> None:
    with pytest.raises(PeerError, match=r"Process 1 hangs \(it lives, but did not come.*--resume"):
        gather(None)


def test_the_others_hear_of_an_error(service: Service) -> None:
    say(service, 0, {"value": None})
    gather(None)
    with pytest.raises(ZeroDivisionError), failing_together():
        raise ZeroDivisionError("by\n zero")
    assert json.loads(service.told["podium/meeting/1/0"]) == {"failed": "ZeroDivisionError: by zero"}


def test_an_error_elsewhere_is_raised_here(service: Service) -> None:
    say(service, 0, {"failed": "ActorError: it hangs"})
    with pytest.raises(PeerError, match=r"Process 1 failed \(ActorError: it hangs\), so process 0 stops"):
        with failing_together():
            gather(None)


def test_a_collective_that_lost_its_peer_becomes_a_sentence(service: Service) -> None:
    with pytest.raises(PeerError, match=r"Another process is gone \(ValueError: UNKNOWN: Gloo all-reduce failed"):
        with failing_together():
            raise ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID not given"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two' must be an integer of 1 or more"),
        ({"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID='2' must be an integer from 0 to 1"),
        ({"JAX_COORDINATOR_ADDRESS": "node"}, "JAX_COORDINATOR_ADDRESS='node' must be HOST:PORT"),
    ],
)
def test_bad_settings_are_refused(variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"JAX_COORDINATOR_ADDRESS": "node:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    if "not given" in words:
        good = {}
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (good | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        initialize()


AGENT = ppo.make(ppo.Config(hidden_sizes=(16,)))


@pytest.mark.parametrize(
    ("placement", "sizes", "words"),
    [
        (podium.Sebulba(), {"num_envs": 7}, "num_envs=7 is not divisible by the 2 actors; use 6 or 8"),
        (podium.Sebulba(envs_per_actor=4), {"num_envs": 4}, "use num_envs=8"),
        (podium.Anakin(), {"seeds": 4}, "seeds=4: several processes run one seed"),
        (podium.Anakin(jax.devices()[:1]), {}, "give the number of devices of each"),
        (podium.Single(), {}, "2 processes: Single runs in one"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(placement: Any, sizes: dict[str, int], words: str, service: Service) -> None:
    with pytest.raises(ValueError, match=words):
        env = podium.envs.make("podium/Catch")
        placement.build(AGENT, env, **({"num_envs": 8, "rollout_length": 8} | sizes))
