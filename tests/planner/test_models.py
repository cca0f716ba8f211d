"""The planner's arithmetic, from given stage times: every number here can be worked out on paper."""

from __future__ import annotations

import pytest

from podium.planner.models import Cost, Line, Prediction, Stage, Turn, act_on_host, predict, split


def stage(name: str, seconds: float, cores: float | None = None) -> Stage:
    return Stage(name, Cost(seconds, seconds if cores is None else cores))


def test_stages_of_one_line_follow_one_another() -> None:
    fused = Line("the program", (stage("environment", 1.0), stage("inference", 2.0), stage("update", 5.0)))
    assert predict([fused], cores=1) == Prediction(8.0, "update", 5 / 8, "the program")


def test_lines_overlap_where_there_are_cores_for_both() -> None:
    lines = [Line("acting", (stage("inference", 3.0),)), Line("learning", (stage("update", 2.0),))]
    assert predict(lines, cores=2) == Prediction(3.0, "inference", 1.0, "acting")


def test_lines_that_share_a_core_add_up() -> None:
    lines = [Line("acting", (stage("inference", 3.0),)), Line("learning", (stage("update", 2.0),))]
    assert predict(lines, cores=1) == Prediction(5.0, "inference", 3 / 5, "cores")
    assert predict(lines, cores=1.25).seconds == pytest.approx(4.0)  # (3 + 2) / 1.25


def test_waiting_costs_no_core() -> None:
    lines = [
        Line("acting", (stage("environment", 3.0, cores=0.0), stage("inference", 0.5))),
        Line("learning", (stage("update", 2.0),)),
    ]
    assert predict(lines, cores=1) == Prediction(3.5, "environment", 3 / 3.5, "acting")


def test_workers_go_on_at_once_until_the_cores_are_full() -> None:
    def workers(number: int) -> list[Line]:
        return [Line("a worker", (stage("gradients", 4.0),), number)]

    assert predict(workers(2), cores=2).seconds == 4.0
    assert predict(workers(4), cores=2) == Prediction(8.0, "gradients", 1.0, "cores")


def test_a_server_that_serves_one_at_a_time_bounds_many_workers() -> None:
    apply = 0.5
    own = Line("a worker", (stage("gradients", 1.0, cores=0.0), stage("server", apply, cores=0.0)), 8)
    server = Line("the server", (stage("server", 8 * apply, cores=0.0),))
    assert predict([own, server], cores=1) == Prediction(4.0, "server", 1.0, "the server")


def test_work_on_many_cores_counts_once_for_each() -> None:
    # Two core seconds in one second: two programs of that kind fill two cores for two.
    lines = [Line("acting", (stage("inference", 1.0, 2.0),)), Line("learning", (stage("update", 1.0, 2.0),))]
    assert predict(lines, cores=2) == Prediction(2.0, "inference", 0.5, "cores")


@pytest.mark.parametrize(
    ("inference", "turn", "environment"),
    [
        # A step is sent, awaited (3), acted for (1), whether others do likewise or not.
        (1.0, Turn(Cost(3.0, 0.0), 3.0), 3.0),
        # The simulator is full, and what is acted for meanwhile is not waited for.
        (1.0, Turn(Cost(10.0, 10.0), 3.0), 9.0),
        # Inference is slow, and the simulator never full.
        (8.0, Turn(Cost(10.0, 10.0), 3.0), 3.0),
    ],
)
def test_acting_on_the_host(inference: float, turn: Turn, environment: float) -> None:
    steps = 10
    stages = act_on_host(steps, Cost(inference, inference / 2), turn)
    assert stages[0] == ("environment", Cost(steps * environment, steps * turn.cycle.cores))
    assert stages[1] == ("inference", Cost(steps * inference, steps * inference / 2))


def test_a_line_that_kept_cores_busy_shows_that_they_are_there() -> None:
    # Asked while others were at work, the machine gave half a core; the update was measured with a whole one.
    assert predict([Line("the program", (stage("update", 5.0),))], cores=0.5) == Prediction(
        5.0, "update", 1.0, "the program"
    )


def test_a_fused_cost_is_split_as_its_parts_are() -> None:
    stages = split(("environment", "inference"), Cost(8.0, 16.0), (Cost(3.0, 9.0), Cost(1.0, 9.0)))
    assert stages == (Stage("environment", Cost(6.0, 12.0)), Stage("inference", Cost(2.0, 4.0)))
