"""What a collective becomes in the program that XLA gets."""

from __future__ import annotations

import re

import jax.numpy as jnp

import purlin_jax as purlin
from purlin_jax import domain
from tests.harness import mesh, sharded


def test_all_operands_and_results_are_row_major() -> None:
    """Plans assume row-major arrays; a compiler that may choose otherwise must be told."""
    tree = [jnp.zeros((8, 4, 6)), jnp.zeros((8, 2))]
    f = sharded(lambda v: purlin.all_to_all(v, "x", 1, 0, tiled=True), mesh(2))
    (call,) = [line for line in f.lower(tree).as_text().splitlines() if domain.TARGET in line]
    operands, results = call.split("operand_layouts = ")[1].split("result_layouts = ")
    layouts = re.compile(r"dense<(?:\[([\d, ]*)\])?> : tensor<\d+xindex>")
    assert layouts.findall(operands) == ["", "2, 1, 0", "1, 0"], call  # first the partition id
    assert layouts.findall(results) == ["2, 1, 0", "1, 0"], call
