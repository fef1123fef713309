"""Says at the start what the policy sees of a robot, and what is stored for nobody: why, and what to say to see it."""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from serl_client.spec import Spec

from serl_launcher.algorithms.base import Algorithm

IMAGES = "observation.images."


def told(config: DictConfig, algorithm: Algorithm, spec: Spec) -> str:
    """Return the line about the observations of a Spec that this algorithm, made from `config`, reads and does not."""
    read = {name for window in algorithm.windows.values() for name in window.offsets}
    seen = set(getattr(algorithm.acting, "inputs", read))
    unread = [name for name in sorted(spec.observation) if name not in read | seen]
    said = f"the policy sees {', '.join(map(_short, sorted(seen & spec.observation.keys()))) or 'nothing'}"
    images = [name for name in unread if name.startswith(IMAGES)]
    others = [_short(name) for name in unread if not name.startswith(IMAGES)]
    if images:
        size = sum(spec.observation[name].nbytes for name in images)
        words = " ".join(f"'{where}=[all]'" for where in cameras(config)) or "an algorithm with cameras"
        said += (
            f"; stored, not seen: {', '.join(map(_short, images))}, {size / 1e3:,.0f} kB a step (because no camera of "
            f"them is named; say {words} in another run_dir to see them)"
        )
    if others:
        said += f"; stored, not seen: {', '.join(others)} (because states are float32: let the task give such numbers)"
    return said


def cameras(config: DictConfig) -> dict[str, list[str]]:
    """Return {the word on the command line: the cameras that it names} for all of a config that reads images."""
    algo = OmegaConf.to_container(config.algo)
    own = OmegaConf.to_container(config.policy) if isinstance(algo, Mapping) and "policy" in algo else {}
    found = dict(_cameras(own, "policy"))
    return found | {where: names for where, names in _cameras(algo, "algo") if not where.startswith("algo.policy.")}


def _cameras(tree: Any, where: str) -> Iterator[tuple[str, list[str]]]:
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if key == "cameras":
            yield f"{where}.{key}", [value] if isinstance(value, str) else list(value)
        yield from _cameras(value, f"{where}.{key}")


def _short(name: str) -> str:
    return name.removeprefix("observation.")
