"""Checkpoints: complete or not there, found again newest first, checked before they are believed.

    checkpoints/step-00000200/__0_0.distcp ...   what each rank holds, by torch.distributed.checkpoint
    checkpoints/step-00000200/.metadata          its table of tensors
    checkpoints/step-00000200/consumption.json   what was used of each source (`mixtures/consumption.py`)
    checkpoints/step-00000200/state.json         progress, and size and xxh3-128 of every file; written last

A checkpoint is written into a folder of another name, which is renamed when all ranks are done. Tensors are stored by
parameter name, so any number of ranks can load what any other number has saved. State beyond the tensors is a handful
of integers: the order of windows is a function of how many were consumed.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from gristmill.trainer.config import TrainError
from gristmill.trainer.group import ALONE, Group
from gristmill.trainer.model import Llama
from gristmill.trainer.muon import Muon
from gristmill.trainer.optim import AdamW, local

STATE_FILE = "state.json"
FORMAT_VERSION = 1
DAMAGED = ".damaged"
BEST = "best"  # of RUN@best


class Progress(BaseModel):
    """How far a run has come."""

    model_config = ConfigDict(extra="forbid")

    step: int = 0  # optimizer steps begun, skipped ones included
    windows: int = 0  # consumed
    updates: int = 0  # optimizer steps that changed the weights
    skipped: int = 0  # steps whose loss or gradient was no number
    skipped_in_row: int = 0


class CheckpointState(BaseModel):
    """state.json."""

    model_config = ConfigDict(extra="forbid")

    version: int = FORMAT_VERSION
    course: str  # identity of the run's steps, past and to come
    prefix: str = ""  # identity of the windows consumed
    counts: dict[str, int] = Field(default_factory=dict)  # windows consumed of each source
    tokenizer: str = ""  # xxh3-128 of the tokenizer.json that the ids belong to
    loss: dict[str, float] = Field(default_factory=dict)  # "training", "evaluation": what it is the best by
    progress: Progress
    world: int
    files: dict[str, tuple[int, str]] = Field(default_factory=dict)  # name -> (bytes, xxh3-128)


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def complete(root: Path) -> list[Path]:
    """Checkpoints that were finished, oldest first."""
    return sorted(path.parent for path in root.glob(f"step-????????/{STATE_FILE}"))


def read_state(folder: Path) -> CheckpointState:
    """state.json of a checkpoint. Raises TrainError where it is missing or damaged."""
    try:
        return CheckpointState.model_validate(orjson.loads((folder / STATE_FILE).read_bytes()))
    except (OSError, ValueError) as error:
        raise TrainError(f"{folder}: not a sound checkpoint: {error}. Name another one.") from error


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def by_loss(folders: list[Path], measure: str) -> list[Path]:
    """Those that have the measure, the best first; of equals the later one. Damaged ones are left out."""
    rated = []
    for folder in folders:
        try:
            loss = read_state(folder).loss
        except TrainError:
            continue
        if measure in loss:
            rated.append((loss[measure], -step_of(folder), folder))
    return [folder for _, _, folder in sorted(rated)]


def best(root: Path) -> Path:
    """The complete checkpoint of the lowest evaluation loss; where none was evaluated, of the lowest training loss.

    Raises TrainError where neither is known.
    """
    folders = complete(root)
    found = by_loss(folders, "evaluation") or by_loss(folders, "training")
    if not found:
        raise TrainError(f"{root}: no checkpoint says how good it is. Name one by its step.")
    return found[0]


def split_mark(named: str) -> tuple[Path, str]:
    """RUN@MARK -> (path, mark); a folder whose name has an @ is meant where it exists, and the mark is empty."""
    path, at, mark = named.rpartition("@")
    if not at or Path(named).exists():
        return Path(named), ""
    return Path(path), mark


def find_checkpoint(named: str) -> Path:
    """RUN (its newest checkpoint), RUN@STEP, RUN@best, or a checkpoint -> its folder.

    Raises TrainError where there is none, with those that there are.
    """
    path, mark = split_mark(named)
    if (path / STATE_FILE).exists() and not mark:
        return path.resolve()
    root = path / "checkpoints"
    found = complete(root)
    if not found:
        raise TrainError(
            f"{named}: neither a training run with a checkpoint nor a checkpoint. Name the folder that `gristmill "
            "train --out` wrote, or a step below its `checkpoints`."
        )
    if not mark:
        return found[-1].resolve()
    if mark == BEST:
        return best(root).resolve()
    if not mark.isdigit() or folder_of(root, int(mark)) not in found:
        steps = ", ".join(str(step_of(folder)) for folder in found)
        raise TrainError(
            f"{named}: there is no checkpoint of that step. {path} has {steps}. `keep_every` and `keep_last` say which "
            "a run keeps."
        )
    return folder_of(root, int(mark)).resolve()


def tensors_of(model: Llama, optimizer: AdamW | Muon) -> dict[str, Any]:
    """The tensors themselves, not copies: a load fills them in place."""
    return {
        "model": {name: p.detach() for name, p in model.named_parameters()},
        "optimizer": optimizer.state(),
    }


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Without torch's warning that there is no process group: one rank needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _digest(path: Path) -> tuple[int, str]:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
            size += len(piece)
    return size, digest.hexdigest()


def _mine(names: list[str], group: Group) -> list[str]:
    """This rank's part of the files to read back."""
    return sorted(names)[group.rank :: group.world]


