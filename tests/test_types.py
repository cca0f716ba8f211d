"""Specs: what is refused where one is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from podium.types import ArraySpec


@pytest.mark.parametrize(
    ("shape", "num_frames", "words"),
    [
        *(((4,), number, "must be an integer of 1 or more; use 1") for number in (0, -1, 2.0, "2", True, None)),
        ((20, 20, 4), 3, r"must divide the last axis of shape=\(20, 20, 4\); use 1"),
        ((), 4, r"must divide the last axis of shape=\(\); use 1"),
    ],
)
def test_a_number_of_frames_that_is_none_is_refused(shape: tuple[int, ...], num_frames: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^num_frames={num_frames!r} {words} for what is no stack of frames.$"):
        ArraySpec(shape, num_frames=num_frames)
    assert ArraySpec((8, 4), num_frames=np.int64(4)).num_frames == 4
