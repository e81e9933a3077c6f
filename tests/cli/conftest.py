"""A working directory with the user's module `user_models` in it, and the program in process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from attngraph.cli import run


@dataclass(frozen=True)
class Ran:
    """One command line: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The message of a run that failed as it should: one line on stderr and nothing else."""
        assert self.code not in (0, 70), self
        assert self.out == ""
        assert self.err.startswith("attngraph: error: "), self.err
        assert self.err.endswith(".\n"), self.err
        assert self.err.count("\n") == 1, self.err
        return self.err.removeprefix("attngraph: error: ").strip()


Command = Callable[..., Ran]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory; whatever a failed command leaves in it is seen by the tests."""
    shutil.copy(Path(__file__).with_name("user_models.py"), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTNGRAPH_DEBUG", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.modules.pop("user_models", None)


@pytest.fixture
def attngraph(capfd: pytest.CaptureFixture[str]) -> Command:
    """`attngraph("explain", "model.pt2")`, run in this process."""

    def command(*arguments: str) -> Ran:
        capfd.readouterr()
        code = run(arguments)
        return Ran(code, *capfd.readouterr())

    return command
