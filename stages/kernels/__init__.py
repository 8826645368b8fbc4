"""Numba kernels, and where what they compile to is kept.

Numba's cache looks only at the file of the function it compiles, not at the functions and tables of other files that
are compiled into it: a changed helper would leave old machine code in use. So the cache lies in a folder named by a
hash of every source and table of this package. It also need not be able to write beside the package, and all
processes of a user share it. Set NUMBA_CACHE_DIR to choose another place; where it cannot be written, what it holds is
copied to the usual one, because to compile anew takes each process minutes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import warnings
from pathlib import Path

import numba
import platformdirs
import xxhash


def fingerprint() -> str:
    """16 hex digits of every source and table of the package, and of where it lies, which numba's index names too."""
    digest = xxhash.xxh3_64(str(Path(__file__).parent).encode())
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in (".py", ".npz"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def cache_folder(name: str) -> Path:
    """A folder that only this user can write: compiled code is loaded from it. The usual place for caches, else one
    below the folder for temporary files. Raises OSError when neither can be had."""
    places = (
        platformdirs.user_cache_path("gristmill"),
        Path(tempfile.gettempdir()) / f"gristmill-{os.getuid()}",
    )
    for place in places:
        folder = place / name
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            state = folder.lstat()
            if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022:
                with tempfile.TemporaryFile(dir=folder):
                    return folder
        except OSError:
            continue
    raise OSError(
        f"No place for compiled kernels: neither {places[0]} nor {places[1]} can be written by this user alone. "
        "Set NUMBA_CACHE_DIR to a folder that can."
    )


def chosen_folder(given: str | None, name: str) -> Path:
    """The folder of that name in the place that NUMBA_CACHE_DIR gives; without one, or where it cannot be written, in
    the usual places, with a warning and with what the given one holds."""
    if not given:
        return cache_folder(name)
    folder = Path(given) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        own = cache_folder(name)
        copied = _copied(folder, own)
        warnings.warn(
            f"NUMBA_CACHE_DIR={given} cannot be written ({error}). Compiled kernels go to {own}; "
            + (f"{copied} files of the given place were copied there." if copied else "the given place has none."),
            RuntimeWarning,
            stacklevel=2,
        )
        return own


def _copied(folder: Path, own: Path) -> int:
    """Copies compiled code that `own` lacks -> files copied. Code before its index: an index never names what is not
    there yet."""
    count = 0
    with contextlib.suppress(OSError):  # a place that cannot be read has nothing to give
        for path in sorted(folder.rglob("*.nb[ci]"), key=lambda path: (path.suffix, path)):
            target = own / path.relative_to(folder)
            if not target.exists():
                target.parent.mkdir(exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as scratch:
                    shutil.copyfile(path, scratch.name)
                Path(scratch.name).replace(target)
                count += 1
    return count


numba.config.CACHE_DIR = str(chosen_folder(os.environ.get("NUMBA_CACHE_DIR"), f"kernels-{fingerprint()}"))
