"""However an attention is written: the result is right, and its sites are seen for what they are.

The first holds for every formulation, understood or not. Inputs make peaked scores, S ≠ T where
the formulation allows, sizes that are no powers of two; the result is also checked on inputs with
other masks than those that were traced, which hide one batch element altogether. Each formulation
runs with static sizes, those that name dynamic dims again with them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from _pytest.mark import ParameterSet

from attngraph.compiling.compiler import optimize
from attngraph.export.parity.budget import compare
from attngraph.export.parity.reference import Reference
from attngraph.optimized import Optimized
from tests.parity.formulations import FORMULATIONS, Formulation


@functools.cache
def _optimized(formulation: Formulation, dynamic: bool) -> Optimized:
    return optimize(
        formulation.module(),
        formulation.args(),
        dynamic_shapes=formulation.dynamic_shapes if dynamic else None,
        verify="final",
    )


def _runs(field: str) -> list[ParameterSet]:
    """Every formulation, static and dynamic; where `field` names a defect it must still fail.

    Three of four are `wide`, for the time that `make test` may take. That of static sizes is `wide`
    or `slow` where there is the other.
    """
    runs = []
    for number, (name, formulation) in enumerate(FORMULATIONS.items()):
        reason = getattr(formulation, field) or formulation.broken
        known = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        static = [] if reason.startswith("dynamic: ") else known
        most = [pytest.mark.wide] if number % 4 else []
        again = [pytest.mark.slow if number % 3 else pytest.mark.wide]
        marks = [*static, *(again if formulation.dynamic else most)]
        runs.append(pytest.param(formulation, False, id=name, marks=marks))
        if formulation.dynamic:
            marks = [*known, *most]
            runs.append(pytest.param(formulation, True, id=f"{name}-dynamic", marks=marks))
    return runs


@pytest.mark.parametrize(("formulation", "dynamic"), _runs("broken"))
def test_result_is_right(formulation: Formulation, dynamic: bool) -> None:
    optimized = _optimized(formulation, dynamic)
    assert optimized.report.parity is not None
    assert optimized.report.parity.passed
    others = formulation.args(seed=1)
    reference = Reference(formulation.module(), precision="fp32")(others)
    parity = compare(reference, optimized.run(others), "fp32")
    assert parity.passed, str(parity)


@pytest.mark.parametrize(("formulation", "dynamic"), _runs("gap"))
def test_sites_are_recognised(formulation: Formulation, dynamic: bool) -> None:
    optimized = _optimized(formulation, dynamic)
    report = optimized.report
    said = {site.location for site in report.sites}
    left = [node for node in optimized.graph if "softmax" in node.op]
    places = ((node, f"{node.loc.file}:{node.loc.line}" if node.loc.file else "") for node in left)
    silent = [node for node, place in places if place not in said]
    assert not silent, "no softmax is left without a remark"
    named = ("linear-attention", "graph-attention")  # without a softmax over an axis of keys
    declined = [s for s in report.sites if s.status == "declined" or s.code in named]
    found = [f"{site.code}: {site.reason} ({site.blamed})" for site in declined]
    assert all(site.code and site.reason and site.blamed for site in declined), found
    assert all(site.code != "unequal" for site in declined), "a reading was wrong, and taken back"
    if formulation.fused is None:
        assert report.sites
        return
    assert report.fused == formulation.fused, found
    assert len(declined) == len(formulation.declined), found
    for word, remark in zip(formulation.declined, found, strict=True):
        assert word in remark.lower(), remark


@pytest.fixture
def every_warning() -> Iterator[None]:
    """torch gives some warnings only once per process, which would hide all but the first."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("every_warning")
def test_trainable_parameters_bring_no_warning() -> None:
    formulation = FORMULATIONS["NonLocalBlock"]
    module = formulation.module().requires_grad_(True)
    optimize(module, formulation.args(), verify="off")
