"""Decoders in int4 against the files of onnxruntime-genai's builder: a prompt, a step, the error.

    python -m bench.quantized_decoding [--layers 4] [--past 1024] [--rounds 5] [--threads 1]
        [--anyway]

The Llama-shaped model of bench.decode. The builder's int4 is at accuracy level 4, its own choice
for the CPU; ours is with and without `--activations int8`, which is that level. A round takes one
prompt, and then some steps; the error is that of the logits behind the prompt, against float32.
CPU time, as in bench.quantized. onnxruntime-genai is left out where it isn't installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attngraph.measuring.load import before
from bench.decode import model
from bench.harness import in_process, in_turns, options_of
from bench.machine import write

STEPS = 16
OURS: dict[str, dict[str, Any]] = {
    "attngraph": {},
    "attngraph int4": {"weights": "int4"},
    "attngraph int4, int8 activations": {"weights": "int4", "activations": "int8"},
}
GENAI = {"genai": "fp32", "genai int4": "int4"}
BEST, THEIRS = "attngraph int4, int8 activations", "genai int4"


def _prompt(past: int) -> torch.Tensor:
    return torch.randint(32000, (1, past), generator=torch.Generator().manual_seed(1))


def prepare(folder: str, layers: int, past: int, threads: int) -> dict[str, str]:
    """Writes each engine's files; which failed, and why."""
    import attngraph

    module, place, failed = model(layers), Path(folder), dict[str, str]()
    with torch.no_grad():
        torch.save(module(_prompt(past)).logits[0, -1], place / "exact.pt")
    room: dict[str, Any] = {"cache": "static", "max_length": past + STEPS + 2}
    for name, options in OURS.items():
        made = attngraph.optimize_decoder(module, **room, **options, verify="off", padding=False)
        made.save(place / f"{name}.onnx")
    if importlib.util.find_spec("onnxruntime_genai") is None:
        return dict.fromkeys(GENAI, "onnxruntime-genai isn't installed")
    module.save_pretrained(place / "model")
    _tokenizer(place / "model")
    for name, precision in GENAI.items():
        command = [sys.executable, "-W", "ignore", "-m", "onnxruntime_genai.models.builder"]
        command += ["-i", str(place / "model"), "-o", str(place / name), "-c", str(place / "cache")]
        command += ["-p", precision, "-e", "cpu"]
        more = ["--extra_options", "int4_accuracy_level=4"] if precision == "int4" else []
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
        if done.returncode:
            failed[name] = done.stderr.strip().splitlines()[-1][:200]
            continue
        file = place / name / "genai_config.json"
        config = json.loads(file.read_text())
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
        file.write_text(json.dumps(config))
    return failed


def _tokenizer(folder: Path) -> None:
    """Any: the builder copies one, and nothing here is text."""
    import transformers
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"t{at}": at for at in range(100)}, unk_token="t0"))
    special = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    fast: Any = transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=words, **special).save_pretrained(folder)


Round = Callable[[], tuple[float, float, torch.Tensor]]
"""CPU seconds of a prompt, those of a step, and the logits behind the prompt."""


def _genai(folder: Path, prompt: torch.Tensor) -> Round:
    onnxruntime_genai: Any = importlib.import_module("onnxruntime_genai")
    opened = onnxruntime_genai.Model(str(folder))
    room = prompt.shape[1] + STEPS + 2

    def turn() -> tuple[float, float, torch.Tensor]:
        settings = onnxruntime_genai.GeneratorParams(opened)
        settings.set_search_options(max_length=room, min_length=room, do_sample=False)
        generator = onnxruntime_genai.Generator(opened, settings)
        start = time.process_time()
        generator.append_tokens(prompt.int().numpy())
        logits = torch.from_numpy(generator.get_output("logits")[0, -1].copy())
        read = time.process_time()
        generator.generate_next_token()  # of the prompt's logits
        between = time.process_time()
        for _ in range(STEPS):
            generator.generate_next_token()
        return read - start, (time.process_time() - between) / STEPS, logits

    return turn


def _ours(file: Path, prompt: torch.Tensor, threads: int) -> Round:
    from attngraph import Decoder

    decoder = Decoder.load(file, "cpu", threads=threads)

    def turn() -> tuple[float, float, torch.Tensor]:
        start = time.process_time()
        found, cache = decoder(prompt)
        read, logits = time.process_time(), found[0, -1]
        token = found[:, -1:].argmax(-1)
        for _ in range(STEPS):
            found, cache = decoder(token, None, cache)
            token = found[:, -1:].argmax(-1)
        return read - start, (time.process_time() - read) / STEPS, logits

    return turn


def block_of(folder: str, engine: str, past: int, threads: int) -> Callable[[], dict[str, float]]:
    """A round: CPU milliseconds of the prompt and of a step, and the error of the logits."""
    torch.set_num_threads(threads)
    place, prompt = Path(folder), _prompt(past)
    exact = torch.load(place / "exact.pt").double()
    turn = (
        _genai(place / engine, prompt)
        if engine in GENAI
        else _ours(place / f"{engine}.onnx", prompt, threads)
    )
    turn()

    def block() -> dict[str, float]:
        read, step, logits = turn()
        off = float((logits.double() - exact).norm() / exact.norm())
        return {"prompt": 1e3 * read, "step": 1e3 * step, "error": off}

    return block


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    given = {"past": options.past, "threads": options.threads}
    with tempfile.TemporaryDirectory() as folder:
        failed = in_process(prepare, folder=folder, layers=options.layers, **given)
        names = [name for name in (*OURS, *GENAI) if name not in failed]
        engines = {name: {"folder": folder, "engine": name, **given} for name in names}
        found = in_turns(block_of, engines, options.rounds, failed=failed)
    rows = {
        name: {key: [block[key] for block in blocks] for key in blocks[0]}
        for name, blocks in found.items()
    }
    return {**given, "layers": options.layers, "engines": rows, "failed": failed}


def main() -> None:
    options = options_of(__doc__, layers=4, past=1024, rounds=5, threads=1, anyway=False)
    load = before()
    if not (load.is_trusted or options.anyway):
        raise SystemExit(f"{load} Nothing was measured.")
    result = {**_measured(options), "others": load.others}
    for name, row in result["engines"].items():
        said = ", ".join(f"{key} {sorted(all_)[len(all_) // 2]:.4g}" for key, all_ in row.items())
        print(f"{name:34} {said}")
    print(result["failed"] or "all engines ran", write("quantized_decoding", result))


if __name__ == "__main__":
    main()
