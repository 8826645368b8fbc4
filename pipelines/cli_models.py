"""The verbs about filter models outside a run: `models train`, `models eval`, `models score`."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import orjson
import typer

from gristmill.stages.settings_file import SettingsError

JsonOption = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]
ModelArgument = Annotated[
    str, typer.Argument(metavar="FOLDER", help="Folder of a model, `models/NAME` in a run; or a fastText file.")
]
LabelOption = Annotated[str, typer.Option("--label", help="The good label of a fastText file of others.")]
_LABEL = "__label__positive"  # as `stages/classifier.py` has it; not imported, for --help should load no kernels
_SHOWN = (5, 25, 50, 75, 95)  # percentiles


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command."""
    models = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Filter models outside a run: train, evaluate, score.",
        epilog="Example:  gristmill models train model.yaml --out out/model",
    )
    app.add_typer(models, name="models")
    models.command(epilog="Example:  gristmill models train model.yaml --out out/model")(train)
    models.command("eval", epilog='Example:  gristmill models eval out/model --text "held/*.jsonl.gz"')(evaluate)
    models.command(epilog="Example:  gristmill models score out/model - < lines.txt > scores.jsonl")(score)


def train(
    file: Annotated[str, typer.Argument(metavar="FILE", help="One entry of a recipe's `models:`, with `files`.")],
    out: Annotated[str, typer.Option("--out", help="Folder to write; it must not exist yet.", metavar="FOLDER")],
    as_json: JsonOption = False,
) -> None:
    """Train a KenLM or fastText model on files, with the settings of an entry of a recipe's `models:`."""
    from gristmill.pipelines import model_files
    from gristmill.pipelines.progress import Display

    with Display(as_json=as_json) as display:
        card = model_files.train(file, out, display)
    if as_json:
        print(orjson.dumps({"event": "result", "out": out, "card": card}).decode())
    elif card["kind"] == "fasttext":
        _show_classifier(card["validation"], "Documents held out")
        print(out)
    else:
        _show_languages({name: entry["held_out"] | _picked(entry) for name, entry in card["languages"].items()})
        if card["languages_skipped"]:
            print(f"Too little text (bytes): {', '.join(f'{k} {n:,}' for k, n in card['languages_skipped'].items())}")
        print(out)


def evaluate(
    folder: ModelArgument,
    text: Annotated[list[str] | None, typer.Option("--text", help="KenLM: files or globs; can be repeated.")] = None,
    positive: Annotated[list[str] | None, typer.Option("--positive", help="fastText: files of good documents.")] = None,
    negative: Annotated[list[str] | None, typer.Option("--negative", help="fastText: files of others.")] = None,
    min_score: Annotated[float, typer.Option(min=0, max=1, help="Of precision and recall.")] = 0.5,
    label: LabelOption = _LABEL,
    as_json: JsonOption = False,
) -> None:
    """Test a model on documents that it has not seen: perplexity; or precision, recall, AUC and calibration."""
    from gristmill.pipelines import model_files
    from gristmill.pipelines.progress import Display

    kind = model_files.kind_of(folder)
    with Display(as_json=as_json) as display:
        if kind == "kenlm":
            if not text or positive or negative:
                raise SettingsError(f"{folder} is a language model: give --text FILES, and nothing else.")
            found = model_files.evaluate_language_model(folder, text, display)
        else:
            if text or not positive or not negative:
                raise SettingsError(f"{folder} is a classifier: give --positive FILES and --negative FILES.")
            found = model_files.evaluate_classifier(
                folder, positive, negative, display, min_score=min_score, label=label
            )
    if as_json:
        print(orjson.dumps({"event": "result", **found}).decode())
    elif kind == "kenlm":
        _show_languages({name: entry | _picked(entry) for name, entry in found["languages"].items()})
        if found["without_model"]:
            print(f"{found['without_model']:,} documents are in languages without a model.")
    else:
        _show_classifier(found, folder)


def score(
    folder: ModelArgument,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILES|-]", help="Files or globs; `-`, and nothing, is standard input."),
    ] = None,
    label: LabelOption = _LABEL,
) -> None:
    """Score documents: JSON lines on standard output, as they come.

    Standard input has one document a line: plain text, or JSON objects with `text`; rows carry its number. Rows of
    files carry the document's id.
    """
    from gristmill.pipelines import model_files
    from gristmill.pipelines.progress import Display

    given = files or ["-"]
    if "-" in given and len(given) > 1:
        raise SettingsError("`-` is standard input: give it alone, or name files.")
    try:
        if given == ["-"]:
            model_files.write_rows(model_files.score_lines_of(folder, sys.stdin.buffer, label), sys.stdout.buffer)
            return
        with Display() as display:
            model_files.write_rows(model_files.score_files(folder, given, display, label), sys.stdout.buffer)
    except BrokenPipeError:  # the reader has enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _picked(entry: dict[str, Any]) -> dict[str, float]:
    values = entry["percentiles"]
    return {f"p{at}": values[at] for at in _SHOWN} if values else {}


def _show_languages(languages: dict[str, dict[str, Any]]) -> None:
    """A row a language: documents, perplexity of all as one text, percentiles by document."""
    from gristmill.pipelines.tables import console, plain_table

    columns = ["language", "documents", "perplexity", *(f"p{at}" for at in _SHOWN)]
    rows = [{"language": name or "all", **entry} for name, entry in languages.items()]
    console().print(plain_table("Perplexity of documents", columns, rows))


def _show_classifier(figures: dict[str, Any], title: str) -> None:
    """Precision, recall and AUC; then what share of the documents of each range of scores is positive."""
    from gristmill.pipelines.tables import console, plain_table

    shown = console()
    names = ["positive", "negative", "min_score", "precision", "recall", "auc"]
    shown.print(plain_table(title, names, [figures], names=0))
    columns = ["score", "documents", "mean_score", "share_positive"]
    rows = [{"score": f"{i / 10:.1f} to {(i + 1) / 10:.1f}", **row} for i, row in enumerate(figures["calibration"])]
    shown.print(plain_table("Calibration", columns, rows))
