"""An unrolled recurrence that is no online softmax is left in no time."""

from __future__ import annotations

import time

from attngraph.analysis.attention.online import read_online
from attngraph.ir import parse


def test_ways_that_double_with_each_step_are_not_followed() -> None:
    lines = ["graph @main {", "  input %x0 : f32[3, 4]"]
    for step in range(40):
        lines += [
            f"  %e{step} = aten.exp(%x{step}) : f32[3, 4]",
            f"  %s{step} = aten.add.Tensor(%x{step}, %x{step}) : f32[3, 4]",
            f"  %p{step} = aten.mul.Tensor(%s{step}, %e{step}) : f32[3, 4]",
            f"  %x{step + 1} = aten.div.Tensor(%p{step}, %s{step}) : f32[3, 4]",
        ]
    graph = parse("\n".join([*lines, "  return %x40", "}"]))
    start = time.process_time()
    assert all(read_online(node) is None for node in graph)
    assert time.process_time() - start < 5.0
