"""Where the workers come from: the file that `--cluster` names.

    class: dask_jobqueue.SLURMCluster        # any class with Dask's cluster interface, by its import path
    arguments: {cores: 1, memory: 4GB, queue: main, walltime: "24:00:00"}
    adapt: {minimum: 1, maximum: 64}         # or `scale: 64`
    workers_within_s: 3600
    tls: {ca: ca.pem, cert: cert.pem, key: key.pem}
    resources:
      minhash: {big: 1}                      # pieces of the stage go to workers that offer it

Instead of `class`, `scheduler: tls://host:8786` names a scheduler that runs already, and so does `--scheduler`. None of
it changes a byte of the result.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from gristmill.stages.documents import Settings
from gristmill.stages.settings_file import SettingsError, SettingsFile, build, nearest, read

PACKAGES = {"dask_jobqueue": "gristmill[cluster]"}  # module -> what to install, where the name does not say it
ALL = "run"  # the entry of `resources` that is for every piece
OTHER_WORK = ("models", "tokenizer", "tokens", "holdout", "ablation")  # what a run does besides its stages


class Adapt(Settings):
    """As many workers as there is work for."""

    minimum: int = Field(1, ge=1)  # one at least, so that it can be asked for its versions before any work
    maximum: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Adapt:
        if self.maximum < self.minimum:
            raise ValueError(f"`maximum: {self.maximum}` is less than `minimum: {self.minimum}`.")
        return self


class Tls(Settings):
    """PEM files, the same for client, scheduler and workers: each needs to see them under this path."""

    ca: str
    cert: str
    key: str

    def security(self) -> Any:
        """As Dask wants it: encrypted connections alone."""
        from distributed.security import Security

        own = {
            f"tls_{role}_{kind}": path
            for role in ("client", "scheduler", "worker")
            for kind, path in (("cert", self.cert), ("key", self.key))
        }
        return Security(tls_ca_file=self.ca, require_encryption=True, **own)


class ClusterSettings(Settings):
    """One file for `--cluster`."""

    cls: str | None = Field(None, alias="class")
    arguments: dict[str, Any] = Field(default_factory=dict)
    scheduler: str | None = None
    scale: int | None = Field(None, ge=1)
    adapt: Adapt | None = None
    workers_within_s: float = Field(600.0, gt=0)  # for the first worker; a queue may take long
    tls: Tls | None = None
    resources: dict[str, dict[str, float]] = Field(default_factory=dict)  # stage -> what a piece takes of a worker

    @model_validator(mode="after")
    def _one_of(self) -> ClusterSettings:
        if self.cls is not None and self.scheduler is not None:
            raise ValueError("`class` starts a cluster and `scheduler` names one that runs: keep one of them.")
        if self.scale is not None and self.adapt is not None:
            raise ValueError("`scale` is a fixed number of workers and `adapt` a range: keep one of them.")
        if self.cls is None and (self.arguments or self.scale or self.adapt):
            raise ValueError(
                "`arguments`, `scale` and `adapt` are of a cluster that is started here: give its `class`, for "
                "example `class: dask_jobqueue.SLURMCluster`."
            )
        return self

    def taken(self, names: Iterable[str]) -> dict[str, float]:
        """What a piece takes of its worker that does all these stages: the most that one of them takes."""
        found: dict[str, float] = {}
        for name in (ALL, *names):
            for resource, amount in self.resources.get(name, {}).items():
                found[resource] = max(amount, found.get(resource, 0.0))
        return found

    def check(self, stages: Iterable[str]) -> None:
        """Raises SettingsError for resources of stages that the recipe does not have."""
        known = [ALL, *OTHER_WORK, *stages]
        for name in self.resources:
            if name not in known:
                raise SettingsError(f"--cluster: `resources` names the stage `{name}`.{nearest(name, known)}")


def load_cluster(path: str, scheduler: str | None = None) -> ClusterSettings:
    """A file for `--cluster`. scheduler: the address that `--scheduler` gave. Raises SettingsError."""
    file = read(path)
    values = dict(file.values)
    if scheduler is not None:
        if "class" in values:
            raise SettingsError(
                f"{file.at(['class'])}: `class` starts a cluster, and --scheduler names one: keep one of them."
            )
        values["scheduler"] = scheduler
    if "class" not in values and "scheduler" not in values:
        raise SettingsError(
            f"{path}: says neither which cluster to start (`class: dask_jobqueue.SLURMCluster`) nor which scheduler "
            "runs already (`scheduler: tcp://HOST:8786`, or --scheduler)."
        )
    settings = build(ClusterSettings, values, file)
    _check_tls(settings, file)
    if settings.cls is not None:
        class_of(settings.cls, file.at(["class"]))
    return settings


def _check_tls(settings: ClusterSettings, file: SettingsFile) -> None:
    for name, path in settings.tls or ():
        if not Path(path).is_file():
            raise SettingsError(f"{file.at(['tls', name])}: there is no file {path}. Give the path of a PEM file.")
    address = settings.scheduler or ""
    if settings.tls is not None and address.startswith("tcp://"):
        raise SettingsError(f"{file.at(['tls'])}: {address} is not encrypted; with `tls` it is tls://HOST:PORT.")


def class_of(path: str, where: str) -> Any:
    """The class that an import path names. Raises SettingsError that says what to install or what it is called."""
    module, _, name = path.rpartition(".")
    if not module:
        raise SettingsError(f"{where}: `{path}` is no import path of a class, such as dask_jobqueue.SLURMCluster.")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = str(error.name or module)
        top = missing.split(".", maxsplit=1)[0]
        if importlib.util.find_spec(top) is not None:
            raise SettingsError(f"{where}: there is no module `{missing}`.") from error
        package = PACKAGES.get(top, top.replace("_", "-"))
        raise SettingsError(
            f"{where}: `{path}` is in the package {top.replace('_', '-')}, which is not installed. Install it with "
            f"`pip install '{package}'`."
        ) from error
    except ImportError as error:
        raise SettingsError(f"{where}: `{module}` cannot be imported: {error}.") from error
    known = [other for other, kind in vars(found).items() if isinstance(kind, type) and hasattr(kind, "scale")]
    cls = getattr(found, name, None)
    if cls is None:
        raise SettingsError(f"{where}: `{module}` has no class `{name}`.{nearest(name, known)}")
    if not isinstance(cls, type) or not hasattr(cls, "scale") or not hasattr(cls, "close"):
        raise SettingsError(f"{where}: `{path}` is no cluster of Dask: it has no `scale` and `close`.")
    return cls
