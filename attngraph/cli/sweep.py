"""`attngraph sweep`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from attngraph.cli.exit_codes import INTERRUPTED, TERMINATED
from attngraph.cli.failures import fail, reported
from attngraph.cli.flags import DebugOption, JsonOption, grouped
from attngraph.cli.optimize import optimize
from attngraph.cli.render_sweep import print_record, print_sweep
from attngraph.errors import UsageError
from attngraph.flag import Flag
from attngraph.sweeping.isolation import Record, preload
from attngraph.sweeping.pools import Trial, on_ray, on_this_machine
from attngraph.sweeping.records import LOST, REFUSED, RIGHT, Records, held
from attngraph.sweeping.spec import Kind, Task, read_spec

_OWN = ("output", "report", "html", "json", "debug")
"""Flags of optimize that a sweep sets itself."""
_PRELOADED = ("torch.export._trace", "onnxruntime", "networkx", "attngraph.cli.work")


@grouped
def sweep(
    spec: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC.toml",
            show_default=False,
            help="Models, and the variants of options to compile each in.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT/",
            show_default=False,
            help="Where the results go: OUT/MODEL/VARIANT with its page beside it, and sweep.json.",
        ),
    ],
    jobs: Annotated[int, Flag("Compiles at a time, on this machine.", metavar="N", least=1)] = 1,
    cpus: Annotated[
        int | None,
        Flag(
            "Cores for each compile; by default all of this machine, shared among the jobs, "
            "or 1 of a Ray cluster.",
            metavar="N",
            least=1,
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        Flag("How long one compile may take.", metavar="SECONDS", least=1),
    ] = None,
    ray: Annotated[
        str | None,
        Flag(
            "Compile on the Ray cluster at this address, or auto; needs attngraph[ray], and "
            "the same files on every node.",
            metavar="ADDRESS",
        ),
    ] = None,
    again: Annotated[bool, Flag("Also compile what has a result already.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compile many models, each in many variants, and go on where it stopped.

    attngraph sweep SPEC.toml -o out/ --jobs 4

    Each compile has a process of its own. One that was killed, or whose model, options or versions
    changed since, is run again; the others are kept.
    """
    with reported(debug):
        if ray is not None and jobs != 1:
            raise UsageError("--jobs is for this machine; a Ray cluster decides how many run.")
        tasks = read_spec(spec, flags())
        with held(output):
            records = Records(output)
            kept = {} if again else {task.name: records.of(task) for task in tasks}
            left = [task for task in tasks if kept.get(task.name) is None]
            done = {name: record for name, record in kept.items() if record is not None}
            cores = cpus or (1 if ray else max(1, (os.cpu_count() or 1) // jobs))
            for record in _run(left, output, ray, jobs=jobs, cpus=cores, timeout=timeout):
                task = next(task for task in left if task.name == record["task"])
                if record.get("code") in (INTERRUPTED, TERMINATED):
                    raise KeyboardInterrupt
                done[task.name] = records.add(task, record)
                if not as_json:
                    print_record(record)
        found = [done[task.name] for task in tasks]
        if as_json:
            print(json.dumps(found, indent=2))
        else:
            print_sweep(found, kept=len(tasks) - len(left))
        if any(record["outcome"] != RIGHT for record in found):
            raise typer.Exit(1)


def _run(
    tasks: Sequence[Task],
    folder: Path,
    ray: str | None,
    *,
    jobs: int,
    cpus: int,
    timeout: float | None,
) -> Iterator[Record]:
    if not tasks:
        return iter(())
    here = os.getcwd()
    trials: list[Trial] = [
        ((task.name, task.arguments, str(task.output(folder)), here, cpus), _lost(task))
        for task in tasks
    ]
    if ray is not None:
        return on_ray(attempt, trials, address=ray, cpus=cpus, timeout=timeout)
    preload(*_PRELOADED)
    return on_this_machine(attempt, trials, jobs=jobs, timeout=timeout)


def _lost(task: Task) -> Record:
    return {"task": task.name, "outcome": LOST}


def attempt(name: str, arguments: Sequence[str], output: str, here: str, cpus: int) -> Record:
    """One compile, in a process of its own: what `attngraph optimize` says, in short.

    Its whole JSON and its page lie beside the output.
    """
    import torch

    os.chdir(here)
    torch.set_num_threads(cpus)
    path = Path(output)
    beside = path if path.suffix != ".onnx" else path.parent
    beside.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    page = beside.with_name(f"{beside.name}.html")
    said, failed, begin = io.StringIO(), io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(failed):
        code = _optimize(*arguments, "-o", output, "--report", str(page), "--json")
    record = {"task": name, "code": code, "seconds": round(time.perf_counter() - begin, 1)}
    if code:
        with contextlib.suppress(OSError):  # a file model's folder, made for it above and empty
            path.parent.rmdir()
        *_, last = failed.getvalue().strip().splitlines() or [f"It ended with code {code}."]
        error = last.removeprefix("attngraph: ").removeprefix("error: ")
        return {**record, "outcome": REFUSED, "error": error}
    report = json.loads(said.getvalue())
    beside.with_name(f"{beside.name}.json").write_text(said.getvalue(), "utf-8")
    return {**record, "outcome": RIGHT, **_figures(report)}


def _figures(report: dict[str, Any]) -> Record:
    parity = report["parity"]
    return {
        "nodes": report["nodes"],
        **report["attention"],
        "parity": None if parity is None else parity["error"] / parity["budget"],
        "bytes": report["output"]["bytes"],
        "output": report["output"]["path"],
    }


def flags() -> dict[str, Kind]:
    """The flags of `attngraph optimize` that a SPEC.toml may set, without their dashes."""
    found: dict[str, Kind] = {}
    for option in _command().params:
        given = (*option.opts, *option.secondary_opts)
        for name in (flag.removeprefix("--") for flag in given if flag.startswith("--")):
            if name not in _OWN:
                found[name] = "switch" if option.is_flag else "list" if option.multiple else "value"
    return found


def _command() -> Any:
    """`attngraph optimize`, as typer has it."""
    app = typer.Typer(add_completion=False)
    app.command()(optimize)
    return typer.main.get_command(app)


def _optimize(*line: str) -> int:
    """Runs one command line; returns its exit code, and what went wrong is on stderr."""
    try:
        code = _command()(line, prog_name="attngraph optimize", standalone_mode=False)
    except Exception as error:
        return fail(error, debug=False)
    return code if isinstance(code, int) else 0
