"""Runs on clusters of real processes: TLS, two network namespaces, a queue of jobs, resources."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gristmill.pipelines.cluster_file import ClusterSettings, Tls, load_cluster
from gristmill.pipelines.connect import Troubles, offering
from gristmill.pipelines.engine import Care, EngineError, OnDask, open_engine
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.verify import verify
from gristmill.stages.settings_file import SettingsError

sys.path.append(str(Path(__file__).parent))
from machines import SECONDS, certificates, free_port, gristmill, job_queue, network, no_namespaces, processes
from poison_stage import full

NO_NAMESPACES = no_namespaces()


def write_corpus(folder: Path, shards: int = 3) -> Path:
    """A recipe with two segments over small files, without kernels."""
    source = folder / "in"
    source.mkdir(parents=True)
    for i in range(shards):
        lines = [
            json.dumps({"id": f"{i}-{j}", "text": f"document {j % 30} of a file, number {i % 2}"}) for j in range(40)
        ]
        (source / f"{i}.jsonl").write_text("\n".join(lines) + "\n")
    recipe = folder / "r.yaml"
    recipe.write_text(f'name: r\nsources:\n  a: {{files: "{source}/*.jsonl"}}\nstages:\n  - exact\n')
    return recipe


def files_of(out: Path) -> dict[str, bytes]:
    found = [*out.glob("*/kept/*"), *out.glob("*/dropped/*"), *out.glob("tokens/*.bin"), *out.glob("tokens/*.idx")]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """(recipe, bytes of a run in one process)."""
    folder = tmp_path_factory.mktemp("corpus")
    recipe = write_corpus(folder)
    run(recipe, folder / "run", "--debug")
    return recipe, files_of(folder / "run")


def run(recipe: Path, out: Path, *options: str, code: int = 0, env: dict[str, str] | None = None) -> str:
    """The command to its end -> what it printed."""
    command = gristmill("run", str(recipe), "--out", str(out), *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def sound(out: Path, expected: dict[str, bytes]) -> None:
    assert files_of(out) == expected
    assert verify(open_run(out)) == []
    assert not [path for path in out.rglob("*") if path.name.endswith((".tmp", ".lock"))]


def write_cluster(folder: Path, text: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.end_to_end
def test_an_encrypted_cluster(corpus: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    recipe, expected = corpus
    tls, other = certificates(tmp_path / "tls"), certificates(tmp_path / "other")
    options = ["--tls-ca-file", tls["ca"], "--tls-cert", tls["cert"], "--tls-key", tls["key"]]
    address = f"tls://127.0.0.1:{free_port()}"
    file = write_cluster(tmp_path, f"scheduler: {address}\ntls: {json.dumps(tls)}\n")
    with processes(tmp_path) as started:
        started.scheduler(address, *options)
        for _ in range(2):
            started.worker(address, "--host", "127.0.0.1", *options)
        run(recipe, tmp_path / "run", "--cluster", file)
        sound(tmp_path / "run", expected)
        wanted = ClusterSettings(**{"class": None}, scheduler=address, tls=Tls(**other))  # type: ignore[arg-type]
        with pytest.raises(EngineError, match="with these certificates"), open_engine(cluster=wanted, connect_s=1.0):
            pass
        with (
            pytest.raises(EngineError, match=r"No `tls:` is given in a file of --cluster"),
            open_engine(scheduler=address, connect_s=1.0),
        ):
            pass


@pytest.mark.end_to_end
@pytest.mark.skipif(bool(NO_NAMESPACES), reason=NO_NAMESPACES or "none")
def test_workers_in_two_network_namespaces(corpus: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    recipe, expected = corpus
    with network() as net, processes(tmp_path) as started:
        address = f"tcp://{net.address}:{free_port()}"
        started.scheduler(address)
        for _ in range(2):
            started.worker(address, before=net.host())
        run(recipe, tmp_path / "run", "--scheduler", address)
    sound(tmp_path / "run", expected)


SLURM = """
class: dask_jobqueue.SLURMCluster
arguments:
  cores: 1
  processes: 1
  memory: 2GB
  queue: {queue}
  walltime: "00:10:00"
  interface: lo
  worker_extra_args: ["--resources", "big=1"]
  scheduler_options: {{dashboard_address: "127.0.0.1:0"}}
