"""Pictures, one after another, as an animated GIF."""

from __future__ import annotations

import io
from collections.abc import Iterable

import numpy as np


def gif(pictures: Iterable[np.ndarray], fps: float = 30) -> bytes:
    """Return an animated GIF that repeats, and pauses for a second on its last picture.

    Args:
      pictures: uint8 [H, W, 3] each, one at least; drawn in 64 colours a picture.
      fps: pictures a second, 1 to 50, which is what a GIF can show; it counts in hundredths of a second.

    Raises:
      ValueError: for no picture, or `fps` out of range.
    """
    from PIL import Image

    check_fps(fps)
    frames = [Image.fromarray(np.asarray(picture)).quantize(64, dither=Image.Dither.NONE) for picture in pictures]
    if not frames:
        raise ValueError("There is no picture to show; give one or more.")
    data = io.BytesIO()
    durations = [round(100 / fps) * 10] * (len(frames) - 1) + [1000]
    frames[0].save(data, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return data.getvalue()


def check_fps(fps: float) -> None:
    """Raise ValueError for pictures a second that a GIF cannot show."""
    if not 1 <= fps <= 50:
        raise ValueError(f"fps={fps} must lie between 1 and 50, which is what a GIF can show.")
