"""One decoding step behind a long past: compiled decoders against eager PyTorch with its cache.

    python -m bench.decode [--model llama] [--past 1024] [--layers 12] [--rounds 9] [--steps 12]
        [--target cpu] [--precision fp32] [--results FOLDER] [--quick]

A Llama-shaped model (12 heads, 4 of keys and values, width 768), batch 1, or one of the models with
states that bench.workloads has, with a head. Each engine runs in a
process of its own, because onnxruntime's threads spin on after a call and slow their neighbours;
their blocks take turns. A block decodes a few tokens greedily from a cache of `past` tokens, as
`generate` does, token by token; the time is that of one token. All start from the same prompt and
must give the same tokens, else no figure is written. Weights in int4 may give others: how many are
the same is written beside the time. Int8 is not measured: onnxruntime 1.31 unpacks such weights one
by one on the CPU, far slower than it multiplies float32. An engine that fails is left out, with the
reason, unless it is eager. In half precision two tokens may be as likely, so there each decoder's
own parity is checked in the place of its tokens.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attngraph.errors import AttngraphError
from attngraph.export.families import own_family
from attngraph.export.parity.samples import DTYPE
from bench import workloads
from bench.harness import Turn, in_turns, option, options_of
from bench.machine import RESULTS, write

ENGINES = (
    *("eager", "torch.compile, static cache"),
    *("attngraph, growing cache", "attngraph, static cache"),
    "attngraph, static cache, int4 weights",
)
EAGER, COMPILED, GROWING, STATIC, INT4 = ENGINES
_HEADS, _KEY_HEADS, _WIDTH, _HIDDEN, _VOCABULARY = 12, 4, 768, 2048, 32000

STATEFUL = {"qwen3_next": workloads.qwen3_next, "mamba2": workloads.mamba2}
"""Models with states, which transformers steps in a cache that grows."""

OUT = Path("out/bench")

Block = Callable[[], tuple[float, list[int]]]
"""Decodes a few tokens from the past: milliseconds per token, and the tokens."""


def model(layers: int, name: str = "llama") -> Any:
    import transformers
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    if name in STATEFUL:
        with workloads.cut_to(layers):
            config: Any = STATEFUL[name]()[0].config
        config.use_cache = True
        kind = type(config).__name__.removesuffix("Config")
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    sizes = _WIDTH, layers, (_HEADS, _KEY_HEADS), _HIDDEN, _VOCABULARY
    config = workloads.llama_config(*sizes, max_position_embeddings=4096)
    module: Any = LlamaForCausalLM(config)
    return module.eval()


def _placed(options: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    """The model and the prompt where eager runs, the model in the precision."""
    device = "cuda" if options.target.startswith("cuda") else "cpu"
    module = model(options.layers, options.model).to(device, DTYPE[options.precision])
    return module, _prompt(options.past).to(device)


def _prompt(past: int) -> torch.Tensor:
    return torch.randint(_VOCABULARY, (1, past), generator=torch.Generator().manual_seed(1))


def _eager(options: argparse.Namespace) -> Block:
    module, prompt = _placed(options)
    return _of_transformers(module, module, prompt, options)


def _of_transformers(
    module: Any, called: Any, prompt: torch.Tensor, options: argparse.Namespace
) -> Block:
    """Steps of what is `called` in the model's own cache, which grows."""
    result = module(prompt, use_cache=True)
    name = next(name for name in ("past_key_values", "cache_params") if result.get(name))
    logits, start = result.logits, result[name]

    def block() -> tuple[float, list[int]]:
        cache = copy.deepcopy(start)

        def step(token: torch.Tensor) -> torch.Tensor:
            given: torch.Tensor = called(token, **{name: cache}, use_cache=True).logits
            return given

        return _timed(step, logits, options.steps)

    return block


