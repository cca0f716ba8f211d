"""The product that dense layers are, with a gradient of its matrix that is fast on a CPU as well."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from podium.types import Array

_ROWS = 128
"""Rows from which the gradient of the matrix has its own way on a CPU; of fewer there is nothing to gain."""

_COLUMNS = 64
"""Columns of the matrix up to which it has; from 128 on, turning a side takes longer than it saves."""


def multiply(x: Array, matrix: Array) -> Array:
    """Return `x @ matrix`; the same mathematics on every platform, and off the CPU the same program.

    The gradient of the matrix is a product whose left side lies transposed, x^T times the gradient of the result. Where
    that is narrow, XLA takes up to six times as long for it on a CPU as for one whose sides lie as they are meant
    (2,048 rows, one thread: 336 us against 56 for a matrix of 64 x 2, 448 against 334 for 64 x 32, 134 against 120 for
    4 x 64). So there the narrower of the two is turned first, of two alike the gradient. A wide one is left as it is,
    for turning costs more than it gains (256 x 256: 6.1 ms, turned 7.2). Derivatives of any mode and order are defined.

    Args:
      x: [..., n].
      matrix: [n, m].

    Returns:
      [..., m].
    """
    product: Array = _multiply(x, matrix)
    return product


def dot_general(x: Array, matrix: Array, dimension_numbers: Any, precision: Any = None) -> Array:
    """Do what `jax.lax.dot_general` does for a dense layer of flax, by `multiply`; for its field `dot_general`."""
    if precision is not None:
        return lax.dot_general(x, matrix, dimension_numbers, precision)
    return multiply(x, matrix)


@jax.custom_jvp
def _multiply(x: Array, matrix: Array) -> Array:
    return x @ matrix


def _tangent(primals: Any, tangents: Any) -> tuple[Array, Any]:
    (x, matrix), (dx, dmatrix) = primals, tangents
    terms = []
    if not isinstance(dx, jax.custom_derivatives.SymbolicZero):
        terms.append(dx @ matrix)
    if not isinstance(dmatrix, jax.custom_derivatives.SymbolicZero):
        terms.append(_by_matrix(x, dmatrix))
    product = _multiply(x, matrix)
    return product, sum(terms) if terms else jax.custom_derivatives.zero_from_primal(product)


_multiply.defjvp(_tangent, symbolic_zeros=True)


def _by_matrix(x: Array, dmatrix: Array) -> Array:
    """Return `x @ dmatrix`, which is linear in the latter, and whose transpose is the gradient of the matrix."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) < _ROWS or dmatrix.shape[-1] > _COLUMNS:
        return x @ dmatrix
    turned = _by_turned_rows if x.shape[-1] < dmatrix.shape[-1] else _by_turned_gradient
    product: Array = lax.platform_dependent(rows, dmatrix, cpu=turned, default=lambda x, dmatrix: x @ dmatrix)
    return product.reshape(*x.shape[:-1], -1)


# A barrier keeps XLA from making one operation of turning and multiplying. It is its own transpose.
def _by_turned_rows(x: Array, dmatrix: Array) -> Array:
    return _contract(lax.optimization_barrier(x.T), dmatrix, 0, 0)


def _by_turned_gradient(x: Array, dmatrix: Array) -> Array:
    return lax.optimization_barrier(_contract(lax.optimization_barrier(dmatrix.T), x, 1, 1)).T


def _contract(a: Array, b: Array, along: int, with_: int) -> Array:
    return lax.dot_general(a, b, (((along,), (with_,)), ((), ())))
