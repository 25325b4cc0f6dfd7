"""A SLURM cluster of four nodes on this machine, for one test: munge, slurmctld and four slurmd on loopback.

Everything lies in one temporary folder, listens on free ports, and is gone after `stop`. Needs root, and Debian's
packages slurm-wlm and munge. No systemd, no database; cgroups where version 1's freezer can be written, because there
a signal reaches only a task's own process, as on a real cluster.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue", "sinfo", "srun")
FREEZER = Path("/sys/fs/cgroup/freezer")
SEARCH_PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"  # a user's may lack the folders of daemons
#: What the tests ran with, for the line below their results.
NOTES: list[str] = []
#: Names that are addresses need no /etc/hosts.
NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


def missing() -> str | None:
    absent = [name for name in COMMANDS if shutil.which(name, path=SEARCH_PATH) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install --no-install-recommends slurm-wlm munge"
    return None if os.geteuid() == 0 else "SLURM's daemons are started as root here"


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


def first_job() -> int:
    """A job number n such that the scripts' rendezvous ports 20000 + n % 10000 of ten jobs from n on are free."""
    for start in range(1000 + os.getpid() % 7000, 9900, 10):
        try:
            for port in range(20000 + start, 20010 + start):
                with socket.socket() as item:
                    item.bind(("127.0.0.1", port))
        except OSError:
            continue
        return start
    raise RuntimeError("no ten free ports in a row between 21000 and 30000")


