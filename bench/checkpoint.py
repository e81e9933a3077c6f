"""A large checkpoint's folder to ONNX: peak memory, and the time against that of copying it.

    python -m bench.checkpoint [--layers 32] [--weights fp16 int4] [--rounds 1] [--folder DIR]

The folder is a Llama of 7 B parameters at 32 layers, in float16, in shards with an index. It is
written shard by shard into DIR (by default that of temporary files), which needs room for it three
times, and removed. Each compile is the command `attngraph optimize FOLDER --verify off` in a
process of its own. `peak_mib` is the most that it had in memory, pages of mapped files among it;
`anonymous_mib` leaves these out. Both a compile and the copy (`cp -r`) begin with none of the
folder's pages in memory, and end when what they wrote is on the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attngraph.measuring.load import Watch
from bench.harness import in_process, option, options_of
from bench.machine import write
from bench.memory import write_safetensors

_SHARD = 2 << 30  # bytes, at most
_EVERY = 0.02  # seconds between two looks at a process
_ROOM = 3.2  # times the folder: itself, its copy or the file made of it, and what is under way
_KTHREADD = "2"  # the parent of the kernel's threads
_ANONYMOUS = re.compile(r"RssAnon:\s+(\d+) kB")


def checkpoint(folder: str, layers: int) -> int:
    """Writes the folder, one weight in memory at a time; returns the number of parameters."""
    import torch
    from transformers import LlamaForCausalLM

    from bench.workloads import llama_config

    stored = {"dtype": "float16", "architectures": ["LlamaForCausalLM"]}
    config = llama_config(4096, layers, (32, 32), 11008, 32000, **stored)
    place = Path(folder)
    config.save_pretrained(place)
    with torch.device("meta"):
        named = LlamaForCausalLM(config).named_parameters()
        shapes = {name: tuple(value.shape) for name, value in named}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        size += 2 * torch.Size(shape).numel()
        if size > _SHARD:
            shards.append({})
            size = 2 * torch.Size(shape).numel()
        shards[-1][name] = shape
    random, count = torch.Generator().manual_seed(0), 0
    places: dict[str, str] = {}
    for number, held in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        count += write_safetensors(place / file, held, random)
        places |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": 2 * count}, "weight_map": places}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return count


def _cold(folder: Path) -> None:
    """Puts a folder's files on the disk, and takes their pages out of memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _kernel_seconds() -> float:
    """CPU seconds of the kernel's own threads so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that has ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += (int(fields[11]) + int(fields[12])) * (fields[1] == _KTHREADD)
    return ticks / os.sysconf("SC_CLK_TCK")


def _run(command: Sequence[str], source: Path, made: Path) -> dict[str, Any]:
    """Seconds until what a command makes is on the disk, its peaks in MiB, and others' load."""
    _cold(source)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    watch, start, anonymous, kernel = Watch(), time.perf_counter(), 0, _kernel_seconds()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        status = Path(f"/proc/{process.pid}/status")
        while True:
            ended, code, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            if found := _ANONYMOUS.search(status.read_text()):
                anonymous = max(anonymous, int(found[1]))
            time.sleep(_EVERY)
        process.returncode = os.waitstatus_to_exitcode(code)
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{log.read().decode()}")
    _cold(made)
    seconds = time.perf_counter() - start
    used, cpu = watch.load().others, usage.ru_utime + usage.ru_stime
    # The kernel's threads put on the disk what was written: that is no other's work.
    own = (cpu + _kernel_seconds() - kernel) / (seconds * (os.cpu_count() or 1))
    return {
        "seconds": seconds,
        "cpu_s": cpu,
        "others": None if used is None else max(0.0, used - own),
        "peak_mib": usage.ru_maxrss / 1024,
        "anonymous_mib": anonymous / 1024,
        "written_bytes": sum(p.stat().st_size for p in made.rglob("*") if p.is_file()),
    }


def _compile(source: Path, made: Path, weights: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", "attngraph", "optimize", str(source)]
    quantized = [] if weights == "fp16" else ["--weights", weights]
    return [*command, "-o", str(made), "--verify", "off", *quantized]


def _rounds(source: Path, made: Path, weights: str, rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {"compile": [], "copy": []}
    commands = {
        "compile": _compile(source, made, weights),
        "copy": ["cp", "-r", str(source), str(made)],
    }
    for _ in range(rounds):
        for name, command in commands.items():
            runs[name].append(_run(command, source, made))
            shutil.rmtree(made)
    pairs = zip(runs["compile"], runs["copy"], strict=True)
    return {
        "weights": weights,
        "ratios": [ours["seconds"] / copy["seconds"] for ours, copy in pairs],
        **runs,
    }


def main() -> None:
    options = options_of(
        __doc__,
        layers=32,
        weights=option(["fp16", "int4"], choices=["fp16", "int4", "int8"]),
        rounds=1,
        folder=tempfile.gettempdir(),
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        source, made = Path(scratch) / "checkpoint", Path(scratch) / "made"
        count = in_process(checkpoint, folder=str(source), layers=options.layers)
        size = 2 * count
        free = shutil.disk_usage(scratch).free
        if free < (_ROOM - 1) * size:
            raise SystemExit(f"{scratch} has {free >> 30} GiB left: too little for {size >> 30}.")
        rows = [_rounds(source, made, each, options.rounds) for each in options.weights]
    for row in rows:
        ours = row["compile"][-1]
        print(
            f"{row['weights']}: {max(each['peak_mib'] for each in row['compile']):.0f} MiB "
            f"({ours['anonymous_mib']:.0f} anonymous), {ours['seconds']:.0f} s, "
            f"{statistics.median(row['ratios']):.2f} × cp"
        )
    print(write("checkpoint", {"parameters": count, "rows": rows}))


if __name__ == "__main__":
    main()
