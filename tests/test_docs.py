"""The Python of the pages runs and prints what they say; their tables are what the code gives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from purlin_jax.heads import plan_heads
from purlin_jax.table_check import check

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program(page: str) -> tuple[str, list[str]]:
    """The Python blocks of a page as one program, and the lines that it should print.

    Those stand in comments behind each print, or in the text block after a Python block.
    """
    blocks = BLOCK.findall((ROOT / page).read_text())
    code, printed = [], []
    for (kind, text), (after, output) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind == "text":
            continue
        code.append(text)
        if after == "text":
            printed += output.splitlines()
        else:
            lines = [line for line in text.splitlines() if line.startswith("print(")]
            printed += [line.rpartition(")  # ")[2] for line in lines]
    return "\n".join(code), printed


@pytest.mark.parametrize(
    "page",
    (
        "README.md",
        "docs/quickstart.md",
        "docs/drop_in.md",
        "docs/moe.md",
        "docs/policies.md",
        "docs/ulysses.md",
        "docs/varlen.md",
    ),
)
def test_the_python_of_a_page(page: str, tmp_path: Path) -> None:
    code, printed = program(page)
    assert printed
    script = tmp_path / f"{Path(page).stem}.py"
    script.write_text(code)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PURLIN_")}
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**env, "JAX_PLATFORMS": "cpu", "PURLIN_POLICIES": os.devnull},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == printed


def test_the_table_of_a_page_is_a_table() -> None:
    text = (ROOT / "docs/policies.md").read_text()
    check(json.loads(text.partition("```json\n")[2].partition("```")[0]))


def head_cell(q: int, kv: int, world: int) -> str:
    """What the table of heads says of a model on `world` ranks."""
    plan = plan_heads("ulysses_attention", q, kv, world, "pad")
    if (plan.q_exchanged, plan.kv_exchanged) == (q, kv):
        return "as they are"
    more = plan.q_exchanged / q - 1
    return f"{plan.q_exchanged} / {plan.kv_exchanged}" + (f" (+{more:.0%})" if more else "")


def test_the_table_of_heads() -> None:
    _, _, table = (ROOT / "docs/ulysses.md").read_text().partition("| model | heads |")
    head, _, *rows = table.split("\n\n")[0].splitlines()
    worlds = [int(n) for n in re.findall(r"P=(\d+)", head)]
    assert worlds and len(rows) > 5
    for row in rows:
        _, heads, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        q, kv = map(int, heads.split(" / "))
        assert cells == [head_cell(q, kv, world) for world in worlds], row
