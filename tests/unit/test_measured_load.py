"""What others take of the machine's time, from counters that a test writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attngraph.measuring.load import Load, Watch, before

HERE, ENGINE = os.getpid(), 77


def write(proc: Path, *, busy: int, idle: int, here: int, engine: int) -> None:
    """Ticks of all processes together, in user and system time alike, and of two of them."""
    half = busy // 2
    (proc / "stat").write_text(f"cpu  {half} 0 {half} {idle} 0 0 0 0 0 0\ncpu0 1 2 3\n")
    for process, ticks in ((HERE, here), (ENGINE, engine)):
        (proc / str(process)).mkdir(exist_ok=True)
        before_them = " ".join("0" for _ in range(10))
        text = f"{process} (a (name) of 3 words) S {before_them} {ticks} {ticks} 0 0"
        (proc / str(process) / "stat").write_text(text)


@pytest.mark.parametrize(("busy", "share"), [(400, 0.0), (480, 0.08), (1000, 0.6)])
def test_it_is_the_share_that_others_took(busy: int, share: float, tmp_path: Path) -> None:
    write(tmp_path, busy=1000, idle=5000, here=10, engine=20)
    watch = Watch([ENGINE], tmp_path)
    write(tmp_path, busy=1000 + busy, idle=6000 - busy, here=60, engine=170)
    load = watch.load()
    assert load.others == pytest.approx(share)
    assert load.is_trusted == (share <= 0.05)
    assert ("trust no time" in str(load)) == (share > 0.05)


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    load = Watch((), tmp_path).load()
    assert load == Load(None)
    assert not load.is_trusted
    assert "could not be measured" in str(load)


def test_a_process_that_ended_leaves_no_figure(tmp_path: Path) -> None:
    write(tmp_path, busy=100, idle=100, here=1, engine=1)
    watch = Watch([ENGINE], tmp_path)
    (tmp_path / str(ENGINE) / "stat").unlink()
    assert watch.load().others is None


def test_this_machine_is_read() -> None:
    load = before(0.05)
    if Path("/proc/stat").exists():
        assert load.others is not None
        assert 0 <= load.others <= 1
