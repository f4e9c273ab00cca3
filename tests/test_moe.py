"""Experts on many devices compute what one device does, and learn as well by both exchanges."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import purlin_jax as purlin
from purlin_jax.examples import digits, moe, moe_layer, moe_train
from tests.harness import mesh, native_collectives

EXPERTS, WIDTH, TOKENS = 16, 8, 12  # tokens of each rank
pytestmark = pytest.mark.usefixtures("optimised")

ROUTERS = {"any": 0.0, "nearly all to one": 20.0, "none to one": -20.0}  # bias of expert 5


def operands(n: int, bias: float) -> tuple[Any, Any, np.ndarray]:
    """Router, experts and tokens of n ranks; the bias is that of expert 5."""
    rng = np.random.default_rng(n)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    router = {"weights": normal(WIDTH, EXPERTS), "bias": bias * np.eye(EXPERTS, dtype="f4")[5]}
    experts = {"w_in": normal(EXPERTS, WIDTH, 16), "w_out": normal(EXPERTS, 16, WIDTH) / 4}
    return router, experts, normal(n * TOKENS, WIDTH)


@pytest.mark.parametrize("n", (2, 8))
def test_layer(n: int) -> None:
    ways: dict[str, Callable[..., Any]] = {
        exchange: moe.with_gradients(moe_layer.sharded(mesh(n), axis="x", exchange=exchange))
        for exchange in moe_layer.EXCHANGES
    }
    dense = moe.with_gradients(moe_layer.dense_reference)
    for name, bias in ROUTERS.items():
        given = operands(n, bias)
        expected = dense(*given)
        rows = np.asarray(expected[1])
        assert rows.sum() == 2 * n * TOKENS
        assert name == "any" or rows[5] == (n * TOKENS if bias > 0 else 0)
        before = purlin.native_calls().get("all_to_all_v", 0)
        got = {exchange: jax.block_until_ready(f(*given)) for exchange, f in ways.items()}
        assert purlin.native_calls()["all_to_all_v"] - before == 4 * n  # two, and two back
        for exchange, found in got.items():
            assert np.array_equal(found[1], rows)
            assert moe.difference(found, expected) < moe.MAX_DIFFERENCE, (exchange, name)
        assert moe.difference(got["purlin"], got["padded"]) < 1e-6, name


@pytest.mark.parametrize("exchange", moe_layer.EXCHANGES)
def test_who_exchanges(exchange: str) -> None:
    layer = moe_layer.sharded(mesh(4), axis="x", exchange=exchange)
    hlo = jax.jit(layer).lower(*operands(4, 0.0)).compile().as_text()
    assert set(native_collectives(hlo)) == ({"all-to-all"} if exchange == "padded" else set())


def test_capacity() -> None:
    """One expert gets every token; a rank with room for just so many is content."""
    n = 4
    given = operands(n, ROUTERS["nearly all to one"])
    expected, routing = jax.jit(moe_layer.dense_reference)(*given)
    needed = int(routing.rows.reshape(n, -1).sum(1).max())
    assert needed < 2 * n * TOKENS

    def run(capacity: int) -> Any:
        layer = moe_layer.sharded(mesh(n), axis="x", exchange="purlin", capacity=capacity)
        return jax.block_until_ready(jax.jit(layer)(*given))

    np.testing.assert_allclose(run(needed)[0], expected, atol=1e-5)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"rank 1 gets from rank \d"):
        run(needed - 1)
    np.testing.assert_allclose(run(needed)[0], expected, atol=1e-5)


def test_gradients_of_the_classifier() -> None:
    params = jax.jit(moe_train.init)(jax.random.key(3))
    images, labels = (v[:16] for v in digits.images_and_labels())
    ep = mesh(2, (moe_train.AXIS,))
    layer = partial(moe_layer.moe, axis=moe_train.AXIS)
    given = (params, images, labels)
    program = jax.jit(moe_train.gradients(ep, layer)).lower(*given).compile()
    assert native_collectives(program.as_text()) == []
    entropy, rows, grads = program(*given)
    (_, measured), expected = jax.jit(
        jax.value_and_grad(
            lambda p: moe_train.loss(p, images, labels, moe_layer.dense_reference), has_aux=True
        )
    )(params)
    assert moe.difference((entropy, rows), measured) < 1e-6
    assert moe.difference(grads, expected) < moe.MAX_DIFFERENCE


@pytest.mark.beyond("packet", why="24,576 words for each pair, and packets hold 16,384")
def test_training() -> None:
    trained = {
        exchange: moe_train.train(
            mesh(8, (moe_train.AXIS,)), exchange=exchange, steps=40, seed=0, capacity=768
        )
        for exchange in moe_layer.EXCHANGES
    }
    losses = [result.losses for result in trained.values()]
    assert np.abs(losses[0] - losses[1]).max() < moe.MAX_LOSS_DIFFERENCE
    assert losses[0][-5:].mean() < losses[0][0] / 2
    assert min(result.accuracy for result in trained.values()) > 0.5


def test_what_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fake(mesh: Any, *, exchange: str, **_: Any) -> moe_train.Trained:
        losses, accuracy, calls = faked[exchange]
        return moe_train.Trained(losses, np.ones((20, 16), int), accuracy, calls, 1.0)

    monkeypatch.setattr(moe_train, "train", fake)
    args = argparse.Namespace(exchange="purlin", steps=20, seed=0, capacity=None)
    falling, native = np.linspace(2.3, 0.1, 20), {"all_to_all_v": 8}
    good = {"purlin": (falling, 0.9, native), "padded": (falling, 0.9, {})}
    differ = "the losses of the exchanges differ"
    for change, failures in (
        ({}, []),
        ({"padded": (falling + 1e-3, 0.9, {})}, [differ]),
        (
            {"padded": (falling[::-1], 0.9, {})},
            ["exchange padded: loss 0.10 to 2.24, accuracy 0.900", differ],
        ),
        (
            {"purlin": (falling, 0.1, native)},
            ["exchange purlin: loss 2.30 to 0.16, accuracy 0.100"],
        ),
        ({"purlin": (falling, 0.9, {})}, ["no native call of all_to_all_v was made"]),
    ):
        faked = {**good, **change}
        found = moe.compare_trainings(mesh(8), args)
        assert [text.partition(";")[0] for text in found] == failures
    assert moe.train(args) == 1
    assert "FAILED: no native call" in capsys.readouterr().err
    faked = {"purlin": (falling * np.nan, 0.9, native)}
    assert moe.train(args) == 1
    assert "FAILED: exchange purlin: loss nan" in capsys.readouterr().err
