"""Policy tables: what is refused and with which words, and whose table is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from purlin_jax.policy import Policy, Traffic, choose, is_own, table, table_file
from purlin_jax.table_check import PACKAGED, check, unreached

ARCHS = sorted(file.name.removesuffix(".json") for file in PACKAGED.iterdir())
LAST = {"up_to_bytes": None, "regime": "zero_staging", "blocks": 32, "threads": 512}
SMALL = {"up_to_bytes": 4096, "regime": "packet", "blocks": 4, "threads": 128}
TABLE: dict[str, Any] = {
    "arch": "sm_90",
    "atom": "hopper",
    "regimes": ["packet", "line", "zero_staging", "zero_staging_push"],
    "rows": [
        {"world": 2, "ops": ["all_reduce"], "source": "guessed", "bands": [SMALL, LAST]},
        {"world": "any", "source": "guessed", "bands": [LAST]},
    ],
}


@pytest.mark.parametrize("arch", ARCHS)
def test_the_tables_of_the_package_are_tables(arch: str) -> None:
    assert table(arch)["arch"] == arch
    assert not is_own(table_file(arch))


def _set(*path: Any) -> Callable[[Any], None]:
    """Sets what lies at path[:-1] to path[-1]."""

    def change(found: Any) -> None:
        *way, last, value = path
        for key in way:
            found = found[key]
        found[last] = value

    return change


BAND = ("rows", 0, "bands")


@pytest.mark.parametrize(
    ("change", "words"),
    (
        (_set("regimes", ["fast"]), "the table has an unknown regime 'fast'; take one of"),
        (_set("atom", "volta"), "the table has an unknown Atom 'volta'"),
        (_set("note", "x"), "the table has an unknown field 'note'"),
        (_set("rows", {}), "rows={} has the wrong type"),
        (_set("rows", 0, 7), "row 1 is not an object with fields, but 7"),
        (_set("rows", 0, "ops", ["all_redcue"]), "row 1 has an unknown op 'all_redcue'"),
        (_set("rows", 0, "world", "all"), "row 1 has world 'all', which is neither a number"),
        (_set("rows", 0, "world", 0), "row 1 has world 0, which is neither a number nor"),
        (_set(*BAND, 0, "regime", "meet"), "row 1, band 1 has an unknown regime 'meet'"),
        (_set(*BAND, 0, "atom", "volta"), "row 1, band 1 has an unknown Atom 'volta'"),
        (_set(*BAND, 0, "blocks", 65), "row 1, band 1: blocks=65 is outside 0 to 64"),
        (_set(*BAND, 0, "threads", 100), "threads=100 is outside 0 to 512, or no multiple of 32"),
        (_set(*BAND, 0, "depth", 9), "depth=9 is outside 0 to 8"),
        (_set(*BAND, 0, "blocks", True), "blocks=True has the wrong type"),
        (_set(*BAND, 0, "block", 4), "row 1, band 1 has an unknown field 'block'"),
        (_set(*BAND, [SMALL]), "row 1 does not end in a band whose up_to_bytes is null"),
        (_set(*BAND, []), "row 1 does not end in a band whose up_to_bytes is null"),
        (_set(*BAND, [SMALL, SMALL, LAST]), "row 1: up_to_bytes does not grow"),
        (_set(*BAND, [LAST, LAST]), "row 1: up_to_bytes does not grow"),
        (_set("rows", 1, "world", 4), 'no row is for all_gather in world "any"'),
        (_set("rows", 0, "world", "any"), ""),  # rows that split the ops are fine
        (_set("rows", 1, "bands", 0, "regime", "packet"), "row 2: its last band is 'packet', wh"),
        (_set(*BAND, 1, "regime", "zero_staging_push"), "row 1: its last band is 'zero_staging_"),
    ),
)
def test_what_is_no_table_is_refused(change: Callable[[Any], None], words: str) -> None:
    found = json.loads(json.dumps(TABLE))
    check(found)
    change(found)
    if not words:
        return check(found)
    with pytest.raises(ValueError) as caught:
        check(found)
    assert words in str(caught.value)


def test_rows_that_nothing_reads_are_refused() -> None:
    for_all, for_two = TABLE["rows"][1], TABLE["rows"][0]
    assert unreached([for_two, for_all]) == []
    assert unreached([for_two, for_two, for_all]) == [1]
    with pytest.raises(ValueError, match="row 2 is never read, since rows before it"):
        check({**TABLE, "rows": [for_all, for_two]})


def test_fields_that_are_missing_are_named() -> None:
    with pytest.raises(ValueError, match="the table has no 'regimes'"):
        check({k: v for k, v in TABLE.items() if k != "regimes"})
    row = {k: v for k, v in TABLE["rows"][1].items() if k != "source"}
    with pytest.raises(ValueError, match="row 1 has no 'source'"):
        check({**TABLE, "rows": [row]})


def test_the_users_table_goes_first(own: Path) -> None:
    (own / "sm_90.json").write_text(json.dumps(TABLE))
    assert table_file("sm_90") == own / "sm_90.json" and is_own(own / "sm_90.json")
    traffic = Traffic(4096, 4)
    assert choose(Policy(), "all_reduce", "sm_90", 2, traffic).blocks == 4
    assert choose(Policy(), "all_reduce", "sm_90", 3, traffic).regime == "zero_staging"
    assert table("sm_80")["arch"] == "sm_80"  # the package's


def test_a_newer_gpu_reads_the_table_of_an_older_one(own: Path) -> None:
    (own / "sm_90.json").write_text(json.dumps(TABLE))
    (own / "sm_copy.json").write_text("not read")
    assert table("sm_95") == table("sm_90") == TABLE
    newest = max((a for a in ARCHS if a.startswith("sm_")), key=lambda a: int(a[3:]))
    assert table("sm_999")["arch"] == newest


@pytest.mark.parametrize("text", ("{", "[]", json.dumps({**TABLE, "atom": "volta"})))
def test_a_broken_table_says_which_and_how_to_go_on(own: Path, text: str) -> None:
    file = own / "sm_90.json"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        table("sm_90")
    words = str(caught.value)
    assert words.startswith(f"purlin: the policy table {file}: ")
    assert words.endswith("; correct it, or remove it and the package's own is used")
    file.unlink()
    assert table("sm_90")["arch"] == "sm_90"


def test_threads_are_the_callers_before_the_tables() -> None:
    traffic = Traffic(1024, 4)
    assert choose(Policy(), "all_reduce", "sm_90", 2, traffic).threads == 128
    assert choose(Policy(threads=256), "all_reduce", "sm_90", 2, traffic).threads == 256
