"""Writes docs/benchmarks.md from bench/results/*.json: no figure on it is typed by hand.

python -m bench.page
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from attngraph.export.families import FAMILIES
from attngraph.export.kernels.weight_only import FORMS
from attngraph.measuring.engines import OURS, PACKED
from attngraph.measuring.load import Load
from bench import page_costs, quantized
from bench.harness import options_of
from bench.machine import RESULTS, measured_on, read, was_measured
from bench.plot import IMAGE, plot

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def _speed() -> list[str]:
    """Every workload that was measured on the CPU, as a plot and a table each."""
    families = speed_by_family()
    if not families:
        return ["## Time per call", "", "Not measured yet: `make bench` measures it."]
    weak = weakest(families)
    plot(families[weak])
    lines = [
        "## Time per call",
        "",
        "Each engine runs in a process of its own, in float32, on the same inputs with the same "
        "number of threads; blocks of calls alternate. An engine is timed only if its outputs are "
        "within the error budget of eager PyTorch against float64. The ONNX files have dynamic "
        "sizes. Milliseconds per call are medians over the rounds, with the least and the most; "
        "the ratio is the median, over the rounds, of an engine's time over attngraph's.",
        "",
        f"On {weak}:",
        "",
        f"![time of every engine over attngraph's]({IMAGE.name})",
        "",
        "The time of the fastest other engine ÷ attngraph's, on each family of CPUs:",
        "",
        *headline(families),
    ]
    for family, workloads in families.items():
        for result in workloads.values():
            lines += ["", *_workload(result, f"{result['title']}, {family}")]
    return lines


def speed_by_family() -> dict[str, dict[str, Any]]:
    """The results of each family of CPUs that was measured, by workload."""
    known = {family: RESULTS / f"speed-{family}.json" for family in FAMILIES}
    return {
        family: json.loads(path.read_text())["workloads"]
        for family, path in known.items()
        if path.exists()
    }


def weakest(families: dict[str, dict[str, Any]]) -> str:
    """The family on which attngraph leads by the least, on the workloads that all of them have."""
    ratios = {
        family: {
            title: ratio for result in workloads.values() for title, _, ratio in _summary(result)
        }
        for family, workloads in families.items()
    }
    shared = set.intersection(*map(set, ratios.values()))

    def lead(family: str) -> float:
        found = ratios[family]
        return statistics.geometric_mean([found[title] for title in shared or found])

    return min(families, key=lead)


def headline(families: dict[str, dict[str, Any]]) -> list[str]:
    """A table of every workload, with a column for each family."""
    cells: dict[str, dict[str, str]] = {}
    for family, workloads in families.items():
        for result in workloads.values():
            for title, engine, ratio in _summary(result):
                cells.setdefault(title, {})[family] = f"{ratio:.2f} ({engine})"
    lines = [f"| workload | {' | '.join(families)} |", f"| --- |{' --- |' * len(families)}"]
    for title, found in cells.items():
        row = [found.get(family, "not measured") for family in families]
        lines.append(f"| {title} | {' | '.join(row)} |")
    return lines


def _summary(result: dict[str, Any]) -> list[tuple[str, str, float]]:
    """For each form of attngraph that was timed: the fastest other engine of the same run."""
    timed = {row["engine"]: row for row in result["rows"] if row["median_ms"] is not None}
    others = [row for name, row in timed.items() if not name.startswith(OURS) and row["parity"]]
    if not others:
        return []
    found = []
    for name, how in ((OURS, ""), (PACKED, ", `--ignore-padded-rows`")):
        if name in timed:
            ratios = [(_ratio(row, timed[name]), str(row["title"])) for row in others]
            ratio, title = min(ratios)
            found.append((f"{result['title']}{how}", title, ratio))
    return found


def _ratio(row: dict[str, Any], ours: dict[str, Any]) -> float:
    """The median over the rounds, in each of which both ran."""
    rounds = zip(row["ms"], ours["ms"], strict=True)
    return float(statistics.median(theirs / own for theirs, own in rounds))


def _workload(result: dict[str, Any], title: str | None = None) -> list[str]:
    whole, measured = result["layers"]["whole"], result["layers"]["measured"]
    cut = f"{measured} of its {whole} layers" if measured < whole else f"all {whole} layers"
    lines = [
        f"### {title or result['title']}",
        "",
        f"{cut[0].upper()}{cut[1:]}, {result['threads']} threads, {result['rounds']} rounds.",
        "",
        "| engine | ms per call | time ÷ attngraph's | error ÷ budget | CPU time of its file |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {' | '.join(_engine(row))} |" for row in result["rows"]]
    load = [str(Load(**result["load"]))] if "load" in result else []
    return [*lines, "", " ".join([measured_on(result), *load])]


def _engine(row: dict[str, Any]) -> list[str]:
    made = "" if row["prepare_cpu_s"] is None else f"{row['prepare_cpu_s']:.1f} s"
    if row["median_ms"] is None:
        reason = row["reason"].replace("|", "\\|")
        return [row["title"], f"{row['status']}: {reason}", "", "", made]
    parity, ms = row["parity"], row["ms"]
    if parity is None:
        told = f"{row['error']:.2%} of the outputs' rms"
    else:
        told = f"{parity['error'] / parity['budget'] if parity['budget'] else 0.0:.2f}"
    time = f"{row['median_ms']:.1f} ({min(ms):.1f} to {max(ms):.1f})"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return [row["title"], time, ratio, told, made]


def _node_count() -> list[str]:
    result = read("node_count")
    lines = [
        "## Nodes",
        "",
        "12 layers, dynamic batch and sequence, nodes of the ONNX graph as it is lowered.",
        "",
    ]
    for model in result["models"]:
        by_op = ", ".join(f"{n:g} {op}" for op, n in model["per_layer_by_op"].items())
        lines.append(
            f"- {model['model']} for {model['target']}: {model['nodes']}, "
            f"{model['per_layer']:g} per layer ({by_op})."
        )
    return [*lines, "", measured_on(result)]


def _kernels() -> list[str]:
    """Three choices among onnxruntime's CPU kernels, where they were measured."""
    if not was_measured("kernels"):
        return []
    result = read("kernels")
    norm, projections, attention = (result[name] for name in ("norm", "projections", "attention"))
    lines = [
        "## Three choices for the CPU's kernels",
        "",
        f"Milliseconds on {result['threads']} threads: a residual norm of {norm['rows']} rows of "
        f"{norm['width']}; the projections of Q, K and V, each {projections['width']} wide; and "
        f"`Attention` with {attention['heads']} heads of 64 over "
        f"{attention['length']} tokens under a bool mask. A session of attngraph counts denormals "
        'as zero (`session.set_denormal_as_zero` is "1"); elsewhere that has to be set.',
        "",
    ]
    for part in (norm, projections, attention):
        lines += [f"- {name}: {ms:.2f}" for name, ms in part["ms"].items()]
    return [*lines, "", measured_on(result), ""]


