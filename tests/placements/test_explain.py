"""What placements say of themselves: every role and move in text and SVG, how stale, and who waits for whom."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.agents import ppo
from podium.drawing import COLUMNS
from podium.report import Move, Report, Role

PLACEMENTS: dict[str, Any] = {
    "Single": podium.Single(),
    "Anakin": podium.Anakin(8),
    "Anakin with a model axis": podium.Anakin(4, model=2, shard="parameters"),
    "LocalSGD": podium.LocalSGD(workers=4, devices=2),
    "Sebulba": podium.Sebulba(actor_devices=2, learner_devices=2),
    "Sebulba in lockstep": podium.Sebulba(lockstep=True),
    "Sebulba with a limit": podium.Sebulba(max_lag=1),
    "ParameterServer": podium.ParameterServer(devices=2),
    "ParameterServer with a limit": podium.ParameterServer(devices=1, max_gradient_lag=2, late="weigh"),
    "Evolution": podium.Evolution(devices=2),
    "CentralInference": podium.CentralInference(devices=2),
    "CentralInference in lockstep": podium.CentralInference(devices=1, batch_size=8, lockstep=True),
    "DistributedActors": podium.DistributedActors(workers=4, actor_devices=2, refresh_every=3, max_lag=2),
    "DistributedActors in lockstep": podium.DistributedActors(lockstep=True),
}


@pytest.fixture(params=PLACEMENTS)
def placement(request: pytest.FixtureRequest) -> Any:
    """Return a placement."""
    return PLACEMENTS[request.param]


@pytest.fixture(params=["placement", "program"])
def report(request: pytest.FixtureRequest, placement: Any) -> Report:
    """Return what a placement says, and what its program does."""
    if request.param == "placement":
        return placement.explain()
    width = 128 if getattr(placement, "model", 1) > 1 else 8
    agent, env = ppo.make(ppo.Config(hidden_sizes=(width,))), podium.envs.make("podium/Catch")
    return placement.build(agent, env, num_envs=32, rollout_length=8).explain()


def kinds(report: Report) -> set[str]:
    return {re.sub(r" \d+$", "", role.name) for role in report.roles}


def ends(report: Report, move: Move) -> list[int]:
    """Return the numbers of the kinds of roles that a move is between, in the order of its way."""
    names = list(dict.fromkeys(re.sub(r" \d+$", "", role.name) for role in report.roles))
    found = sorted((move.way.index(name), number) for number, name in enumerate(names) if name in move.way)
    return [number for _, number in found]


def drawn(report: Report) -> list[Move]:
    """Return the moves that a drawing shows: all but those among equals of which there is one."""
    return [move for move in report.moves if len(ends(report, move)) > 1 or move.amount != 0]


def test_it_is_text_with_every_part_in_it(report: Report) -> None:
    assert isinstance(report, str)
    lines = str(report).splitlines()
    assert lines[0] == report.headline
    assert f"  how stale: {report.stale}" in lines and f"  who waits: {report.waits}" in lines
    assert report.stale.endswith(".") and report.waits.endswith(".")
    assert report.startswith(report.words) and report.drawing.splitlines()[-1].strip() in lines[-1]


def test_the_drawing_fits_a_terminal_and_shows_who_and_what(report: Report) -> None:
    lines = report.drawing.splitlines()
    assert max(map(len, lines)) <= COLUMNS <= 80
    assert all(kind in report.drawing for kind in kinds(report))
    assert all(move.name in report.drawing for move in drawn(report))
    pairs = [tuple(ends(report, move)) for move in report.moves]
    # An arrow down or up between neighbours; what moves past a box, or among equals, is said beside them.
    assert report.drawing.count("▼") == len({pair for pair in pairs if len(pair) == 2 and pair[1] == pair[0] + 1})
    assert report.drawing.count("▲") == len({pair for pair in pairs if len(pair) == 2 and pair[1] == pair[0] - 1})


def test_the_svg_is_valid_and_shows_who_and_what(report: Report) -> None:
    root = ElementTree.fromstring(report.svg())
    assert report.svg() == report._repr_svg_()
    assert re.fullmatch(r"0 0 [\d.]+ [\d.]+", root.attrib["viewBox"])
    texts = " ".join("".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text"))
    assert all(kind in texts for kind in kinds(report))
    assert all(move.name in texts for move in drawn(report))
    assert report.stale in texts and report.waits in texts


def test_it_is_saved_by_its_ending(tmp_path: Path) -> None:
    report = PLACEMENTS["Sebulba"].explain()
    for ending in ("txt", "svg"):
        report.save(tmp_path / f"drawing.{ending}")
    assert (tmp_path / "drawing.txt").read_text() == f"{report}\n"
    assert (tmp_path / "drawing.svg").read_text() == report.svg()
    with pytest.raises(ValueError, match=r"drawing\.png' must end in \.txt or \.svg\."):
        report.save(tmp_path / "drawing.png")


def test_many_of_a_kind_share_a_box() -> None:
    assert "everything x 8" in podium.Anakin(8).explain().drawing
    assert "cpu:0 to cpu:7" in podium.Anakin(8).explain().drawing
    assert "worker x 4" in podium.LocalSGD(workers=4, devices=2).explain().drawing


def test_what_moves_past_a_box_is_said_below() -> None:
    roles = [Role(name, "here") for name in ("worker", "queue", "learner")]
    moves = [Move("a", "workers to queue", 1), Move("news < & >", "learner to workers", None)]
    report = Report("Title & more.", roles, moves, stale="never.", waits="nobody.")
    assert report.drawing.splitlines()[-1] == "news < & >: learner to workers"
    assert "Title &amp; more." in report.svg()
    ElementTree.fromstring(report.svg())
