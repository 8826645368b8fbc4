"""The verbs about tokenizers and token shards: `tokenizer train`, `tokenizer report`, `tokens show` and its kin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import orjson
import typer

if TYPE_CHECKING:
    from gristmill.pipelines.token_files import ShownDocument

JsonOption = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]
TokensArgument = Annotated[
    str, typer.Argument(metavar="TOKENS", help="A folder of token shards: `tokens` in a run, or the run.")
]
_EXAMPLES = {
    "tokenizer train": "gristmill tokenizer train pipelines/recipes/demo.yaml --on out/demo/run --out mine.json",
    "tokenizer report": "gristmill tokenizer report mine.json out/demo/run --on out/demo/run",
    "tokens show": "gristmill tokens show out/demo/run/tokens --doc 0 --source docs",
    "tokens verify": "gristmill tokens verify out/demo/run/tokens",
    "tokens measures": "gristmill tokens measures out/demo/run",
    "tokens export": "gristmill tokens export out/demo/run/tokens --format megatron --out out/megatron",
    "tokens import": "gristmill tokens import web=web_text_document.idx out/demo/run/tokens --tokenizer out/demo/run "
    "--eos '<|endoftext|>' --out out/all",
}


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command."""
    tokenizer = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Tokenizers: train one on a run's documents, compare several.",
        epilog=f"Example:  {_EXAMPLES['tokenizer report']}",
    )
    tokens = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Token shards: look at documents, verify, export, import.",
        epilog=f"Example:  {_EXAMPLES['tokens show']}",
    )
    app.add_typer(tokenizer, name="tokenizer")
    app.add_typer(tokens, name="tokens")
    verbs = (("train", train), ("report", report), ("show", show), ("verify", verify), ("export", export))
    for name, function in (*verbs, ("import", adopt), ("measures", measures)):
        group = tokenizer if function in (train, report) else tokens
        whole = f"{'tokenizer' if group is tokenizer else 'tokens'} {name}"
        group.command(name, epilog=f"Example:  {_EXAMPLES[whole]}")(function)


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="Whose `tokenizer` to train. Default: that of the run's own recipe."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", help="Run to learn from. Default: the recipe's.", metavar="RUN"),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", help="File to write. Default: tokenizer.json in the run.", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a tokenizer on the documents that a run kept, but for those held out. The run stays as it is."""
    from gristmill.pipelines.progress import Display
    from gristmill.pipelines.token_files import train_tokenizer

    with Display(as_json=as_json) as display:
        path = train_tokenizer(recipe, on, out, display)
        display.event("result", tokenizer=path)
    if not as_json:
        print(path)


def report(
    tokenizers: Annotated[
        list[str],
        typer.Argument(metavar="TOKENIZER...", help="tokenizer.json files, runs, or folders of token shards."),
    ],
    on: Annotated[str, typer.Option("--on", help="Run on whose documents to compare them.", metavar="RUN")],
    max_bytes: Annotated[
        int, typer.Option("--max-bytes", min=1_000, help="Of text, for each source and language.")
    ] = 1_000_000,
    as_json: JsonOption = False,
) -> None:
    """Compare tokenizers: bytes per token, tokens per word, common words, digits, indentation, losses."""
    from gristmill.pipelines.token_files import compare_tokenizers

    found = compare_tokenizers(tokenizers, on, max_bytes=max_bytes)
    print(found.model_dump_json(indent=1) if as_json else found.table())


def show(
    tokens: Annotated[
        str, typer.Argument(metavar="TOKENS|SHARD", help="A run, its folder of token shards, or one shard of it.")
    ],
    doc: Annotated[
        str,
        typer.Option("--doc", help="Its place from 0, or its id (`id:7` where that is a number).", metavar="N|DOC_ID"),
    ],
    source: Annotated[str | None, typer.Option("--source", help="Only documents of this source.")] = None,
    holdout: Annotated[bool, typer.Option("--holdout", help="Held-out documents, not those to train on.")] = False,
    n: Annotated[int, typer.Option("-n", min=0, help="How many tokens to print; 0 prints all.")] = 500,
    as_json: JsonOption = False,
) -> None:
    """Show a document of token shards: its text with the borders of tokens, and its ids."""
    from gristmill.pipelines import token_files

    split = "holdout" if holdout else "train" if doc.isdigit() else None
    found = token_files.show(tokens, doc, source, split)  # type: ignore[arg-type]
    if as_json:
        print(orjson.dumps(found.data(), option=orjson.OPT_INDENT_2).decode())
    else:
        _print_document(found, n or len(found.ids))


