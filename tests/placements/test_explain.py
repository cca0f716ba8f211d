"""What placements say of themselves: every role and move in words and pictures, and how stale, and who waits."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.agents import ppo
from podium.placement.explanation import COLUMNS, Explanation
from podium.placement.table import Move, Role

PLACEMENTS: dict[str, Any] = {
    "Single": podium.Single(),
    "Anakin": podium.Anakin(8),
    "LocalSGD": podium.LocalSGD(workers=4, devices=2),
    "Sebulba": podium.Sebulba(actor_devices=2, learner_devices=2),
    "Sebulba in lockstep": podium.Sebulba(lockstep=True),
    "Sebulba with a limit": podium.Sebulba(max_lag=1),
    "ParameterServer": podium.ParameterServer(devices=2),
    "ParameterServer with a limit": podium.ParameterServer(devices=1, max_lag=2, late="weigh"),
    "Evolution": podium.Evolution(devices=2),
    "CentralInference": podium.CentralInference(devices=2),
    "CentralInference in lockstep": podium.CentralInference(devices=1, batch_size=8, lockstep=True),
    "DistributedActors": podium.DistributedActors(workers=4, worker_devices=2, refresh_every=3, max_lag=2),
    "DistributedActors in lockstep": podium.DistributedActors(lockstep=True),
}


@pytest.fixture(params=PLACEMENTS)
def placement(request: pytest.FixtureRequest) -> Any:
    """Return a placement."""
    return PLACEMENTS[request.param]


@pytest.fixture(params=["placement", "program"])
def explanation(request: pytest.FixtureRequest, placement: Any) -> Explanation:
    """Return what a placement says, and what its program does."""
    if request.param == "placement":
        return placement.explain()
    agent, env = ppo.make(ppo.Config(hidden_sizes=(8,))), podium.envs.make("podium/Catch")
    return placement.build(agent, env, num_envs=32, rollout_length=8).explain()


def kinds(explanation: Explanation) -> set[str]:
    return {re.sub(r" \d+$", "", role.name) for role in explanation.roles}


def drawn(explanation: Explanation) -> list[Move]:
    """Return the moves that a drawing shows: all but those among equals of which there is one."""
    between = [move for move in explanation.moves if len([x for x in kinds(explanation) if x in move.way]) > 1]
    return between + [move for move in explanation.moves if move not in between and move.amount != 0]


def test_it_is_text_with_every_part_in_it(explanation: Explanation) -> None:
    assert isinstance(explanation, str)
    lines = str(explanation).splitlines()
    assert lines[0] == explanation.headline
    assert f"  how stale: {explanation.stale}" in lines and f"  who waits: {explanation.waits}" in lines
    assert explanation.stale.endswith(".") and explanation.waits.endswith(".")
    assert explanation.startswith(explanation.words) and explanation.drawing.splitlines()[-1].strip() in lines[-1]


def test_the_drawing_fits_a_terminal_and_shows_who_and_what(explanation: Explanation) -> None:
    lines = explanation.drawing.splitlines()
    assert max(map(len, lines)) <= COLUMNS <= 80
    assert all(kind in explanation.drawing for kind in kinds(explanation))
    assert all(move.name in explanation.drawing for move in drawn(explanation))
    heads = sum(explanation.drawing.count(head) for head in "▲▼◀▶")
    ways = {move.way for move in drawn(explanation)}
    assert heads == len(ways)


def test_the_svg_is_valid_and_shows_who_and_what(explanation: Explanation) -> None:
    root = ElementTree.fromstring(explanation.svg())
    assert explanation.svg() == explanation._repr_svg_()
    assert re.fullmatch(r"0 0 [\d.]+ [\d.]+", root.attrib["viewBox"])
    texts = " ".join("".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text"))
    assert all(kind in texts for kind in kinds(explanation))
    assert all(move.name in texts for move in drawn(explanation))
    assert explanation.stale in texts and explanation.waits in texts


def test_it_is_saved_by_its_ending(tmp_path: Path) -> None:
    explanation = PLACEMENTS["Sebulba"].explain()
    for ending in ("txt", "svg", "png"):
        explanation.save(tmp_path / f"drawing.{ending}")
    assert (tmp_path / "drawing.txt").read_text() == f"{explanation}\n"
    assert (tmp_path / "drawing.svg").read_text() == explanation.svg()
    assert (tmp_path / "drawing.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(ValueError, match=r"drawing\.pdf' must end in \.txt, \.svg or \.png"):
        explanation.save(tmp_path / "drawing.pdf")


def test_many_of_a_kind_share_a_box() -> None:
    assert "everything x 8" in podium.Anakin(8).explain().drawing
    assert "cpu:0 to cpu:7" in podium.Anakin(8).explain().drawing
    assert "worker x 4" in podium.LocalSGD(workers=4, devices=2).explain().drawing


def test_what_moves_past_a_box_is_said_below() -> None:
    roles = [Role(name, "here") for name in ("worker", "queue", "learner")]
    moves = [Move("a", "workers to queue", 1), Move("news < & >", "learner to workers", "much")]
    explanation = Explanation("Title & more.", roles, moves, stale="never.", waits="nobody.")
    assert explanation.drawing.splitlines()[-1] == "news < & >: learner to workers"
    assert "Title &amp; more." in explanation.svg()
    ElementTree.fromstring(explanation.svg())
