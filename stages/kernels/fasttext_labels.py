"""The second half of fastText's `predict`: the mean row of a text (`fasttext_lines`) -> a label and its probability.

As in fastText 0.9.2, to the bit: sums from the first column on, all of it rounded to float32, logarithms of x + 1e-5.
Models of the kind `TREE` (hierarchical softmax) walk Huffman's tree and leave out what is worse than the best leaf so
far; the others score all labels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int64, njit, types
from numba.extending import intrinsic

from gristmill.stages.kernels.fasttext_lines import PLAN, SOFTMAX, TREE, at, field, tiny
from gristmill.stages.kernels.memory import inner, peek32, peek64

NOTHING = -1  # no label: the model knows no word of the text
_OUTPUTS, _SCALE, _DIM, _LABELS = (PLAN.index(name) for name in ("outputs", "scale", "dim", "labels"))
_CHILDREN, _PATHS, _PATH_ENDS = (PLAN.index(name) for name in ("children", "paths", "path_ends"))
_KIND, _SIGMOIDS = (PLAN.index(name) for name in ("kind", "sigmoids"))


@intrinsic
def _float(typing_context: Any, address: Any) -> Any:
    """The float32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.FloatType().as_pointer()), align=1)

    return types.float32(types.int64), generate


@inner
def _dot(plan, mean, row):  # type: ignore[no-untyped-def]
    """Of the vector at `mean` with a row of the outputs, float32."""
    dim, total = field(plan, _DIM), float32(0)
    weights = field(plan, _OUTPUTS) + 4 * dim * row
    for i in range(dim):
        total += _float(weights + 4 * i) * _float(mean + 4 * i)
    return total * _float(field(plan, _SCALE) + 4 * row)


@inner
def _log(x):  # type: ignore[no-untyped-def]
    return float32(math.log(float(x) + 1e-5))


@inner
def _right(plan, mean, node):  # type: ignore[no-untyped-def]
    """The probability, float32, that a path goes right at a node of the tree."""
    return float32(1.0 / float(float32(1) + math.exp(-_dot(plan, mean, node))))


@inner
def _sigmoid(plan, x):  # type: ignore[no-untyped-def]
    """fastText's table of it, float32; what is no number stays none."""
    if x < -8 or x > 8:
        return float32(0) if x < -8 else float32(1)
    if x != x:  # noqa: PLR0124  not a number
        return x
    step = int64(float32(float32(float32(x + float32(8)) * float32(512)) / float32(8)) / float32(2))
    return _float(field(plan, _SIGMOIDS) + 4 * step)


@njit(nogil=True, cache=True)
def _values(plan, mean, values):  # type: ignore[no-untyped-def]
    """Fills values, (labels,) float32: probabilities of all labels, where there is no tree."""
    labels = field(plan, _LABELS)
    for i in range(labels):
        values[i] = _dot(plan, mean, i)
    if field(plan, _KIND) != SOFTMAX:
        for i in range(labels):
            values[i] = _sigmoid(plan, values[i])
        return
    highest, total = values[0], float32(0)
    for i in range(labels):
        highest = max(highest, values[i])
    for i in range(labels):
        values[i] = math.exp(float32(values[i] - highest))
        total += values[i]
    for i in range(labels):
        values[i] /= total


@njit(nogil=True, cache=True)
def _best_leaf(plan, mean, stack, scores):  # type: ignore[no-untyped-def]
    """-> (label or NOTHING, log of its probability), going left first; of equal ones the last.

    stack, scores: (labels + 2,) int64 and float32 of scratch.
    """
    labels, children = field(plan, _LABELS), field(plan, _CHILDREN)
    best, best_score, floor = int64(NOTHING), float32(0), _log(float32(0))
    stack[0], scores[0], top = 2 * labels - 2, float32(0), 1
    while top:
        top -= 1
        node, score = stack[top], scores[top]
        if score < floor or (best != NOTHING and score < best_score):
            continue
        if node < labels:
            best, best_score = node, score
            continue
        right, pair = _right(plan, mean, node - labels), children + 8 * (node - labels)
        stack[top], scores[top] = peek32(pair + 4), score + _log(right)
        stack[top + 1], scores[top + 1] = peek32(pair), score + _log(float32(1.0 - float(right)))
        top += 2
    return best, best_score


@njit(nogil=True, cache=True)
def best_labels(plan, means, seen, chosen, probabilities):  # type: ignore[no-untyped-def]
    """The most probable label of each text, from what `hidden` gave.

    chosen: (n,) int32 out, NOTHING where there is none; probabilities: (n,) float64 out, up to 1.00001 as fastText's.
    """
    net = at(plan)
    labels = field(net, _LABELS)
    stack, scores = np.empty(labels + 2, np.int64), np.empty(labels + 2, np.float32)
    for text in range(len(seen)):
        best, score = int64(NOTHING), float32(0)
        mean = at(means) + 4 * field(net, _DIM) * text
        if seen[text] and field(net, _KIND) == TREE:
            best, score = _best_leaf(net, mean, stack, scores)
        elif seen[text]:
            _values(net, mean, scores)
            for label in range(labels):
                value = _log(scores[label])
                if best == NOTHING or not value < score:
                    best, score = int64(label), value
        chosen[text] = best
        probabilities[text] = math.exp(score) if best != NOTHING else float32(0)


@njit(nogil=True, cache=True)
def label_probabilities(plan, means, seen, label, probabilities):  # type: ignore[no-untyped-def]
    """The probability of one label in each text, from what `hidden` gave.

    probabilities: (n,) float64 out, up to 1.00001 as fastText's; 0 where fastText leaves the label out of its answer,
    NaN where no word is known.
    """
    net = at(plan)
    values, floor = np.empty(field(net, _LABELS), np.float32), _log(float32(0))
    steps = field(net, _PATHS)
    first, last = (
        int64(peek64(field(net, _PATH_ENDS) + 8 * label)),
        int64(peek64(field(net, _PATH_ENDS) + 8 * label + 8)),
    )
    for text in range(len(seen)):
        mean = at(means) + 4 * field(net, _DIM) * text
        if seen[text] == 0:
            probabilities[text] = np.nan
        elif field(net, _KIND) != TREE:
            _values(net, mean, values)
            probabilities[text] = math.exp(_log(values[label]))
        else:
            score, lost = float32(0), False
            for place in range(first, last):
                step = int64(peek64(steps + 8 * place))
                right = _right(net, mean, step >> 1)
                score += _log(right if step & 1 else float32(1.0 - float(right)))
                lost = lost or score < floor
            probabilities[text] = float32(0) if lost else math.exp(score)


def warm() -> None:
    net = tiny()
    plan, means, seen = net.plan(), np.zeros((1, 1), np.float32), np.ones(1, np.int64)
    best_labels(plan, means, seen, np.zeros(1, np.int32), np.zeros(1))
    label_probabilities(plan, means, seen, 0, np.zeros(1))