def wait_for(what: str, condition: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def processes(condition: Callable[[dict[str, str], str], bool]) -> list[int]:
    """Processes whose (environment, executable) fit, none of them this one or already dead."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            raw, binary = (entry / "environ").read_bytes(), os.readlink(entry / "exe")
        except OSError:
            continue
        pairs = (item.partition("=") for item in raw.decode(errors="replace").split("\0"))
        if condition({name: value for name, _, value in pairs}, binary):
            found.append(int(entry.name))
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


class Cluster:
    """The daemons, their folder, and SLURM's commands against them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o711)  # munge refuses a socket that others cannot reach
        self.conf = self.folder / "slurm.conf"
        self.proctrack = "cgroup" if os.access(FREEZER, os.W_OK) else "linuxproc"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        self.environment |= {"SLURM_CONF": str(self.conf), "PATH": SEARCH_PATH}
        self.daemons: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        for name in ("munge", "ctld", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o711 if name == "munge" else 0o700)
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [f"--{name}-file={self.folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        self.launch("munged", "--foreground", f"--socket={self.folder}/munge/socket", *files)
        wait_for("munge's socket", (self.folder / "munge/socket").exists, 10)
        try:
            self.start_slurm()
        except AssertionError:
            if self.proctrack != "cgroup":
                raise
            self.stop_slurm()
            self.proctrack = "linuxproc"
            self.start_slurm()

    def start_slurm(self) -> None:
        self.write_configuration()
        self.launch("slurmctld", "-D", "-f", self.conf)
        for node in NODES:
            self.launch("slurmd", "-D", "-f", self.conf, "-N", node, name=node)
        wait_for("all nodes idle", lambda: self.idle() == set(NODES), 30)

    def launch(self, *words: Any, name: str | None = None) -> None:
        self.daemons[name or words[0]] = subprocess.Popen(
            [str(word) for word in words],
            env=self.environment,
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG of Linux
        )

    def end(self, *names: str) -> None:
        ending = [self.daemons.pop(name) for name in names if name in self.daemons]
        for daemon in ending:
            daemon.terminate()
        for daemon in ending:
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def idle(self) -> set[str]:
        done = self.call("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False)
        return set(done.stdout.split())

    def write_configuration(self) -> None:
        host, ports, at = socket.gethostname(), free_ports(1 + len(NODES)), self.folder
        (at / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n")
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": ports[0],
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            # a requeued job waits as long as its credential lasts
            "AuthInfo": f"socket={at}/munge/socket,cred_expire=5",
            "CommunicationParameters": "NoInAddrAny,NoCtldInAddrAny",
            "ProctrackType": f"proctrack/{self.proctrack}",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "SlurmdParameters": "config_overrides",
            "MpiDefault": "none",
            "MailProg": "/bin/true",
            "FirstJobId": first_job(),
            "JobRequeue": 1,
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "sched_interval=1,bf_interval=1,batch_sched_delay=0",
            "KillWait": 10,
            "ReturnToService": 2,
            "SlurmctldTimeout": 30,
            "SlurmdTimeout": 10,
            "StateSaveLocation": at / "ctld",
            "SlurmdSpoolDir": at / "spool.%n",
            "SlurmctldPidFile": at / "slurmctld.pid",
            "SlurmdPidFile": at / "slurmd.%n.pid",
            "SlurmctldLogFile": at / "slurmctld.log",
            "SlurmdLogFile": at / "slurmd.%n.log",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4"
            for node, port in zip(NODES, ports[1:])
        ]
        lines += ["PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]
        self.conf.write_text("\n".join(lines) + "\n")

    def call(self, *words: Any, check: bool = True, **more: Any) -> subprocess.CompletedProcess:
        options = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60} | more
        done = subprocess.run([str(word) for word in words], stdin=subprocess.DEVNULL, **options)
        assert not check or done.returncode == 0, f"{words[0]} ended with {done.returncode}: {done.stderr}{self.logs()}"
        return done

    def job(self, number: str) -> dict[str, str]:
        shown = self.call("scontrol", "-o", "show", "job", number).stdout
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wait_for_end(self, number: str, seconds: float) -> dict[str, str]:
        def ended() -> dict[str, str] | None:
            job = self.job(number)
            return job if job["JobState"] in ENDED else None

        return wait_for(f"the end of job {number}", ended, seconds)

    def lose(self, node: str) -> None:
        daemon = self.daemons.pop(node)
        kill([daemon.pid, *self.on_node(node)])
        daemon.wait()

    def on_node(self, node: str) -> list[int]:
        tasks = processes(
            lambda env, binary: env.get("SLURM_CONF") == str(self.conf) and env.get("SLURMD_NODENAME") == node
        )
        log = str(self.folder / f"slurmd.{node}.log")
        return tasks + [pid for pid in processes(lambda env, binary: "slurmstepd" in binary) if holds(pid, log)]

    def logs(self) -> str:
        files = sorted(self.folder.glob("*.log"))
        return "".join(f"\n--- {file.name}\n" + "\n".join(file.read_text().splitlines()[-15:]) for file in files)

    def stop_slurm(self) -> None:
        self.end("slurmctld", *NODES)
        for node in NODES:
            kill(self.on_node(node))
            for group in sorted(FREEZER.glob(f"slurm_{node}/**/"), reverse=True):
                try:
                    group.rmdir()
                except OSError:  # a process is still dying
                    continue

    def stop(self) -> None:
        if "slurmctld" in self.daemons:
            self.call("scancel", "--user", "root", check=False, timeout=20)
        self.stop_slurm()
        self.end("munged")
        shutil.rmtree(self.folder, ignore_errors=True)


def holds(pid: int, file: str) -> bool:
    try:
        return any(os.readlink(entry) == file for entry in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def train(cluster: Cluster, folder: Path, name: str, *flags: str, nodes: int = 2, options=(), **more: str) -> str:
    """Submit a training by folder/tiny.yaml with one process on each of so many nodes; returns the job's number."""
    variables = {"RUNS": str(folder), "NAME": name, "GPUS": "1", "SHARDS": "data/emoji/{noto,twemoji}.tar"}
    variables |= {"GLOO_SOCKET_IFNAME": "lo", "PREFLIGHT": "off"} | more
    script = ["slurm/train.sbatch", "--config", str(folder / "tiny.yaml"), *flags]
    return sbatch(cluster, folder, f"--nodes={nodes}", *options, *script, **variables)


def reported(cluster: Cluster, folder: Path, job: str) -> str:
    """Return the output of a job, its nodes and the daemons, for a failing test."""
    files = [folder / f"{job}.out", *folder.glob(f"*/slurm/{job}-*/node-*.err")]
    return "".join(f"\n--- {file}\n{file.read_text()[-3000:]}" for file in files if file.exists()) + cluster.logs()


def stand_in(folder: Path, name: str, script: str) -> str:
    """Write a script that takes Python's place in a job."""
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)
    return str(folder / name)


def sbatch(cluster: Cluster, folder: Path, *words: str, **variables: str) -> str:
    environment = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | variables
    options = ["--parsable", "--gpus-per-node=0", "--cpus-per-task=1", f"--output={folder}/%j.out"]
    return cluster.call("sbatch", *options, *words, cwd=ROOT, env=cluster.environment | environment).stdout.strip()
