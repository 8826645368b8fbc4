"""How often an ablation is wrong: copies of one mixture that it tells apart, and planted noise that it misses.

    python tools/false_positives.py --text "corpus/*.jsonl.gz"             # `make false-positives TEXT=...`
    python tools/false_positives.py --tokens RUN/tokens --source docs      # tokens that are there; no planted noise

With --text, the documents become the source `clean`, and, with a fifth of their characters replaced, the source
`noise`; a small tokenizer is trained on the clean ones. Then small models are trained, each with a seed of its own, in
this process:

- copies: `pairs` times two copies of the mixture of clean text, `--seeds` runs each. Every verdict but "not
  distinguishable" is a false positive. At 95 % confidence one in twenty is allowed.
- planted: clean text against the spoilt one, `pairs` / 4 times, scored on held-out clean text. Every verdict but
  "clean is better" is a miss.

Runs that are there are not repeated. Prints each verdict with its p, then one line of JSON with counts and the measured
noise; exit code 0 when at most a tenth of the pairs of copies is told apart.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path

import numpy as np
import orjson
import torch

from gristmill.pipelines.cli import app
from gristmill.trainer.config import SCORES_FILE, Run, TrainConfig
from gristmill.trainer.group import ALONE
from gristmill.trainer.ranking import SAME, Ranking, RunRow, rank
from gristmill.trainer.score import Scores
from gristmill.trainer.train import work

MIXTURES = {"clean": "{clean: 1}", "noisy": "{noise: 1}"}
SPOILT = 0.2  # of the characters of a document of `noise`
MAX_CHARS = 20_000  # of a document


def documents(pattern: str, limit: int) -> Iterator[str]:
    for path in sorted(glob(pattern)):
        data = Path(path).read_bytes()
        for line in (gzip.decompress(data) if path.endswith(".gz") else data).splitlines():
            if limit <= 0:
                return
            limit -= 1
            yield orjson.loads(line)["text"][:MAX_CHARS]


def write_corpus(pattern: str, folder: Path, limit: int) -> None:
    """Clean documents, and each again with some characters replaced by others of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    with (folder / "clean.jsonl").open("wb") as clean, (folder / "noise.jsonl").open("wb") as noise:
        for number, text in enumerate(documents(pattern, limit)):
            clean.write(orjson.dumps({"id": f"c{number}", "text": text}) + b"\n")
            swapped = rng.random(len(text)) < SPOILT
            spoilt = np.where(swapped, rng.permutation(list(text)), list(text))
            noise.write(orjson.dumps({"id": f"n{number}", "text": "".join(spoilt)}) + b"\n")
    sources = "".join(f'  {name}: {{files: "{folder}/{name}.jsonl"}}\n' for name in ("clean", "noise"))
    (folder / "recipe.yaml").write_text(
        f"name: planted\nsources:\n{sources}stages:\n  - exact\n"
        "tokenizer: {vocab_size: 2048, split: llama3, weights: {clean: 1, noise: 0}}\ntokens: {holdout_share: 0.15}\n"
    )


def tokens_of(arguments: argparse.Namespace, folder: Path) -> Path:
    """The folder of token shards: as given, or made from the texts."""
    if arguments.tokens is not None:
        return Path(arguments.tokens)
    if not (folder / "run/tokens/shards.json").exists():
        write_corpus(arguments.text, folder / "corpus", arguments.documents)
        recipe = str(folder / "corpus/recipe.yaml")
        app(["run", recipe, "--out", str(folder / "run"), "--debug"], standalone_mode=False)
    return folder / "run/tokens"


