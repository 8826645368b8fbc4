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

BITS = 44  # of a weight's fraction: 7e8 steps below a weight of 1e-7, and 2^40 positions times a weight stay exact
ONE = 1 << BITS
NEVER = 1 << 62
MIN_PERMUTED_BITS = 7  # a Feistel network on fewer bits has too few permutations; cycle walking leads back to n
ROUNDS = 6

_HALF = BITS // 2
_LOW = (1 << _HALF) - 1
_FRACTION = ONE - 1


@njit(inline="always")
def mix64(h):  # type: ignore[no-untyped-def]
    """MurmurHash3's 64-bit finaliser: every bit of the input changes every bit of the output."""
    h ^= h >> uint64(33)
    h *= uint64(0xFF51AFD7ED558CCD)
    h ^= h >> uint64(33)
    h *= uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> uint64(33)
    return h


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
    """When source s has gained `missing` / ONE from `position` on -> (last position at or before, 1 if past it else 0).

    missing > 0. (position, 0) means exactly then, (position, 1) between it and the next. NEVER where weights are 0.
    """
    steps = len(step_start)
    while step + 1 < steps:
        length = step_start[step + 1] - position
        w = weight[step, s]
        if w > 0 and (missing - 1) // w < length:
            break
        missing -= length * w
        position = step_start[step + 1]
        step += 1
    w = weight[step, s]
    if w == 0:
        return int64(NEVER), int64(0)
    q = missing // w
    return position + q, int64(1) if q * w != missing else int64(0)


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
    and Varvel 1996, "Proportionate progress"). Where there is none, the late ones come first, then the next to be due.
    """
    k, n = len(low), end - begin
    first_step = step_at(step_start, begin)
    floor = np.empty(k, np.int64)
    fraction = np.empty(k, np.int64)
    count = low.copy()
    deadline = np.empty(k, np.int64)
    following = np.full(k, -1, np.int64)  # linked list of the sources that become free at one position
    freed = np.full(n, -1, np.int64)  # its heads
    heap = np.empty(k, np.int64)
    size = 0
    j = first_step
    for s in range(k):
        floor[s], fraction[s] = due(whole[j, s], part[j, s], weight[j, s], begin - step_start[j])
        if count[s] < high[s]:
            release = begin
            if count[s] > floor[s]:  # ahead: its next may come when all that came are due
                missing = (count[s] - floor[s]) * ONE - fraction[s]
                release, _ = reaches(missing, s, begin, j, step_start, weight)
            missing = (count[s] + 1 - floor[s]) * ONE - fraction[s]
            deadline[s] = begin
            if missing > 0:
                deadline[s], more = reaches(missing, s, begin, j, step_start, weight)
                deadline[s] += more - 1
            at = min(release - begin, n - 1)
            following[s] = freed[at]
            freed[at] = s
    for i in range(n):
        s = freed[i]
        while s >= 0:
            size = _push(heap, size, deadline, s)
            s = following[s]
        if size == 0:  # nothing may come yet: the one that may come next does
            later = i + 1
            while later < n and freed[later] < 0:
                later += 1
            s = freed[later]
            freed[later] = following[s]
        else:
            s = heap[0]
            size = _pop(heap, size, deadline)
        source[i] = s
        rank[i] = count[s]
        count[s] += 1
        if count[s] < high[s]:
            release = i + 1
            missing = (count[s] - floor[s]) * ONE - fraction[s]
            if missing > 0:
                release, more = reaches(missing, s, begin, j, step_start, weight)
                release = max(release - begin, i + 1)
            missing += ONE
            deadline[s] = begin + i
            if missing > 0:
                deadline[s], more = reaches(missing, s, begin, j, step_start, weight)
                deadline[s] += more - 1
            at = min(release, n - 1)
            following[s] = freed[at]
            freed[at] = s


@njit(inline="always")
def _before(deadline, a, b):  # type: ignore[no-untyped-def]
    return deadline[a] < deadline[b] or (deadline[a] == deadline[b] and a < b)


@njit(inline="always")
def _push(heap, size, deadline, s):  # type: ignore[no-untyped-def]
    """Adds source s to the binary heap of (deadline, source) -> new size."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if not _before(deadline, s, heap[parent]):
            break
        heap[at] = heap[parent]
        at = parent
    heap[at] = s
    return size + 1


@njit(inline="always")
def _pop(heap, size, deadline):  # type: ignore[no-untyped-def]
    """Removes the first of the heap -> new size."""
    size -= 1
    s = heap[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _before(deadline, heap[child + 1], heap[child]):
            child += 1
        if not _before(deadline, heap[child], s):
            break
        heap[at] = heap[child]
        at = child
    if size > 0:
        heap[at] = s
    return size


@njit(nogil=True, cache=True)
def gather(ids, start, out):  # type: ignore[no-untyped-def]
    """Copies windows: out (n, length) of any integer dtype from ids (m,) at start (n,) int64. Starts are checked."""
    n, length = out.shape
    for i in range(n):
        for j in range(length):
            out[i, j] = ids[start[i] + j]


def warm() -> None:
    """Compiles the kernels, or loads them from numba's cache."""
    one = np.array([[ONE]], np.int64)
    zero = np.zeros((1, 1), np.int64)
    timeline = (np.zeros(1, np.int64), one, zero, zero)
    low, out = np.zeros(1, np.int64), np.zeros(1, np.int64)
    state(*timeline, 1, 1, low, np.zeros(0, np.int64), out)
    source, rank = np.zeros(1, np.int32), np.zeros(1, np.int64)
    fill(*timeline, 0, 1, low, out, source, rank)
    windows_of(np.zeros(1, np.uint64), np.ones(1, np.int64), source, rank, np.zeros(1, np.int64), np.zeros(1, np.int64))
