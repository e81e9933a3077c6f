"""Writes the generated parts of the documentation: `make docs`.

A part stands in a page between `<!-- generated: NAME -->` and `<!-- end -->`. No part holds a
timing of the run; tests/docs/test_generated.py compares each with what it would be now.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from attngraph.cli.app import run as command
from attngraph.compiling.pipeline import pipeline
from attngraph.export import to_onnx
from attngraph.frontend.model import Model, trace
from attngraph.ir import Graph, Node, format_graph
from attngraph.ir.printer import format_node
from attngraph.passes import label_of, purpose_of, run
from attngraph.passes.canonical.normal_form import FORMS
from attngraph.passes.loops.loop_bodies import LoopBodies
from bench import page as benchmarks
from bench import two_keys, versions
from examples import eager_attention, make_checkpoint
from tests.fuzz import results as fuzz
from tests.gpu.page import page as gpu_page
from tests.kernels import table
from tests.passes.spellings import SPELLINGS, spelled
from tests.runtimes import page as runtimes

ROOT = Path(__file__).parents[1]
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_ENTRY = re.compile(r"^### `([^`]+)`\n\n(.+?[.:])(?=\s)", re.MULTILINE | re.DOTALL)


def _fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text.rstrip()}\n```\n"


def session() -> str:
    """What `make demo` prints of a compilation, without its times."""
    commands = (
        ("python -m examples.make_checkpoint", make_checkpoint.main, "out/bert"),
        ("attngraph", command, "optimize out/bert -o out/onnx"),
    )
    shown = []
    for program, main, arguments in commands:
        printed = io.StringIO()
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(printed):
            code = main(arguments.split())
        assert code == 0, printed.getvalue()
        lines = printed.getvalue().splitlines(keepends=True)
        kept = "".join(text for text in lines if not text.startswith("  time "))
        shown.append(f"$ {program} {arguments}\n{kept}")
    return _fenced("".join(shown), "console")


def figures() -> str:
    """The times of the family of CPUs on which attngraph leads by the least."""
    families = benchmarks.speed_by_family()
    weak = benchmarks.weakest(families)
    return "\n".join(benchmarks.headline({weak: families[weak]})) + "\n"


def explain() -> str:
    """One attention that fuses and one that doesn't."""
    # For a family of its own, so that every machine generates the same.
    line = "explain --factory examples.talking_heads:build --target cpu:amx"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = command(line.split())
    assert code == 0, printed.getvalue()
    return _fenced(f"$ attngraph {line}\n{printed.getvalue()}", "console")


def passes() -> str:
    """The pipeline: what each pass does where it first stands, later its name alone."""
    lines: list[str] = []
    seen: set[str] = set()
    for is_again, items in groupby(
        pipeline(part=True, experts=True), lambda item: item.name in seen
    ):
        if is_again:
            lines.append(f"- again: {', '.join(item.name for item in items)}\n")
            continue
        for item in items:
            lines.append(
                f"- **{item.name}**: {purpose_of(item)} *{label_of(item).capitalize()}.*\n"
            )
            seen.add(item.name)
    for item in pipeline():
        for inner in item.stages if isinstance(item, LoopBodies) else ():
            if inner.name not in seen:
                purpose = f"{purpose_of(inner)} *{label_of(inner).capitalize()}.*"
                lines.append(f"- in loop-bodies alone: **{inner.name}**: {purpose}\n")
                seen.add(inner.name)
    return "".join(lines)


def codes() -> str:
    """Every entry of docs/remarks.md with its first sentence."""
    page = (ROOT / "docs" / "remarks.md").read_text(encoding="utf-8")
    rows = ["| code | meaning |\n| --- | --- |\n"]
    for code, text in _ENTRY.findall(page):
        meaning = re.split(r"(?<=[.:]) ", " ".join(text.split()))[0].rstrip(":.")
        rows.append(f"| [`{code}`](#{code}) | {meaning}. |\n")
    return "".join(rows)


def _captured() -> Graph:
    module, args, shapes = eager_attention.build()
    return trace(Model(module, None, args, {}, shapes)).graph


def ir() -> str:
    """The tutorial's attention, optimised."""
    graph = _captured()
    run(graph, pipeline())
    return _fenced(format_graph(graph))


