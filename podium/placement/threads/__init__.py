"""Threads beside the learner: supervision, channels, rates. Standard library only: no agent, environment, array."""
