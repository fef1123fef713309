"""Says at the start what the policy sees of a robot, and what is stored for nobody: why, and what to say to see it."""

from omegaconf import DictConfig
from serl_client.spec import IMAGES, Spec

from serl_launcher.algorithms.base import Algorithm
from serl_launcher.config import cameras


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


def _short(name: str) -> str:
    return name.removeprefix("observation.")