def tutorial() -> str:
    """The graph as it was captured, what each pass changed, and the ONNX nodes."""
    graph = _captured()
    before = format_graph(graph, loc=False)
    parts = [f"## As captured\n\n{len(graph)} nodes.\n\n{_fenced(format_graph(graph))}"]
    for item in pipeline():
        count = len(graph)
        (result,) = run(graph, [item])
        after = format_graph(graph, loc=False)
        if after == before:
            continue
        said = "".join(f"> {remark}\n" for remark in result.remarks)
        parts.append(
            f"## {item.name}\n\n{_capitalised(purpose_of(item))} {count} → {len(graph)} nodes."
            f"\n\n{said}{chr(10) if said else ''}{_fenced(_changes(before, after), 'diff')}"
        )
        before = after
    parts.append(f"## Optimised\n\n{_fenced(format_graph(graph))}")
    checks = (
        "The first four nodes fail for sizes outside of the dims' ranges; they read no elements."
    )
    parts.append(f"## ONNX\n\n{checks}\n\n{_fenced(_onnx(graph))}")
    return "\n".join(parts)


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _changes(before: str, after: str) -> str:
    """A diff without the lines that stay, which are counted."""
    lines: list[str] = []
    same = 0
    for line in difflib.ndiff(before.splitlines(), after.splitlines()):
        if line[0] == "?":
            continue
        if line[0] == " ":
            same += 1
            continue
        if same:
            lines.append(f"  … {same} as before")
        lines.append(line)
        same = 0
    return "\n".join([*lines, f"  … {same} as before"] if same else lines)


def _onnx(graph: Graph) -> str:
    lines = []
    for node in to_onnx(graph).graph:
        inputs = ", ".join("" if value is None else str(value.name) for value in node.inputs)
        attrs = [f"{name}={attr.value}" for name, attr in node.attributes.items()]
        outputs = ", ".join(str(value.name) for value in node.outputs)
        text = f"{outputs} = {node.op_type}({inputs})"
        lines.append(f"{text} {{{', '.join(attrs)}}}" if attrs else text)
    return "\n".join(lines)


def kernels() -> str:
    """What onnxruntime computes otherwise, and what PyTorch leaves open."""
    return f"{table.page()}\n"


def gpu() -> str:
    """What was seen on a GPU."""
    return gpu_page()


def normal_form() -> str:
    """Each rule of the normal form, with every spelling that it knows and what it makes of it."""
    shown = []
    for rule in FORMS:
        lines = "".join(_respelled(op) for op in rule.ops if op in SPELLINGS)
        said = " ".join((inspect.getdoc(rule.apply) or "").split("\n\n")[0].split())
        shown.append(f"**{rule.name}**: {said}\n\n{_fenced(lines)}")
    return "\n".join(shown)


def _respelled(op: str) -> str:
    """A spelling, and below it what canonicalize writes; nothing where only an input is left."""
    graph = spelled(op)
    before = [_call(node) for node in graph]
    run(graph, "canonicalize")
    after = [_call(node) for node in graph] or [f"%{graph.outputs[0].name}"]
    return "".join(f"{line}\n" for line in before) + "".join(f"    → {line}\n" for line in after)


def _call(node: Node) -> str:
    return format_node(node, loc=False).rpartition(" : ")[0]


MAKERS: dict[str, Callable[[], str]] = {
    "codes": codes,
    "explain": explain,
    "fuzz": fuzz.page,
    "ir": ir,
    "kernels": kernels,
    "gpu": gpu,
    "normal-form": normal_form,
    "passes": passes,
    "runtimes": runtimes.page,
    "session": session,
    "figures": figures,
    "tutorial": tutorial,
    "two-keys": two_keys.page,
    "versions": versions.page,
}


def pages() -> list[Path]:
    """The pages that may hold generated parts."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def parts_of(page: Path) -> dict[str, str]:
    """The generated parts of a page, as they are there."""
    text = page.read_text(encoding="utf-8")
    return {
        found[2]: found[0].removeprefix(found[1]).removesuffix(found[3])
        for found in _PART.finditer(text)
    }


def write(page: Path) -> None:
    """Makes the parts of a page anew."""
    text = page.read_text(encoding="utf-8")
    page.write_text(_PART.sub(lambda part: part[1] + MAKERS[part[2]]() + part[3], text), "utf-8")


if __name__ == "__main__":
    for page in pages():
        if parts_of(page):
            write(page)
            print(page.relative_to(ROOT))
