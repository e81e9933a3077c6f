"""Every encoder-decoder of transformers that generates text: `python -m tests.corpus.seq2seq`.

Each is compiled tiny, with random weights, and its greedy tokens are held against those of
`generate`, for rows of which one is padded. One line each: right, wrong, or the sentence with which
it is refused; they are written to bench/results/seq2seq.json as well.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "seq2seq.json"
STEPS, SECONDS = 12, 300
_KINDS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT")


def classes() -> dict[str, str]:
    """The class of each model type that is made for it, composed ones included."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for kind in _KINDS:
        found |= dict(getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES"))
    return found


def build(model_type: str) -> Any:
    """A tiny model with telling weights; None where it is no encoder-decoder."""
    import transformers

    from tests.corpus.architectures import _config, _quiet
    from tests.corpus.rows import parse_row
    from tests.models.kit import peaked

    with _quiet():
        if model_type.endswith("encoder-decoder"):
            config = _composed(model_type)
        else:
            config = _config(parse_row(model_type), "eager")
        if not config.is_encoder_decoder:
            return None
        torch.manual_seed(0)
        made = getattr(transformers, classes()[model_type])
        model = peaked(made._from_config(config, attn_implementation="eager").float())
    generation: Any = model.generation_config
    for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "bad_words_ids"):
        setattr(generation, name, None)
    generation.decoder_start_token_id, generation.pad_token_id = 2, 0
    generation.suppress_tokens = generation.begin_suppress_tokens = None
    return model


def _composed(model_type: str) -> Any:
    import transformers

    from tests.corpus.architectures import _config
    from tests.corpus.rows import parse_row

    encoder = {"vision": "vit", "speech": "wav2vec2"}.get(model_type.split("-")[0], "bert")
    parts = [_config(parse_row(name), "eager") for name in (encoder, "bert")]
    parts[1].is_decoder = parts[1].add_cross_attention = True
    return transformers.CONFIG_MAPPING[model_type].from_encoder_decoder_configs(*parts)


def source_of(model: nn.Module) -> tuple[dict[str, Tensor] | None, dict[str, Any]]:
    """Samples of what is encoded, where the compiler makes none, with the batch as a dim."""
    from attngraph.errors import UsageError
    from attngraph.frontend.families.seq2seq import sample_source
    from tests.corpus.inputs import sample_inputs
    from tests.corpus.rows import parse_row

    try:
        return sample_source(model, "model")
    except UsageError:
        found, _ = sample_inputs(model, parse_row(model.config.model_type))  # type: ignore[arg-type, union-attr]
        kept = {name: each for name, each in found.items() if not name.startswith("decoder")}
        rows = Dim("batch")
        return kept, {name: {0: rows} for name in kept}


def attempt(model_type: str) -> str:
    """What becomes of it, in a line."""
    from transformers import GenerationMixin

    import attngraph
    from attngraph.errors import AttngraphError

    try:
        model = build(model_type)
        if model is None:
            return "no encoder-decoder"
        source, shapes = source_of(model)
        assert source is not None
        expected = GenerationMixin.generate(
            model, **source, max_new_tokens=STEPS, do_sample=False, num_beams=1
        )
    except Exception as error:
        return f"not built: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    try:
        compiled = attngraph.optimize_seq2seq(model, source, source_shapes=shapes, first_step=False)
        tokens = compiled.generate(source, STEPS)
    except AttngraphError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if not torch.equal(tokens, expected):
        return f"wrong: {tokens[:, :6].tolist()} for {expected[:, :6].tolist()}"
    return f"right, {expected.unique().numel()} different tokens"


def _send(sender: Connection, model_type: str) -> None:
    torch.set_num_threads(1)
    sender.send(attempt(model_type))


def main() -> None:
    """Tries the types named on the command line, or all."""
    context = multiprocessing.get_context("spawn")
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for model_type in sys.argv[1:] or sorted(classes()):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_send, args=(sender, model_type))
        worker.start()
        sender.close()
        try:
            said = receiver.recv() if receiver.poll(SECONDS) else f"took over {SECONDS} s"
        except EOFError:
            said = "failed: the process ended"
        worker.kill()
        worker.join()
        print(f"{model_type}: {said}", flush=True)
        results[model_type] = said
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
