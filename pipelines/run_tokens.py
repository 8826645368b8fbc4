"""From kept documents to token shards: tokenizer, documents near to held-out ones, shards, manifest, report."""

from __future__ import annotations

import orjson

from gristmill.pipelines.done import (
    card_key,
    holdout_report_key,
    manifest_key,
    tokenizer_report_key,
)
from gristmill.pipelines.learn import TokenizerOrder, TokensOrder, run_tokenizer, run_tokens
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
from gristmill.pipelines.plan import held_out_key
from gristmill.pipelines.runner import GUARDED, Runner, documents_of, ledger_figures
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
from gristmill.pipelines.upstream import parts_of
from gristmill.stages.ledger import ShardLedger
from gristmill.stages.shards import (
    Shard,
    filesystem,
    join,
    publish_bytes,
    read_bytes,
)
from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.shards import ShardInfo
from gristmill.tokenize.train import forecast
from gristmill.tokenize.write import write_manifest


def make_tokens(runner: Runner) -> None:
    plan = runner.plan
    if plan.tokenizer is None or plan.recipe.tokenizer is None:
        return
    runner.display.say("tokens: tokenizer, shards")
    folder = plan.segments[-1].segment.folder
    if card_key(join(runner.out, "tokens", "tokenizer_card.json")) != plan.tokenizer:
        runner.wait("the tokenizer", range(len(plan.shards)))
        order = TokenizerOrder(
            out=runner.out,
            key=plan.tokenizer,
            settings=plan.recipe.tokenizer,
            upstream=folder,
            shards=plan.shards,
            holdout_share=plan.recipe.tokens.holdout_share,
        )
        runner.display.say(f"tokenizer: {forecast(_kept_bytes(runner, folder), plan.recipe.tokenizer)}")
        runner.work("tokenizer", run_tokenizer, [order], ["tokenizer"], lambda _: {}, takes=["tokenizer"])
    if plan.near:
        _near_holdout(runner, folder)
    else:
        _forget_near(runner.out)
    if plan.scattered:
        _shuffled(runner)
    else:
        left = runner.left("tokens", plan.tokens, plan.tokens_ordered)
        orders = [_tokens_order(runner, shard, key) for shard, key in runner.missing.left("tokens", left)]
        labels = [order.shard.label for order in orders]
        runner.work("token shards", run_tokens, orders, labels, ledger_figures, GUARDED, ["tokens"])
    if runner.missing:
        return
    runner.plan_again()
    _manifest(runner)
    drop_scattered(runner.out)
    report = TokenizerReportOrder(runner.out, tokenizer_report_key(plan))
    reports = [] if card_key(join(runner.out, TOKENIZER_REPORT)) == report.key else [report]
    runner.work("tokenizer report", run_tokenizer_report, reports, ["tokenizer report"], lambda _: {}, takes=["tokens"])


def _tokens_order(runner: Runner, shard: Shard, key: str) -> TokensOrder:
    settings = runner.plan.recipe.tokens
    assert runner.plan.recipe.tokenizer is not None
    return TokensOrder(
        out=runner.out,
        key=key,
        upstream=runner.plan.segments[-1].segment.folder,
        shard=shard,
        holdout_share=settings.holdout_share,
        encoder=settings.encoder,
        eos_token=runner.plan.recipe.tokenizer.eos_token,
        max_tokens=settings.max_tokens,
        shuffle_seed=None if settings.shuffle == "none" else settings.seed,
        drop_near=settings.drop_near_holdout and bool(runner.plan.near),
        poison=runner.poison("tokens", shard, key),
    )


