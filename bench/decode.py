"""One decoding step behind a long past: the compiled decoder against eager PyTorch with its cache.

    python -m bench.decode [--past 1024] [--layers 12] [--rounds 9] [--steps 12]

A Llama-shaped model (12 heads, 4 of keys and values, width 768), batch 1. Each engine runs in a
process of its own, because onnxruntime's threads spin on after a call and slow their neighbours;
their blocks take turns. A block decodes a few tokens greedily from a cache of `past` tokens, as
`generate` does, token by token; the time is that of one token. Both start from the same prompt and
must give the same tokens, else no figure is written.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from attngraph.measuring.turns import Server, own_stdout, serve, take_turns
from bench.machine import write

ENGINES = ("eager", "attngraph")
_HEADS, _KEY_HEADS, _WIDTH, _HIDDEN, _VOCABULARY = 12, 4, 768, 2048, 32000

Block = Callable[[], tuple[float, list[int]]]
"""Decodes a few tokens from the past: milliseconds per token, and the tokens."""


def model(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    module: Any = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=_WIDTH,
            num_attention_heads=_HEADS,
            num_key_value_heads=_KEY_HEADS,
            num_hidden_layers=layers,
            intermediate_size=_HIDDEN,
            vocab_size=_VOCABULARY,
            max_position_embeddings=4096,
        )
    )
    return module.eval()


def _prompt(past: int) -> torch.Tensor:
    return torch.randint(_VOCABULARY, (1, past), generator=torch.Generator().manual_seed(1))


def _eager(options: argparse.Namespace) -> Block:
    from transformers import DynamicCache

    module, start = model(options.layers), DynamicCache()
    logits = module(_prompt(options.past), past_key_values=start, use_cache=True).logits

    def block() -> tuple[float, list[int]]:
        cache = copy.deepcopy(start)

        def step(token: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = module(token, past_key_values=cache, use_cache=True).logits
            return result

        return _timed(step, logits, options.steps)

    return block


def _compiled(options: argparse.Namespace) -> Block:
    from attngraph import Decoder

    decoder = Decoder.load(options.file)
    logits, start = decoder(_prompt(options.past))

    def block() -> tuple[float, list[int]]:
        cache = start

        def step(token: torch.Tensor) -> torch.Tensor:
            nonlocal cache
            found, cache = decoder(token, None, cache)
            return found

        return _timed(step, logits, options.steps)

    return block


def _timed(
    step: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor, steps: int
) -> tuple[float, list[int]]:
    token, tokens = logits[:, -1:].argmax(-1), []
    began = time.perf_counter()
    for _ in range(steps):
        token = step(token)[:, -1:].argmax(-1)
        tokens.append(int(token))
    return (time.perf_counter() - began) / steps * 1e3, tokens


def _serve(options: argparse.Namespace) -> None:
    """Answers with [milliseconds per token, tokens] of each block."""
    answers = own_stdout()
    with torch.no_grad():
        block = _eager(options) if options.engine == "eager" else _compiled(options)
        block()
        serve(block, answers)


def measure(options: argparse.Namespace, file: Path) -> dict[str, list[float]]:
    """Milliseconds per token by engine, one figure per round. Raises where the tokens differ."""
    with ExitStack() as stack:
        servers = {}
        for name in ENGINES:
            command = [sys.executable, "-W", "ignore", "-m", "bench.decode", "--engine", name]
            for key in ("past", "layers", "steps"):
                command += [f"--{key}", str(getattr(options, key))]
            servers[name] = stack.enter_context(Server([*command, "--file", str(file)]))
        for server in servers.values():
            server.answer()
        found = take_turns(servers, options.rounds)
    for said in zip(*found.values(), strict=True):
        if len({tuple(tokens) for _, tokens in said}) > 1:
            raise SystemExit(f"The engines give different tokens: {said}.")
    return {name: [milliseconds for milliseconds, _ in blocks] for name, blocks in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--past", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    if options.engine:
        _serve(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        import attngraph

        file = Path(folder) / "decoder.onnx"
        module = model(options.layers)
        attngraph.optimize_decoder(module, verify="off").save(file)
        weights = sum(weight.numel() for weight in module.parameters())
        del module
        figures = measure(options, file)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    ratio = medians["eager"] / medians["attngraph"]
    for name, values in figures.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"  {name:10} {medians[name]:8.2f} ms per token ({spread})")
    print(f"  {'ratio':10} {ratio:8.2f}")
    path = write(
        "decode",
        {
            "model": {"layers": options.layers, "parameters": weights, "dtype": "float32"},
            "past": options.past,
            "batch": 1,
            "threads": torch.get_num_threads(),
            "ms_per_token": figures,
            "ratio": ratio,
        },
    )
    print(f"  {path}")


if __name__ == "__main__":
    main()
