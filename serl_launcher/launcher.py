"""Starts the learner's processes (server, trainer, inference, export), after the checks that need no torch.

`python -m serl_launcher.launcher NAME RUN_DIR LOCAL` runs one of them (`child`); supervisor.py starts them again. A
process that fails says why in one sentence. If the run ends with it, the actors hear that sentence, too. A trainer of
several ranks is the parent of these (`accelerate launch`). A node beyond the first runs nothing but ranks.
"""

import importlib
import importlib.util
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from omegaconf import DictConfig, OmegaConf, open_dict
from serl_client.connection import tcp
from serl_client.errors import ConfigError, RetakeError, full_disk
from serl_client.frames import MAX_HISTORY
from serl_client.lockfile import holder, lock_folder, sign
from serl_client.names import cleaned

from serl_launcher.config import cameras, saved
from serl_launcher.datasets import importer
from serl_launcher.datasets.export import FINISH_S, recorded, wanted
from serl_launcher.error_log import ERRORS, first_line, write_traceback
from serl_launcher.page import certificate
from serl_launcher.page.ports import check_port
from serl_launcher.report import begun, page
from serl_launcher.service.access import AllowList, check_address
from serl_launcher.service.link import report_end
from serl_launcher.service.router import cannot_listen
from serl_launcher.service.sockets import RUN_DIR, SERVER, other_runs, socket_folder
from serl_launcher.sharing import check_user, group_of, take_over
from serl_launcher.store.creation import capacities_there, run_of
from serl_launcher.store.extras import ANY, with_extras
from serl_launcher.store.files import make_folder
from serl_launcher.supervisor import BESIDE, LEARNING, REFUSED, Supervisor, begun_file, killed_with_parent
from serl_launcher.training import metrics
from serl_launcher.training.plan import Plan
from serl_launcher.training.plan_reader import plan_of
from serl_launcher.training.resuming import check_origin, check_resumable, origin_of

log = logging.getLogger(__name__)

NEEDED = ("torch", "safetensors", "matplotlib", "websockets")  # of the extra `learner`
NEEDED_BY_RANKS = ("accelerate", "deepspeed")  # of the extra `vla`


def launch(config: DictConfig, words: Sequence[str] = ()) -> int:
    """Run the learner until its plan ends, and return the exit status. The run's report is written then.

    config: the composed one. words: of the command line, which the run notes.

    Raises ConfigError, before anything is started or changed, for whatever can be found without torch.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"the learner needs {', '.join(missing)}: run `. examples/install.sh --extra learner` here")
    metrics.check(config.log)
    most = ranks_of(config)
    if config.ranks != "auto" or config.nodes > 1 or most == 1:
        config.ranks = most  # else the trainer says how many, when it knows how many weights there are
    if config.node_rank:
        return _follow(config)
    plan = plan_of(config)
    imports, exports = importer.open_datasets(plan), wanted(config, plan) or recorded(config)
    children = ["importer"] * bool(imports) + ["export"] * bool(exports)
    if config["keys"]:
        AllowList(Path(config["keys"]))
    group_of(config.share)
    check_address(tcp(config.host, config.port), config["keys"])
    check_address(tcp(config.bridge.host, config.bridge.port), config["keys"], "bridge.host")
    if config.page is not None:
        certificate.opened(**certificate.wanted(config))
    run_dir = writable(Path(str(config.run_dir)))
    with _lock(run_dir) as lock, socket_folder() as sockets:
        check_ports(config)
        check_user(run_dir)
        _check_original(run_dir, sockets)
        describe_store(config, plan)
        with suppress(sqlite3.Error):  # of a disk: the server says it
            said = plan.capacities
            for name, steps in capacities_there(run_dir / "store", said).items():
                if steps != said[name]:
                    log.info("source %s keeps the %d steps with which this run began, not %d", name, steps, said[name])
        config["from"] = origin_of(config)
        if not check_resumable(run_dir / "checkpoints", config, plan) and config["from"]:
            check_origin(config)
        sign(lock)
        take_over(run_dir, config.share, is_learner=True)
        begun.save(config, run_dir / "config.yaml", words)
        log.info("in %s: %s", run_dir, " ".join(config.remembered))
        shown = ["page"] * (config.page is not None)
        first = ["server", *shown, *children, *([] if "importer" in children else LEARNING)]
        local = f"ipc://{sockets / SERVER}"
        status = Supervisor(run_dir, local, first, archives=bool(plan.archived), export_s=FINISH_S).run()
    report(run_dir)
    return status


def report(run_dir: Path) -> None:
    """Write the run's report, and say where. That it fails is no reason for a run to fail."""
    try:
        log.info("report: %s", page.write(run_dir))
    except Exception as error:
        log.warning("no report (%s): tools/report.py %s tries again", first_line(error), run_dir)
        write_traceback(run_dir, "report", error)


