"""Actors: sources of rollouts. They start, take published parameters, give rollouts, and close."""
