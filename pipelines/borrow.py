"""Pieces that another run has done already, taken over by links.

    taken = borrow(recipe, "out/vary/no_c4", lenders=[(control, "out/vary/control")])

A piece belongs to a run by its key, whatever made it, so two recipes that agree up to a stage agree in every byte up
to there. Links cost no disk and no time; where the storage has none, files are copied. A file of a run is never changed
in place, only replaced, so what a borrower does to its link leaves the lender alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence

from fsspec.implementations.local import LocalFileSystem

from gristmill.pipelines.done import card_key, ledger_done
from gristmill.pipelines.listing import frozen
from gristmill.pipelines.plan import Plan, SegmentPlan, plan_of
from gristmill.pipelines.recipe import Recipe
from gristmill.stages.shards import exists, filesystem, join

Lender = tuple[Recipe, str]  # a recipe and its run folder


def borrow(recipe: Recipe, out: str, lenders: Sequence[Lender]) -> int:
    """Links into `out` what its recipe asks for and the lenders have -> pieces taken.

    Raises InputError as `frozen` does.
    """
    taken = 0
    shards = frozen(recipe, out)
    theirs = [(plan_of(other, frozen(other, folder), folder), folder) for other, folder in lenders]
    for index in range(len(plan_of(recipe, shards, out).segments)):
        plan = plan_of(recipe, shards, out)  # anew: documents that a stage cannot take are borrowed with the piece
        for lender, folder in theirs:
            taken += _segment(plan, index, out, lender, folder)
    plan = plan_of(recipe, shards, out)
    for lender, folder in theirs:
        taken += _tokens(plan, out, lender, folder)
    return taken


def _segment(plan: Plan, index: int, out: str, lender: Plan, folder: str) -> int:
    segment = plan.segments[index]
    models = {name: key for theirs in lender.segments for name, key in theirs.models.items()}
    taken = sum(
        _tree(join(folder, "models", name), join(out, "models", name))
        for name, key in segment.models.items()
        if models.get(name) == key and _card(folder, "models", name) == key != _card(out, "models", name)
    )
    for theirs in lender.segments:
        taken += _decisions(segment, out, theirs, folder)
        keys = {(shard.part, key): i for i, (shard, key) in enumerate(zip(lender.shards, theirs.ordered, strict=True))}
        both = [
            (shard.part, keys[shard.part, key])
            for shard, key, done in zip(plan.shards, segment.ordered, segment.shards, strict=True)
            if (shard.part, key) in keys and not ledger_done(out, segment.segment.folder, shard, done)
        ]
        have = {
            part for part, i in both if ledger_done(folder, theirs.segment.folder, lender.shards[i], theirs.shards[i])
        }
        if have:
            taken += _parts(join(folder, theirs.segment.folder), join(out, segment.segment.folder), have)
    return taken


def _decisions(segment: SegmentPlan, out: str, theirs: SegmentPlan, folder: str) -> int:
    """The decisions of a global stage, and the signatures that they come from."""
    mine, other = join(out, segment.segment.folder), join(folder, theirs.segment.folder)
    key = segment.cluster
    if key is None or key != theirs.cluster or _card(other, "cluster") != key or _card(mine, "cluster") == key:
        return 0
    if exists(join(other, "sign")):
        _tree(join(other, "sign"), join(mine, "sign"))
    return _tree(join(other, "cluster"), join(mine, "cluster"))


def _tokens(plan: Plan, out: str, lender: Plan, folder: str) -> int:
    """The tokenizer, or all of the tokens: they hang together, so they are the same all or none."""
    key = plan.tokenizer
    if key is None or key != lender.tokenizer:
        return 0
    mine, other = join(out, "tokens"), join(folder, "tokens")
    if (plan.tokens, plan.near) == (lender.tokens, lender.near) and _card(other) not in (None, _card(mine)):
        return _tree(other, mine)
    name = "tokenizer_card.json"
    if card_key(join(other, name)) != key or card_key(join(mine, name)) == key:
        return 0
    _link(other, mine, ["tokenizer.json", name])
    return 1


def _card(*names: str) -> str | None:
    return card_key(join(*names, "card.json"))


def _tree(source: str, target: str) -> int:
    """Links everything below a folder, its card last -> 1."""
    _link(source, target, sorted(_files(source), key=lambda name: name.endswith("card.json")))
    return 1


def _parts(source: str, target: str, parts: set[str]) -> int:
    """Links the files of some parts, their ledgers last -> parts."""
    mine = [name for name in _files(source) if _part_of(name) in parts and not name.startswith(("sign/", "cluster/"))]
    _link(source, target, sorted(mine, key=lambda name: name.startswith("ledger/")))
    return len(parts)


def _part_of(name: str) -> str:
    """ "part-00007" of "kept/part-00007.parquet"."""
    return name.rsplit("/", 1)[-1].split(".", maxsplit=1)[0]


def _files(folder: str) -> Iterator[str]:
    """Names of the files below a folder; what begins with a dot is half written or a lock."""
    fs, inner = filesystem(folder)
    base = inner.rstrip("/")
    for path in fs.find(inner):
        name = str(path)[len(base) :].lstrip("/")
        if not name.rsplit("/", 1)[-1].startswith("."):
            yield name


def _link(source: str, target: str, names: Sequence[str]) -> None:
    """Links, or copies, files from one folder to another, replacing what is there."""
    fs, _ = filesystem(source)
    to, _ = filesystem(target)
    local = isinstance(fs, LocalFileSystem) and isinstance(to, LocalFileSystem)
    for name in names:
        (_, here), (_, there) = filesystem(join(source, name)), filesystem(join(target, name))
        to.makedirs(there.rsplit("/", 1)[0], exist_ok=True)
        if local:
            _hard_link(here, there)
        else:
            to.cp_file(here, there)


def _hard_link(source: str, target: str) -> None:
    """A second name for the file. Atomic: a name that is there points to the old file, then to the new one."""
    if os.path.exists(target) and os.path.samefile(source, target):
        return
    temporary = f"{target.rsplit('/', 1)[0]}/.{target.rsplit('/', 1)[1]}.borrowed.tmp"
    if os.path.exists(temporary):
        os.unlink(temporary)
    try:
        os.link(source, temporary)
    except OSError:  # another disk, or a file system without hard links
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)