def _torch_compiled(options: argparse.Namespace) -> Block:
    """transformers' own way to be fast: a cache of fixed size, and a step without guards on it.

    What keeps states has none of fixed size there.
    """
    from transformers import StaticCache

    module, prompt = _placed(options)
    if options.model in STATEFUL:
        return _of_transformers(module, torch.compile(module), prompt, options)
    cache: Any = StaticCache(module.config, max_cache_len=_room(options))
    logits = module(prompt, past_key_values=cache, use_cache=True).logits
    compiled: Any = torch.compile(module, dynamic=False)

    def step(token: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = compiled(token, past_key_values=cache, use_cache=True).logits
        return result

    def block() -> tuple[float, list[int]]:
        for layer in cache.layers:  # what is behind the prompt is written over
            layer.cumulative_length.fill_(options.past)
        return _timed(step, logits, options.steps)

    return block


def _room(options: argparse.Namespace) -> int:
    """Tokens that a static cache has room for: no more than the block needs."""
    return int(options.past + options.steps)


def _compiled(options: argparse.Namespace) -> Block:
    from attngraph import Decoder

    decoder = Decoder.load(Path(options.folder) / _file(options.engine), options.target)
    logits, start = decoder(_prompt(options.past))

    def block() -> tuple[float, list[int]]:
        cache = start

        def step(token: torch.Tensor) -> torch.Tensor:
            nonlocal cache
            found, cache = decoder(token, None, cache)
            return found

        return _timed(step, logits, options.steps)

    return block


def _file(engine: str) -> str:
    return f"{engine.replace(', ', '_').replace(' ', '_')}.onnx"


def _write_decoders(options: argparse.Namespace, folder: Path) -> tuple[int, dict[str, str]]:
    """Saves the decoder of each engine that has one; the number of parameters, what failed."""
    import attngraph

    module = model(options.layers, options.model)
    half = options.precision != "fp32"
    failed: dict[str, str] = {}
    common: dict[str, Any] = {"target": options.target, "verify": "final" if half else "off"}
    common["padding"] = False  # eager is given no mask either
    if half:
        common["precision"] = options.precision
    static: dict[str, Any] = {"cache": "static", "max_length": _room(options)}
    for engine, settings in (
        (GROWING, {}),
        (STATIC, static),
        (INT4, {**static, "weights": "int4"}),
    ):
        how, given = common, module
        if engine == INT4 and half:  # weights are quantized in the model's own precision
            how = {name: value for name, value in common.items() if name != "precision"}
            given = copy.deepcopy(module).to(DTYPE[options.precision])
        try:
            decoder = attngraph.optimize_decoder(given, **how, **settings)
        except AttngraphError as error:
            failed[engine] = str(error)
            continue
        decoder.save(folder / _file(engine))
        del decoder
    return sum(weight.numel() for weight in module.parameters()), failed


def _timed(
    step: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor, steps: int
) -> tuple[float, list[int]]:
    token, tokens = logits[:, -1:].argmax(-1), []
    began = time.perf_counter()
    for _ in range(steps):
        token = step(token)[:, -1:].argmax(-1)
        tokens.append(int(token))
    return (time.perf_counter() - began) / steps * 1e3, tokens


@torch.no_grad()
def block_of(**given: Any) -> Block:
    """The engine's, after a first one: milliseconds per token, and the tokens."""
    options = argparse.Namespace(**given)
    make = {EAGER: _eager, COMPILED: _torch_compiled}.get(options.engine, _compiled)
    block = torch.no_grad()(make(options))
    block()
    return block


def measure(
    options: argparse.Namespace, folder: Path, failed: dict[str, str], turn: Turn
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Milliseconds per token by engine, one figure per round; the tokens. Adds to what `failed`.

    Raises where the tokens of engines with the model's own weights differ in float32, or from block
    to block.
    """
    names = ("model", "past", "layers", "steps", "target", "precision")
    given = {"folder": str(folder), **{name: getattr(options, name) for name in names}}
    engines = {name: {"engine": name, **given} for name in ENGINES if name not in failed}
    found = in_turns(
        block_of,
        engines,
        options.rounds,
        failed=failed,
        needed=EAGER,
        patience=options.patience,
        ready=turn.take,
    )
    if EAGER in failed:
        raise SystemExit(f"{EAGER}: {failed[EAGER]}.")
    tokens = {name: blocks[0][1] for name, blocks in found.items()}
    for name, blocks in found.items():
        if options.precision == "fp32" and any(said != tokens[name] for _, said in blocks):
            raise SystemExit(f"{name} gives different tokens from block to block: {blocks}.")
        if options.precision == "fp32" and name != INT4 and tokens[name] != tokens[EAGER]:
            raise SystemExit(f"{name} gives {tokens[name]}, and eager {tokens[EAGER]}.")
    times = {name: [each for each, _ in blocks] for name, blocks in found.items()}
    return times, tokens


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = options_of(
        __doc__,
        arguments,
        model=option("llama", choices=["llama", *STATEFUL]),
        past=1024,
        layers=12,
        rounds=9,
        steps=12,
        target="cpu",
        precision=option("fp32", choices=list(DTYPE)),
        results=option(None, "a folder", type=Path),
        patience=option(None, "seconds that an engine may take to answer", type=float),
        turn=option(None, "a file: see bench.harness.Turn", type=Path),
        quick=option(False, "no figure: one layer, few tokens"),
    )
    if options.quick:
        options.layers, options.past, options.rounds, options.steps = 1, 16, 2, 2
    return options


def main() -> None:
    options = parse()
    turn = Turn(options.turn)
    with tempfile.TemporaryDirectory() as folder:
        weights, failed = _write_decoders(options, Path(folder))
        figures, tokens = measure(options, Path(folder), failed, turn)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    ratios = {name: medians[EAGER] / median for name, median in medians.items()}
    for name, values in figures.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"  {name:38} {medians[name]:8.2f} ms per token ({spread}), × {ratios[name]:.2f}")
    for name, reason in failed.items():
        print(f"  {name:38} left out: {reason}")
    same = {
        name: sum(a == b for a, b in zip(tokens[EAGER], said, strict=True))
        for name, said in tokens.items()
        if said != tokens[EAGER] or name == INT4
    }
    for name, count in same.items():
        print(f"  {count} of {options.steps} tokens are eager's in {name}")
    ours = [name for name in (STATIC, GROWING) if name in ratios]
    if not ours:
        raise SystemExit("No decoder could be timed.")
    plain = (options.target, options.precision, options.results) == ("cpu", "fp32", None)
    name = "decode" if options.model == "llama" else f"decode_{options.model}"
    path = write(
        f"{name}-{own_family()}" if plain else f"{name}_{options.precision}",
        {
            "model": {
                "name": options.model,
                "layers": options.layers,
                "parameters": weights,
                "dtype": str(DTYPE[options.precision]).removeprefix("torch."),
            },
            "target": options.target,
            "precision": options.precision,
            "past": options.past,
            "batch": 1,
            "threads": torch.get_num_threads(),
            "ms_per_token": figures,
            "failed": failed,
            "tokens": options.steps,
            "same_tokens": same,
            "ratios": ratios,
            "ratio": ratios[ours[0]],
            "best": ours[0],
        },
        options.results or (OUT if options.quick else RESULTS),
    )
    print(f"  {path}")


if __name__ == "__main__":
    main()
