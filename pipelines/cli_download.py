"""The verb `download`: crawl data, datasets and lists of files, politely and surely, into a folder."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
import typer

JsonOption = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]


def register(app: typer.Typer) -> None:
    """Adds the verb to the command."""
    app.command(
        epilog="Example:  gristmill download --crawl CC-MAIN-2024-10 --kind wet --files 10 --seed 1 --out crawl"
    )(download)


def download(
    spec: Annotated[
        str | None,
        typer.Argument(metavar="[SPEC]", help="A recipe, for all its downloads; or a file with the keys of one."),
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="Folder to fill; of a recipe: the run folder.")] = None,
    crawl: Annotated[str | None, typer.Option(help="A crawl of Common Crawl, CC-MAIN-2024-10.")] = None,
    kind: Annotated[str | None, typer.Option(help="Of a crawl: warc, wet or wat. Default: warc.")] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="An address or glob: http(s), hf, s3, gs, local; can be given again.")
    ] = None,
    url_list: Annotated[str | None, typer.Option(help="A file or address with an address a line.")] = None,
    files: Annotated[int | None, typer.Option(help="How many files, by a seeded sample. Default: all.")] = None,
    share: Annotated[float | None, typer.Option(help="Share of the files, instead of a number.")] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed takes other files.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Mirror of Common Crawl.")] = None,
    connections: Annotated[int | None, typer.Option(help="Files at a time. Default: 4.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Dask scheduler whose workers fetch, tcp://HOST:8786.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="FILE", help="File that says where workers come from: SLURM, Kubernetes, TLS.")
    ] = None,
    refresh_inputs: Annotated[bool, typer.Option("--refresh-inputs", help="Ask the listing again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say which files, and fetch nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch crawl data, or go on: what is there and whole is not fetched again."""
    from gristmill.pipelines import downloads
    from gristmill.pipelines.cluster_file import load_cluster
    from gristmill.pipelines.progress import Display

    where = None if cluster is None else load_cluster(cluster, scheduler)
    options: dict[str, Any] = {
        "crawl": crawl, "kind": kind, "urls": url or None, "url_list": url_list, "files": files, "share": share,
        "seed": seed, "base_url": base_url, "policy": None if connections is None else {"connections": connections},
    }  # fmt: skip
    with Display(as_json=as_json) as display:
        jobs = downloads.jobs(spec, out, {k: v for k, v in options.items() if v is not None})
        for job in jobs:
            wanted = downloads.chosen(job.settings, job.folder, refresh=refresh_inputs, keep=not dry_run)
            if dry_run:
                _list(wanted, job.folder, as_json=as_json)
                continue
            cards = downloads.fetch_job(job, wanted, display, scheduler, where)
            _summary(cards, job.folder, as_json=as_json)


def _list(wanted: Any, folder: str, *, as_json: bool) -> None:
    if as_json:
        body = [{"url": w.url, "name": w.name, "size": w.size} for w in wanted]
        print(orjson.dumps({"event": "result", "out": folder, "wanted": body}).decode())
        return
    for w in wanted:
        print(w.url)


def _summary(cards: Any, folder: str, *, as_json: bool) -> None:
    body = {
        "out": folder,
        "files": len(cards),
        "bytes": sum(card.size for card in cards),
        "found": sum(card.found for card in cards),
        "unverified": sum(not card.verified for card in cards),
    }
    if as_json:
        print(orjson.dumps({"event": "result", **body}).decode())
        return
    print(f"{folder}: {body['files']:,} files, {body['bytes']:,} bytes; {body['found']:,} were there already.")
    if body["unverified"]:
        print(f"{body['unverified']:,} came without a length or checksum: nobody can tell whether they are whole.")
