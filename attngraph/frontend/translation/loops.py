"""Loops that torch.export keeps: `torch._higher_order_ops.scan` as `attn.scan`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from attngraph.errors import CaptureError
from attngraph.frontend.sizes.symbols import Symbols
from attngraph.frontend.translation.functional import Functional, functional_body
from attngraph.frontend.translation.inline import BODY
from attngraph.frontend.translation.translate import Translator
from attngraph.ir.body_sizes import give_sizes
from attngraph.ir.builder import Builder
from attngraph.ir.graph import Value
from attngraph.ir.printer import used_dims


class LoopTranslator(Translator):
    """Translates a program that may hold loops."""

    def _call(self, node: fx.Node) -> None:
        if BODY in node.meta:
            self._scan(node)
        else:
            super()._call(node)

    def _scan(self, node: fx.Node) -> None:
        initial, sequences, given = (self._group(group) for group in node.args[1:4])
        module = node.meta[BODY]
        body = _Body(module, functional_body(self._program, module), self._symbols)
        body.named = [
            *(f"state_{at}" for at in range(len(initial))),
            *(f"step_{at}" for at in range(len(sequences))),
            *(f"given_{at}" for at in range(len(given))),
        ]
        body.finish()
        operands: Any = node.args[3]
        for outer, own in zip(operands, body.given(len(operands)), strict=True):
            if _is_size(outer) and self._read(outer) != body.size(own):
                raise CaptureError(f"The loop at {self._locator.of(node)} has a size of its own.")
        self.asked += [replace(each, value=None) for each in body.asked]
        lifted = [
            self.graph.add_constant(f"{node.name}.{name}", data) for name, data in body.lifted
        ]
        sizes = give_sizes(body.graph, Builder(self.graph, loc=self._locator.of(node)))
        created = self.graph.create(
            "attn.scan",
            [*initial, *sequences, *given, *lifted, *sizes],
            {
                "body": body.graph,
                "carried": len(initial),
                "scanned": len(sequences),
            },
            types=[self._type(value) for value in node.meta["val"]],
            names=[f"{node.name}_{at}" for at in range(len(node.meta["val"]))],
            loc=self._locator.of(node),
        )
        self._parts[node] = list(created.outputs)

    def _group(self, items: Any) -> list[Value]:
        """The tensors among what a loop is given; a size is that of its body as well."""
        return [self._tensor(item) for item in items if not _is_size(item)]


class _Body(LoopTranslator):
    """One step. What it reads is an input of its graph; `lifted` are constants of its own."""

    named: list[str]

    def __init__(self, module: fx.GraphModule, functional: Functional, symbols: Symbols) -> None:
        super().__init__(functional, symbols)
        self.graph.name = "step"
        self._module = module
        self.lifted: list[tuple[str, torch.Tensor]] = []

    def finish(self) -> None:
        results: list[Any] = self.run()
        self.graph.set_outputs(results, [f"result_{at}" for at in range(len(results))])
        used = used_dims(self.graph)
        infos = self._symbols.infos.items()
        self.graph.dims.update((name, info) for name, info in infos if name in used)

    def given(self, count: int) -> list[fx.Node]:
        """The last inputs, sizes included."""
        nodes = [node for node in self._functional.graph.nodes if node.op == "placeholder"]
        return nodes[len(nodes) - count :]

    def size(self, node: fx.Node) -> Any:
        return self._read(node)

    def _inputs(self) -> None:
        placeholders = [node for node in self._functional.graph.nodes if node.op == "placeholder"]
        nodes = [node for node in placeholders if not _is_size(node)]
        for name, node in zip(self.named, nodes, strict=True):
            self._values[node] = self.graph.add_input(name, self._type(node.meta["val"]))

    def _weight(self, node: fx.Node) -> Value:
        name, data = self._weights[node]
        if node not in self._values:
            self.lifted.append((name, data.detach()))
            self._values[node] = self.graph.add_input(name, self._type(data))
        return self._values[node]


def _is_size(item: Any) -> bool:
    value = item.meta.get("val") if isinstance(item, fx.Node) else item
    return isinstance(value, (int, torch.SymInt))
