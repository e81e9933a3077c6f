"""Trials in processes of their own: one that dies or hangs costs no other."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from attngraph.errors import UsageError
from attngraph.sweeping.isolation import isolated_each
from attngraph.sweeping.pools import on_ray


def trial(kind: str) -> dict[str, Any]:
    if kind == "dies":
        os._exit(7)
    if kind == "hangs":
        time.sleep(600)
    return {"task": kind, "process": os.getpid()}


def test_each_has_a_process_and_a_lost_one_is_told() -> None:
    kinds = ("one", "dies", "two")
    trials = [((kind,), {"task": kind, "outcome": "lost"}) for kind in kinds]
    found = {each["task"]: each for each in isolated_each(trial, trials, jobs=2, timeout=None)}
    assert found["dies"]["error"] == "its process ended with code 7"
    processes = {found["one"]["process"], found["two"]["process"], os.getpid()}
    assert len(processes) == 3
    (late,) = isolated_each(trial, [(("hangs",), {"task": "hangs"})], jobs=1, timeout=0.5)
    assert late == {"task": "hangs", "error": "it took over 0.5 seconds"}


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'attngraph\[ray\]'"):
        next(on_ray(trial, [], address="auto", cpus=1, timeout=None))
