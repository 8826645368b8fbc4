"""The order in compiled code: which source comes when, and which of its windows. Integers only.

A source's due is the sum of its weights over the positions before: a whole part and a fraction in units of 2^-44
window (`ONE`). Weights are integers that add up to `ONE` at every position, so no rounding ever accumulates.

Arrays of a timeline (one phase), for k sources and j steps of constant weights, positions counted from its start:
    step_start (j,) int64       first position of each step; the last step goes on for ever
    weight (j, k) int64         in units of 1 / ONE, each row sums to ONE
    whole, part (j, k) int64    what is due at the start of the step: whole + part / ONE windows
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint64

from gristmill.stages.kernels.buffers import mix64

BITS = 44  # of a weight's fraction: 7e8 steps below a weight of 1e-7, and 2^40 positions times a weight stay exact
ONE = 1 << BITS
NEVER = 1 << 62
MIN_PERMUTED_BITS = 7  # a Feistel network on fewer bits has too few permutations; cycle walking leads back to n
ROUNDS = 6

_DE_BRUIJN = 0x03F79D71B4CB0A89  # every 6 bits of it are different, so a shift by a bit's place names the place
_PLACES = np.array([((_DE_BRUIJN << i) & (2**64 - 1)) >> 58 for i in range(64)]).argsort()
_HALF = BITS // 2
_LOW = (1 << _HALF) - 1
_FRACTION = ONE - 1


@njit(nogil=True, cache=True)
def permute(key, n, index):  # type: ignore[no-untyped-def]
    """The place of index in a keyed permutation of 0 .. n - 1: a Feistel network with cycle walking. n < 2^62.

    The network permutes 0 .. 2^bits - 1. Walking its cycle until it comes back below n permutes 0 .. n - 1
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"); below two rounds of it on average for n over
    2^MIN_PERMUTED_BITS.
    """
    if n <= 1:
        return int64(0)
    bits = uint64(MIN_PERMUTED_BITS)
    while (uint64(1) << bits) < uint64(n):
        bits += uint64(1)
    low_bits = bits >> uint64(1)
    low_mask = (uint64(1) << low_bits) - uint64(1)
    high_mask = (uint64(1) << (bits - low_bits)) - uint64(1)
    x = uint64(index)
    while True:
        high, low = x >> low_bits, x & low_mask
        for r in range(0, ROUNDS, 2):
            high ^= mix64(low + uint64(key) + uint64(r) * uint64(0x9E3779B97F4A7C15)) & high_mask
            low ^= mix64(high + uint64(key) + uint64(r + 1) * uint64(0x9E3779B97F4A7C15)) & low_mask
        x = (high << low_bits) | low
        if x < uint64(n):
            return int64(x)


@njit(inline="always")
def epoch_key(source_key, epoch):  # type: ignore[no-untyped-def]
    """The key of one epoch's permutation (uint64) from the source's key (uint64)."""
    return mix64(uint64(source_key) ^ mix64(uint64(epoch) + uint64(0x632BE59BD9B4E019)))


@njit(nogil=True, cache=True)
def windows_of(source_key, windows, source, rank, epoch_out, window_out):  # type: ignore[no-untyped-def]
    """Fills epoch and window (n,) int64 of positions whose source (n,) and rank (n,) in that source are known.

    rank is how many windows of the source came before. source_key, windows: (k,) uint64, (k,) int64.
    """
    for i in range(len(source)):
        s = source[i]
        n = windows[s]
        epoch = rank[i] // n
        epoch_out[i] = epoch
        window_out[i] = permute(epoch_key(source_key[s], epoch), n, rank[i] - epoch * n)


@njit(inline="always")
def step_at(step_start, position):  # type: ignore[no-untyped-def]
    """The step that a position lies in."""
    low, high = 0, len(step_start)
    while high - low > 1:
        middle = (low + high) >> 1
        if step_start[middle] <= position:
            low = middle
        else:
            high = middle
    return low


@njit(inline="always")
def due(whole, part, weight, positions):  # type: ignore[no-untyped-def]
    """What is due `positions` (< 2^40) after a step's start -> (whole windows, rest in units of 1 / ONE). Exact.

    The product has up to 84 bits; its upper and lower half are taken apart.
    """
    upper = positions * (weight >> _HALF)  # in units of 2^-22
    lower = ((upper & _LOW) << _HALF) + positions * (weight & _LOW) + part
    return whole + (upper >> (BITS - _HALF)) + (lower >> BITS), lower & _FRACTION


@njit(inline="always")
def reaches(missing, s, position, step, step_start, weight):  # type: ignore[no-untyped-def]
    """When source s has gained `missing` / ONE from `position` in `step` on: (last position before or then, rest).

    missing > 0. The rest is what is still missing at that position, 0 <= rest < its weight there. (NEVER, 0) where
    weights are 0 from there on.
    """
    steps = len(step_start)
    while step + 1 < steps:
        length = step_start[step + 1] - position
        w = weight[step, s]
        if w > 0 and uint64(missing) // uint64(w) < uint64(length):
            break
        missing -= length * w
        position = step_start[step + 1]
        step += 1
    w = weight[step, s]
    if w == 0:
        return (position if missing == 0 else int64(NEVER)), int64(0)
    q = int64(uint64(missing) // uint64(w))
    return position + q, missing - q * w


@njit(nogil=True, cache=True)
def state(step_start, weight, whole, part, position, total, low, high, out):  # type: ignore[no-untyped-def]
    """How often each source has come before `position`, between the known states low and high: fills out (k,) int64.

    total: the sum to reach. high: (k,), or (0,) where nothing is known of later.

    Every source gets the whole part of its due; what is left goes to sources in the middle of a window. They are
    taken in classes of like weight, the heaviest first, and each class gets its share rounded so that the classes up
    to it are together within half a window of their due: then at every scale of time as much is behind as ahead,
    and both the way here and the way on can keep within the bound. In a class the largest rest comes first.
    """
    k = len(out)
    j = step_at(step_start, position)
    rest = np.empty(k, np.int64)  # due beyond out[s], in units of 1 / ONE
    room = np.empty(k, np.int64)  # 1: may get one more
    key = np.empty(k, np.int64)
    left = int64(total)
    for s in range(k):
        w = weight[j, s]
        floor, fraction = due(whole[j, s], part[j, s], w, position - step_start[j])
        top = floor + (1 if fraction > 0 and w > 0 else 0)
        if len(high) > 0:
            top = min(top, high[s])
        top = max(top, low[s])
        out[s] = max(min(floor, top), low[s])
        room[s] = top - out[s]
        rest[s] = fraction + (floor - out[s]) * ONE
        left -= out[s]
        bits = int64(0)
        while w > 0:
            bits += 1
            w >>= 1
        key[s] = ((63 - bits) << (BITS + 1)) | (ONE - fraction)
    order = np.argsort(key, kind="mergesort")
    owed = int64(0)  # to the classes so far
    begin = 0
    while begin < k and left > 0:
        group = key[order[begin]] >> (BITS + 1)
        end = begin
        while end < k and key[order[end]] >> (BITS + 1) == group:
            owed += rest[order[end]]
            end += 1
        quota = min((owed + (ONE >> 1)) >> BITS, left)
        for at in range(begin, end):
            s = order[at]
            if quota > 0 and room[s] > 0:
                _move(out, rest, room, s, 1)
                owed -= ONE
                left -= 1
                quota -= 1
        begin = end
    while left != 0:
        s = _furthest(low, high, out, rest, 1 if left > 0 else -1)
        _move(out, rest, room, s, 1 if left > 0 else -1)
        left -= 1 if left > 0 else -1


@njit(inline="always")
def _move(out, rest, room, s, by):  # type: ignore[no-untyped-def]
    out[s] += by
    rest[s] -= by * ONE
    room[s] -= by


@njit(nogil=True, cache=True)
def _furthest(low, high, out, rest, sign):  # type: ignore[no-untyped-def]
    """The source furthest behind (sign 1) or ahead (-1) among those that the states low and high leave free."""
    best = -1
    for s in range(len(out)):
        free = (len(high) == 0 or out[s] < high[s]) if sign > 0 else out[s] > low[s]
        if free and (best < 0 or sign * rest[s] > sign * rest[best]):
            best = s
    return best


@njit(nogil=True, cache=True)
def fill(step_start, weight, whole, part, begin, end, low, high, source, rank):  # type: ignore[no-untyped-def]
    """The sources of the positions begin .. end - 1: fills source (n,) int32 and rank (n,) int64, n = end - begin.

    low, high: (k,) int64, the states at begin and at end. rank: how many windows of that source came before.

    Window number m of a source (from 1) may come once more than m - 1 are due, and must have come when m are due.
    Of the windows that may come, the one that must come first does: earliest deadline first, which finds a sequence
    that keeps every window in its time wherever there is one (Jackson 1955; for these windows Baruah, Cohen, Plaxton
    and Varvel 1996, "Proportionate progress"). Where there is none, the late ones come first, and where nothing may
    come, what may come next. Deadlines past the end are as good as the end, because `high` must be reached there.
    """
    k, n = len(low), end - begin
    step = step_at(step_start, begin)
    linear_until = step_start[step + 1] if step + 1 < len(step_start) else int64(NEVER)
    count = low.copy()
    behind = np.empty(k, np.int64)  # what is due at begin less what came, in units of 1 / ONE
    at, rest = np.empty(k, np.int64), np.empty(k, np.int64)  # when all that came will be due, as `reaches` says
    period, period_rest = np.zeros(k, np.int64), np.zeros(k, np.int64)  # of one window, by the weights at begin
    following = np.full(k, -1, np.int64)  # linked lists of the sources that may come from one position on
    freed = np.full(n, -1, np.int64)  # their heads
    for s in range(k):
        floor, fraction = due(whole[step, s], part[step, s], weight[step, s], begin - step_start[step])
        behind[s] = (floor - count[s]) * ONE + fraction
        at[s], rest[s] = begin, int64(0)
        if behind[s] < 0:
            at[s], rest[s] = reaches(-behind[s], s, begin, step, step_start, weight)
        w = weight[step, s]
        if w > 0:
            period[s] = ONE // w
            period_rest[s] = ONE - period[s] * w
        if count[s] < high[s]:
            place = min(at[s] - begin, n - 1)
            following[s] = freed[place]
            freed[place] = s
    queue, words, tops = np.full(n, -1, np.int64), np.zeros((n >> 6) + 1, np.uint64), np.zeros((n >> 12) + 1, np.uint64)
    size = 0
    for i in range(n):
        place = i
        while True:  # those that may come from here on; where nothing may come yet, those that may come next
            s, freed[place] = freed[place], -1
            while s >= 0:
                w = weight[step, s]
                known = behind[s] <= 0 and w > 0  # at and rest are those of the window before
                behind[s] -= ONE  # as if it had come
                if known:
                    at[s] += period[s]
                    rest[s] += period_rest[s]
                    if rest[s] >= w:
                        at[s] += 1
                        rest[s] -= w
                if not known or at[s] >= linear_until:
                    at[s], rest[s] = begin, int64(0)
                    if behind[s] < 0:
                        at[s], rest[s] = reaches(-behind[s], s, begin, step, step_start, weight)
                deadline = at[s] - begin + (1 if rest[s] > 0 else 0) - 1
                after = following[s]
                enqueue(queue, words, tops, following, min(max(deadline, 0), n - 1), s)
                size += 1
                s = after
            if size > 0:
                break
            place += 1
        s = dequeue(queue, words, tops, following, least(words, tops))
        size -= 1
        source[i] = s
        rank[i] = count[s]
        count[s] += 1
        if count[s] < high[s] and i + 1 < n:
            place = min(max(at[s] - begin, i + 1), n - 1)
            following[s] = freed[place]
            freed[place] = s


@njit(nogil=True, cache=True)
def furthest(step_start, weight, whole, part, begin, end, low, source):  # type: ignore[no-untyped-def]
    """The largest |came - due| of any source at the prefixes begin + 1 .. end, in units of 1 / ONE.

    source (end - begin,): what `fill` gave. Between two of its windows a source only falls behind, so it is enough to
    look before and after each, and at the end.
    """
    worst = int64(0)
    count = low.copy()
    j = step_at(step_start, begin)
    for i in range(end - begin):
        s = source[i]
        for later in range(2):  # before the window, then after it
            position = begin + i + later
            while j + 1 < len(step_start) and step_start[j + 1] <= position:
                j += 1
            floor, rest = due(whole[j, s], part[j, s], weight[j, s], position - step_start[j])
            error = (count[s] - floor) * ONE - rest
            if position > begin:
                worst = max(worst, abs(error))
            count[s] += 1 - later
    for s in range(len(low)):
        floor, rest = due(whole[j, s], part[j, s], weight[j, s], end - step_start[j])
        worst = max(worst, abs((count[s] - floor) * ONE - rest))
    return worst


@njit(inline="always")
def lowest_bit(word):  # type: ignore[no-untyped-def]
    """The place of the lowest bit that is set in a word (uint64) that is not 0."""
    isolated = word & (~word + uint64(1))
    return int64(_PLACES[(isolated * uint64(_DE_BRUIJN)) >> uint64(58)])


@njit(inline="always")
def enqueue(queue, words, tops, following, value, item):  # type: ignore[no-untyped-def]
    """Puts an item into the list of a value. A bit in `words` says that a list has something in it, a bit in `tops`
    that a word has: the least value in use is three look-ups away."""
    following[item] = queue[value]
    queue[value] = item
    words[value >> 6] |= uint64(1) << uint64(value & 63)
    tops[value >> 12] |= uint64(1) << uint64((value >> 6) & 63)


@njit(inline="always")
def least(words, tops):  # type: ignore[no-untyped-def]
    """The least value whose list is not empty. There must be one."""
    top = 0
    while tops[top] == uint64(0):
        top += 1
    word = (top << 6) + lowest_bit(tops[top])
    return (word << 6) + lowest_bit(words[word])


@njit(inline="always")
def dequeue(queue, words, tops, following, value):  # type: ignore[no-untyped-def]
    """Takes the item that came last out of the list of a value."""
    item = queue[value]
    queue[value] = following[item]
    if queue[value] < 0:
        word = value >> 6
        words[word] &= ~(uint64(1) << uint64(value & 63))
        if words[word] == uint64(0):
            tops[word >> 6] &= ~(uint64(1) << uint64(word & 63))
    return item


def warm() -> None:
    """Compiles the kernels, or loads them from numba's cache."""
    one = np.array([[ONE]], np.int64)
    zero = np.zeros((1, 1), np.int64)
    timeline = (np.zeros(1, np.int64), one, zero, zero)
    low, out = np.zeros(1, np.int64), np.zeros(1, np.int64)
    state(*timeline, 1, 1, low, np.zeros(0, np.int64), out)
    source, rank = np.zeros(1, np.int32), np.zeros(1, np.int64)
    fill(*timeline, 0, 1, low, out, source, rank)
    furthest(*timeline, 0, 1, low, source)
    windows_of(np.zeros(1, np.uint64), np.ones(1, np.int64), source, rank, np.zeros(1, np.int64), np.zeros(1, np.int64))
