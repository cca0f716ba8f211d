"""Pure mathematics with no state of its own: returns, losses, distributions, running statistics, permutations."""
