"""What the benchmarks share: options by their defaults, and functions in processes of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.harness import Turn, in_process, in_turns, option, options_of

DECLARED: dict[str, Any] = {
    "rounds": 5,
    "seconds": option(0.5, "of a block"),
    "layers": [8, 16],
    "only": option([], choices=["a", "b"]),
    "keep": False,
    "at_once": 2,
    "results": option(None, type=Path),
}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", {"rounds": 5, "seconds": 0.5, "layers": [8, 16], "only": [], "results": None}),
        ("--rounds 2 --layers 1", {"rounds": 2, "layers": [1], "keep": False}),
        ("--keep --only a b --at-once 3", {"keep": True, "only": ["a", "b"], "at_once": 3}),
        ("--seconds 2 --results out", {"seconds": 2.0, "results": Path("out")}),
    ],
)
def test_an_option_has_the_type_of_its_default(line: str, said: dict[str, Any]) -> None:
    found = vars(options_of("What is measured.", line.split(), **DECLARED))
    assert {name: found[name] for name in said} == said


@pytest.mark.parametrize("line", ["--rounds x", "--only c", "--layers", "--keep yes"])
def test_what_an_option_does_not_take_ends_the_bench(line: str) -> None:
    with pytest.raises(SystemExit):
        options_of("What is measured.", line.split(), **DECLARED)


def measured(*, label: str) -> dict[str, Any]:
    print("a library prints this")
    return {"label": label, "process": os.getpid()}


def counting(*, start: int, last: int | None = None) -> Callable[[], int]:
    numbers = iter(range(start, 100 if last is None else last))

    def block() -> int:
        try:
            return next(numbers)
        except StopIteration:
            os._exit(3)

    return block


def test_a_function_runs_in_a_process_of_its_own() -> None:
    found = in_process(measured, label="é")
    assert found["label"] == "é"
    assert found["process"] != os.getpid()


def test_engines_take_turns_and_one_that_ends_is_left_out() -> None:
    failed: dict[str, str] = {}
    engines = {"whole": {"start": 1}, "short": {"start": 5, "last": 6}}
    assert in_turns(counting, engines, 2, failed=failed) == {"whole": [1, 2]}
    assert failed == {"short": "its process ended (3)"}


def test_a_turn_begins_when_none_prepares_any_more(tmp_path: Path) -> None:
    done: list[str] = []
    first, second, mine = (Turn(tmp_path / "turn") for _ in range(3))

    def timed(turn: Turn, name: str) -> None:
        turn.take()
        done.append(f"{name} begins")
        time.sleep(0.1)
        done.append(f"{name} ends")
        turn.end()

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(timed, first, "first"), pool.submit(timed, second, "second")]
        time.sleep(0.1)
        assert done == []  # mine still prepares
        mine.end()
        for job in running:
            job.result()
    begun = [said.partition(" ")[0] for said in done[::2]]
    assert sorted(begun) == ["first", "second"]
    assert done[1::2] == [f"{name} ends" for name in begun]  # one after the other


def test_without_a_file_nobody_waits() -> None:
    Turn(None).take()
