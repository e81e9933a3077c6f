"""Which way a line of Python went."""

from __future__ import annotations

import sys
from types import FrameType

from attngraph.frontend.watching.jumps import chooses_alone, recorded_jumps


class Asked:
    """Is asked for its truth, and remembers whether its line asks nothing else."""

    def __init__(self, truth: bool) -> None:
        self.truth = truth
        self.alone: list[bool] = []

    def __bool__(self) -> bool:
        frame: FrameType = sys._getframe(1)
        self.alone.append(chooses_alone(frame))
        return self.truth


def plain(count: int) -> int:
    for _ in range(3):
        if count == 0:
            continue
        count -= 1
    return count


def negated(count: int) -> str:
    return "none" if not count > 0 else "some"


def twice(count: int, other: int) -> int:
    if count == 0 or other == 0:
        count += 1
    return count


def in_a_loop(count: int) -> int:
    while count > 0:
        count -= 1
    return count


def _line(function: object, ahead: int) -> tuple[str, int]:
    code = function.__code__  # type: ignore[attr-defined]
    return code.co_filename, code.co_firstlineno + ahead


def _seen(function: object, ahead: int, *args: int) -> set[bool]:
    found = {_line(function, ahead): set[bool]()}
    with recorded_jumps(found):
        function(*args)  # type: ignore[operator]
    return found[_line(function, ahead)]


def test_the_sides_that_a_line_took() -> None:
    assert _seen(plain, 2, 0) == {True}
    assert _seen(plain, 2, 5) == {False}
    assert _seen(plain, 2, 2) == {True, False}


def test_a_negation_is_of_what_is_asked() -> None:
    # The condition of the line is `count > 0`: that is what a trace is asked for.
    assert _seen(negated, 1, 3) == {True}
    assert _seen(negated, 1, 0) == {False}


def test_lines_with_several_conditions_tell_nothing() -> None:
    assert _seen(twice, 1, 0, 1) == set()
    twice_in_code = sys.version_info < (3, 14)  # a loop's condition, before the loop and behind it
    assert _seen(in_a_loop, 1, 3) == (set() if twice_in_code else {True, False})


def test_other_tracing_goes_on_afterwards() -> None:
    before = sys.gettrace()
    _seen(plain, 2, 1)
    assert sys.gettrace() is before


def test_whether_a_condition_is_the_only_one_of_its_line() -> None:
    one, two, inner = Asked(True), Asked(False), Asked(True)
    if one:
        pass
    if two or inner:
        pass
    nested = [each for each in [1] if inner]
    assert nested
    flipped = not one
    assert not flipped
    assert one.alone == [True, False]
    assert two.alone == [False]
    assert not inner.alone[0]  # of a list that Python 3.14 makes in the frame, it is the only one