def _weight_only() -> list[str]:
    """A linear with a quantized weight, in every form."""
    if not was_measured("weight_only"):
        return []
    result = read("weight_only")
    rows = list(next(iter(result["forms"].values())))
    lines = [
        "## Weight-only quantization",
        "",
        f"A linear of {result['width']} × {result['width']} on {result['threads']} threads, for "
        f"{' and '.join(rows)} rows: its time over that of the product in float32 of the same "
        f"round (median of {result['rounds']}; one session open at a time), and its error against "
        "the weight that the codes stand for over the error of that product. `--weights` uses "
        "the forms in bold; accuracy 4 rounds activations to int8, which is out of the error "
        "budget of kernels.",
        "",
        f"| form | {' | '.join(f'time, {n} | error, {n}' for n in rows)} |",
        f"| --- | {' | '.join(['--- | ---'] * len(rows))} |",
    ]
    for name, by_rows in result["forms"].items():
        title = f"**{name}**" if name in FORMS.values() else name
        cells = [
            f"{statistics.median(found['ratios']):.2f} | {found['error']:.3g}"
            for found in by_rows.values()
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return [*lines, "", measured_on(result), ""]


def _quantized() -> list[str]:
    """Rounded activations beside `quantize_dynamic`, and decoders beside genai's builder."""
    lines: list[str] = []
    if was_measured("quantized"):
        result = read("quantized")
        lines += [
            "## Int8 activations",
            "",
            f"Layers in each stack: {result['layers']}. Random weights, as they are, with "
            "peaked attention and with outlying features (bench/quantized.py); "
            f"threads: {result['threads']}. Error: rms on other inputs than the compile saw, over "
            "the output's. Time: median over the rounds of CPU time over that of attngraph int8.",
            "",
            "| workload | weights | error of quantize_dynamic | of attngraph int8 | time of "
            "quantize_dynamic | of attngraph in float32 |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in result["rows"]:
            errors = {name: f"{each['error']:.2%}" for name, each in row["engines"].items()}
            times = [quantized.ratio(row, name) for name in (quantized.NAIVE, quantized.FLOAT)]
            told = [errors.get(name, "none") for name in (quantized.NAIVE, quantized.OURS)]
            told += ["none" if time is None else f"{time:.2f}" for time in times]
            lines.append(f"| {row['workload']} | {row['kind']} | {' | '.join(told)} |")
        commits = sorted({row.get("commit", "") for row in result["rows"]} - {""})
        of = f" Rows are of the commits {', '.join(commits)}." if len(commits) > 1 else ""
        lines += ["", f"{_before(result)} {measured_on(result)}{of}", ""]
    if was_measured("quantized_decoding"):
        result = read("quantized_decoding")
        lines += [
            "## Decoding in int4",
            "",
            f"The Llama-shaped model, {result['layers']} layers, behind {result['past']} tokens, "
            "against onnxruntime-genai with what its builder writes (bench/quantized_decoding.py), "
            f"threads: {result['threads']}. Median CPU milliseconds; genai computes the logits of "
            "the whole prompt. Error: of the logits behind the prompt.",
            "",
            "| engine | prompt | step | error |",
            "| --- | --- | --- | --- |",
        ]
        for name, row in result["engines"].items():
            prompt, step = statistics.median(row["prompt"]), statistics.median(row["step"])
            lines.append(f"| {name} | {prompt:.0f} | {step:.2f} | {row['error'][0]:.2g} |")
        lines += ["", f"{_before(result)} {measured_on(result)}", ""]
    return lines


def _before(result: dict[str, Any]) -> str:
    """What the machine did when a run began."""
    load = Load(result["others"])
    if load.is_trusted:
        return "The machine was quiet when it began."
    return "The machine was busy when it began: errors hold, times only roughly."


_DECODED = {"decode": "Llama", "decode_qwen3_next": "Qwen3-Next", "decode_mamba2": "Mamba-2"}


def _decode() -> list[str]:
    """The decoding step of each model of which it was measured."""
    known = [(f"{n}-{family}", shape) for n, shape in _DECODED.items() for family in FAMILIES]
    found = [(name, shape) for name, shape in known if was_measured(name)]
    lines = ["## A decoding step", ""] if found else []
    for name, shape in found:
        lines += _decoded(read(name), shape)
    return lines


def _decoded(result: dict[str, Any], shape: str) -> list[str]:
    size = result["model"]
    lines = [
        f"A {shape}-shaped model of {size['layers']} layers and {size['parameters'] / 1e6:.0f} M "
        f"parameters in {size['dtype']}, batch {result['batch']}, {result['past']} tokens in the "
        f"cache, {result['threads']} threads. Milliseconds per token: the median, then the least "
        "and the most of the rounds.",
        "",
    ]
    lines += [
        "| engine | ms per token | × eager | tokens as eager's |",
        "| --- | --- | --- | --- |",
    ]
    count, has_states = result["tokens"], size.get("name", "llama") != "llama"
    for name, times in result["ms_per_token"].items():
        same = result["same_tokens"].get(name, count)
        ratio = result["ratios"][name]
        spread = f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
        if has_states and name.startswith("torch.compile"):
            name = "torch.compile, growing cache"  # transformers has no other for states
        lines.append(f"| {name} | {spread} | {ratio:.2f} | {same} of {count} |")
    for name, reason in result["failed"].items():
        lines.append(f"\n{name} is left out: {reason.rstrip('.')}.")
    return [*lines, "", measured_on(result), ""]


def _bounds() -> list[str]:
    """What the products alone cost, on each family of CPUs where it was measured."""
    known = [f"bounds-{family}" for family in FAMILIES]
    results = [read(name) for name in known if was_measured(name)]
    if not results:
        return []
    lines = [
        "## What the products alone cost",
        "",
        "Median milliseconds, with the least and the most of the rounds; stacks cut to 4 layers, "
        "but for the decoding step with its 12. The products are those of the linears, of experts "
        "(each with as many rows as the others) and of the attentions (half of them, where "
        "causal), and nothing else is computed. The last column is eager's time over that of all "
        "products in onnxruntime: what no float32 file for onnxruntime can exceed, whatever it "
        "fuses.",
    ]
    for result in results:
        lines += ["", *_bounds_on(result), "", measured_on(result)]
    return [*lines, ""]


def _bounds_on(result: dict[str, Any]) -> list[str]:
    engines = list(next(iter(result["workloads"].values()))["ms"])
    lines = [
        f"| workload, {result['threads']} threads | {' | '.join(engines)} | bound |",
        f"| --- |{' --- |' * (len(engines) + 1)}",
    ]
    for found in result["workloads"].values():
        cells = [
            f"{statistics.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})"
            for ms in found["ms"].values()
        ]
        lines.append(f"| {found['title']} | {' | '.join(cells)} | {found['bound']:.2f} |")
    return lines


def page() -> str:
    """The whole page; the plot is drawn beside it."""
    lines = [
        "# Benchmarks",
        "",
        "Generated by `make bench` from bench/results; not written by hand.",
        "",
        *_speed(),
        "",
        *_decode(),
        *_bounds(),
        *_kernels(),
        *_weight_only(),
        *_quantized(),
        *page_costs.compile_time(),
        *page_costs.static_sizes(),
        "",
        *page_costs.memory(),
        *page_costs.checkpoint(),
        *page_costs.start(),
        *page_costs.soak(),
        *_node_count(),
        "",
        "## CUDA",
        "",
        *_cuda(),
        "",
    ]
    return "\n".join(lines)


def _cuda() -> list[str]:
    found = sorted(RESULTS.glob("speed_cuda_*.json"))
    if not found:
        return [
            "No times: a GPU was lent for 15 minutes in all, and they went into what is right on "
            "it ([onnxruntime.md](onnxruntime.md#on-cuda)). `make gpu OUT=dir` measures the same "
            "workloads against eager PyTorch and torch.compile with CUDA graphs."
        ]
    lines = []
    for path in found:
        lines += [f"Precision {path.stem.rpartition('_')[2]}.", ""]
        for result in read(path.stem)["workloads"].values():
            lines += [*_workload(result), ""]
    return lines[:-1]


if __name__ == "__main__":
    options_of(__doc__)
    PAGE.write_text(page())
    print(PAGE)
