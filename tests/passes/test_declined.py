"""Each reason that fuse-attention gives for leaving a site has a fixture that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attngraph.analysis.attention.refusals import Refusal

FOLDER = Path(__file__).parent / "fuse-attention"
_REMARK = re.compile(r"^# remark: (?:declined|named) \[([a-z-]+)\] (.+)$", re.MULTILINE)
_PLACE = re.compile(r"\\\{\w+(?::g)?\\\}")
# No input is known for them: the first three tell of a defect (test_evidence.py plants one), and
# heads whose number is symbolic are read as batch.
WITHOUT_FIXTURE = {
    Refusal.UNEQUAL,
    Refusal.UNWRITABLE,
    Refusal.NOT_EVALUATED,
    Refusal.HEADS_DYNAMIC,
}
SHOWN = {path.stem: _REMARK.findall(path.read_text("utf-8")) for path in FOLDER.glob("*.ir")}


def test_a_fixture_named_after_a_code_shows_that_code_alone() -> None:
    for name, remarks in SHOWN.items():
        if name.startswith("declined-"):
            assert {code for code, _ in remarks} == {name.removeprefix("declined-")}, name


@pytest.mark.parametrize("refusal", Refusal)
def test_each_row_of_the_table_is_shown_by_a_fixture(refusal: Refusal) -> None:
    sentence = re.compile(_PLACE.sub(".+", re.escape(refusal.sentence)))
    shown = {
        name
        for name, remarks in SHOWN.items()
        for code, said in remarks
        if code == refusal.code and sentence.fullmatch(said)
    }
    assert bool(shown) != (refusal in WITHOUT_FIXTURE)
