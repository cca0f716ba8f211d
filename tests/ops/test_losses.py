"""The actor-critic loss by a loop over its rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podium.ops import losses
from podium.ops.distributions import Categorical


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0, 3]], ids=["all", "masked"])
def test_actor_critic_is_the_slow_loop(rows: list[int]) -> None:
    rng = np.random.default_rng(0)
    logits, value, advantage, target = rng.normal(size=(4, 3)), *rng.normal(size=(3, 4))
    action = rng.integers(3, size=4)
    valid = None if len(rows) == 4 else jnp.isin(jnp.arange(4), jnp.array(rows))
    policy_loss = value_loss = entropy = 0.0
    for i in rows:
        p = np.exp(logits[i]) / np.exp(logits[i]).sum()
        policy_loss -= np.log(p[action[i]]) * advantage[i] / len(rows)
        value_loss += 0.5 * (target[i] - value[i]) ** 2 / len(rows)
        entropy -= (p * np.log(p)).sum() / len(rows)
    single = [jnp.asarray(x, jnp.float32) for x in (logits, value, advantage, target)]
    total, metrics = losses.actor_critic(
        Categorical(single[0]), single[1], jnp.asarray(action), *single[2:], valid, 0.3, 0.1
    )
    parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "loss": total}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), metrics, parts)
    np.testing.assert_allclose(total, policy_loss + 0.3 * value_loss - 0.1 * entropy, rtol=1e-5)
