"""docs/speed.svg: the time of every engine over attngraph's, from bench/results/speed-*.json."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from attngraph.measuring.engines import BY_NAME, OURS

IMAGE = Path(__file__).parents[1] / "docs" / "speed.svg"
_COLOURS = ("#4e79a7", "#f28e2b", "#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#59a14f", "#e15759")


def plot(workloads: dict[str, Any], path: Path = IMAGE) -> Path:
    """One group of bars for each workload, with the spread over the rounds; 1 is attngraph.

    The same figures give the same file.
    """
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "attngraph"
    from matplotlib import pyplot

    engines = [e.name for e in BY_NAME.values() if e.name != OURS and not e.quantized]
    height = 0.8 / len(engines)
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.95 * len(workloads)))
    for row, name in enumerate(engines):
        places, ratios, spreads = [], [], []
        for group, result in enumerate(workloads.values()):
            if (found := _ratios(result, name)) is not None:
                middle = statistics.median(found)
                places.append(group - 0.4 + height * (row + 0.5))
                ratios.append(middle)
                spreads.append((middle - min(found), max(found) - middle))
        axes.barh(
            places,
            ratios,
            height * 0.9,
            xerr=list(zip(*spreads, strict=True)) if spreads else None,
            color=_COLOURS[row],
            label=BY_NAME[name].title,
            error_kw={"elinewidth": 0.8, "ecolor": "#555555"},
        )
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(workloads)), [result["title"] for result in workloads.values()])
    axes.invert_yaxis()
    axes.set_xlabel("time ÷ attngraph's time in the same run (right of 1: attngraph is faster)")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.3, -0.08), ncols=2)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return path


def _ratios(result: dict[str, Any], engine: str) -> list[float] | None:
    """Its time over attngraph's, round by round; None where one of them was not timed."""
    times = {row["engine"]: row["ms"] for row in result["rows"]}
    theirs, ours = times.get(engine), times.get(OURS)
    if not theirs or not ours:
        return None
    return [a / b for a, b in zip(theirs, ours, strict=True)]
