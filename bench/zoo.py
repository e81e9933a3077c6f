"""The zoo's page: what each example becomes, its size and its time per call, before and after.

    python -m bench.zoo [--only NAME …] [--rounds 5]

"Before" is the same model lowered without any pass, "after" the optimised one, both on onnxruntime.
Each runs in a process of its own, on the sample inputs; their blocks take turns. Writes
bench/results/zoo.json and docs/zoo.md; with --only those rows of them, with the commit of each.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import torch
from torch.utils import _pytree as pytree

import attngraph
from attngraph.export.files.save import save
from attngraph.export.lowering.lower import lower
from attngraph.frontend.model import Model, trace
from attngraph.measuring.turns import timed
from bench.harness import in_turns, options_of
from bench.machine import RESULTS, describe, write
from examples.zoo import ENTRIES, Entry

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "zoo.md"
SECONDS = 0.3


def block_of(model: str, inputs: str) -> Callable[[], float]:
    """A block says the milliseconds per call."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    feeds = dict(np.load(inputs))
    for _ in range(3):
        session.run(None, feeds)
    return lambda: timed(lambda: session.run(None, feeds), SECONDS)


def measure(entry: Entry, rounds: int) -> dict[str, Any]:
    """One row: sites, nodes and milliseconds."""
    module, args, shapes = entry.build()
    optimized = attngraph.optimize(module, args, dynamic_shapes=shapes)
    plain = lower(trace(Model.of_module(module, args, shapes)).graph)
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        save(plain, here / "before.onnx")
        optimized.save(here / "after.onnx")
        names = optimized.session.input_names
        feeds: dict[str, Any] = dict(zip(names, (t.numpy() for t in tensors), strict=True))
        np.savez(here / "inputs.npz", **feeds)
        times = _times(here, rounds)
    told = {
        "fused": "{0.mask} → {0.op}",
        "recurrence": "{0.code} → {0.op}",
        "declined": "declined: {0.code}",
    }
    sites = [
        told.get(site.code, told.get(site.status, "{0.code}")).format(site)
        for site in optimized.report.sites
    ]
    parity = optimized.report.parity
    assert parity is not None
    return {
        "name": entry.name,
        "what": entry.what,
        "sites": sites,
        "nodes": {"before": _count(plain.graph), "after": _count(optimized.model.graph)},
        "ms": times,
        "error": parity.worst.error,
        "budget": parity.worst.budget,
    }


def _count(graph: onnx_ir.Graph) -> int:
    """Nodes, those in the bodies of loops and branches included."""
    total = 0
    for node in graph:
        total += 1
        for held in node.attributes.values():
            if held.type == onnx_ir.AttributeType.GRAPH:
                total += _count(held.as_graph())
    return total


def _times(folder: Path, rounds: int) -> dict[str, list[float]]:
    inputs = str(folder / "inputs.npz")
    files = {name: str(folder / f"{name}.onnx") for name in ("before", "after")}
    engines = {name: {"model": file, "inputs": inputs} for name, file in files.items()}
    return in_turns(block_of, engines, rounds)


def page(found: dict[str, Any]) -> str:
    """docs/zoo.md from the results."""
    machine = found["measured_on"]
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    own = {row["name"]: row["commit"] for row in found["rows"] if "commit" in row}
    later = "".join(f"; `{name}` at {commit}" for name, commit in own.items())
    lines = [
        "# The zoo",
        "",
        "Every model of examples/, optimised for the CPU. This page is made by `python -m "
        "bench.zoo`; `tests/zoo` holds each row to its entry in examples/zoo.py. A site is told "
        "by what its mask became, or by the [remark](remarks.md) that names it. *Before* is the "
        "same model without any pass, on onnxruntime as well. Times are medians of blocks that "
        "take turns, at the sample's sizes, which are tiny: what they show is overhead, not "
        "arithmetic.",
        "",
        f"Measured on {machine['machine']} with {machine['cores']} cores, Python "
        f"{machine['python']}, {packages}, at commit {machine['commit']}{later}.",
        "",
        "| example | what | attention | nodes | ms per call | ratio | error ÷ budget |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        nodes, times = row["nodes"], row["ms"]
        before, after = (statistics.median(times[name]) for name in ("before", "after"))
        counted: dict[str, int] = {}
        for site in row["sites"]:
            counted[site] = counted.get(site, 0) + 1
        told = "; ".join(f"{count} × {site}" for site, count in counted.items()) or "none"
        lines.append(
            f"| `{row['name']}` | {row['what']} | {told} | {nodes['before']} → {nodes['after']} | "
            f"{before:.3f} → {after:.3f} | {before / after:.2f} | "
            f"{row['error'] / row['budget']:.2f} |"
        )
    lines += [
        "",
        "## Seeing it",
        "",
        "`examples/alignment.py` trains Bahdanau's attention for a few seconds on a language that "
        "is written backwards with other words. The weights of the optimised model, a row for "
        "each word written and a column for each word read:",
        "",
        "![The alignment runs along the other diagonal](alignment.svg)",
        "",
        "`attngraph attend MODEL -o attention.html` draws the weights of any model's attentions.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    options = options_of(__doc__, only=[], rounds=5)
    chosen = [entry for entry in ENTRIES if not options.only or entry.name in options.only]
    rows = []
    for entry in chosen:
        rows.append(measure(entry, options.rounds))
        print(entry.name, rows[-1]["nodes"], flush=True)
    if options.only:
        found = json.loads((RESULTS / "zoo.json").read_text("utf-8"))
        commit = describe()["commit"]
        new = {row["name"]: row | {"commit": commit} for row in rows}
        every = {row["name"]: row for row in found["rows"]} | new
        found["rows"] = [every[entry.name] for entry in ENTRIES if entry.name in every]
        (RESULTS / "zoo.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    else:
        found = json.loads(write("zoo", {"rows": rows}).read_text("utf-8"))
    PAGE.write_text(page(found), "utf-8")


if __name__ == "__main__":
    main()
