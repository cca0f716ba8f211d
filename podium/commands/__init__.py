"""The command `podium`: a file for each of train, evaluate, replay, plan and list, and what they share.

`fields` turns dataclasses into flags, `options` puts the flags of a run together and reads them, `words` says what is
about to happen and what has, `console` says refusals in one sentence; `scripts` is for files that fix an agent and a
placement, as those in `experiments/` do.
"""
