"""When checkpoints are written and which of them stay.

    saver = Saver(root, model, optimizer, group, config)
    saver.save(state, extra, wait=False)       # returns when the tensors are copied; a thread writes
    for text in saver.problems(): ...          # of writes that failed since; training goes on
    saver.settle()                             # before the process ends

With `async_save` the loop waits for the copy alone (torch's stager: one copy of masters and moments in memory, kept
for the next time), unless the write before is still going on. The thread talks over a gloo group of its own.

What stays: the last `keep_last`, those of every `keep_every` steps, and the `keep_best` of the lowest loss. Only
finite states are written and only a whole checkpoint makes an older one go, so the last finite one always stays.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from gristmill.trainer.checkpoint import (
    CheckpointState,
    by_loss,
    complete,
    refuse_infinite,
    step_of,
    tensors_of,
    write,
)
from gristmill.trainer.config import TrainConfig
from gristmill.trainer.group import Group
from gristmill.trainer.model import Llama
from gristmill.trainer.muon import Muon
from gristmill.trainer.optim import AdamW

PATIENCE_S = 30.0


def kept(root: Path, config: TrainConfig) -> set[Path]:
    """Of the complete checkpoints, those that stay."""
    found = complete(root)
    stay = set(found[-config.keep_last :])
    if config.keep_every:
        stay |= {f for f in found if step_of(f) % config.keep_every == 0}
    if config.keep_best:
        stay |= set(by_loss(found, config.best_by)[: config.keep_best])
    return stay


class Saver:
    """See the top of this module. All ranks call the same methods in the same order."""

    def __init__(self, root: Path, model: Llama, optimizer: AdamW | Muon, group: Group, config: TrainConfig):
        self.root, self.group, self.config = root, group, config
        self._tensors = tensors_of(model, optimizer)
        self._writers = group.apart() if config.async_save else group
        self._stager = DefaultStager(StagingOptions(False, False, False, False)) if config.async_save else None
        self._pending: Future[None] | None = None
        self._problems: list[str] = []

    def save(self, state: CheckpointState, extra: Mapping[str, bytes], *, wait: bool) -> None:
        """Saves model and optimizer as they are now. extra: small files by name; the leader's count.

        Raises TrainError where they are not finite; with `wait`, OSError where the disk refuses this checkpoint.
        """
        self._join()
        refuse_infinite(self.root, state.progress.step, self._tensors, self.group)
        if self._stager is None:
            self._settle_now(state, extra, self._tensors, wait=wait)
            return
        copy: Any = self._stager.stage(self._tensors)
        if wait:
            self._settle_now(state, extra, copy, wait=True)
            return
        self._pending = Future()
        threading.Thread(
            target=self._in_thread, args=(self._pending, state, extra, copy), name="checkpoint", daemon=True
        ).start()

    def _settle_now(
        self, state: CheckpointState, extra: Mapping[str, bytes], tensors: dict[str, Any], *, wait: bool
    ) -> None:
        try:
            self._write(state, extra, tensors)
        except OSError as error:
            if wait:
                raise
            self._problems.append(str(error))

    def _in_thread(
        self, done: Future[None], state: CheckpointState, extra: Mapping[str, bytes], tensors: dict[str, Any]
    ) -> None:
        try:
            self._write(state, extra, tensors)
            done.set_result(None)
        except BaseException as error:  # it goes on in the loop's thread
            done.set_exception(error)

    def _write(self, state: CheckpointState, extra: Mapping[str, bytes], tensors: dict[str, Any]) -> None:
        target = write(self.root, tensors, state, extra, self._writers)
        if self._writers.leads:
            stay = {target, *kept(self.root, self.config)}
            for old in complete(self.root):
                if old not in stay:
                    shutil.rmtree(old)

    def _join(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except OSError as error:
                self._problems.append(str(error))

    def problems(self) -> list[str]:
        """Of checkpoints that could not be written since the last call. Never waits."""
        if self._pending is not None and self._pending.done():
            self._join()
        found, self._problems = self._problems, []
        return found

    def settle(self) -> None:
        """Waits for what is being written, at most PATIENCE_S: the thread may wait for a rank that is gone."""
        if self._pending is not None:
            wait([self._pending], timeout=PATIENCE_S)
