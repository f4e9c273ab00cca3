"""What a collective becomes in the program that XLA gets."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purlin_jax as purlin
from purlin_jax import domain
from tests.harness import Fn, custom_calls, mesh, sharded


def test_all_operands_and_results_are_row_major() -> None:
    """Plans assume row-major arrays; a compiler that may choose otherwise must be told."""
    tree = [jnp.zeros((8, 4, 6)), jnp.zeros((8, 2))]
    f = sharded(lambda v: purlin.all_to_all(v, "x", 1, 0, tiled=True), mesh(2))
    (call,) = [line for line in f.lower(tree).as_text().splitlines() if domain.TARGET in line]
    operands, results = call.split("operand_layouts = ")[1].split("result_layouts = ")
    layouts = re.compile(r"dense<(?:\[([\d, ]*)\])?> : tensor<\d+xindex>")
    assert layouts.findall(operands) == ["", "2, 1, 0", "1, 0"], call  # first the partition id
    assert layouts.findall(results) == ["2, 1, 0", "1, 0"], call


def _every_collective(lib: Any) -> Fn:
    def each(v: jax.Array) -> jax.Array:
        v = lib.all_to_all(v, "a", 1, 0, tiled=True) + lib.all_to_all(v[None], "a", 0, 1)[:, 0]
        v = lib.psum_scatter(v, "a", scatter_dimension=1, tiled=True)
        v = lib.all_gather(v, "a", axis=1)[:, 0] + lib.psum(v, "a") + lib.pmax(v.sum(), "a")
        return lib.psum(v, ("a", "b"))

    return each


@pytest.mark.parametrize("check_vma", (True, False))
def test_collectives_of_one_rank_are_nothing(
    check_vma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mesh axis of size 1 costs nothing, as with jax.lax; unless a policy is forced."""
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    grid = mesh(2, ("a", "b"), (1, 2))

    def program(lib: Any) -> Fn:
        specs = {"in_specs": jax.P("b"), "out_specs": jax.P(None if check_vma else "b")}
        return sharded(_every_collective(lib), grid, check_vma=check_vma, **specs)

    monkeypatch.delenv("PURLIN_SINGLE")
    assert custom_calls(program(purlin).lower(x).compile().as_text()) == 1  # over both axes
    np.testing.assert_array_equal(program(purlin)(x), program(jax.lax)(x))
    with purlin.policy("packet"):
        assert custom_calls(program(purlin).lower(x).compile().as_text()) > 1
    monkeypatch.setenv("PURLIN_SINGLE", "call")
    assert custom_calls(program(purlin).lower(x).compile().as_text()) > 1