class Lab:
    """Trains and keeps runs."""

    def __init__(self, folder: Path, tokens: Path, source: str, budget: int) -> None:
        self.folder, self.tokens = folder, tokens
        self.config = TrainConfig(
            model={"width": 32, "layers": 2, "heads": 2},
            seq_len=128,
            batch_windows=16,
            budget_tokens=budget,
            lr=0.01,
            threads=1,
            checkpoint_every=0,
            keep_last=1,
            eval_bytes=60_000,
            eval_document_bytes=2_000,
        )
        for name, sources in MIXTURES.items():
            if name == "noisy" and source != "clean":
                continue
            text = sources.replace("clean", source)
            (folder / f"{name}.yaml").write_text(f"name: {name}\nmax_epochs: 1000\nsources: {text}\n")

    def scores(self, mixture: str, seed: int) -> Scores:
        out = self.folder / f"{mixture}-seed{seed}"
        if not (out / "done.json").exists():
            out.mkdir(parents=True, exist_ok=True)
            config = self.config.model_copy(update={"seed": seed})
            run = Run(
                config=config, mixture=str(self.folder / f"{mixture}.yaml"), tokens=str(self.tokens), out=str(out)
            )
            run.save(out / "run.json")
            work(run, ALONE)
        return Scores.load(out / SCORES_FILE)

    def ranked(self, mixtures: tuple[str, str], seeds: tuple[list[int], list[int]], by: str) -> Ranking:
        """Two mixtures, each with seeds of its own; the same mixture twice counts as two."""
        names = ["first", "second"]
        columns = range(len(seeds[0]))
        cells = {
            (name, column): self.scores(mixture, own[column])
            for name, mixture, own in zip(names, mixtures, seeds, strict=True)
            for column in columns
        }
        rows = [RunRow(name=f"{m}{s}", mixture=m, seed=s, status="done") for m, s in cells]
        return rank("pair", names, list(columns), cells, rows, self.config.total_tokens, rank_by=[by])


def tell(kind: str, number: int, ranking: Ranking) -> str:
    (pair,) = ranking.pairs
    print(
        f"{kind} {number}: {pair.verdict}; difference {pair.difference.mean:+.5f}, p seeds {pair.p_seeds:.3g}, "
        f"documents {pair.p_documents:.3g}",
        flush=True,
    )
    return pair.verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--text", help="JSON lines with a field `text`, plain or gzip; a glob")
    parser.add_argument("--tokens", help="folder of token shards instead")
    parser.add_argument("--source", default="clean", help="of the tokens, with --tokens")
    parser.add_argument("--folder", type=Path, default=Path("build/false_positives"))
    parser.add_argument("--documents", type=int, default=1_500)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=50_000, help="tokens of a run")
    arguments = parser.parse_args()
    if (arguments.text is None) == (arguments.tokens is None):
        parser.error("give one of --text and --tokens")
    torch.set_num_threads(1)
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lab = Lab(folder, tokens_of(arguments, folder), arguments.source, arguments.budget)
    n = arguments.seeds
    wrong, means = 0, []
    for k in range(arguments.pairs):
        own = [list(range(1 + (2 * k + half) * n, 1 + (2 * k + half + 1) * n)) for half in (0, 1)]
        wrong += tell("copies", k, lab.ranked(("clean", "clean"), (own[0], own[1]), arguments.source)) != SAME
        means += [lab.scores("clean", seed).sources[arguments.source].bits_per_byte for half in own for seed in half]
    planted = missed = 0
    if arguments.text is not None:
        for k in range(arguments.pairs // 4):
            seeds = list(range(1 + k * n, 1 + (k + 1) * n))
            missed += tell("planted", k, lab.ranked(("clean", "noisy"), (seeds, seeds), "clean")) != "first is better"
            planted += 1
    body = {
        "pairs": arguments.pairs,
        "told_apart": wrong,
        "planted": planted,
        "missed": missed,
        "runs": len(means),
        "mean": round(float(np.mean(means)), 5),
        "noise": round(float(np.std(means, ddof=1)), 5),
    }
    print(json.dumps(body))
    return 0 if wrong <= arguments.pairs / 10 else 1


if __name__ == "__main__":
    sys.exit(main())
