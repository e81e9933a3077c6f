"""Puts weights that are stored in codes into a module: as the codes, or as the numbers.

transformers is given a tensor for each, of the weight's shape and dtype but without memory of its
own, that can be told from all others. The linear that has it afterwards is the weight's; where none
has it, because transformers merged it with others, say, it is given the numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from attngraph.checkpoints.codes import Codes, Stored, in_rows
from attngraph.dialect.quantized import dequantize
from attngraph.mapped import Spill, is_large

_BLOCKS = (16, 32, 64, 128)  # columns of a block that the kernels know
_SHOWN = 3


class StoredLinear(torch.nn.Module):
    """x Wᵀ + b with W in codes, as `attn.quantized_linear` has them.

    Columns of one group stand together: `order` (K,) tells, if they don't in W, which of x belongs
    to each.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(
        self,
        bits: int,
        shape: tuple[int, int],
        tensors: Mapping[str, torch.Tensor | None],
        bias: torch.nn.Parameter | None,
    ) -> None:
        super().__init__()
        self.bits = bits
        self.out_features, self.in_features = shape
        for name in ("codes", "scales", "zeros", "order"):
            self.register_buffer(name, tensors.get(name))
        self.bias = bias

    def _stored(self) -> torch.Tensor:
        found: torch.Tensor = dequantize(
            self.codes, self.scales, self.zeros, bits=self.bits, width=self.in_features
        )
        return found

    @property
    def weight(self) -> torch.Tensor:
        """The numbers (N, K), for a parent that reads them, or asks for their dtype."""
        order, found = self.order, self._stored()
        return found if order is None else found.index_select(1, torch.argsort(order))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = self.order
        x = x if order is None else x.index_select(-1, order)
        return torch.nn.functional.linear(x, self._stored(), self.bias)