def _print_document(found: ShownDocument, n: int) -> None:
    from rich.text import Text

    from gristmill.pipelines.inspect import visible
    from gristmill.pipelines.tables import console
    from gristmill.pipelines.token_files import BORDER

    shown = console()
    facts = (
        f"{found.doc_id}  source {found.source}, {found.split}, {found.shard} row {found.row}: "
        f"{len(found.ids):,} tokens, {found.bytes:,} bytes"
    )
    shown.print(Text(visible(facts), style="bold"), soft_wrap=True)
    if found.others:
        shown.print(f"{found.others:,} other documents have the same id; --source or one shard tells them apart.")
    text = Text()
    for i, piece in enumerate(found.pieces[:n]):
        text.append(BORDER, style="dim") if i else None
        text.append(visible(piece), style="cyan" if i % 2 else "")
    shown.print(text, soft_wrap=True)
    if len(found.ids) > n:
        shown.print(f"... {len(found.ids) - n:,} more tokens; -n 0 prints all.")
    shown.print(Text(" ".join(map(str, found.ids[:n])), style="dim"), soft_wrap=True)


def verify(tokens: TokensArgument, as_json: JsonOption = False) -> None:
    """Read every byte of token shards and say what is wrong where."""
    from pathlib import Path

    from gristmill.tokenize.verify import verify_tokens

    inner = Path(tokens) / "tokens"
    folder = str(inner) if (inner / "shards.json").is_file() else tokens
    problems = verify_tokens(folder)
    if as_json:
        body = {"tokens": folder, "sound": not problems, "problems": problems}
        print(orjson.dumps(body, option=orjson.OPT_INDENT_2).decode())
    else:
        for problem in problems:
            print(problem)
        print(f"{folder}: {'sound' if not problems else f'{len(problems):,} problems'}.")
    if problems:
        raise typer.Exit(1)


def export(
    tokens: TokensArgument,
    kind: Annotated[str, typer.Option("--format", help="megatron, datatrove, nanogpt, llmc or olmo.")],
    out: Annotated[str, typer.Option("--out", help="Folder to write to.", metavar="DIR")],
    as_json: JsonOption = False,
) -> None:
    """Write token shards in the format of another trainer."""
    from typing import get_args

    from gristmill.pipelines.token_files import open_tokens
    from gristmill.stages.settings_file import SettingsError, nearest
    from gristmill.tokenize.export import Format, export_tokens

    if kind not in get_args(Format):
        raise SettingsError(f"--format: no format {kind!r}.{nearest(kind, get_args(Format))}")
    written = export_tokens(open_tokens(tokens)[0], kind, out)  # type: ignore[arg-type]
    if as_json:
        print(orjson.dumps({"format": kind, "files": written}, option=orjson.OPT_INDENT_2).decode())
    else:
        print("\n".join(written))


def measures(
    tokens: TokensArgument,
    column: Annotated[
        list[str] | None, typer.Option("--column", help="Only this one; may be given again. Default: all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write what the run measured of each document beside its token shards, so that the folder can travel alone.

    In the run itself `where:` of a mixture and `trace --train` find the measures without."""
    from gristmill.pipelines.token_files import open_tokens
    from gristmill.tokenize.measures import MEASURES, write_measures

    folder = open_tokens(tokens)[0].folder
    names = write_measures(folder, column or ())
    if as_json:
        print(orjson.dumps({"folder": str(folder / MEASURES), "columns": names}).decode())
    else:
        print(f"{folder / MEASURES}: {len(names):,} columns: {', '.join(names)}")


def adopt(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="[SOURCE=]FILE...",
            help=".idx of Megatron-LM, .ds of datatrove, .bin of nanoGPT or llm.c, .npy of OLMo, or folders of token "
            "shards.",
        ),
    ],
    tokenizer: Annotated[str, typer.Option("--tokenizer", help="The tokenizer.json that made the ids; or a run.")],
    eos: Annotated[str, typer.Option("--eos", help="The token that ends every document.", metavar="TOKEN")],
    out: Annotated[str, typer.Option("--out", help="Folder of token shards to write.", metavar="DIR")],
    source: Annotated[str | None, typer.Option("--source", help="Source of files that name none.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make one set of token shards of files of other programs and of other sets. Ids are not copied, but for llm.c."""
    from gristmill.pipelines.token_files import tokenizer_file
    from gristmill.tokenize.adopt import adopt_tokens

    manifest = adopt_tokens(files, out, tokenizer_file(tokenizer), source=source, eos_token=eos)
    documents, ids = (sum(getattr(info, name) for info in manifest.shards) for name in ("documents", "tokens"))
    sources = sorted({info.source for info in manifest.shards})
    if as_json:
        body = {"tokens": out, "sources": sources, "shards": len(manifest.shards), "documents": documents, "ids": ids}
        print(orjson.dumps(body).decode())
    else:
        print(
            f"{out}: {documents:,} documents, {ids:,} tokens, in {len(manifest.shards):,} shards of sources "
            f"{', '.join(sources)}."
        )
