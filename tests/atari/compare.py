"""Plays games in ale-py and in the scalar core at once and reports the first difference of each.

From the folder of tests: `python -m atari.compare --frames 300 pong breakout`; without games, all of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice
from typing import Any

import numpy as np

from atari import oracle
from atari.scalar import Environment


def make_both(rom: str, **settings: Any) -> tuple[Any, Environment]:
    """Return ale-py and the scalar core after loading the same game."""
    game = oracle.games()[rom]
    return oracle.make(rom, **settings), Environment(oracle.rom_path(rom).read_bytes(), game, **settings)


def state_differences(ale: Any, environment: Environment) -> dict[str, tuple[int, int]]:
    """Return the machine's fields in which ale-py (first) and the scalar core (second) differ."""
    state, console = oracle.machine_state(ale), environment.console
    differences = {}
    for name, value in state.items():
        ours = getattr(console, name, None)
        if isinstance(ours, int) and isinstance(value, int):
            if ours & 0xFFFFFFFF != value & 0xFFFFFFFF:
                differences[name] = (value, ours)
    if state["cartridge"][-2:] in ("F8", "F6") and state["bank"] != console.cartridge.bank:
        differences["bank"] = (state["bank"], console.cartridge.bank)
    return differences


def differences(ale: Any, environment: Environment, rewards: tuple[int, int] = (0, 0)) -> list[str]:
    """Return what differs between ale-py (first) and the scalar core (second); empty if all is equal."""
    found = []
    ram, ours = oracle.ram(ale), environment.ram()
    if ram != ours:
        cells = [f"${k + 128:02X}: {a:02X} {b:02X}" for k, (a, b) in enumerate(zip(ram, ours, strict=True)) if a != b]
        found.append(f"RAM in {len(cells)} cells, {', '.join(cells[:8])}")
    wrong = np.argwhere(oracle.screen(ale) != environment.screen())
    if len(wrong):
        rows = sorted(set(wrong[:, 0].tolist()))
        found.append(f"screen in {len(wrong)} pixels, first {wrong[0].tolist()}, rows {rows[:6]}")
    want = (rewards[0], ale.lives(), ale.game_over())
    got = (rewards[1], environment.lives(), environment.over)
    if want != got:
        found.append(f"reward, lives, over {want} {got}")
    return found


def compare(rom: str, num_frames: int, seed: int = 0, **settings: Any) -> tuple[int, list[str]]:
    """Play one game from power-on with held random actions; return the frames compared and the first differences."""
    ale, environment = make_both(rom, **settings)
    found = differences(ale, environment)
    if found:
        return 0, ["after loading: " + text for text in found]
    actions = environment.game["minimal_actions"]
    for count, action in enumerate(islice(oracle.held_actions(actions, seed), num_frames)):
        if count == 0 or ale.game_over():
            ale.reset_game()
            environment.reset_game()
            if found := differences(ale, environment):
                return count, ["after reset: " + text for text in found]
        rewards = oracle.act(ale, action), environment.act(action)
        if found := differences(ale, environment, rewards):
            return count, found
    return num_frames, []


def main() -> int:
    """Compare the games asked for; return 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("games", nargs="*")
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the actions")
    parser.add_argument("--sticky", type=float, default=0.0)
    parser.add_argument("--skip", type=int, default=1)
    arguments = parser.parse_args()
    failed = 0
    for rom in arguments.games or sorted(oracle.games()):
        start = time.perf_counter()
        count, found = compare(
            rom, arguments.frames, arguments.seed, repeat_action_probability=arguments.sticky, frame_skip=arguments.skip
        )
        print(f"{rom:20s} {'differs' if found else 'equal':8s} {count:6d} {time.perf_counter() - start:6.1f} s")
        for text in found:
            print("    " + text)
        sys.stdout.flush()
        failed += bool(found)
    print(f"{failed} games differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
