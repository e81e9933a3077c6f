"""How much copying it takes to bring an operand into wanted axes."""

from __future__ import annotations

from attngraph.analysis.layout.axes import Axes, Operand, resolve, size_of
from attngraph.ir import Dim, Node
from attngraph.ir.dims import same_shape
from attngraph.ir.traits import EXPAND, PERMUTE, REPEAT, SELECT, SLICE, SPLIT

_SLICE, _SELECT, _PERMUTE, _EXPAND, _RESHAPE = 3, 4, 10, 6, 1


def layout_cost(node: Node) -> int:
    """The cost of one op on the way up, in the units of `cost`."""
    costs = {PERMUTE: _PERMUTE, EXPAND | REPEAT: _EXPAND, SLICE | SPLIT: _SLICE, SELECT: _SELECT}
    return next((units for kind, units in costs.items() if node.op in kind), _RESHAPE)


class _Plan:
    """Steps from an operand's axes to the target's; `cost` prefers views to copies."""

    def __init__(self, operand: Operand, target: Axes) -> None:
        self.operand = operand
        self.target = tuple(resolve(dim) for dim in target)
        self.wanted = [atom for dim in self.target for atom in dim]
        have = set(operand.atoms)
        self.missing = [atom for atom in self.wanted if atom not in have]
        self.present = [atom for atom in self.wanted if atom in have]
        self.moves = list(operand.atoms) != self.present
        self.shape: list[Dim] = [size_of(dim) for dim in self.target]

    @property
    def possible(self) -> bool:
        """Whether every variable atom of the operand is wanted, once each."""
        return set(self.operand.atoms) <= set(self.wanted) and len(set(self.wanted)) == len(
            self.wanted
        )

    @property
    def cost(self) -> int:
        constants = [
            index > 0
            for dim in self.operand.dims
            for index, atom in enumerate(dim)
            if atom.const is not None
        ]
        total = sum(_SELECT if inner else _SLICE for inner in constants)
        total += _PERMUTE if self.moves else 0
        total += _EXPAND if self.missing else 0
        rest = tuple(tuple(a for a in dim if a.const is None) for dim in self.operand.dims)
        whole = [size_of(dim) for dim in rest]
        return total + (0 if same_shape(whole, self.shape) else _RESHAPE)


def cost(operand: Operand, target: Axes) -> int | None:
    """How much copying `materialize` would cause; None where the target can't be reached."""
    plan = _Plan(operand, target)
    return plan.cost if plan.possible else None
