"""A trained model, opened again: its weights, its shape, and what it was trained on.

trained = open_trained("out/train")            # a run: its newest checkpoint; or one of its checkpoints
trained.model.logits(ids)                      # float32
print(continue_text(trained, "The", max_tokens=50, seed=1))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from gristmill.tokenize.shards import TOKENIZER_FILE, TokenManifest, mapped_folder, read_manifest
from gristmill.trainer.checkpoint import CheckpointState, find_checkpoint, load_weights
from gristmill.trainer.config import RUN_FILE, Run
from gristmill.trainer.model import Llama


@dataclass(frozen=True)
class Trained:
    """What a checkpoint holds, and the run that it belongs to."""

    run: Run
    folder: Path  # of the run
    checkpoint: Path
    state: CheckpointState
    manifest: TokenManifest
    model: Llama  # float32, on the CPU

    @property
    def tokenizer_json(self) -> bytes:
        return (mapped_folder(self.run.tokens) / TOKENIZER_FILE).read_bytes()


def open_trained(path: str | Path) -> Trained:
    """path: a run's folder (its newest checkpoint), RUN@STEP, RUN@best, or one checkpoint.

    Raises TrainError where there is none or it is damaged, TokenError where its token shards are gone: the tokenizer
    is kept with them.
    """
    checkpoint = find_checkpoint(str(path))
    folder = checkpoint.parents[1]
    run = Run.load(folder / RUN_FILE)
    manifest = read_manifest(mapped_folder(run.tokens))
    shape = run.config.shape.resolved(manifest.vocab_size)
    with torch.device("meta"):
        model = Llama(shape)
    model.to_empty(device="cpu")
    state = load_weights(checkpoint, model)
    return Trained(run, folder, checkpoint, state, manifest, model.eval())


def continue_ids(
    model: Llama,
    ids: list[int],
    max_tokens: int,
    context: int,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Samples ids one by one; temperature 0 takes the likeliest. context: ids that the model looks back on.

    Everything is computed again for each id: for a look, not for serving. The same seed gives the same ids. No id is
    vocab_size or above: a model may have a larger vocabulary than its tokenizer.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(ids)
    for _ in range(max_tokens):
        with torch.no_grad():
            inputs = torch.tensor([ids[-context:]], device=model.output_weight.device)
            logits = model.logits(inputs)[0, -1, :vocab_size].cpu()  # (vocab,)
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            if top_k:
                logits = logits.masked_fill(logits < logits.topk(min(top_k, len(logits))).values[-1], float("-inf"))
            chosen = int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator))
        ids.append(chosen)
        yield chosen


def continue_text(
    trained: Trained,
    prompt: str,
    max_tokens: int = 64,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
) -> str:
    """What the model writes after the prompt, up to its end-of-text id. The prompt starts a document."""
    tokenizer = Tokenizer.from_str(trained.tokenizer_json.decode())
    eos = trained.manifest.eos_id  # ends the document before, so it is what a document starts after
    ids = [eos, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    out: list[int] = []
    context, vocab = trained.run.config.seq_len, trained.manifest.vocab_size
    for chosen in continue_ids(trained.model, ids, max_tokens, context, seed, temperature, top_k, vocab):
        if chosen == eos:
            break
        out.append(chosen)
    text: str = tokenizer.decode(out)
    return text