def _sync(path: Path) -> None:
    """Makes a rename or a new name in a folder last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refuse_infinite(root: Path, step: int, tensors: Mapping[str, Any], group: Group) -> None:
    """Raises TrainError where a parameter or a moment is not finite: such a state must never push a sound one out.

    tensors: as `tensors_of`. All ranks together.
    """
    finite = all(bool(torch.isfinite(local(tensor)).all()) for tensor in _leaves(tensors))
    if not all(group.gather(finite)):
        raise TrainError(
            f"{root}: after step {step} a parameter or a moment is not finite, so nothing was saved; the last "
            "checkpoint is sound. Lower the learning rate or the clip, and run again: training goes on from there."
        )


def _leaves(tensors: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in tensors.values():
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _leaves(value)


def write(
    root: Path, tensors: dict[str, Any], state: CheckpointState, extra: Mapping[str, bytes], group: Group
) -> Path:
    """Writes one checkpoint. All ranks call it together, on any thread whose `group` no other thread talks over.

    state: all but `files`. extra: small files that go with it, by name; the leader's count. Raises OSError where the
    disk refuses, on all ranks alike: what was written is cleaned up, older checkpoints stay.
    """
    target = folder_of(root, state.progress.step)
    work = root / f"{target.name}.tmp"
    problem = ""
    digests: dict[str, tuple[int, str]] = {}
    if group.leads:
        problem = _problem_of(lambda: _begin(work, extra))
    problem = group.gather(problem)[0]
    if not problem:
        problem = _problem_of(lambda: _save_tensors(work, tensors, group))
        if not problem:
            digests, problem = _digests(work, group)
        elif full := _full(work, tensors):
            problem = full
    problems = [text for text in group.gather(problem) if text]
    files = {name: digest for part in group.gather(digests) for name, digest in part.items()}
    if group.leads and not problems:
        whole = state.model_copy(update={"files": files})
        problems = [text for text in [_problem_of(lambda: _publish(work, target, whole))] if text]
    problems = group.gather(problems)[0]
    if problems:
        if group.leads:
            shutil.rmtree(work, ignore_errors=True)
        raise OSError(
            f"{target}: the checkpoint could not be written: {problems[0].strip().splitlines()[-1].rstrip('.')}."
        )
    return target


def _problem_of(act: Callable[[], None]) -> str:
    """What went wrong, for the other ranks; empty: nothing."""
    try:
        act()
    except (OSError, CheckpointException, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _begin(work: Path, extra: Mapping[str, bytes]) -> None:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for name, data in extra.items():
        (work / name).write_bytes(data)


def _save_tensors(work: Path, tensors: dict[str, Any], group: Group) -> None:
    with _alone_is_fine():
        save_tensors(
            tensors, storage_writer=FileSystemWriter(work), process_group=group.talk, no_dist=group.mesh is None
        )


def _full(work: Path, tensors: dict[str, Any]) -> str:
    """What to say where there is no room for this rank's part. torch's writer then fails in ways that do not say so."""
    needed = sum(local(tensor).nbytes for tensor in _leaves(tensors))
    try:
        free = shutil.disk_usage(work).free
    except OSError:
        return ""
    what = f"No space left on device: {free:,} bytes are free, and the {needed:,} of a rank did not fit"
    return what if free < needed else ""


def _digests(work: Path, group: Group) -> tuple[dict[str, tuple[int, str]], str]:
    try:
        names = [path.name for path in work.iterdir()]
        return {name: _digest(work / name) for name in _mine(names, group)}, ""
    except OSError as error:
        return {}, str(error)


def _publish(work: Path, target: Path, state: CheckpointState) -> None:
    with (work / STATE_FILE).open("wb") as file:
        file.write(orjson.dumps(state.model_dump(mode="json"), option=orjson.OPT_INDENT_2))
        file.flush()
        os.fsync(file.fileno())
    _sync(work)
    if target.exists():
        shutil.rmtree(target)
    work.rename(target)
    _sync(target.parent)


def _check(folder: Path, group: Group) -> tuple[CheckpointState | None, str]:
    """The state of a checkpoint and what is wrong with it, the same answer on all ranks."""
    state, problem = None, ""
    try:
        state = CheckpointState.model_validate(orjson.loads((folder / STATE_FILE).read_bytes()))
        for name in _mine(list(state.files), group):
            size, digest = _digest(folder / name)
            if (size, digest) != tuple(state.files[name]):
                problem = f"{name} is not what was written ({size:,} bytes, expected {state.files[name][0]:,})"
    except (OSError, ValueError) as error:
        problem = str(error)
    problems = [text for text in group.gather(problem) if text]
    return state, problems[0] if problems else ""


def load(
    root: Path, model: Llama, optimizer: AdamW | Muon, course: str, group: Group, say: Callable[[str], None]
) -> Progress | None:
    """Fills model and optimizer from the newest sound checkpoint; None where there is none. All ranks together.

    A damaged checkpoint is skipped, and `say` gets the reason. Raises TrainError where a sound one belongs to
    another run.
    """
    found = group.gather([path.name for path in complete(root)])[0]  # one rank's listing counts
    for name in reversed(found):
        folder = root / name
        state, problem = _check(folder, group)
        if problem or state is None:
            say(f"{folder}: damaged, {problem}; set aside as {name}{DAMAGED}. Trying the one before.")
            if group.leads:
                _set_aside(folder)
            continue
        if state.course != course:
            raise TrainError(
                f"{folder}: belongs to another run: the mixture, the tokens, the seed or a setting of the training has "
                "changed since. Train in another folder, or delete this one to start over."
            )
        _fill(folder, model, optimizer, group, "Delete it to go on from the one before.")
        optimizer.updates = state.progress.updates
        return state.progress
    return None


def _set_aside(folder: Path) -> None:
    """Renames it, so that it is neither found again nor counted among those to keep."""
    aside = folder.with_name(folder.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def _fill(folder: Path, model: Llama, optimizer: AdamW | Muon, group: Group, advice: str) -> None:
    tensors = tensors_of(model, optimizer)
    try:
        with _alone_is_fine():
            load_tensors(tensors, storage_reader=FileSystemReader(folder), no_dist=group.mesh is None)
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise TrainError(f"{folder}: cannot be loaded: {str(error).strip().splitlines()[-1]}. {advice}") from error


def begin_from(folder: Path, digest: str, model: Llama, optimizer: AdamW | Muon, group: Group) -> Progress:
    """Fills model and optimizer from one checkpoint of another run. All ranks together.

    digest: xxh3-128 of its state.json. Raises TrainError where it is damaged, gone, or another one by now.
    """
    state, problem = _check(folder, group)
    if state is None or problem or _digest(folder / STATE_FILE)[1] != digest:
        raise TrainError(
            f"{folder}: the checkpoint to begin from is {problem or 'not the one that this run was planned with'}. "
            "Name another one in `init_from`, and train in another folder."
        )
    _fill(folder, model, optimizer, group, "Name another one in `init_from`.")
    optimizer.updates = state.progress.updates
    return state.progress


def load_weights(folder: Path, model: Llama) -> CheckpointState:
    """Fills a model that is whole in this process from one checkpoint. Raises TrainError where it is damaged."""
    state, problem = _check(folder, ALONE)
    if state is None or problem:
        raise TrainError(f"{folder}: not a sound checkpoint: {problem}. Name another one, or train on from one before.")
    tensors = {"model": {name: p.detach() for name, p in model.named_parameters()}}
    try:
        with _alone_is_fine():
            load_tensors(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise TrainError(f"{folder}: cannot be loaded: {str(error).strip().splitlines()[-1]}") from error
    return state
