"""Notes in the head of a run's config.yaml by which commands and versions its learner was started; tells what differs.

The notes are comments, so whoever reads the config does not see them.
"""

import platform
import shlex
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from serl_client.names import cleaned

from serl_launcher.config import composed, groups
from serl_launcher.store.files import replaced

COMMAND, VERSIONS = "# begun by: ", "# with: "
MOST = 20  # commands that are kept, the newest
NAMED = ("retake", "torch", "numpy", "mujoco", "gymnasium", "lerobot")  # packages
OWN = ("run_dir", "remembered", "store", "learner", "port", "inference_port")  # settings that are no difference


def save(config: DictConfig, path: Path, words: Sequence[str]) -> None:
    """Write a run's config with its values resolved, under the commands of this start and of those before."""
    command = shlex.join(["examples/train.py", *map(cleaned, words)])
    before = [each for each in commands(path) if each != command]
    with replaced(path) as aside:
        lines = [f"{COMMAND}{each}" for each in [*before, command][-MOST:]]
        aside.write_text("\n".join([*lines, f"{VERSIONS}{installed()}", OmegaConf.to_yaml(config, resolve=True)]))


def commands(path: Path) -> list[str]:
    """Return the commands that a config.yaml notes, the newest last; none of a version that noted none."""
    return _noted(path, COMMAND)


def versions(path: Path) -> str:
    """Return the versions that the latest start noted; empty: none."""
    return "".join(_noted(path, VERSIONS))


def _noted(path: Path, mark: str) -> list[str]:
    if not path.is_file():
        return []
    lines = path.read_text(errors="replace").splitlines()
    return [line.removeprefix(mark) for line in lines[: MOST + 2] if line.startswith(mark)]


def installed() -> str:
    """Return the versions of what matters here, as one line."""
    found = [f"Python {platform.python_version()}"]
    for name in NAMED:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join([*found, f"{platform.system()} {platform.machine()}"])


def differing(config: DictConfig, folder: Path, words: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return (setting, its value, its default) of all that differs from what the chosen yamls alone would give.

    folder: config/. words: of the command. Raises ConfigError if these yamls are others now.
    """
    names = groups(folder)
    chosen = {word.partition("=")[0]: word for word in [*config.remembered, *words] if word.partition("=")[0] in names}
    plain = composed(folder, [*chosen.values(), "run_dir=runs/.none"])
    now, default = (dict(_leaves(OmegaConf.to_container(each, resolve=True))) for each in (config, plain))
    return [
        (name, str(now.get(name, "-")), str(default.get(name, "-"))) for name in {**default, **now}
        if now.get(name) != default.get(name) and name.partition(".")[0] not in OWN
    ]  # fmt: skip


def _leaves(tree: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield where, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, f"{where}.{key}" if where else str(key))
