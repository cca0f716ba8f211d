"""The Atari 2600 as pure functions: `games` and `roms` say what is played, the other modules how."""
