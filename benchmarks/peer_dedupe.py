"""MinHash signatures of rensa, text-dedup and Daft, for `dedupe.py --peer-python`: packages that would change the
versions that Gristmill has installed.

    python -m venv peers && peers/bin/pip install rensa==0.5.0 text-dedup==0.4.0 daft==0.7.26
    python benchmarks/dedupe.py --corpus DIR --peer-python peers/bin/python

This file is run by that interpreter, with a file of JSON strings, one text a line, and the name of a package. It
answers {"version": ...} when it is ready, null where the package is not installed, and then each line of its standard
input with {"seconds": ...}: the CPU seconds of the process in which it signed all texts once: runs of 5 words, 112
permutations. It imports nothing of Gristmill.

    rensa        words between white space, runs joined in Python, `RMinHash.digest_matrix_from_token_sets` for the
                 whole list. Its rho mode looks at a sample of the words only and is left out.
    text-dedup   `embed_func` with its 32-bit xxh3, the fastest of its hashes, as its command calls it
    daft         the expression `minhash` with xxhash3_64 over a DataFrame in memory, one thread. It takes the texts as
                 they are: no lower case, words end at spaces
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NGRAM, PERMUTATIONS, BANDS = 5, 112, 14
Sign = Callable[[], object]


def rensa(texts: list[str]) -> Sign:
    from rensa import RMinHash

    def runs(text: str) -> list[str]:
        words = text.lower().split()
        return [" ".join(words[i : i + NGRAM]) for i in range(max(1, len(words) - NGRAM + 1))]

    return lambda: RMinHash.digest_matrix_from_token_sets([runs(t) for t in texts], num_perm=PERMUTATIONS, seed=1)


def text_dedup(texts: list[str]) -> Sign:
    import numpy as np
    from text_dedup.minhash import embed_func
    from text_dedup.utils import xxh3_32hash

    prime = np.uint32((1 << 32) - 5)
    rng = np.random.RandomState(1)
    size = PERMUTATIONS // BANDS
    settings = {
        "num_perm": PERMUTATIONS,
        "ngram_size": NGRAM,
        "min_length": NGRAM,
        "hashranges": [(i * size, (i + 1) * size) for i in range(BANDS)],
        "permutations": tuple(rng.randint(low, prime, size=PERMUTATIONS, dtype=np.uint32) for low in (1, 0)),
        "hash_func": xxh3_32hash,
        "dtype": np.uint32,
        "max_hash": np.uint32((1 << 32) - 1),
        "modulo_prime": prime,
    }
    return lambda: [embed_func(text, i, **settings) for i, text in enumerate(texts)]


def daft(texts: list[str]) -> Sign:
    import daft
    from daft.functions import minhash

    daft.set_runner_native(num_threads=1)
    frame = daft.from_pydict({"text": texts}).collect()
    column = minhash(daft.col("text"), num_hashes=PERMUTATIONS, ngram_size=NGRAM, hash_function="xxhash3_64")
    return lambda: frame.select(column).collect()


PEERS = {"rensa": rensa, "text-dedup": text_dedup, "daft": daft}


def main() -> None:
    path, name = sys.argv[1:3]
    try:
        found = version(name)
    except PackageNotFoundError:
        print(json.dumps({"version": None}), flush=True)
        return
    texts = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    with contextlib.redirect_stdout(sys.stderr):
        sign = PEERS[name](texts)
        sign()  # what is loaded with the first document is loaded
    print(json.dumps({"version": found}), flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        sign()
        print(json.dumps({"seconds": time.process_time() - start}), flush=True)


if __name__ == "__main__":
    main()
