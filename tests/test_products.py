"""The product of dense layers: values and derivatives of any mode are those of `@`; only a CPU is given another way."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import assert_close_in_scale

from podium.products import multiply

SHAPES = [
    *[((600,), 4, 7), ((600,), 7, 4), ((600,), 5, 5), ((600,), 3, 1), ((3, 400), 4, 7)],
    *[((600,), 4, 70), ((600,), 70, 70), ((8,), 4, 7), ((), 4, 7)],
]
"""Axes before the last, and the matrix: either side the narrower, one column, several axes; wide; few rows, none."""


def arrays(rows: tuple[int, ...], inputs: int, outputs: int, dtype: Any = np.float32) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (*rows, inputs), (inputs, outputs), (*rows, outputs)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_and_its_derivatives_are_those_of_the_operator(shape: tuple[tuple[int, ...], int, int]) -> None:
    x, matrix, weight = arrays(*shape)

    def both(product: Any) -> Any:
        loss = lambda x, matrix: jnp.sum(jnp.sin(weight * product(x, matrix)))
        along = lambda x, matrix: jax.jvp(loss, (x, matrix), (jnp.cos(x), jnp.sin(matrix)))
        gradient = jax.grad(lambda x, matrix: along(x, matrix)[1], (0, 1))
        return product(x, matrix), jax.grad(loss, (0, 1))(x, matrix), along(x, matrix), gradient(x, matrix)

    assert_close_in_scale(both(multiply), both(jnp.matmul))


@pytest.mark.parametrize("apart", [(True, True), (False, True), (True, False)], ids=str)
def test_a_batch_of_products_is_each_alone(apart: tuple[bool, bool]) -> None:
    x, matrix, _ = arrays((600,), 4, 7)
    batch = [jnp.stack([a, 2 * a]) if each else a for a, each in zip((x, matrix), apart, strict=True)]
    gradient = jax.grad(lambda x, matrix: jnp.sum(jnp.sin(multiply(x, matrix))), (0, 1))
    together = jax.jit(jax.vmap(gradient, [0 if each else None for each in apart]))(*batch)
    alone = [gradient(*(a[i] if each else a for a, each in zip(batch, apart, strict=True))) for i in range(2)]
    assert_close_in_scale(together, jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone))


def test_gradients_have_the_matrix_dtype() -> None:
    x, matrix, weight = arrays((600,), 7, 4, jnp.bfloat16)
    gradients = jax.grad(lambda x, matrix: jnp.sum(weight * multiply(x, matrix)).astype(jnp.float32), (0, 1))(x, matrix)
    assert [g.dtype for g in gradients] == [jnp.bfloat16] * 2


@pytest.mark.parametrize(
    ("platform", "rows", "columns", "turned"),
    [("cpu", 600, 4, True), ("cpu", 8, 4, False), ("cpu", 600, 256, False), ("cuda", 600, 4, False)],
)
def test_only_a_cpu_turns_a_side_of_many_rows_for_few_columns(
    platform: str, rows: int, columns: int, turned: bool
) -> None:
    x, matrix, weight = arrays((rows,), 7, columns)
    gradient = jax.jit(jax.grad(lambda matrix: jnp.sum(jnp.sin(weight * multiply(x, matrix)))))
    text = gradient.trace(matrix).lower(lowering_platforms=(platform,)).as_text()
    assert ("optimization_barrier" in text) == turned
