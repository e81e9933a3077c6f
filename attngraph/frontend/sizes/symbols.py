"""torch's symbolic sizes under the user's names."""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterable
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as torch_sympy

from attngraph.errors import CaptureError
from attngraph.ir.dims import DimInfo, as_dim, divide, symbol
from attngraph.ir.graph import free_name
from attngraph.ir.parser import parse_attr

FloorDiv: Any = torch_sympy.FloorDiv
IntTrueDiv: Any = torch_sympy.IntTrueDiv
TruncToInt: Any = torch_sympy.TruncToInt
FloorToInt: Any = torch_sympy.FloorToInt

UNKNOWN_SIZE = DimInfo(low=0)
"""A size that only a run can tell."""
_ANY_INTEGER = DimInfo(low=-(2**63))
"""A number that .item() reads, which is a size only if the code says so."""


class Symbols:
    """Translates torch's symbols; `infos` collects the dims they became."""

    def __init__(self) -> None:
        self.infos: dict[str, DimInfo] = {}
        self._renamed: dict[sympy.Symbol, sympy.Expr] = {}
        self._cache: dict[sympy.Basic, Any] = {}

    def name(self, original: sympy.Symbol, name: str, info: DimInfo) -> str:
        """Gives a symbol a name, adapted where the text form would read it as something else."""
        name = _free(name, self.infos)
        self.infos[name] = info
        self._renamed[original] = symbol(name)
        return name

    def equate(self, original: sympy.Symbol, name: str) -> None:
        """Takes a symbol for the dim of this name, as the caller says that it is."""
        self._renamed[original] = symbol(name)

    def define(self, original: sympy.Symbol, expr: sympy.Expr) -> None:
        """Makes a symbol that has no name yet stand for an expression of those that have one."""
        if self.is_new(original) and not self.unnamed([expr]):
            self._renamed[original] = expr.xreplace(self._renamed)

    def is_new(self, original: sympy.Symbol) -> bool:
        return original not in self._renamed

    def renamed(self, expr: sympy.Basic) -> sympy.Basic:
        """An expression of torch's symbols, all of which have a name, in the dims' names."""
        return without_remainders(expr.xreplace(self._renamed))

    def unnamed(self, exprs: Iterable[sympy.Basic]) -> list[sympy.Symbol]:
        """The symbols of some expressions that have no name yet, in a fixed order."""
        found = {s for expr in exprs for s in expr.free_symbols if s not in self._renamed}
        return sorted(found, key=lambda s: (len(s.name), s.name))

    def read(self, value: Any) -> Any:
        """A number, or the expression of a SymInt, SymFloat or SymBool in named dims.

        A symbol not seen before is a size (`u0`, …) that only a run can tell. Raises CaptureError
        for a fraction of that kind.
        """
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        expr = value.node.expr
        if expr not in self._cache:
            for unknown in self.unnamed([expr]):
                if not unknown.is_integer:
                    raise CaptureError(
                        "A number that .item() reads at run time is used in Python arithmetic; "
                        "keep it a tensor."
                    )
                taken = sum(name.startswith("u") and name[1:].isdigit() for name in self.infos)
                env = value.node.shape_env
                is_size = env is None or bool(env.var_to_range[unknown].lower >= 0)
                self.name(unknown, f"u{taken}", UNKNOWN_SIZE if is_size else _ANY_INTEGER)
            self._cache[expr] = _plain(self.renamed(_whole(expr)))
        return self._cache[expr]


def _whole(expr: sympy.Basic) -> sympy.Basic:
    """`int(a / b)` of sizes as `a // b`, which it is as long as a is below 2^53."""
    if not expr.has(IntTrueDiv):
        return expr

    def divides(part: sympy.Basic) -> bool:
        if not isinstance(part, (TruncToInt, FloorToInt)) or not isinstance(
            part.args[0], IntTrueDiv
        ):
            return False
        numerator, denominator = part.args[0].args
        return bool(numerator.is_nonnegative and denominator.is_positive)

    return expr.replace(divides, lambda part: FloorDiv(*part.args[0].args))


def without_remainders(expr: sympy.Basic) -> sympy.Basic:
    """Writes a / b for each whole a // b: torch has a symbol for each axis, and that n·m // n
    is n shows where both axes have one name.
    """
    if not expr.has(FloorDiv):
        return expr

    def exact(base: sympy.Expr, divisor: sympy.Expr) -> Any:
        quotient = None if divisor.is_number else divide(as_dim(base), as_dim(divisor))
        return FloorDiv(base, divisor) if quotient is None else sympy.sympify(quotient)

    return expr.replace(FloorDiv, exact)


def _plain(expr: sympy.Basic) -> Any:
    if expr.is_Integer:
        return int(expr)
    if expr.is_Float:
        return float(expr)
    if expr in (sympy.true, sympy.false):
        return bool(expr)
    return expr


def _free(name: str, taken: Collection[str]) -> str:
    while keyword.iskeyword(name) or parse_attr(name) != symbol(name):
        name += "_"
    return free_name(name, taken)
