"""The verbs that hand results on or look at them: `export documents`, `export model`, `generate`, `trace`."""

from __future__ import annotations

import sys
from typing import Annotated

import orjson
import typer

JsonOption = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")]


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command."""
    export = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Write a run's results for other programs.",
        epilog="Example:  gristmill export documents out/demo/run --format hf --out out/demo/dataset",
    )
    app.add_typer(export, name="export")
    export.command(epilog="Example:  gristmill export documents out/demo/run --format hf --out out/demo/dataset")(
        documents
    )
    export.command(epilog="Example:  gristmill export model out/train --out out/model")(model)
    app.command(epilog='Example:  gristmill generate out/train --prompt "The" --max-tokens 50')(generate)
    app.command(
        epilog="Examples:  gristmill trace 00000000-0000-0000-0000-000000000000 out/demo/run;  "
        "gristmill trace --train out/demo/run/ablation/blend-seed1 --step 12"
    )(trace)


def documents(
    run_folder: RunArgument,
    out: Annotated[str, typer.Option("--out", help="Folder to write; it must be empty or not there.", metavar="DIR")],
    format: Annotated[
        str, typer.Option(help="parquet, jsonl.zst, datatrove, dolma, or hf: a Hugging Face dataset with its card.")
    ] = "parquet",
    max_file_bytes: Annotated[int, typer.Option(help="A file has at most so many bytes.")] = 512_000_000,
    as_json: JsonOption = False,
) -> None:
    """Write the kept documents of a finished run."""
    from gristmill.pipelines.export_documents import export_documents
    from gristmill.pipelines.open_run import open_run

    def on_part(done: int, parts: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done:,} of {parts:,} parts", end="" if done < parts else "\n", file=sys.stderr, flush=True)

    done = export_documents(open_run(run_folder), format, out, max_file_bytes, on_part)
    size = sum(file.bytes for file in done.files)
    if as_json:
        body = {"event": "result", "out": out, "files": len(done.files), "bytes": size}
        print(orjson.dumps(body | {"documents": done.contents.documents}).decode())
    else:
        print(f"{out}: {done.contents.documents:,} documents in {len(done.files):,} files, {size / 1e6:,.1f} MB")


def model(
    trained: Annotated[
        str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A training run (RUN@STEP, RUN@best), or a checkpoint.")
    ],
    out: Annotated[str, typer.Option("--out", help="Folder to write; it must be empty or not there.", metavar="DIR")],
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
) -> None:
    """Write a trained model as a Hugging Face folder: weights, configuration, tokenizer, model card."""
    from gristmill.stages.settings_file import SettingsError
    from gristmill.trainer.export import DTYPES, export_model
    from gristmill.trainer.trained import open_trained

    if dtype not in DTYPES:
        raise SettingsError(f"--dtype {dtype}: give one of {', '.join(DTYPES)}.")
    opened = open_trained(trained)
    print(f"{export_model(opened, out, DTYPES[dtype])}: {opened.checkpoint}")


def generate(
    trained: Annotated[
        str, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A training run (RUN@STEP, RUN@best), or a checkpoint.")
    ],
    prompt: Annotated[str, typer.Option(help="Text that the model goes on from.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from so many likeliest tokens; 0: from all.")] = 0,
) -> None:
    """Let a trained model write, for a look."""
    from gristmill.trainer.trained import continue_text, open_trained

    print(prompt + continue_text(open_trained(trained), prompt, max_tokens, seed, temperature, top_k))


def trace(
    doc_id: Annotated[
        str | None, typer.Argument(metavar="[DOC_ID]", help="A document's id, as `gristmill inspect` shows it.")
    ] = None,
    run_folder: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run folder.")] = None,
    train: Annotated[
        str | None, typer.Option("--train", help="A training run: which documents a step of it saw.", metavar="RUN")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=1, help="Of the training run, from 1.", metavar="N")] = None,
    n: Annotated[int, typer.Option("-n", min=0, help="Documents of a step to print; 0 prints all.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """Say where a document came from, what each stage measured and decided, and where its tokens are; or, with
    --train and --step, which documents a training step saw."""
    from gristmill.pipelines import trace as tracing
    from gristmill.pipelines.open_run import open_run
    from gristmill.pipelines.tables import console
    from gristmill.stages.settings_file import SettingsError

    if (train is None) != (step is None) or (train is None) == (doc_id is None):
        raise SettingsError("Give either DOC_ID and RUN, or --train RUN --step N.")
    if train is not None and step is not None:
        from gristmill.pipelines import trace_step

        _, seen = trace_step.documents_of_step(train, step)
        print(trace_step.as_json(seen)) if as_json else trace_step.render(seen, console(), n or len(seen))
        return
    if doc_id is None or run_folder is None:
        raise SettingsError("Name the run that the document is of: gristmill trace DOC_ID RUN.")
    found = tracing.trace(open_run(run_folder), doc_id)
    if as_json:
        print(tracing.as_json(found))
    else:
        tracing.render(found, console())