def describe_store(config: DictConfig, plan: Plan) -> None:
    """Put under `store` of the config what the server process needs of plan, algorithm and policy: it reads none."""
    history = OmegaConf.select(config, "policy.history", default=1)
    if history not in range(1, MAX_HISTORY + 1):
        raise ConfigError(f"policy.history={history}: say a whole number from 1 to {MAX_HISTORY}")
    with_extras(ANY, config.extras)
    with open_dict(config):
        config.store = {
            "capacities": plan.capacities, "archived": sorted(plan.archived), "on_silence": plan.on_silence,
            "extras": config.extras, "history": history, "unread": _unread(config, plan),
        }  # fmt: skip


def _unread(config: DictConfig, plan: Plan) -> dict[str, Any] | None:
    """Return what becomes of a simulated robot's images that this run does not read, for Welcomes; None: they are kept.

    They are if the plan trains nothing, because it may be another one that reads them, and if somebody looks at them.
    """
    words = cameras(config)
    names = sorted({name for several in words.values() for name in several})
    trains = any(phase.updates for phase in plan.phases.values())
    shown = config.unread_images or plan.archived or config.export.sources == "all" or config.live is not None
    if not words or "all" in names or not trains or shown or config.record != "none":
        return None
    seen = " ".join(f"'{where}=[all]'" for where in words)
    return {"cameras": names, "say": f"say {seen} to see it, or unread_images=true to store it all the same"}


def _follow(config: DictConfig) -> int:
    """Run the ranks of a node beyond the first. Rank 0 tells them the run's config."""
    said = "node %d of %d: starting this node's ranks; node 0 at %s defines the run"
    log.info(said, config.node_rank, config.nodes, config.main)
    with socket_folder() as folder:
        OmegaConf.save(config, folder / "config.yaml", resolve=True)
        return Supervisor(folder, "", ["trainer"]).run()


def ranks_of(config: DictConfig) -> int:
    """Return how many processes train on this machine, at most where `ranks` is auto.

    Raises ConfigError for numbers that do not fit each other.
    """
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
        raise ConfigError(f"several ranks need {', '.join(missing)}: run `. examples/install.sh --extra vla` here")
    return ranks


def _gpus(device: str) -> int:
    """Return how many GPUs the trainer may use; 1 where it uses none."""
    if device not in ("auto", "cuda"):
        return 1
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len(visible.split(","))  # an empty value gives 1, which is right: no GPU
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 1
    return max(1, sum(line.startswith("GPU ") for line in found.splitlines()))


def writable(folder: Path) -> Path:
    """Make the folder if it is not there, and return its absolute path. Raises ConfigError if it cannot be written."""
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