workers_within_s: {within_s}
{more}
"""


@pytest.mark.end_to_end
@pytest.mark.parametrize("more", ["scale: 2", "adapt: {minimum: 1, maximum: 2}\nresources: {exact: {big: 1}}"])
def test_a_queue_of_jobs(corpus: tuple[Path, dict[str, bytes]], tmp_path: Path, more: str) -> None:
    recipe, expected = corpus
    file = write_cluster(tmp_path, SLURM.format(queue="main", within_s=60, more=more))
    with job_queue(tmp_path) as env:
        run(recipe, tmp_path / "run", "--cluster", file, env=env)
        scripts = sorted((tmp_path / "jobs").glob("*.sh"))
        assert 1 <= len(scripts) <= 2 + ("adapt" in more)
        assert "#SBATCH -p main" in scripts[0].read_text()
        assert not list((tmp_path / "jobs").glob("*.pid"))  # every job was cancelled
    sound(tmp_path / "run", expected)


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("queue", "within_s", "wanted"),
    [
        (
            "closed",
            60,
            r"SLURMCluster got no worker: RuntimeError: .*sbatch: error: invalid partition specified: closed",
        ),
        ("full", 1, r"No worker of dask_jobqueue\.SLURMCluster came within 1 s .*script of a job:.*#SBATCH -p full"),
    ],
)
def test_a_queue_that_gives_no_worker(
    corpus: tuple[Path, dict[str, bytes]], tmp_path: Path, queue: str, within_s: float, wanted: str
) -> None:
    file = write_cluster(tmp_path, SLURM.format(queue=queue, within_s=within_s, more="scale: 1"))
    with job_queue(tmp_path) as env:
        shown = run(corpus[0], tmp_path / "run", "--cluster", file, code=1, env=env)
    assert re.search(wanted, shown, re.DOTALL), shown


def test_no_program_to_submit_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = load_cluster(write_cluster(tmp_path, SLURM.format(queue="main", within_s=1, more="scale: 1")))
    with pytest.raises(EngineError, match=r"submits jobs with `sbatch`, which is not on this machine's PATH"):
        open_engine(cluster=settings).__enter__()


LOCAL = """
class: dask.distributed.LocalCluster
arguments: {n_workers: 1, threads_per_worker: 1, host: 127.0.0.1, dashboard_address: "127.0.0.1:0"}
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine on a cluster of a file, whose one worker offers nothing."""
    settings = load_cluster(write_cluster(tmp_path_factory.mktemp("small"), LOCAL + "workers_within_s: 30\n"))
    with open_engine(cluster=settings) as engine:
        yield engine


@pytest.mark.end_to_end
def test_a_class_of_ones_own_and_resources_that_nobody_offers(small: OnDask, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(small.run(full, [1], lambda *_: None)) == 1
    monkeypatch.setattr(small, "wait_s", 0.1)
    with pytest.raises(EngineError, match=r"No worker offers {'big': 2\.0}.*Workers offer: nothing\. Start some"):
        small.run(full, [1], lambda *_: None, Care(resources={"big": 2.0}))


@pytest.mark.end_to_end
def test_a_worker_that_joins_and_cannot_do_the_work_is_not_used(
    small: OnDask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    retired: list[str] = []
    monkeypatch.setattr(small, "_out", str(tmp_path))
    monkeypatch.setattr(small, "say", said.append)
    monkeypatch.setattr(small, "_known", set())
    monkeypatch.setattr(small._client, "retire_workers", lambda workers, **_: retired.extend(workers))
    small.look()
    assert (said, retired) == ([], [])
    monkeypatch.setattr(small, "_known", set())
    monkeypatch.setattr("gristmill.pipelines.worker_check.here", lambda: {"numpy": "0.1"})
    small.look()
    assert retired == list(small._client.nthreads())
    assert "Not used: " in said[0]
    assert "runs other versions: numpy 0.1 here" in said[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:unclosed cluster:ResourceWarning")  # of the half-made one, when it is collected
def test_arguments_that_the_class_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program: f"/bin/{program}")
    settings = load_cluster(write_cluster(tmp_path, "class: dask_jobqueue.SLURMCluster\narguments: {queue: main}\n"))
    with pytest.raises(EngineError, match=r"SLURMCluster could not be started: ValueError: You must specify how much"):
        open_engine(cluster=settings).__enter__()
    gc.collect()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "class: dask_jobqueue.SLRUMCluster",
            r":1: `dask_jobqueue` has no class `SLRUMCluster`\. Did you mean `SLURMC",
        ),
        (
            "class: dask_martian.Cluster",
            r":1: .*package dask-martian, which is not installed.*pip install 'dask-martian",
        ),
        ("class: dask_jobqueue.nothing.SLURMCluster", r":1: there is no module `dask_jobqueue\.nothing`"),
        ("class: SLURMCluster", r":1: `SLURMCluster` is no import path of a class"),
        ("class: collections.OrderedDict", r":1: `collections\.OrderedDict` is no cluster of Dask"),
        ("class: !!python/name:os.system x", r":1: the tag .* is refused"),
        ("scale: 3", r"says neither which cluster to start"),
        ("scheduler: tcp://a:1\nscale: 3", r"`scale` and `adapt` are of a cluster that is started here"),
        ("scheduler: tcp://a:1\nclass: dask.distributed.LocalCluster", r"keep one of them"),
        ("class: dask.distributed.LocalCluster\nscale: 1\nadapt: {maximum: 2}", r"keep one of them"),
        ("class: dask.distributed.LocalCluster\nadapt: {minimum: 0, maximum: 2}", r"minimum"),
        ("class: dask.distributed.LocalCluster\nadapt: {minimum: 3, maximum: 2}", r"is less than `minimum: 3`"),
        ("class: dask.distributed.LocalCluster\nscal: 1", r":2: .*scal.*Did you mean `scale`"),
        ("scheduler: tls://a:1\ntls: {ca: no.pem, cert: no.pem, key: no.pem}", r":2: there is no file no\.pem"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(SettingsError, match=wanted):
        load_cluster(write_cluster(tmp_path, text + "\n"))


def test_a_scheduler_of_the_command_line_and_a_file_go_together(tmp_path: Path) -> None:
    tls = certificates(tmp_path / "tls")
    file = write_cluster(tmp_path, f"tls: {json.dumps(tls)}\nresources: {{minhash: {{big: 1}}, run: {{small: 2}}}}\n")
    settings = load_cluster(file, "tls://head:8786")
    assert settings.scheduler == "tls://head:8786"
    assert settings.taken(["extract"]) == {"small": 2}
    assert settings.taken(["extract", "minhash"]) == {"small": 2, "big": 1}
    with pytest.raises(SettingsError, match="is not encrypted"):
        load_cluster(file, "tcp://head:8786")
    with pytest.raises(SettingsError, match=r"names the stage `minhash`\. Did you mean `minhash_2`"):
        settings.check(["minhash_2"])
    settings.check(["minhash"])
    security = settings.tls.security() if settings.tls else None
    assert security.tls_worker_cert == tls["cert"]
    assert security.require_encryption


def test_offers_of_workers() -> None:
    workers = {"a": {"resources": {"big": 1}}, "b": {"resources": {"small": 4}}}
    assert offering(workers, {"big": 1})
    assert not offering(workers, {"big": 2})
    assert not offering(workers, {"big": 1, "small": 1})  # of one worker
    assert not offering({}, {"big": 1})


def test_troubles_are_heard_and_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("tornado.application")
    with Troubles() as troubles:
        try:
            raise OSError("no\n such queue")
        except OSError:
            logger.exception("in a callback")
    logger.error("after the end")
    assert troubles.said == ["OSError: no such queue"]
    assert "OSError: no such queue" in troubles.last()
    assert "".join(capsys.readouterr()) == ""


def test_the_command_line_says_where_workers_are_once(tmp_path: Path) -> None:
    file = write_cluster(tmp_path, LOCAL)
    shown = run(tmp_path / "r.yaml", tmp_path / "run", "--cluster", file, "--workers", "2", code=2)
    assert "leave out --workers and --debug" in shown
    assert os.listdir(tmp_path) == ["cluster.yaml"]
