"""What a finished run has learned, read from its folder: its algorithm, and rows of its evaluations."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from serl_client.spec import Spec

from serl_launcher.config import saved
from serl_launcher.replay.mixture import ReplayMixture
from serl_launcher.store.index import Index
from serl_launcher.training.build import build
from serl_launcher.training.checkpoint import Checkpoints
from serl_launcher.training.resuming import free_settings, kept_settings
from serl_launcher.types import Batch


def newest(folder: Path) -> tuple[Any, Spec, Any]:
    """Return the algorithm of the newest checkpoint, its Spec, and the run's config."""
    config: Any = saved(folder)
    manifest = max((folder / "checkpoints").glob("[0-9]*/manifest.json"), key=lambda path: int(path.parent.name))
    spec = Spec.from_dict(json.loads(manifest.read_text())["spec"])
    algorithm: Any = build(config, spec)
    kept = Checkpoints(
        manifest.parent.parent, spec=spec, config=kept_settings(config), changeable=free_settings(config)
    )
    algorithm.load_state_dict((kept.load() or {})["algorithm"])
    return algorithm, spec, config


def trained(folder: Path, update: str, rows: int = 2000) -> tuple[Any, Batch]:
    """Return the algorithm of the newest checkpoint, and rows of evaluations, on which nothing has trained.

    update: whose windows the rows are.
    """
    algorithm, spec, _ = newest(folder)
    with closing(Index(folder / "store/index.sqlite")) as index:
        capacities = {name: source.capacity for name, source in index.sources().items()}
        sources = ReplayMixture(folder / "store", spec, capacities, {}, seed=0, derived=algorithm.derived)
        sources.update(index.catalog(0, 1_000_000)[1])
    batch = sources.sample(rows, algorithm.windows[update], {"eval": 1.0})
    assert batch is not None, f"{folder}: nothing was evaluated"
    return algorithm, batch
