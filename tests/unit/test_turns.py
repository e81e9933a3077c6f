"""Servers take turns, and say it when they end."""

from __future__ import annotations

import sys

import pytest

from attngraph.measuring.turns import Server, take_turns, timed

COUNTS = """
import itertools
from attngraph.measuring.turns import own_stdout, serve
answers, count = own_stdout(), itertools.count()
print("noise of a library")
serve(lambda: next(count), answers, "ready")
"""


def _server(code: str) -> Server:
    return Server([sys.executable, "-c", code])


def test_each_server_gives_one_block_a_round_and_nothing_but_answers_is_read() -> None:
    with _server(COUNTS) as first, _server(COUNTS) as second:
        assert (first.answer(), second.answer()) == ("ready", "ready")
        assert take_turns({"a": first, "b": second}, 3) == {"a": [0, 1, 2], "b": [0, 1, 2]}


DIES = """
import os
from attngraph.measuring.turns import own_stdout, serve
answers = own_stdout()
serve(lambda: os._exit(4), answers)
"""


def test_a_server_that_ends_takes_no_other_with_it() -> None:
    lost: dict[str, str] = {}
    with _server(COUNTS) as first, _server(DIES) as second:
        first.answer()
        second.answer()
        assert take_turns({"b": second, "a": first}, 3, lost) == {"a": [0, 1, 2]}
    assert lost == {"b": "its process ended (4)"}


def test_a_server_that_hangs_is_ended() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with Server(command, patience=0.1) as server, pytest.raises(EOFError, match="no answer for"):
        server.answer()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.kill(os.getpid(), 11)", "its process was ended by signal 11"),
        ("raise SystemExit(3)", r"its process ended \(3\)"),
    ],
)
def test_a_server_that_ended_says_how(code: str, said: str) -> None:
    with _server(code) as server, pytest.raises(EOFError, match=said):
        server.answer()


def test_a_block_has_at_least_one_call() -> None:
    calls: list[int] = []
    timed(lambda: calls.append(1), 0.0)
    assert calls == [1]