@dataclass
class Held:
    """The stored weights of a checkpoint by their modules' names, on their way into a module.

    `stand_ins` are given to the class in their place; with `packs` linears keep the codes.
    """

    method: str
    stored: Mapping[str, Stored]
    dtype: torch.dtype
    packs: bool = True
    stand_ins: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = sum(weight.shape[0] * weight.shape[1] for weight in self.stored.values())
        self._keep: Callable[[torch.Tensor], torch.Tensor] = (
            Spill([]) if is_large(size // 2) else lambda data: data
        )

    def names(self, sideways: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """The weights that a class is given: stand-ins, or where it had no use for these, numbers.

        Those of the modules `sideways` are kept as (K, N).
        """
        given: dict[str, torch.Tensor] = {}
        for name, weight in self.stored.items():
            known = self.stand_ins.get(name)
            if known is None:
                turned = any(_ends(name, each) for each in sideways)
                shape = weight.shape[::-1] if turned else weight.shape
                known = torch.zeros(1, dtype=self.dtype).expand(shape)
                self.stand_ins[name] = known
            given[f"{name}.weight"] = known
        return given

    def has(self, module: str) -> bool:
        """Whether one of the weights is that module's; prefixes may differ."""
        return any(_ends(name, module) for name in self.stored)

    def unused(self, module: torch.nn.Module) -> list[str]:
        """The names of the weights that no part of the module has as it was given them."""
        places = {_place(p) for p in module.parameters()}
        return [
            n for n, t in self.stand_ins.items() if t.stride(0) == 0 and _place(t) not in places
        ]

    def spell_out(self, names: Collection[str]) -> None:
        """From now on the class is given the numbers of these weights."""
        for name in names:
            self.stand_ins[name] = self._numbers(self.stored[name])

    def put(self, module: torch.nn.Module) -> list[str]:
        """Puts the weights where their stand-ins are. Returns sentences on what was done."""
        places = {_place(t): n for n, t in self.stand_ins.items() if t.stride(0) == 0}
        told: Counter[str] = Counter()
        for path, part in list(module.named_modules()):
            name = places.get(_place(part._parameters.get("weight")))
            if name is None:
                for key, value in list(part._parameters.items()):
                    if (name := places.get(_place(value))) is not None:
                        self._spell(part, key, name)
                        told["they are no linears'"] += 1
                continue
            kind, weight = type(part), self.stored[name]
            is_linear = kind is torch.nn.Linear or kind.__name__ == "Conv1D"
            why = "" if self.packs and is_linear else "they are no linears'"
            made = None if why else self._packed(weight, part.bias)
            if isinstance(made, StoredLinear):
                module.set_submodule(path, made.train(part.training))
            else:
                self._spell(part, "weight", name, turned=kind.__name__ == "Conv1D")
                told[made or why] += 1
        return self._notes(told)

    def _notes(self, told: Counter[str]) -> list[str]:
        total, float_ = len(self.stored), sum(told.values())
        merged = sum(t.stride(0) != 0 for t in self.stand_ins.values())
        if merged:
            told["the model has them merged, or in another dtype"] += merged
        found = []
        if kept := total - float_ - merged:
            bits = sorted({w.bits for w in self.stored.values() if isinstance(w, Codes)})
            shown = " and ".join(map(str, bits))
            found.append(
                f"{kept} weights of linears are stored in {shown} bits as {self.method} has them, "
                "and stay so."
            )
        if told and not self.packs:
            told = Counter({"the adapter is added to them": total})
        for why, count in told.items():
            found.append(f"{count} weights that {self.method} stored are floats here: {why}.")
        return found

    def _spell(self, part: torch.nn.Module, key: str, name: str, *, turned: bool = False) -> None:
        numbers = self._numbers(self.stored[name])
        setattr(part, key, torch.nn.Parameter(numbers.T if turned else numbers, False))

    def _numbers(self, weight: Stored) -> torch.Tensor:
        found = torch.empty(weight.shape, dtype=self.dtype)
        for rows in in_rows(weight.shape):
            found[rows] = weight.numbers(rows.start, rows.stop)
        return self._keep(found)

    def _packed(self, weight: Stored, bias: torch.nn.Parameter | None) -> StoredLinear | str:
        """A linear with the same codes, or why its kernel can't have them."""
        if not isinstance(weight, Codes):
            return "no kernel looks numbers up in a table"
        scales = weight.scales.to(self.dtype)
        if not torch.equal(scales.to(weight.scales.dtype), weight.scales):
            return f"their scales aren't numbers of {str(self.dtype).removeprefix('torch.')}"
        order = torch.argsort(weight.groups, stable=True)
        sizes = torch.bincount(weight.groups, minlength=scales.shape[1]).tolist()
        block = _block(sizes)
        if block is None:
            return "no kernel has blocks as their groups are"
        rows, width = weight.shape
        blocks = -(-width // block)
        of_block = weight.groups[order][::block]
        codes = torch.empty(rows, blocks, block * weight.bits // 8, dtype=torch.uint8)
        is_sorted = bool((order[1:] > order[:-1]).all())
        for part in in_rows(weight.shape):
            found = weight.read(part.start, part.stop)
            found = found if is_sorted else found[:, order]
            whole = torch.nn.functional.pad(found, (0, blocks * block - width))
            whole = whole.reshape(-1, blocks, block)
            codes[part] = whole if weight.bits == 8 else whole[..., ::2] | whole[..., 1::2] << 4
        tensors = {
            "codes": self._keep(codes),
            "scales": scales[:, of_block].contiguous(),
            "zeros": None if weight.zeros is None else weight.zeros[:, of_block].contiguous(),
            "order": None if is_sorted else order,
        }
        return StoredLinear(weight.bits, weight.shape, tensors, bias)


def _block(sizes: list[int]) -> int | None:
    """The columns of a block such that none has columns of two groups, of these sizes."""
    if len(sizes) == 1:
        return next((block for block in _BLOCKS if block >= sizes[0]), _BLOCKS[-1])
    fitting = (b for b in reversed(_BLOCKS) if all(size % b == 0 for size in sizes[:-1]))
    return next(fitting, None)


def _ends(name: str, other: str) -> bool:
    return name == other or name.endswith(f".{other}") or other.endswith(f".{name}")


def _place(data: torch.Tensor | None) -> int | None:
    if data is None or data.is_meta or data.layout is not torch.strided:
        return None
    return data.untyped_storage().data_ptr()
