"""The segments of a run, in order: models, signatures and decisions of a global stage, then shard after shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gristmill.pipelines import work
from gristmill.pipelines.done import (
    card_key,
    drop_signatures,
    withdraw_cards,
)
from gristmill.pipelines.learn import TrainOrder, run_train
from gristmill.pipelines.plan import SegmentPlan
from gristmill.pipelines.recipe import StageUse, kept_schema
from gristmill.pipelines.runner import ALONE, Runner, documents_of, ledger_figures
from gristmill.pipelines.upstream import Upstream, parts_of, upstream_of
from gristmill.stages.shards import (
    Shard,
    join,
    publish_bytes,
    read_bytes,
)


def run_segments(runner: Runner) -> None:
    for index in range(len(runner.plan.segments)):
        segment = runner.plan.segments[index]
        folder = segment.segment.folder
        runner.display.say(f"{folder}: {', '.join(use.heading for use in segment.segment.uses) or 'read'}")
        before = upstream_of(runner.plan.recipe, runner.out, folder)
        _models(runner, segment, before.folder)
        if segment.cluster is not None:
            _gate(runner, index, before)
        _shards(runner, runner.plan.segments[index], before)
        runner.plan_again()
        drop_signatures(segment, runner.out)


def _models(runner: Runner, segment: SegmentPlan, upstream: str | None) -> None:
    orders = [
        TrainOrder(
            out=runner.out,
            name=name,
            key=key,
            settings=runner.plan.recipe.models[name].settings,
            upstream=upstream,
            shards=runner.plan.shards,
        )
        for name, key in segment.models.items()
        if card_key(join(runner.out, "models", name, "card.json")) != key
    ]
    for order in orders:
        wanted = [selection.sources for selection in order.settings.roles().values() if selection.files is None]
        needed = [s.index for s in runner.plan.shards if any(names is None or s.source in names for names in wanted)]
        runner.wait(f"model {order.name}", needed)
    labels = [f"model {order.name}" for order in orders]
    runner.work(f"{segment.segment.folder} models", run_train, orders, labels, lambda _: {}, takes=["models"])


def _gate(runner: Runner, index: int, upstream: Upstream) -> None:
    segment = runner.plan.segments[index]
    folder, gate = segment.segment.folder, segment.segment.gate
    assert gate is not None
    if card_key(join(runner.out, folder, "cluster", "card.json")) == segment.cluster:
        return
    signed = [shard for shard in runner.plan.shards if shard.index in segment.sign]
    runner.wait(f"{folder} ({gate.heading})", segment.sign)
    unsigned = [
        (shard, segment.sign_ordered[shard.index])
        for shard in signed
        if card_key(parts_of(runner.out, folder, "sign", shard, "json")) != segment.sign[shard.index]
    ]
    resolved = runner.stage(gate)
    orders = [
        work.SignOrder(
            runner.out, folder, upstream, shard, key, resolved, gate.heading, runner.poison(folder, shard, key)
        )
        for shard, key in runner.missing.left(folder, unsigned)
    ]
    labels = [order.shard.label for order in orders]
    runner.work(f"{folder} sign", work.run_sign, orders, labels, _sign_figures, ALONE, _names(gate))
    runner.wait(f"{folder} ({gate.heading})", segment.sign)
    runner.plan_again()
    segment = runner.plan.segments[index]
    if hasattr(gate.stage, "groups"):
        _groups(runner, segment, signed, upstream)
        return
    order = _cluster_order(runner, segment, signed, str(segment.cluster), upstream)
    runner.work(f"{folder} cluster", work.run_cluster, [order], [f"{folder}/cluster"], documents_of, takes=_names(gate))


def _cluster_order(
    runner: Runner,
    segment: SegmentPlan,
    shards: Sequence[Shard],
    key: str,
    upstream: Upstream,
    group: int | None = None,
) -> work.ClusterOrder:
    assert segment.segment.gate is not None
    stage, keys = runner.stage(segment.segment.gate), tuple(segment.sign[shard.index] for shard in shards)
    return work.ClusterOrder(runner.out, segment.segment.folder, tuple(shards), keys, key, stage, upstream, group)


def _groups(runner: Runner, segment: SegmentPlan, signed: Sequence[Shard], upstream: Upstream) -> None:
    """Decides group by group, each group in one worker, and sums up."""
    folder, gate = segment.segment.folder, segment.segment.gate
    assert gate is not None
    signs = [orjson.loads(read_bytes(parts_of(runner.out, folder, "sign", s, "json"))) for s in signed]
    sizes = [(int(card["rows"]), int(card["bytes"])) for card in signs]
    groups = [[signed[i] for i in group] for group in gate.stage.groups(sizes)]
    orders = [_cluster_order(runner, segment, g, segment.group(g), upstream, g[0].index) for g in groups]
    # Cards of other groups go first: the decisions that they speak of are about to be replaced.
    withdraw_cards(join(runner.out, folder, "cluster"), {order.card: order.key for order in orders})
    runner.display.say(f"{folder}: {gate.stage.plan(sizes)}")
    left = [order for order in orders if card_key(order.card) != order.key]
    labels = [f"{folder}/cluster, {order.shards[0].part} to {order.shards[-1].part}" for order in left]
    runner.work(f"{folder} cluster", work.run_cluster, left, labels, documents_of, takes=_names(gate))
    cards = [orjson.loads(read_bytes(order.card)) for order in orders]
    figures = {name: sum(card["figures"][name] for card in cards) for name in (cards[0]["figures"] if cards else ())}
    total = {name: sum(card[name] for card in cards) for name in ("documents", "seconds")}
    card = {"key": segment.cluster, "figures": figures | {"groups": len(cards)}, **total}
    publish_bytes(join(runner.out, folder, "cluster", work.card_name(None)), orjson.dumps(card))


def _shards(runner: Runner, segment: SegmentPlan, upstream: Upstream) -> None:
    folder = segment.segment.folder
    schema = kept_schema(runner.plan.recipe, segment.segment)
    left = runner.left(folder, segment.shards, segment.ordered)
    orders = [
        work.ShardOrder(
            out=runner.out,
            folder=folder,
            upstream=upstream,
            shard=shard,
            key=key,
            steps=tuple(_step(runner, use, segment) for use in segment.uses(shard)),
            schema=schema,
            sample_per_reason=runner.plan.recipe.sample_per_reason,
            removals_share=runner.plan.recipe.removals_share,
            poison=runner.poison(folder, shard, key, segment.sign_ordered.get(shard.index, "")),
        )
        for shard, key in runner.missing.left(folder, left)
    ]
    labels = [order.shard.label for order in orders]
    runner.work(folder, work.run_shard, orders, labels, ledger_figures, ALONE, _names(*segment.segment.uses))


def _step(runner: Runner, use: StageUse, segment: SegmentPlan) -> work.StageStep:
    return work.StageStep(use.heading, runner.stage(use), is_gate=use is segment.segment.gate)


def _names(*uses: StageUse) -> list[str]:
    """What the file of --cluster may call these stages."""
    return [name for use in uses for name in (use.key, use.heading)]


def _sign_figures(card: Mapping[str, Any]) -> dict[str, int]:
    return {"documents": int(card["rows"]), "bytes_": int(card["bytes"])}
