"""The predicates of the kernel table on a site: True, False, or None where neither is provable."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attngraph.export.kernels.facts import (
    BIAS,
    BOOL,
    CAUSAL,
    LENGTHS,
    PAST,
    SINKS,
    SOFTCAP,
    WEIGHTS,
    WINDOW,
    Facts,
)

Need = Callable[[Facts], bool | None]


def _multiple(size: int | None) -> bool | None:
    return None if size is None else size % 8 == 0


def _at_least(size: tuple[int, int | None], least: int) -> bool | None:
    low, high = size
    return True if low >= least else None if high is None or high >= least else False


def _same_size(facts: Facts) -> bool | None:
    if facts.head_size is None or facts.value_size is None:
        return None
    return facts.head_size == facts.value_size


def _masked(facts: Facts) -> bool:
    """Whether an op that knows only of masks and causality gets a mask."""
    return bool({BOOL, BIAS, WINDOW, LENGTHS, SINKS} & facts.features)


def _aligned(facts: Facts) -> bool | None:
    """Sinks are one more key there."""
    if SINKS in facts.features:
        return False if facts.aligned_keys else None
    return facts.aligned_keys


def _turns_by_16(facts: Facts) -> bool:
    sizes = facts.rotary_features, facts.head_size
    return all(size is not None and size % 16 == 0 for size in sizes)


def _either(*answers: bool | None) -> bool | None:
    if any(answers):
        return True
    return None if None in answers else False


def _negated(answer: bool | None) -> bool | None:
    return None if answer is None else not answer


NEEDS: Mapping[str, Need] = {
    "S = T": lambda facts: facts.square,
    "S ≥ 256": lambda facts: _at_least(facts.queries, 256),
    "H = G": lambda facts: facts.heads == facts.groups,
    "D % 8 = 0": lambda facts: _multiple(facts.head_size),
    "E % 8 = 0": lambda facts: _multiple(facts.value_size),
    "D or E is no multiple of 8": lambda facts: _either(
        _negated(_multiple(facts.head_size)), _negated(_multiple(facts.value_size))
    ),
    "D ≤ 256": lambda facts: None if facts.head_size is None else facts.head_size <= 256,
    "E = D": _same_size,
    "heads share a head size": lambda facts: (
        facts.head_size is not None and facts.value_size is not None
    ),
    "scale > 0": lambda facts: facts.positive_scale,
    "no mask or bias": lambda facts: not _masked(facts),
    "no mask or bias but a window": lambda facts: not {BOOL, BIAS, LENGTHS} & facts.features,
    "no mask or bias, or T % 4 = 0": lambda facts: _either(not _masked(facts), _aligned(facts)),
    "not causal, or S = T or a past": lambda facts: _either(
        CAUSAL not in facts.features, PAST in facts.features, facts.square
    ),
    "T is static, or no weights are returned": lambda facts: (
        WEIGHTS not in facts.features or facts.keys[0] == facts.keys[1]
    ),
    "no empty row gets a mean": lambda facts: not facts.mean_rows,
    "no window, or causal": lambda facts: WINDOW not in facts.features or CAUSAL in facts.features,
    "S = T, or no window": lambda facts: WINDOW not in facts.features or facts.square,
    # a query past a length may have nothing but padding in its window
    "no window beside lengths": lambda facts: not {WINDOW, LENGTHS} <= facts.features,
    "no past beside sinks": lambda facts: not {PAST, SINKS} <= facts.features,
    "no window, softcap or sinks": lambda facts: not {WINDOW, SOFTCAP, SINKS} & facts.features,
    "a window": lambda facts: WINDOW in facts.features,
    "R % 16 = 0 and D % 16 = 0": _turns_by_16,
}
