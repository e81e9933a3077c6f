"""Every rule that is applied without being evaluated is an identity, to the sign of a zero.

A rule that canonicalize applies counts as proved: nothing compares what it makes. Here chains of
the ops that it looks at are drawn, with sizes of 0 and 1, promotions, broadcasts and numbers at the
edges of their dtypes, and run before and after.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from attngraph.ir import clone, format_graph, interpret, verify
from attngraph.passes.canonical.identities import IDENTITIES
from attngraph.passes.canonical.normal_form import FORMS
from attngraph.passes.canonical.scatters import SCATTER_RULES
from attngraph.passes.canonical.slices import SLICE_RULES
from attngraph.passes.rewriting.rewriter import Rewriter, Rule
from tests.passes.drawn import drawn, same_bits, values_for

RULES = [*FORMS, *IDENTITIES, *SLICE_RULES, *SCATTER_RULES]


@pytest.mark.filterwarnings("ignore:The use of `x.T`:UserWarning")
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_local_rule_is_an_identity(rule: Rule) -> None:
    fired = 0

    @settings(
        max_examples=15,
        phases=[Phase.generate],  # the graphs are small as they are
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        nonlocal fired
        old = drawn(data.draw, rule.ops)  # a new op needs its inputs in drawn.ARGUMENTS
        new = clone(old)
        count = Rewriter(new, [rule]).run()
        if not count:
            return
        fired += 1
        verify(new)
        for _ in range(2):
            inputs = values_for(data.draw, old)
            try:
                results = interpret(old, inputs)
            except NotImplementedError:  # torch has no such kernel for the dtype
                assume(False)
            # squeeze drops a dim that is 1 in this run alone, which no captured graph lets happen
            assume(all(x.ndim == len(v.shape) for x, v in zip(results, old.outputs, strict=True)))
            assert same_bits(old, new, inputs), f"{format_graph(old)}{format_graph(new)}{inputs}"

    holds()
    assert fired, "nothing that was drawn is rewritten"
