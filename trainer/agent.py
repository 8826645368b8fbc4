"""torchrun, with an exit code that says when it was asked to stop: 128 + the signal, as a shell has it.

    python -m gristmill.trainer.agent --nproc-per-node=2 -m gristmill.trainer.train --config out/run.json

torchrun itself ends with 1 then, as it does when a rank has failed for good.
"""

from __future__ import annotations

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException


def main() -> int:
    try:
        run.main(sys.argv[1:])
    except SignalException as asked:
        return 128 + int(asked.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