def _shuffled(runner: Runner) -> None:
    """Sorts the parts of the sources that lack a token shard, then merges what is left of each complete source."""
    plan = runner.plan
    parts: dict[str, list[Shard]] = {}
    for shard in plan.shards:
        parts.setdefault(shard.source, []).append(shard)
    wanted = {shard.source for shard, _ in runner.left("tokens", plan.tokens, plan.tokens)}
    unsorted = [
        (shard, ordered)
        for shard, ordered, key in zip(plan.shards, plan.tokens_ordered, plan.scattered, strict=True)
        if shard.source in wanted and not scattered_done(runner.out, shard, key)
    ]
    scatters = [
        ScatterOrder(**vars(_tokens_order(runner, shard, key)), gathered=plan.tokens[shard.index])
        for shard, key in runner.missing.left("tokens", unsorted)
    ]
    labels = [order.shard.label for order in scatters]
    runner.work("documents in random order", run_scatter, scatters, labels, documents_of, GUARDED, ["tokens"])
    runner.plan_again()
    whole = {name for name in wanted if not runner.missing.held_up(name, [part.index for part in parts[name]])}
    left = {shard.index: key for shard, key in runner.left("tokens", runner.plan.tokens, runner.plan.tokens)}
    gathers = [
        GatherOrder(_tokens_order(runner, shard, left[shard.index]), tuple(parts[shard.source]), at)
        for name in parts
        if name in whole
        for at, shard in enumerate(parts[name])
        if shard.index in left
    ]
    labels = [order.shard.label for order in gathers]
    runner.work("token shards", run_gather, gathers, labels, ledger_figures, takes=["tokens"])


def _near_holdout(runner: Runner, folder: str) -> None:
    """Signs held-out documents, finds what is near to them, and says so in tokens/holdout_report.json."""
    plan, settings = runner.plan, runner.plan.recipe.tokens
    together = held_out_key(plan.held_out)
    runner.wait("held-out documents", range(len(plan.shards)))
    for name, function, keys, card in (
        ("held-out documents", sign_held_out, plan.held_out, held_card),
        ("near held-out documents", find_near, plan.near, found_card),
    ):
        orders = [
            NearOrder(
                out=runner.out,
                key=key,
                upstream=folder,
                shard=shard,
                holdout_share=settings.holdout_share,
                similarity=settings.near_holdout_similarity,
                together=together,
            )
            for shard, key in zip(plan.shards, keys, strict=True)
            if card_key(card(runner.out, shard)) != key
        ]
        labels = [order.shard.label for order in orders]
        runner.work(name, function, orders, labels, documents_of, takes=["holdout"])
        runner.wait(name, range(len(plan.shards)))
        if function is sign_held_out and card_key(together_card(runner.out)) != together:
            order = TogetherOrder(runner.out, together, plan.shards)
            runner.work("held-out documents, together", put_together, [order], [name], documents_of)
    key = holdout_report_key(plan)
    if card_key(join(runner.out, HOLDOUT_REPORT)) != key:
        similarity, dropped = settings.near_holdout_similarity, settings.drop_near_holdout
        write_holdout_report(runner.out, plan.shards, similarity, key, dropped=dropped)
    if text := warning(orjson.loads(read_bytes(join(runner.out, HOLDOUT_REPORT)))):
        runner.display.say(text)


def _kept_bytes(runner: Runner, folder: str) -> int:
    """UTF-8 bytes of text that a finished segment kept."""
    total = 0
    for shard in runner.plan.shards:
        path = parts_of(runner.out, folder, "ledger", shard, "json")
        ledger = ShardLedger.opened(read_bytes(path), path)
        total += ledger.stages[-1].kept.bytes if ledger.stages else 0
    return total


def _manifest(runner: Runner) -> None:
    infos: list[ShardInfo] = []
    for shard in runner.plan.shards:
        card = orjson.loads(read_bytes(parts_of(runner.out, "tokens", "cards", shard, "json")))
        infos.extend(ShardInfo.model_validate(info) for info in card["infos"])
    assert runner.plan.recipe.tokenizer is not None
    encoder = Encoder(
        read_bytes(join(runner.out, "tokens", "tokenizer.json")),
        eos_token=runner.plan.recipe.tokenizer.eos_token,
        backend="tokenizers",
    )
    check_balance(runner.out, infos, runner.plan.shards)
    settings = runner.plan.recipe.tokens
    write_manifest(
        join(runner.out, "tokens"),
        infos,
        encoder,
        holdout_share=settings.holdout_share,
        shuffle=settings.shuffle,
        seed=settings.seed,
    )
    publish_bytes(join(runner.out, "tokens", "card.json"), orjson.dumps({"key": manifest_key(runner.plan)}))


def _forget_near(out: str) -> None:
    """Removes what an earlier recipe, which held documents out, left about them."""
    for name in (NEAR, HOLDOUT_REPORT):
        fs, inner = filesystem(join(out, name))
        if fs.exists(inner):
            fs.rm(inner, recursive=True)
