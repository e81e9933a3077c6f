"""Whether a condition holds for all sizes where some are multiples, or are cut into blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
from torch.utils._sympy import functions as torch_sympy

from attngraph.ir.conditions import Condition, always, multiples
from attngraph.ir.dims import DimInfo, symbol, symbols_of


def holds(
    condition: Condition,
    infos: Mapping[str, DimInfo],
    steps: Mapping[str, int],
    equal: Mapping[str, str],
    *,
    least: int,
) -> bool:
    """Whether it holds for all sizes that are multiples as `steps` says, `least` times or more.

    That they are multiples, and which are `equal`, is left to the conditions that say it. To a
    trace the number of windows of a length is a size like any other: 2 or more. So is that of the
    blocks into which a length is cut, the last of them padded.
    """
    is_tie = isinstance(condition, sympy.Eq) and all(side.is_Symbol for side in condition.args)
    if multiples([condition]) or is_tie:
        return always(condition, infos) is True
    times, place = dict(infos), {}
    for name in steps.keys() & symbols_of(condition):
        number = _times(equal.get(name, name), steps[name])
        high = infos[name].high
        most = None if high is None else high // steps[name]
        times[str(number)] = _from(max(least, -(-infos[name].low // steps[name])), most)
        place[symbol(name)] = steps[name] * number
    for count, (name, size) in blocks(condition).items():
        if name in infos and name not in steps:
            low, high = infos[name].low, infos[name].high
            number = symbol(f"{name} by {size}s")
            most = None if high is None else -(-high // size)
            times[str(number)] = _from(max(least, -(-low // size)), most)
            place[count] = number
    if place:
        condition = _reduced(condition.xreplace(place), times)
    return always(condition, times) is True


def blocks(condition: Condition) -> dict[sympy.Basic, tuple[str, int]]:
    """The (n + k - 1) // k in a condition, with the name of n, and k."""
    found = {}
    for part in condition.atoms(torch_sympy.FloorDiv):
        total, size = part.args
        name = total - size + 1
        if size.is_Integer and name.is_Symbol:
            found[part] = str(name), int(size)
    return found


def equal_dims(conditions: Sequence[Condition], steps: Mapping[str, int]) -> dict[str, str]:
    """Dims that conditions make equal to another: k // (q // 8) = 8 and k % (q // 8) = 0."""
    place = {symbol(name): step * _times(name, step) for name, step in steps.items()}
    own = [condition.xreplace(place) for condition in conditions]
    exact = {
        remainder.args
        for condition in own
        if isinstance(condition, sympy.Eq) and condition.args[1].is_zero
        for remainder in condition.args[:1]
        if isinstance(remainder, (torch_sympy.Mod, torch_sympy.PythonMod))
    }
    found: dict[str, str] = {}
    for condition in own:
        if not isinstance(condition, sympy.Eq) or not condition.has(torch_sympy.FloorDiv):
            continue
        first, second, *others = [*sorted(condition.free_symbols, key=str), None, None]
        if second is None or others[0] is not None:
            continue
        whole = (condition.lhs - condition.rhs).replace(
            lambda part: isinstance(part, torch_sympy.FloorDiv) and part.args in exact,
            lambda part: part.args[0] / part.args[1],
        )
        names = [name for name in steps if _times(name, steps[name]) in (first, second)]
        is_pair = len(names) == 2 and steps[names[0]] == steps[names[1]]
        if (
            is_pair
            and not whole.has(torch_sympy.FloorDiv)
            and sympy.solve(whole, first) == [second]
        ):
            found[names[1]] = found.get(names[0], names[0])
    return found


def _times(name: str, step: int) -> sympy.Symbol:
    """How often a dim has the number that it is a multiple of."""
    return symbol(f"{name} in {step}s")


def _from(low: int, high: int | None) -> DimInfo:
    """A range that begins at its end where it would begin beyond it: there is but one block."""
    return DimInfo(low=low if high is None else min(low, high), high=high)


def _reduced(condition: Condition, infos: Mapping[str, DimInfo]) -> Condition:
    """A relation of sizes without the factor that its sides share, and with remainders settled."""

    def remainder(expr: sympy.Expr) -> sympy.Expr:
        number, divisor = expr.args
        return number if always(_reduced(number < divisor, infos), infos) is True else expr

    if not isinstance(condition, sympy.Rel):
        return condition
    mods = (torch_sympy.Mod, torch_sympy.PythonMod)
    sides = [
        side.replace(lambda part: isinstance(part, mods), remainder) for side in condition.args
    ]
    factor = sympy.gcd(*sides)
    if factor.is_positive:
        sides = [sympy.cancel(side / factor) for side in sides]
    return condition.func(*sides)
