"""The parent of the learner's processes: server, importer, trainer, inference and export. No torch here.

It restarts all but the trainer, at most three times a minute, and at most three times in all while a child has not come
as far as its work; when the trainer ends, the run ends, and the export may bring the rest into shards. A child that
fails says so in one sentence, and what ends the run its actors hear, too. Trainer and inference start when the importer
has brought the plan's datasets, where it names some. Its children die with it. A trainer of several ranks is the parent
of these (`accelerate launch`); on a node beyond the first there is nothing else.
`launch` is the parent; `python -m serl_launcher.launcher NAME RUN_DIR LOCAL` is one child.
"""

import ctypes
import fcntl
import importlib
import importlib.util
import logging
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from serl_client.errors import ConfigError, RetakeError, full_disk

from serl_launcher.datasets import importer
from serl_launcher.datasets.export import FINISH_S, recorded, wanted
from serl_launcher.learner_link import report_end
from serl_launcher.store.access import AllowList, check_address
from serl_launcher.store.files import make_folder
from serl_launcher.training.plan import Plan
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.utils import logging as metrics

log = logging.getLogger(__name__)

RESTARTS, WITHIN_S = 3, 60.0
ERRORS = "errors.log"  # in the run's folder: the tracebacks of what nobody foresaw
REFUSED = 2  # exit status of a child that said in one sentence why it cannot run: starting it again does not help
NEEDED = ("torch", "safetensors", "matplotlib")  # of the extra `learner`
NEEDED_BY_RANKS = ("accelerate", "deepspeed")  # of the extra `vla`
LEARNING = ("trainer", "inference")
SOCKETS = "retake-"  # folders of the ipc sockets, in the system's folder for what is temporary
GIVING_UP = (
    "%s ended %d times %s: giving up, the log above says why. Nothing that was stored is lost: mend that, and give the "
    "same command again"
)
RANKED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # what a rank hears from its launcher; a cluster's own is not meant


