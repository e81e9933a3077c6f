"""All cases, what is known to differ, and the page that says so."""

from __future__ import annotations

from attngraph.ir.types import dtype_name
from tests.kernels import elementwise, layouts, products, reductions, states
from tests.kernels.runner import Case

_ALL = [*elementwise.CASES, *reductions.CASES, *layouts.CASES, *products.CASES, *states.CASES]
CASES: dict[str, Case] = {case.name: case for case in _ALL}
assert len(CASES) == len(_ALL), "two cases have one name"


def page() -> str:
    """The known differences and what PyTorch leaves open, as two tables."""
    lines = ["| what | dtypes | onnxruntime |", "| --- | --- | --- |"]
    for case in CASES.values():
        if case.difference:
            dtypes = ", ".join(map(dtype_name, case.dtypes))
            lines.append(f"| {case.name} | {dtypes} | {case.difference} |")
    lines += ["", "Left open by PyTorch, and not compared:", ""]
    reasons: dict[str, list[str]] = {}
    for case in CASES.values():
        if case.because:
            reasons.setdefault(case.because, []).append(case.name)
    lines += [f"- {', '.join(names)}: {reason}." for reason, names in reasons.items()]
    return "\n".join(lines)
