"""Agents that act together: one that all of them share, or one for each group of them.

`shared` lets any agent act and learn for all N of an environment, with one policy; `groups` has an agent of its own for
each of several groups of them; `returns_of` makes of an environment one whose returns are those of some.
"""

from podium.multi.grouping import groups, returns_of
from podium.multi.sharing import shared, spec_of_one

__all__ = ["groups", "returns_of", "shared", "spec_of_one"]
