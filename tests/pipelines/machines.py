"""Clusters of real processes: `dask scheduler` and `dask worker`, certificates, network namespaces, a job queue."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SECONDS = 240  # of patience; nothing waits that long when all is well
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def gristmill(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gristmill.pipelines.cli", *arguments]


def wait_until(true: Callable[[], object], what: str) -> None:
    """Polls a callable; fails with `what` when it stays false."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, f"waited {SECONDS} s in vain for {what}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Processes:
    """Processes that end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.all = folder, list[subprocess.Popen[bytes]]()

    def start(self, command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, cwd=self.folder, start_new_session=True, **{**QUIET, **how})
        self.all.append(process)
        return process

    def scheduler(self, address: str, *options: str, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """`dask scheduler` at an address, tcp://HOST:PORT."""
        protocol, host, port = address.replace("//", "").split(":")
        where = ["--host", f"{protocol}://{host}", "--port", port, "--no-dashboard"]
        return self.start([*before, sys.executable, "-m", "dask", "scheduler", *where, *options])

    def worker(self, address: str, *options: str, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """`dask worker` of one thread."""
        command = [sys.executable, "-m", "dask", "worker", address, "--nthreads", "1", "--no-dashboard"]
        return self.start([*before, *command, "--memory-limit", "2GB", *options])


@contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    started = Processes(folder)
    try:
        yield started
    finally:
        for process in started.all:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def certificates(folder: Path) -> dict[str, str]:
    """An authority, and one certificate that it signed -> the values of `tls:`."""
    now = datetime.datetime.now(datetime.UTC)

    def signed(name: str, key: Any, issuer: str, issuer_key: Any, *, authority: bool) -> x509.Certificate:
        subject, by = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, issuer))
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(by)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(names, critical=False)
            .sign(issuer_key, hashes.SHA256())
        )

    folder.mkdir(parents=True, exist_ok=True)
    root, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca = signed("authority", root, "authority", root, authority=True)
    cert = signed("cluster", own, "authority", root, authority=False)
    pem = serialization.Encoding.PEM
    plain = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    parts = {"ca": ca.public_bytes(pem), "cert": cert.public_bytes(pem), "key": plain}
    for name, data in parts.items():
        (folder / f"{name}.pem").write_bytes(data)
    return {name: str(folder / f"{name}.pem") for name in parts}


# Network namespaces


def no_namespaces() -> str:
    """Why this machine has no network namespaces for a test; "" where it has."""
    if shutil.which("ip") is None:
        return "the program `ip` is not installed"
    name = f"gm-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False, **QUIET)
    return ""


class Network:
    """A bridge of this machine with hosts on it, each a network namespace."""

    def __init__(self) -> None:
        self.tag = f"{os.getpid() % 10_000}"
        self.net = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"
        self.bridge, self.address = f"gmb{self.tag}", f"{self.net}.1"
        self.hosts: list[str] = []

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def host(self) -> list[str]:
        """A new host -> what goes before a command to run there."""
        number = len(self.hosts) + 2
        name, here, there = f"gm{self.tag}n{number}", f"gmh{self.tag}n{number}", f"gmp{self.tag}n{number}"
        self.ip("netns", "add", name)
        self.hosts.append(name)
        self.ip("link", "add", here, "type", "veth", "peer", "name", there)
        self.ip("link", "set", there, "netns", name)
        self.ip("link", "set", here, "master", self.bridge, "up")
        for words in (
            ["addr", "add", f"{self.net}.{number}/24", "dev", there],
            ["link", "set", there, "up"],
            ["link", "set", "lo", "up"],
        ):
            self.ip("-n", name, *words)
        return ["ip", "netns", "exec", name]

    def cable(self, number: int, state: str) -> None:
        """Cuts a host off ("down"), or connects it again ("up"). number: 0 for the first."""
        self.ip("link", "set", f"gmh{self.tag}n{number + 2}", state)


@contextmanager
def network() -> Iterator[Network]:
    made = Network()
    made.ip("link", "add", made.bridge, "type", "bridge")
    try:
        made.ip("addr", "add", f"{made.address}/24", "dev", made.bridge)
        made.ip("link", "set", made.bridge, "up")
        yield made
    finally:
        for name in made.hosts:
            subprocess.run(["ip", "netns", "delete", name], check=False, **QUIET)
        subprocess.run(["ip", "link", "delete", made.bridge], check=False, **QUIET)


# A queue of jobs

SBATCH = """#!{python}
# Takes a job as SLURM's sbatch does: writes down its directives, starts the script, answers with a number.
import os, re, subprocess, sys
from pathlib import Path
folder, script = Path({folder!r}), Path(sys.argv[-1])
text = script.read_text()
wanted = re.findall("^#SBATCH (.*)$", text, re.M)
if "-p closed" in wanted:
    sys.exit("sbatch: error: invalid partition specified: closed")
number = len(list(folder.glob("job-*.sh"))) + 1
(folder / f"job-{{number}}.sh").write_text(text)
if "-p full" not in wanted:
    log = open(folder / f"job-{{number}}.log", "wb")
    job = subprocess.Popen(["bash", str(folder / f"job-{{number}}.sh")], stdin=subprocess.DEVNULL, stdout=log,
                           stderr=log, start_new_session=True)
    (folder / f"job-{{number}}.pid").write_text(str(job.pid))
print("Submitted batch job", number)
"""
SCANCEL = """#!{python}
import os, signal, sys
from pathlib import Path
pid = Path({folder!r}, f"job-{{sys.argv[-1]}}.pid")
if pid.exists():
    try:
        os.killpg(int(pid.read_text()), signal.SIGTERM)
    except ProcessLookupError:
        pass
    pid.unlink()
"""


@contextmanager
def job_queue(folder: Path) -> Iterator[dict[str, str]]:
    """`sbatch` and `scancel` of a queue that starts every job at once -> an environment that has them on PATH.

    Jobs of the partition `full` never start; `closed` takes none.
    """
    programs, jobs = folder / "bin", folder / "jobs"
    programs.mkdir(parents=True)
    jobs.mkdir()
    for name, text in (("sbatch", SBATCH), ("scancel", SCANCEL)):
        (programs / name).write_text(text.format(python=sys.executable, folder=str(jobs)))
        (programs / name).chmod(0o755)
    try:
        yield {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    finally:
        for pid in jobs.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.killpg(int(pid.read_text()), signal.SIGKILL)
