"""`assert_compiles_once`: watch jitted functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from podium.contracts import ContractError


@contextlib.contextmanager
def assert_compiles_once(*functions: Any) -> Iterator[None]:
    """Assert that each of the jitted `functions` is compiled at most once inside the `with` block.

    Raises:
      ContractError: at the end of the block, where one was compiled for a second signature, or was never called.
      ValueError: at once, for a function that `jax.jit` did not make.

    >>> import jax, jax.numpy as jnp
    >>> double = jax.jit(lambda x: 2 * x)
    >>> with assert_compiles_once(double):
    ...     _ = double(jnp.ones(3)), double(jnp.zeros(3))
    """
    for function in functions:
        if not hasattr(function, "_cache_size"):
            raise ValueError(
                f"{function!r} is not jitted; pass the very object that jax.jit returned and that is called."
            )
    if not functions:
        raise ValueError("assert_compiles_once needs at least one jitted function to watch.")
    before = [function._cache_size() for function in functions]
    yield
    for function, count in zip(functions, before, strict=True):
        name = getattr(function, "__name__", repr(function))
        compiled = function._cache_size() - count
        if compiled > 1:
            raise ContractError(
                f"{name} was compiled {compiled} times where once was expected: an argument changed its shape, dtype, "
                "weak type (a Python number once, an array then), static value or sharding between calls. Run with "
                "jax.config.update('jax_explain_cache_misses', True) to see which."
            )
        if function._cache_size() == 0:
            raise ContractError(f"{name} was never called; a test that calls nothing shows nothing.")