def launch(config: DictConfig) -> int:
    """Run the learner until its plan ends; returns the exit status. `config` is the composed one.

    Raises ConfigError, before anything is started or changed, for what can be seen to fail without torch.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"the learner needs {', '.join(missing)}: run `uv sync --inexact --extra learner` here")
    metrics.check(config.wandb)
    config.ranks = ranks_of(config)
    if config.node_rank:
        return _follow(config)
    plan = plan_of(config)
    children = ["importer"] * bool(importer.opened(plan)) + ["export"] * bool(wanted(config, plan) or recorded(config))
    if config["keys"]:
        AllowList(Path(config["keys"]))
    check_address(f"tcp://{config.host}:{config.port}", config["keys"])
    run_dir = writable(Path(str(config.run_dir)))
    _forget_dead_sockets()
    with _lock(run_dir), tempfile.TemporaryDirectory(prefix=SOCKETS) as sockets, _lock(Path(sockets)):
        _check_ports(config)
        describe_store(config, plan)
        OmegaConf.save(config, run_dir / "config.yaml", resolve=True)
        log.info("in %s: %s", run_dir, " ".join(config.remembered))
        first = ["server", *children, *([] if "importer" in children else LEARNING)]
        return _Family(run_dir, f"ipc://{sockets}/server", first, archives=bool(plan.archived)).run()


def describe_store(config: DictConfig, plan: Plan) -> None:
    """Put under `store` of the config what the server process needs of the plan: it reads no plan itself."""
    with open_dict(config):
        config.store = {
            "capacities": plan.capacities, "archived": sorted(plan.archived), "on_silence": plan.on_silence,
        }  # fmt: skip


def _forget_dead_sockets() -> None:
    """Remove the folders of learners that were killed: nobody listens at their sockets, and nobody holds them (where a
    launcher does, its server is starting again)."""
    for path in Path(tempfile.gettempdir()).glob(f"{SOCKETS}*/server"):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                with suppress(ConfigError), _lock(path.parent):
                    shutil.rmtree(path.parent, ignore_errors=True)
            except OSError:
                continue  # somebody else's


def _follow(config: DictConfig) -> int:
    """Run the ranks of a node beyond the first, which hear from rank 0 what the run is."""
    log.info("node %d of %d: what the run is, node 0 says at %s", config.node_rank, config.nodes, config.main)
    with tempfile.TemporaryDirectory(prefix="retake-") as folder:
        OmegaConf.save(config, Path(folder) / "config.yaml", resolve=True)
        return _Family(Path(folder), "", ["trainer"], archives=False).run()


def ranks_of(config: DictConfig) -> int:
    """How many processes train on this machine. Raises ConfigError for numbers that do not fit each other."""
    ranks = _gpus(str(config.device)) if config.ranks == "auto" else config.ranks
    missing = [name for name in NEEDED_BY_RANKS if importlib.util.find_spec(name) is None]
    if missing and config.ranks == "auto":
        ranks = 1
    for name, least, value in (("ranks", 1, ranks), ("nodes", 1, config.nodes), ("node_rank", 0, config.node_rank)):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value}: say a whole number, at least {least}")
    if config.node_rank >= config.nodes:
        raise ConfigError(f"node_rank={config.node_rank}: the {config.nodes} nodes are 0 to {config.nodes - 1}")
    if config.nodes > 1 and not str(config.main).rpartition(":")[2].isdecimal():
        raise ConfigError(f"main={config.main}: say the address and a free port of node 0, as in main=10.0.0.5:29500")
    if ranks * config.nodes > 1 and ":" in str(config.device):
        raise ConfigError(f"device={config.device} is one GPU, and each of several ranks has its own: say device=cuda")
    if ranks * config.nodes > 1 and missing:
        raise ConfigError(f"several ranks need {', '.join(missing)}: run `uv sync --inexact --extra vla` here")
    return ranks


def _gpus(device: str) -> int:
    """How many GPUs the trainer may use; 1 where it uses none."""
    if device not in ("auto", "cuda"):
        return 1
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len(visible.split(","))  # of an empty one 1, which is right: it uses none
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 1
    return max(1, sum(line.startswith("GPU ") for line in found.splitlines()))


def writable(folder: Path) -> Path:
    """The folder, made if it is not there, as an absolute path. Raises ConfigError when it cannot be written to."""
    folder = folder.resolve()
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror}): choose another run_dir=..., or make room there"
        ) from None
    return folder


def _check_ports(config: DictConfig) -> None:
    if config.port == config.inference_port:
        raise ConfigError(f"port and inference_port are both {config.port}: choose another inference_port=...")
    for name in ("port", "inference_port", *["live"] * (config.live is not None)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.host, config[name]))
            except (OSError, OverflowError, TypeError) as error:
                raise ConfigError(
                    f"cannot listen on {config.host}:{config[name]} ({getattr(error, 'strerror', None) or error}). "
                    f"Is another learner running? Stop it, or choose {name}=..."
                ) from None


def _lock(run_dir: Path) -> Any:
    """The open lock file of a folder; it names who holds it. Raises ConfigError when somebody else does."""
    file = open(run_dir / "lock", "a+")  # noqa: SIM115 - the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise ConfigError(
            f"{run_dir} is in use by the learner with process {holder}: stop it, or choose run_dir=..."
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


class _Family:
    """The children of one run; `first` are started at once: trainer and inference are not where there is an importer,
    after which they come. `archives`: episodes stay in the store until they are exported."""

    def __init__(self, run_dir: Path, local: str, first: Sequence[str], *, archives: bool) -> None:
        self._run_dir, self._local, self._first, self._archives = run_dir, local, first, archives
        self._restarts = {name: deque[float](maxlen=RESTARTS) for name in CHILDREN}
        self._vain = dict.fromkeys(CHILDREN, 0)  # starts in succession that came to nothing
        self._children: dict[str, subprocess.Popen] = {}
        self._signalled = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "_signalled", True))
        try:
            for name in self._first:
                self._start(name)
            while (status := self._look()) is None:
                time.sleep(0.05)
            if status == 0:
                self._finish_export()
            return status
        finally:
            self._end()

    def _start(self, name: str) -> None:
        command = [sys.executable, "-m", __spec__.name, name, str(self._run_dir), self._local]
        if self._local:
            _sign(name, self._local).unlink(missing_ok=True)
        here = {key: value for key, value in os.environ.items() if key not in RANKED}
        self._children[name] = subprocess.Popen(
            command, preexec_fn=_die_with_parent, stdin=subprocess.DEVNULL, env=here
        )

    def _look(self) -> int | None:
        """The exit status if the run is over; restarts what may be restarted."""
        if self._signalled:
            return 1
        for name, child in list(self._children.items()):
            if (status := child.poll()) is not None and (over := self._ended(name, status)) is not None:
                return over
        return None

    def _ended(self, name: str, status: int) -> int | None:
        """Go on after a child has ended; the exit status if the run is over with it."""
        if name == "importer" and status == 0:
            del self._children[name]
            for other in LEARNING:
                self._start(other)
            return None
        if name == "export" and status == REFUSED and not self._archives:
            del self._children[name]  # it has said why, and nothing needs it
            return None
        if name == "trainer" or status == REFUSED:
            return 1 if status else 0
        recent = self._restarts[name]
        self._vain[name] = 0 if _sign(name, self._local).exists() else self._vain[name] + 1
        often = len(recent) == RESTARTS and time.monotonic() - recent[0] < WITHIN_S
        if often or self._vain[name] > RESTARTS:
            if name == "export":
                return None  # shards can wait: it is started again when the minute is over
            log.error(GIVING_UP, name, RESTARTS + 1, "within a minute" if often else "before it could do anything")
            return 1
        recent.append(time.monotonic())
        log.warning("%s ended with status %d: starting it again", name, status)
        self._start(name)
        return None

    def _finish_export(self) -> None:
        """Let the export bring the rest into shards, for a while."""
        child = self._children.get("export")
        if child is None:
            return
        if child.poll() is None:
            log.info("the run is over; the last episodes are brought into datasets")
            child.terminate()
        deadline = time.monotonic() + FINISH_S + 30.0  # it stops by itself, after the shard that it is at
        while child.poll() is None and time.monotonic() < deadline and not self._signalled:
            time.sleep(0.05)
        if child.poll() != 0:
            log.warning("not all episodes are in shards: `tools/data.py export %s` does the rest", self._run_dir)

    def _end(self) -> None:
        """Stop the children, the server last: it may still take what the others say."""
        if (child := self._children.get("export")) is not None:
            child.kill()  # whenever it dies, there are only whole shards
            child.wait()
        for name in (*LEARNING, "importer", "server"):
            child = self._children.get(name)
            if child is not None and child.poll() is None:
                child.terminate()
                try:
                    child.wait(10)
                except subprocess.TimeoutExpired:
                    child.kill()


def _die_with_parent() -> None:
    """In a child before exec: be killed when the parent dies, and leave Ctrl-C to the parent."""
    _killed_with_parent()
    os.setpgid(0, 0)


def _killed_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _sign(name: str, local: str) -> Path:
    """The file that says that this child has come as far as its work: it lies beside the socket of the server."""
    return Path(local.removeprefix("ipc://")).with_name(f"{name}.begun")


CHILDREN = {  # process: the module below serl_launcher that has its `main`; only that process imports it
    "server": "store.server", "importer": "datasets.importer", "trainer": "training.trainer",
    "inference": "acting.server", "export": "datasets.export",
}  # fmt: skip


def child(name: str, run_dir: str, local: str) -> int:
    """Run one child; returns its exit status. What makes it fail is one sentence, which actors hear where the run ends
    with it; the traceback of what nobody foresaw goes into a file."""
    if "RANK" in os.environ:
        _killed_with_parent()  # which `accelerate launch` does not see to
    config = OmegaConf.load(Path(run_dir) / "config.yaml")
    assert isinstance(config, DictConfig)
    try:
        module = importlib.import_module(f"serl_launcher.{CHILDREN[name]}")
        module.main(config, Path(run_dir), local, lambda: _sign(name, local).touch())
    except Exception as error:
        status, reason = _failed(name, Path(run_dir), local, error)
        sys.stderr.write(f"{name}: {reason}\n" if reason else "")  # rank 0 says what all refuse
        if reason and name != "server" and local and (status == REFUSED or name == "trainer"):
            report_end(local, f"{name}: {reason}")
        return status
    return 0


def _failed(name: str, run_dir: Path, local: str, error: Exception) -> tuple[int, str]:
    """The exit status of a child that this error has ended, and the sentence that says why."""
    if isinstance(error, RetakeError):
        return REFUSED, str(error)
    if (full := full_disk(error)) is not None:
        return REFUSED, f"{full}: make room for {run_dir}, then give the same command again"
    first = (str(error).splitlines() or ["no reason given"])[0]
    if "RANK" in os.environ and any(word in str(error) for word in ("gloo", "NCCL")):
        return 1, f"rank {os.environ['RANK']} lost another: {first}"
    with suppress(OSError), open(run_dir / ERRORS, "a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {name}\n{''.join(traceback.format_exception(error))}\n")
    is_vain = (  # another start would fail as this one did; a disk may work again
        name in ("server", "inference")
        and not isinstance(error, OSError | sqlite3.Error)
        and not _sign(name, local).exists()
    )
    return REFUSED if is_vain else 1, f"it failed: {type(error).__name__}: {first} (where: {run_dir / ERRORS})"


if __name__ == "__main__":
    status = child(*sys.argv[1:])
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the threads of gloo and NCCL do not survive an orderly end
    sys.exit(status)
