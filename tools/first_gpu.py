#!/usr/bin/env python
"""Tries what a GPU may break, measures what it is for, and writes all of it into one page.

tests       the tests that need a GPU
quickstart  the first run of the README, with its learner on the GPU
infer       how fast PI0 answers: eager, compiled and recorded, with one camera and with three
train       how fast PI0 is trained, with and without checkpointing
ranks       how fast two GPUs train PI0 together: replicated, with ZeRO-2 and with ZeRO-3

It needs this checkout and Python with torch, but no network and nothing installed of this project. A part whose
packages are missing says which. Try the page without a GPU: --device cpu --policy pi0_tiny
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.processes import ended, start

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ("msgpack", "numpy", "xxhash", "zmq")
LEARNER = (*CLIENT, "hydra", "omegaconf", "safetensors", "torch")
ENDS_S = 10.0  # seconds that what is too slow gets to end by itself


@dataclass(frozen=True, slots=True)
class Part:
    """Commands that are run one after the other, the packages that they need, and how many GPUs (0: any)."""

    needs: Sequence[str]
    commands: Sequence[str]
    gpus: int = 0


def parts(options: argparse.Namespace) -> dict[str, Part]:
    python, device, words = shlex.quote(sys.executable), f"device={options.device}", f"--policy {options.policy}"
    train = f"{python} examples/train.py run_dir={shlex.quote(options.folder)} {device} log=false"
    bench = f"{python} tools/bench.py pi0"
    return {
        "tests": Part((*LEARNER, "pytest"), [f"{python} -m pytest -q -m gpu -p no:cacheprovider tests"]),
        "quickstart": Part(
            (*LEARNER, "matplotlib", "mujoco"),
            [f"{train} actor=true >/dev/null 2>&1 & {train} learner=true && wait $!"],
        ),
        "infer": Part((*LEARNER, "transformers"), [
            f"{bench} --parts answer {words} --cameras {cameras} --rounds {options.rounds} {device}"
            for cameras in (1, 3)
        ]),
        "train": Part((*LEARNER, "transformers"), [
            f"{bench} --parts train {words} --rounds {options.rounds} {device} policy.checkpointing={checkpointing}"
            for checkpointing in ("true", "false")
        ]),
        "ranks": Part((*LEARNER, "transformers", "accelerate", "deepspeed"), [
            f"{bench} --parts train --ranks 2 {words} --rounds {options.rounds} {device} policy.checkpointing=true"
        ], gpus=0 if options.device == "cpu" else 2),
    }  # fmt: skip


def main() -> None:
    """Exits with 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("tests", "quickstart", "infer", "train", "ranks")
    parser.add_argument("part", nargs="*", help="(all)", metavar="PART", choices=(*names, []))
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (cuda)")
    parser.add_argument(
        "--policy", default="pi0", help="of all but tests and quickstart: pi0, pi0_expert, pi0_lora or pi0_tiny (pi0)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="how often these measure (20)")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds that a part may take (540)")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu.md"), help="the page; what it holds already stays (gpu.md)"
    )
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="first-gpu-") as folder, open(options.out, "a") as page:
        options.folder = folder
        chosen, failed = parts(options), False
        for name in options.part or names:
            for line in tried(name, chosen[name], options.limit):
                print(line, flush=True)
                print(line, file=page, flush=True)
                failed |= line.startswith("FAILED")
    sys.exit(1 if failed else 0)


def tried(name: str, part: Part, limit: float) -> Iterator[str]:
    """Yield the part's section of the page, line by line."""
    yield from (f"## {name}", "", f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {machine()}", "")
    if missing := [package for package in part.needs if find_spec(package) is None]:
        yield from (f"Left out: this Python lacks {', '.join(missing)}.", "")
        return
    if part.gpus and (there := gpus()) < part.gpus:
        yield from (f"Left out: it needs {part.gpus} GPUs, and this machine has {there}.", "")
        return
    deadline = time.monotonic() + limit
    for command in part.commands:
        begin = time.monotonic()
        status, text = run(command, deadline - begin)
        how = {0: "ended well", None: f"FAILED: the part took more than {limit:g} s"}.get(status, f"FAILED: {status}")
        yield from ("```", f"$ {command.replace(sys.executable, 'python')}", *text.splitlines(), "```")
        yield from (f"{how}, after {time.monotonic() - begin:.0f} s", "")


def run(command: str, limit: float) -> tuple[int | None, str]:
    """Run a shell command in the root of this checkout. Returns its exit status, None if it took longer than `limit`
    seconds, and what it printed."""
    paths = [str(ROOT), str(ROOT / "packages/serl_client/src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as said:
        process = start(["bash", "-c", command], said, cwd=ROOT, env=environment)
        status: int | None = None
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(max(0.0, limit))
        with suppress(ProcessLookupError):  # what is left of it, in its own group
            os.killpg(process.pid, signal.SIGINT)
        ended(process, ENDS_S)
        said.seek(0)
        return status, said.read()


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def machine() -> str:
    """Name GPU, torch and commit."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    if find_spec("torch") is None:
        return f"no torch, commit {commit.stdout.strip()}"
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{', '.join(gpus) or 'no GPU'}, torch {torch.__version__}, commit {commit.stdout.strip() or 'unknown'}"


if __name__ == "__main__":
    main()