def check_ports(config: DictConfig) -> None:
    """Raise ConfigError for a port that another program has, that is said twice, or that no browser opens."""
    check_port(config.page)
    taken: dict[int, str] = {}
    hosts = {"bridge.port": config.bridge.host, "page": config.page_host}
    for name in ("port", "inference_port", "live", *hosts):
        host, port = hosts.get(name, config.host), OmegaConf.select(config, name)
        if port is None:
            continue
        if (other := taken.setdefault(port, name)) != name:
            raise ConfigError(f"{other} and {name} are both {port}: choose another {name}=...")
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, OverflowError, TypeError) as error:
                why = str(getattr(error, "strerror", None) or error)
                raise ConfigError(cannot_listen(tcp(host, port), why, name)) from None


def _lock(run_dir: Path) -> IO[str]:
    """Lock a run's folder. Raises ConfigError if another process holds it."""
    taken = "{} is in use by the learner with process {}: stop it, or choose run_dir=..."
    return lock_folder(run_dir, lambda process: taken.format(run_dir, process))


def _check_original(run_dir: Path, sockets: Path) -> None:
    """Raise ConfigError if the same run, of which one folder is a copy, is open on this machine: its actors would bring
    one part of their records to each."""
    (sockets / RUN_DIR).write_text(str(run_dir))
    run = run_of(run_dir / "store")
    for other in other_runs(sockets):
        if run and run_of(other / "store") == run:
            raise ConfigError(
                f"{run_dir} and {other} are copies of one run, and a learner has {other} open (process "
                f"{holder(other) or 'unknown'}): stop that one first, or choose another run_dir=..."
            )


CHILDREN = {  # process: the module below serl_launcher that has its `main`; only that process imports it
    "server": "service.server", "importer": "datasets.importer", "trainer": "training.trainer",
    "inference": "acting.server", "export": "datasets.export", "page": "page.server",
}  # fmt: skip


def child(name: str, run_dir: str, local: str) -> int:
    """Run one process, and return its exit status.

    Why it fails is printed as one sentence. If the run ends with it, the actors hear that sentence. The traceback of an
    unforeseen error goes into the run's file ERRORS.
    """
    if "RANK" in os.environ:
        killed_with_parent()  # because `accelerate launch` does not kill its ranks
    config = saved(Path(run_dir))
    try:
        module = importlib.import_module(f"serl_launcher.{CHILDREN[name]}")
        module.main(config, Path(run_dir), local, lambda: begun_file(name, local).touch())
    except Exception as error:
        status, reason = _failed(name, Path(run_dir), local, error)
        sys.stderr.write(cleaned(f"{name}: {reason}", "\n") + "\n" if reason else "")  # rank 0 says what all refuse
        if reason and name not in ("server", *BESIDE) and local and (status == REFUSED or name == "trainer"):
            report_end(local, f"{name}: {reason}")
        return status
    return 0


def _failed(name: str, run_dir: Path, local: str, error: Exception) -> tuple[int, str]:
    """Return the exit status of a process that this error has ended, and the sentence that says why."""
    if isinstance(error, RetakeError):
        return REFUSED, str(error)
    if (full := full_disk(error)) is not None:
        return REFUSED, f"{full}: make room for {run_dir}, then give the same command again"
    if "RANK" in os.environ and any(word in str(error) for word in ("gloo", "NCCL")):
        return 1, f"rank {os.environ['RANK']} lost another: {first_line(error)}"
    write_traceback(run_dir, name, error)
    is_vain = (  # another start would fail as this one did; a disk may work again
        name in ("server", "inference")
        and not isinstance(error, OSError | sqlite3.Error)
        and not begun_file(name, local).exists()
    )
    return REFUSED if is_vain else 1, f"it failed: {first_line(error)} (where: {run_dir / ERRORS})"


if __name__ == "__main__":
    if "RANK" not in os.environ:  # stays ignored here, but not in the programs that this process starts
        signal.signal(signal.SIGTERM, lambda *_: None)
    status = child(*sys.argv[1:])
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the threads of gloo and NCCL do not survive an orderly end
    sys.exit(status)
