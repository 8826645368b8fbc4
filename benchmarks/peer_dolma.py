"""dolma's taggers of Gopher and C4, for `rules.py --dolma-python`: dolma 1.2.1 needs older packages than Gristmill.

    uv venv dolma && uv pip install --python dolma/bin/python dolma==1.2.1      (pip alone does not find a solution)
    python benchmarks/rules.py --corpus DIR --dolma-python dolma/bin/python

This file is run by that interpreter, with a file of JSON strings, one text a line. It answers {"version": ...} when it
is ready, and then each line of its standard input with {"seconds": ...}: the CPU seconds of the thread in which it
tagged all texts once. It imports nothing of Gristmill.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

TAGGERS = ("gopher_v2", "c4_v2")


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # on import it tries to download a model, and says that it cannot
        from dolma.core.data_types import Document
        from dolma.core.registry import TaggerRegistry

        taggers = [TaggerRegistry.get(name)() for name in TAGGERS]
    texts = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    documents = [Document(source="corpus", id=str(i), text=text) for i, text in enumerate(texts)]
    print(json.dumps({"version": version("dolma")}), flush=True)
    for _ in sys.stdin:
        start = time.thread_time()
        for document in documents:
            for tagger in taggers:
                tagger.predict(document)
        print(json.dumps({"seconds": time.thread_time() - start}), flush=True)


if __name__ == "__main__":
    main()
