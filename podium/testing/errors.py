"""The one error of this package."""


class ContractError(ValueError):
    """A contract of podium is broken; the message names the rule and the remedy."""
