"""Runs a recipe: does what the plan says is left, in order, and publishes the rest of the run folder.

`plan.py` decides, `work.py` does one piece, `engine.py` says where. Here is only the order of things:

    for each segment: its models -> signatures -> decisions -> shards        then tokenizer -> token shards -> manifest
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from ruamel.yaml import YAML

from gristmill.pipelines import downloads, poison, work
from gristmill.pipelines.beacon import Beacon
from gristmill.pipelines.bundles import run_all
from gristmill.pipelines.cluster_file import ClusterSettings
from gristmill.pipelines.done import (
    card_key,
    drop_signatures,
    holdout_report_key,
    ledger_done,
    manifest_key,
    pieces_left,
    tokenizer_report_key,
    withdraw_cards,
)
from gristmill.pipelines.engine import PLAIN, Care, Engine, Failure, open_engine
from gristmill.pipelines.faults import LASTING, storage_message
from gristmill.pipelines.isolation import TIMEOUT_S
from gristmill.pipelines.learn import TokenizerOrder, TokensOrder, TrainOrder, run_tokenizer, run_tokens, run_train
from gristmill.pipelines.listing import frozen
from gristmill.pipelines.lock import RunLock
from gristmill.pipelines.missing import MEND, Missing
from gristmill.pipelines.near_holdout import (
    HOLDOUT_REPORT,
    NEAR,
    NearOrder,
    TogetherOrder,
    find_near,
    found_card,
    held_card,
    put_together,
    sign_held_out,
    together_card,
    warning,
    write_holdout_report,
)
from gristmill.pipelines.plan import Plan, SegmentPlan, held_out_key, plan_of
from gristmill.pipelines.progress import Display
from gristmill.pipelines.recipe import Recipe, StageUse, check, kept_schema, model_of
from gristmill.pipelines.shuffled_tokens import (
    GatherOrder,
    ScatterOrder,
    check_balance,
    drop_scattered,
    run_gather,
    run_scatter,
    scattered_done,
)
from gristmill.pipelines.tokenizer_card import (
    TOKENIZER_REPORT,
    TokenizerReportOrder,
    run_tokenizer_report,
)
from gristmill.pipelines.upstream import Upstream, parts_of
from gristmill.pipelines.warmup import warm
from gristmill.stages.ledger import ShardLedger
from gristmill.stages.readers import columns_of
from gristmill.stages.shards import (
    Shard,
    filesystem,
    join,
    publish_bytes,
    read_bytes,
    remove_leftovers,
)
from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.shards import ShardInfo
from gristmill.tokenize.train import forecast
from gristmill.tokenize.write import write_manifest

SEGMENT_FOLDER = re.compile(r"^\d{2}-[a-z0-9_]+$")
GUARDED = Care(guarded=True)
ALONE = Care(guarded=True, copy=lambda order: replace(order, is_copy=True))  # of a shard by itself
PART = re.compile(r"^((?:part|holdout)-\d+)(-\d+)?$")  # a token shard may be one of several of its part


class RunError(RuntimeError):
    """A run could not be finished; what was done stays, and the same command goes on from there."""


@dataclass(frozen=True)
class Options:
    """How to run, as opposed to what: none of it changes a byte of the result."""

    debug: bool = False
    workers: int | None = None
    scheduler: str | None = None
    cluster: ClusterSettings | None = None  # where workers come from, and what stages take of them
    refresh_inputs: bool = False
    retry_failed: bool = False  # take up the shards again that were set aside
    timeout_s: float = TIMEOUT_S  # for one batch in one stage; then the worker is stuck


@dataclass
class Outcome:
    """What a call of `run` did."""

    out: str
    done: int = 0  # pieces worked on
    found: int = 0  # pieces that were there already
    failures: list[str] = field(default_factory=list)


def run(recipe: Recipe, out: str, options: Options, display: Display, lock: RunLock | None = None) -> Outcome:
    """Everything up to the token shards. lock: of the run folder, where the caller holds it already.

    Raises SettingsError, InputError and LockError before any work, RunError when pieces were given up: it names each
    of them.
    """
    with RunLock(out) if lock is None else nullcontext(lock) as held, storage_faults(out):
        if lock is None:
            announce(held, display)
        return _run(recipe, out, options, display, held)


def announce(lock: RunLock, display: Display) -> None:
    """Says it when the driver before was killed."""
    if lock.taken_over is not None:
        display.say(f"Going on for a driver that is gone: {lock.taken_over}.")


@contextmanager
def storage_faults(out: str) -> Iterator[None]:
    """A storage that takes no more is one message, wherever the driver notices it."""
    try:
        yield
    except OSError as error:
        if error.errno not in LASTING:
            raise
        raise RunError(storage_message(out, f"{type(error).__name__}: {error}")) from error


def _run(recipe: Recipe, out: str, options: Options, display: Display, lock: RunLock) -> Outcome:
    if options.cluster is not None:
        options.cluster.check(name for use in recipe.stages for name in (use.key, use.heading))
    downloads.fetch_sources(
        recipe, out, display, scheduler=options.scheduler, cluster=options.cluster, refresh=options.refresh_inputs
    )
    plan = prepare(recipe, out, refresh_inputs=options.refresh_inputs)
    outcome = Outcome(out)
    left = pieces_left(plan, out)
    outcome.found = left.found
    if not left.todo:
        for segment in plan.segments:
            drop_signatures(segment, out)
        display.say(f"Nothing to do: all {left.found:,} pieces of {out} are there and up to date.")
        return outcome
    if left.found:
        display.say(f"Going on: {left.found:,} pieces of {out} are there and up to date.")
    display.say(warm())
    opened = open_engine(
        debug=options.debug,
        workers=options.workers,
        scheduler=options.scheduler,
        cluster=options.cluster,
        timeout_s=options.timeout_s,
        out=out,
        say=display.say,
    )
    with opened as engine:
        if engine.dashboard:
            display.say(f"{engine.workers} workers; dashboard {engine.dashboard}")
        _work_through(plan, out, engine, display, outcome, lock, options)
    # A scheduler of its own begins pieces of a dead worker again without telling the driver.
    if engine.cut_short or options.scheduler is not None or options.cluster is not None:
        remove_leftovers(out)
    return outcome


def work_through(plan: Plan, out: str, engine: Engine, display: Display) -> Outcome:
    """Everything of a plan, in a folder of its own and on a given engine: what `gristmill plan` does with a sample.

    Raises RunError when pieces were given up.
    """
    outcome = Outcome(out)
    with RunLock(out) as lock, storage_faults(out):
        _work_through(plan, out, engine, display, outcome, lock, Options(debug=True))
    return outcome


def _work_through(
    plan: Plan, out: str, engine: Engine, display: Display, outcome: Outcome, lock: RunLock, options: Options
) -> None:
    with Beacon(out, engine) as beacon:
        runner = _Runner(plan, out, engine, display, outcome, beacon, lock, options)
        runner.segments()
        runner.tokens()
        runner.end()


def prepare(recipe: Recipe, out: str, *, refresh_inputs: bool = False) -> Plan:
    """Checks the recipe against its input, freezes the listing, clears what no longer belongs, and plans."""
    shards = frozen(recipe, out, refresh=refresh_inputs)
    formats: dict[str, tuple[str, ...]] = {}
    for shard in shards:
        formats.setdefault(shard.source, tuple(columns_of(shard.format)))
    check(recipe, formats)
    plan = plan_of(recipe, shards, out)
    text = io.StringIO()
    YAML(typ="safe").dump(recipe.dump(), text)
    publish_bytes(join(out, "recipe.yaml"), text.getvalue().encode())
    _prune(plan, out)
    remove_leftovers(out)
    return plan


def _prune(plan: Plan, out: str) -> None:
    """Removes segments and parts that the plan does not know: they are of an earlier recipe or listing."""
    fs, inner = filesystem(out)
    known = {segment.segment.folder for segment in plan.segments}
    if plan.tokenizer is not None:
        known.add("tokens")
    parts = {name for shard in plan.shards for name in (shard.part, shard.part.replace("part-", "holdout-"))}
    for path in fs.ls(inner, detail=False):
        name = path.rstrip("/").rsplit("/", 1)[-1]
        if name != "tokens" and not SEGMENT_FOLDER.match(name):
            continue
        if name not in known:
            fs.rm(path, recursive=True)
            continue
        for file in fs.find(path):
            stem = file.rsplit("/", 1)[-1].split(".")[0]
            if (found := PART.match(stem)) and found[1] not in parts:
                fs.rm(file)


class _Runner:
    """One pass over a plan. `missing.py` says how it goes on without shards that could not be done."""

    def __init__(
        self,
        plan: Plan,
        out: str,
        engine: Engine,
        display: Display,
        outcome: Outcome,
        beacon: Beacon,
        lock: RunLock,
        options: Options,
    ) -> None:
        self.plan, self.out, self.engine, self.display, self.outcome = plan, out, engine, display, outcome
        self.beacon, self.lock, self.cluster = beacon, lock, options.cluster
        self._found = False  # poison that the plan does not know
        self.missing = Missing(out, len(plan.shards), display.say, retry_failed=options.retry_failed)

    def segments(self) -> None:
        upstream: str | None = None
        for index in range(len(self.plan.segments)):
            segment = self.plan.segments[index]
            folder = segment.segment.folder
            self.display.say(f"{folder}: {', '.join(use.heading for use in segment.segment.uses) or 'read'}")
            self._models(segment, upstream)
            before = Upstream(self.out, upstream, self.plan.recipe.max_chars, self.plan.recipe.unreadable == "count")
            if segment.cluster is not None:
                self._gate(index, before)
            self._shards(self.plan.segments[index], before)
            self._plan_again()
            drop_signatures(segment, self.out)
            upstream = folder

    def end(self) -> None:
        """Raises RunError with the list when shards are missing."""
        if self.missing:
            raise RunError(self.missing.message())

    def _work(
        self,
        name: str,
        function: Callable[[Any], Any],
        orders: Sequence[Any],
        labels: Sequence[str],
        count: Any,
        care: Care = PLAIN,
        takes: Iterable[str] = (),
    ) -> None:
        """Does orders on the engine, with a row of the display. Shards that were given up are `missing` afterwards.

        takes: names under which the file of --cluster may say what the work takes of a worker.

        Raises RunError when the storage takes no more, and when pieces that are no shards were given up.
        """
        if not orders:
            return
        if self.cluster is not None:
            care = replace(care, resources=self.cluster.taken(takes))
        with self.display.phase(name, len(orders)) as phase:

            def show(positions: Sequence[int]) -> None:
                self.beacon.show(phase, [labels[position] for position in positions])

            def done(position: int, result: Any) -> None:
                self.lock.check()
                self.outcome.done += 1
                phase.advance(**count(result))
                if hasattr(orders[position], "poison"):
                    self._found |= _carried(orders[position]) != result["key"]
                for line in result.get("problems", ()):
                    if poison.IS_DROPPED in line:
                        self.display.say(f"  {line}")
                if hasattr(orders[position], "shard"):
                    self.missing.done(orders[position].shard, _folder(orders[position]))

            found: list[Failure] = run_all(self.engine, function, orders, done, care, show)
            failures = sorted(found, key=lambda failure: failure.position)
        for failure in failures:
            if failure.kind == "storage":
                raise RunError(storage_message(self.out, f"{labels[failure.position]}: {failure.error}"))
        listed = [f"{labels[f.position]}: {f.error}" for f in failures]
        self.outcome.failures.extend(listed)
        if failures and not hasattr(orders[0], "shard"):
            raise RunError(
                f"{len(failures):,} of {len(orders):,} pieces of {name} were given up; the others are done:\n  "
                + "\n  ".join(listed[:20])
                + f"\n{MEND}"
            )
        for failure in failures:
            order = orders[failure.position]
            self.missing.add(order.shard, _folder(order), order.key, failure)
            self._found = True  # some may have been found before it was given up

    def _plan_again(self) -> None:
        """Poison that was found just now is part of the keys of what comes after."""
        if self._found:
            self.plan = plan_of(self.plan.recipe, self.plan.shards, self.out)
            self._found = False

    def _wait(self, what: str, indexes: Iterable[int]) -> None:
        """Raises RunError when one of these shards is missing."""
        if message := self.missing.held_up(what, indexes):
            raise RunError(message)

    def _models(self, segment: SegmentPlan, upstream: str | None) -> None:
        orders = [
            TrainOrder(
                out=self.out,
                name=name,
                key=key,
                settings=self.plan.recipe.models[name].settings,
                upstream=upstream,
                shards=self.plan.shards,
            )
            for name, key in segment.models.items()
            if card_key(join(self.out, "models", name, "card.json")) != key
        ]
        for order in orders:
            wanted = [selection.sources for selection in order.settings.roles().values() if selection.files is None]
            needed = [s.index for s in self.plan.shards if any(names is None or s.source in names for names in wanted)]
            self._wait(f"model {order.name}", needed)
        labels = [f"model {order.name}" for order in orders]
        self._work(f"{segment.segment.folder} models", run_train, orders, labels, lambda _: {}, takes=["models"])

    def _gate(self, index: int, upstream: Upstream) -> None:
        segment = self.plan.segments[index]
        folder, gate = segment.segment.folder, segment.segment.gate
        assert gate is not None
        if card_key(join(self.out, folder, "cluster", "card.json")) == segment.cluster:
            return
        signed = [shard for shard in self.plan.shards if shard.index in segment.sign]
        self._wait(f"{folder} ({gate.heading})", segment.sign)
        unsigned = [
            (shard, segment.sign_ordered[shard.index])
            for shard in signed
            if card_key(parts_of(self.out, folder, "sign", shard, "json")) != segment.sign[shard.index]
        ]
        resolved = self._resolved(gate)
        orders = [
            work.SignOrder(
                self.out, folder, upstream, shard, key, resolved, gate.heading, self._poison(folder, shard, key)
            )
            for shard, key in self.missing.left(folder, unsigned)
        ]
        labels = [order.shard.label for order in orders]
        self._work(f"{folder} sign", work.run_sign, orders, labels, _sign_figures, ALONE, _names(gate))
        self._wait(f"{folder} ({gate.heading})", segment.sign)
        self._plan_again()
        segment = self.plan.segments[index]
        if hasattr(gate.stage, "groups"):
            self._groups(segment, signed, upstream)
            return
        order = self._cluster_order(segment, signed, str(segment.cluster), upstream)
        self._work(
            f"{folder} cluster", work.run_cluster, [order], [f"{folder}/cluster"], _documents, takes=_names(gate)
        )

    def _cluster_order(
        self, segment: SegmentPlan, shards: Sequence[Shard], key: str, upstream: Upstream, group: int | None = None
    ) -> work.ClusterOrder:
        assert segment.segment.gate is not None
        stage, keys = self._resolved(segment.segment.gate), tuple(segment.sign[shard.index] for shard in shards)
        return work.ClusterOrder(self.out, segment.segment.folder, tuple(shards), keys, key, stage, upstream, group)

    def _groups(self, segment: SegmentPlan, signed: Sequence[Shard], upstream: Upstream) -> None:
        """Decides group by group, each group in one worker, and sums up."""
        folder, gate = segment.segment.folder, segment.segment.gate
        assert gate is not None
        signs = [orjson.loads(read_bytes(parts_of(self.out, folder, "sign", s, "json"))) for s in signed]
        sizes = [(int(card["rows"]), int(card["bytes"])) for card in signs]
        groups = [[signed[i] for i in group] for group in gate.stage.groups(sizes)]
        orders = [self._cluster_order(segment, g, segment.group(g), upstream, g[0].index) for g in groups]
        # Cards of other groups go first: the decisions that they speak of are about to be replaced.
        withdraw_cards(join(self.out, folder, "cluster"), {order.card: order.key for order in orders})
        self.display.say(f"{folder}: {gate.stage.plan(sizes)}")
        left = [order for order in orders if card_key(order.card) != order.key]
        labels = [f"{folder}/cluster, {order.shards[0].part} to {order.shards[-1].part}" for order in left]
        self._work(f"{folder} cluster", work.run_cluster, left, labels, _documents, takes=_names(gate))
        cards = [orjson.loads(read_bytes(order.card)) for order in orders]
        figures = {
            name: sum(card["figures"][name] for card in cards) for name in (cards[0]["figures"] if cards else ())
        }
        total = {name: sum(card[name] for card in cards) for name in ("documents", "seconds")}
        card = {"key": segment.cluster, "figures": figures | {"groups": len(cards)}, **total}
        publish_bytes(join(self.out, folder, "cluster", work.card_name(None)), orjson.dumps(card))

    def _shards(self, segment: SegmentPlan, upstream: Upstream) -> None:
        folder = segment.segment.folder
        schema = kept_schema(self.plan.recipe, segment.segment)
        left = self._left(folder, segment.shards, segment.ordered)
        orders = [
            work.ShardOrder(
                out=self.out,
                folder=folder,
                upstream=upstream,
                shard=shard,
                key=key,
                steps=tuple(self._step(use, segment) for use in segment.uses(shard)),
                schema=schema,
                sample_per_reason=self.plan.recipe.sample_per_reason,
                removals_share=self.plan.recipe.removals_share,
                poison=self._poison(folder, shard, key, segment.sign_ordered.get(shard.index, "")),
            )
            for shard, key in self.missing.left(folder, left)
        ]
        labels = [order.shard.label for order in orders]
        self._work(folder, work.run_shard, orders, labels, _ledger_figures, ALONE, _names(*segment.segment.uses))

    def _left(self, folder: str, carried: Sequence[str], ordered: Sequence[str]) -> list[tuple[Shard, str]]:
        """Shards that are not done, with the keys that they are ordered under."""
        triples = zip(self.plan.shards, carried, ordered, strict=True)
        return [(shard, key) for shard, done, key in triples if not ledger_done(self.out, folder, shard, done)]

    def _poison(self, folder: str, shard: Shard, *keys: str) -> tuple[poison.Poisoned, ...]:
        """Documents of the shard that are known to kill a worker."""
        return poison.load(join(self.out, folder, "poison", f"{shard.part}.json"), keys)

    def _resolved(self, use: StageUse) -> Any:
        """The stage, its model as a path."""
        name = model_of(self.plan.recipe, use)
        if name is None:
            return use.stage
        return use.stage.model_copy(update={"model": join(self.out, "models", name)})

    def _step(self, use: StageUse, segment: SegmentPlan) -> work.StageStep:
        return work.StageStep(use.heading, self._resolved(use), is_gate=use is segment.segment.gate)

    def tokens(self) -> None:
        plan = self.plan
        if plan.tokenizer is None or plan.recipe.tokenizer is None:
            return
        self.display.say("tokens: tokenizer, shards")
        folder = plan.segments[-1].segment.folder
        if card_key(join(self.out, "tokens", "tokenizer_card.json")) != plan.tokenizer:
            self._wait("the tokenizer", range(len(plan.shards)))
            order = TokenizerOrder(
                out=self.out,
                key=plan.tokenizer,
                settings=plan.recipe.tokenizer,
                upstream=folder,
                shards=plan.shards,
                holdout_share=plan.recipe.tokens.holdout_share,
            )
            self.display.say(f"tokenizer: {forecast(self._kept_bytes(folder), plan.recipe.tokenizer)}")
            self._work("tokenizer", run_tokenizer, [order], ["tokenizer"], lambda _: {}, takes=["tokenizer"])
        if plan.near:
            self._near_holdout(folder)
        else:
            _forget_near(self.out)
        if plan.scattered:
            self._shuffled()
        else:
            left = self._left("tokens", plan.tokens, plan.tokens_ordered)
            orders = [self._tokens_order(shard, key) for shard, key in self.missing.left("tokens", left)]
            labels = [order.shard.label for order in orders]
            self._work("token shards", run_tokens, orders, labels, _ledger_figures, GUARDED, ["tokens"])
        if self.missing:
            return
        self._plan_again()
        self._manifest()
        drop_scattered(self.out)
        report = TokenizerReportOrder(self.out, tokenizer_report_key(plan))
        reports = [] if card_key(join(self.out, TOKENIZER_REPORT)) == report.key else [report]
        self._work(
            "tokenizer report", run_tokenizer_report, reports, ["tokenizer report"], lambda _: {}, takes=["tokens"]
        )

    def _tokens_order(self, shard: Shard, key: str) -> TokensOrder:
        settings = self.plan.recipe.tokens
        assert self.plan.recipe.tokenizer is not None
        return TokensOrder(
            out=self.out,
            key=key,
            upstream=self.plan.segments[-1].segment.folder,
            shard=shard,
            holdout_share=settings.holdout_share,
            encoder=settings.encoder,
            eos_token=self.plan.recipe.tokenizer.eos_token,
            max_tokens=settings.max_tokens,
            shuffle_seed=None if settings.shuffle == "none" else settings.seed,
            drop_near=settings.drop_near_holdout and bool(self.plan.near),
            poison=self._poison("tokens", shard, key),
        )

    def _shuffled(self) -> None:
        """Sorts the parts of the sources that lack a token shard, then merges what is left of each complete source."""
        plan = self.plan
        parts: dict[str, list[Shard]] = {}
        for shard in plan.shards:
            parts.setdefault(shard.source, []).append(shard)
        wanted = {shard.source for shard, _ in self._left("tokens", plan.tokens, plan.tokens)}
        unsorted = [
            (shard, ordered)
            for shard, ordered, key in zip(plan.shards, plan.tokens_ordered, plan.scattered, strict=True)
            if shard.source in wanted and not scattered_done(self.out, shard, key)
        ]
        scatters = [
            ScatterOrder(self._tokens_order(shard, key), plan.tokens[shard.index])
            for shard, key in self.missing.left("tokens", unsorted)
        ]
        labels = [order.shard.label for order in scatters]
        self._work("documents in random order", run_scatter, scatters, labels, _documents, takes=["tokens"])
        self._plan_again()
        whole = {name for name in wanted if not self.missing.held_up(name, [part.index for part in parts[name]])}
        left = {shard.index: key for shard, key in self._left("tokens", self.plan.tokens, self.plan.tokens)}
        gathers = [
            GatherOrder(self._tokens_order(shard, left[shard.index]), tuple(parts[shard.source]), at)
            for name in parts
            if name in whole
            for at, shard in enumerate(parts[name])
            if shard.index in left
        ]
        labels = [order.shard.label for order in gathers]
        self._work("token shards", run_gather, gathers, labels, _ledger_figures, takes=["tokens"])

    def _near_holdout(self, folder: str) -> None:
        """Signs held-out documents, finds what is near to them, and says so in tokens/holdout_report.json."""
        plan, settings = self.plan, self.plan.recipe.tokens
        together = held_out_key(plan.held_out)
        self._wait("held-out documents", range(len(plan.shards)))
        for name, function, keys, card in (
            ("held-out documents", sign_held_out, plan.held_out, held_card),
            ("near held-out documents", find_near, plan.near, found_card),
        ):
            orders = [
                NearOrder(
                    out=self.out,
                    key=key,
                    upstream=folder,
                    shard=shard,
                    holdout_share=settings.holdout_share,
                    similarity=settings.near_holdout_similarity,
                    together=together,
                )
                for shard, key in zip(plan.shards, keys, strict=True)
                if card_key(card(self.out, shard)) != key
            ]
            labels = [order.shard.label for order in orders]
            self._work(name, function, orders, labels, _documents, takes=["holdout"])
            self._wait(name, range(len(plan.shards)))
            if function is sign_held_out and card_key(together_card(self.out)) != together:
                order = TogetherOrder(self.out, together, plan.shards)
                self._work("held-out documents, together", put_together, [order], [name], _documents)
        key = holdout_report_key(plan)
        if card_key(join(self.out, HOLDOUT_REPORT)) != key:
            similarity, dropped = settings.near_holdout_similarity, settings.drop_near_holdout
            write_holdout_report(self.out, plan.shards, similarity, key, dropped=dropped)
        if text := warning(orjson.loads(read_bytes(join(self.out, HOLDOUT_REPORT)))):
            self.display.say(text)

    def _kept_bytes(self, folder: str) -> int:
        """UTF-8 bytes of text that a finished segment kept."""
        total = 0
        for shard in self.plan.shards:
            path = parts_of(self.out, folder, "ledger", shard, "json")
            ledger = ShardLedger.opened(read_bytes(path), path)
            total += ledger.stages[-1].kept.bytes if ledger.stages else 0
        return total

    def _manifest(self) -> None:
        infos: list[ShardInfo] = []
        for shard in self.plan.shards:
            card = orjson.loads(read_bytes(parts_of(self.out, "tokens", "cards", shard, "json")))
            infos.extend(ShardInfo.model_validate(info) for info in card["infos"])
        assert self.plan.recipe.tokenizer is not None
        encoder = Encoder(
            read_bytes(join(self.out, "tokens", "tokenizer.json")),
            eos_token=self.plan.recipe.tokenizer.eos_token,
            backend="tokenizers",
        )
        check_balance(self.out, infos, self.plan.shards)
        settings = self.plan.recipe.tokens
        write_manifest(
            join(self.out, "tokens"),
            infos,
            encoder,
            holdout_share=settings.holdout_share,
            shuffle=settings.shuffle,
            seed=settings.seed,
        )
        publish_bytes(join(self.out, "tokens", "card.json"), orjson.dumps({"key": manifest_key(self.plan)}))


def _carried(order: Any) -> str:
    """The key that comes of an order when no more poison is found."""
    return poison.key_with(order.key, order.poison)


def _folder(order: Any) -> str:
    """The segment that an order for a shard belongs to."""
    return getattr(order, "folder", "tokens")


def _names(*uses: StageUse) -> list[str]:
    """What the file of --cluster may call these stages."""
    return [name for use in uses for name in (use.key, use.heading)]


def _sign_figures(card: Mapping[str, Any]) -> dict[str, int]:
    return {"documents": int(card["rows"]), "bytes_": int(card["bytes"])}


def _forget_near(out: str) -> None:
    """Removes what an earlier recipe, which held documents out, left about them."""
    for name in (NEAR, HOLDOUT_REPORT):
        fs, inner = filesystem(join(out, name))
        if fs.exists(inner):
            fs.rm(inner, recursive=True)


def _documents(card: Mapping[str, Any]) -> dict[str, int]:
    return {"documents": int(card["documents"])}


def _ledger_figures(ledger: Mapping[str, Any]) -> dict[str, int]:
    figures = work.summary(ledger)
    return {"documents": figures["documents"], "kept": figures["kept"], "bytes_": figures["bytes"]}
