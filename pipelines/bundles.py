"""Small shards go to the workers in bundles: what the scheduler does for a piece costs more than the piece.

A bundle is several orders for one worker, one after the other; each is booked by itself. What a worker could not do in
a bundle, for whatever reason, is done again alone, with all the care that a piece gets: so faults look the same, and a
document that kills is looked for in one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gristmill.pipelines.engine import Care, Done, Engine, Failure, InProcess
from gristmill.pipelines.faults import LASTING
from gristmill.pipelines.isolation import in_own_child
from gristmill.stages.shards import Shard

MANY = 100  # pieces a worker; where there are fewer, each goes alone
BUNDLE = 32  # pieces
BUNDLE_BYTES = 1_000_000  # of input: some hundred milliseconds of work


@dataclass(frozen=True)
class Bundle:
    """Orders for one worker."""

    function: Callable[[Any], Any]
    orders: tuple[Any, ...]


def run_all(
    engine: Engine,
    function: Callable[[Any], Any],
    orders: Sequence[Any],
    done: Done,
    care: Care,
    show: Callable[[Sequence[int]], None] = lambda _: None,
) -> list[Failure]:
    """`engine.run`, small pieces in bundles where there are many.

    show: told before each pass, for every piece of the engine, the position of its first order.
    """
    groups = [] if isinstance(engine, InProcess) or care.at_once else bundles(orders, engine.workers)
    if not groups:
        show(range(len(orders)))
        return engine.run(function, orders, done, care)
    alone = set(range(len(orders))).difference(*groups)

    def landed(at: int, result: Any) -> None:
        for position, one in zip(groups[at], result, strict=True):
            if one is None:
                alone.add(position)
            else:
                done(position, one)

    show([group[0] for group in groups])
    packed = [Bundle(function, tuple(orders[position] for position in group)) for group in groups]
    for failure in engine.run(run_bundle, packed, landed, replace(care, copy=None)):
        first = groups[failure.position]
        if failure.kind == "storage":
            return [replace(failure, position=first[0])]
        alone.update(first)
    left = sorted(alone)
    show(left)
    failures = engine.run(
        function, [orders[position] for position in left], lambda at, result: done(left[at], result), care
    )
    return [replace(failure, position=left[failure.position]) for failure in failures]


def bundles(orders: Sequence[Any], workers: int) -> list[list[int]]:
    """Positions of the orders that go together; those in none go alone. Order is kept: big ones come first."""
    sizes = [_bytes(order) for order in orders]
    if len(orders) < MANY * workers or not any(0 <= size < BUNDLE_BYTES // 2 for size in sizes):
        return []
    return [group for group in _groups(sizes) if len(group) > 1]


def _groups(sizes: Sequence[int]) -> Iterator[list[int]]:
    group: list[int] = []
    total = 0
    for position, size in enumerate(sizes):
        if size < 0:
            continue
        if group and (total + size > BUNDLE_BYTES or len(group) == BUNDLE):
            yield group
            group, total = [], 0
        group.append(position)
        total += size
    if group:
        yield group


def _bytes(order: Any) -> int:
    """Bytes of input of an order for a shard; -1 for another order."""
    shard = getattr(order, "shard", None)
    if not isinstance(shard, Shard):
        return -1
    if shard.format == "jsonl" and (shard.start or shard.stop is not None):
        return (shard.size if shard.stop is None else shard.stop) - shard.start
    return shard.size


def run_bundle(bundle: Bundle) -> list[Any]:
    """On a worker: each order's result; None for one that is to be done alone.

    Raises OSError when the storage takes no more, and RuntimeError in a child process, which is for one piece alone.
    """
    if in_own_child():
        raise RuntimeError("a bundle that killed its worker is taken apart")
    out: list[Any] = []
    for order in bundle.orders:
        try:
            out.append(bundle.function(order))
        except OSError as error:
            if error.errno in LASTING:
                raise
            out.append(None)
        except Exception:  # whatever it is comes up again when the order is done alone, and is told then
            out.append(None)
    return out
