"""Options of the test suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# Read as torch is imported. For dynamic dims its cache pays from about twelve layers on; our models
# have two, and their traces take half as long without it.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

# Shared machines are slow now and then, and a run must say the same thing twice.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-fixtures",
        action="store_true",
        help="rewrite the expected halves of tests/passes/**/*.ir, then check them as usual",
    )

    parser.addoption(
        "--other-blas",
        action="store_true",
        help="multiply in another order in the interpreter's runs and in what passes fold",
    )

    parser.addoption(
        "--near",
        type=float,
        metavar="SHARE",
        help="list the tests whose numbers are equal by their tolerance, but not by this share",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """tests/unit comes last: of its short files, each worker takes one more until all are done."""
    from tests.older_torch import skip_later

    skip_later(items)
    items.sort(key=lambda item: item.path.parent.name == "unit")


@pytest.fixture(autouse=True, scope="session")
def every_pass_is_verified() -> Iterator[None]:
    """Every graph is verified after every pass, with the normal form once it is canonical."""
    from attngraph.passes.rewriting import manager
    from tests.passes.verified import Verified

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "OBSERVERS", [Verified()])
        yield


@pytest.fixture(autouse=True)
def no_pass_is_wrong(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewrite that is taken back, or a pass that stops, is a defect: the test fails.

    Tests that plant a defect are marked `defect`; their graphs are not verified either.
    """
    from attngraph.passes.rewriting import manager

    if request.node.get_closest_marker("defect") is not None:
        monkeypatch.setattr(manager, "OBSERVERS", [])
        return
    from attngraph.passes.rewriting.checked import Checked

    def fail(checked: Checked, old: Any, difference: str) -> None:
        raise AssertionError(f"{checked.pass_name} made something else of {old!r}: {difference}.")

    def stop(item: Any, error: Exception) -> None:
        raise error

    monkeypatch.setattr(Checked, "_defect", fail)
    monkeypatch.setattr(manager, "_stopped", stop)


@pytest.fixture(autouse=True)
def other_blas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under --other-blas the interpreter multiplies as a library does that eager doesn't use."""
    if not request.config.getoption("--other-blas"):
        return
    from attngraph.ir import interpreter
    from tests.passes.fixtures import Fixture
    from tests.products import halved

    monkeypatch.setattr(interpreter, "_run", halved(interpreter._run))
    monkeypatch.setattr(Fixture, "run", halved(Fixture.run))


@pytest.fixture(autouse=True)
def comparisons(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under --near each comparison is made twice: by its tolerance, and by a share of it."""
    share = request.config.getoption("--near")
    if share is not None:
        import torch

        from tests.margins import watched

        found = request.node.user_properties
        near = watched(torch.testing.assert_close, share, found)
        monkeypatch.setattr(torch.testing, "assert_close", near)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    share = config.getoption("--near")
    if share is None:
        return
    from tests.margins import NEAR

    reports = [each for kind in terminalreporter.stats.values() for each in kind]
    near = {
        report.nodeid
        for report in reports
        if any(name == NEAR for name, _ in getattr(report, "user_properties", []))
    }
    terminalreporter.section(f"equal, but not by {share} of the tolerance: {len(near)}")
    for name in sorted(near):
        terminalreporter.line(name)
