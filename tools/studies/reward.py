"""Does a trained classifier see success? On the simulated arm, from two cameras alone, by seed.

It learns from --episodes of RLPD's practice, which begins by failing, from the demonstrations before it, and from
--near misses: a script lifts the block to a height of its own draw, and stays there or lets go. A scripted person says
success a second late, so that the robot was seen there, and failure when the time is over. Then --held-out episodes
succeed and as many fail, by scripts with noise, each from a start of its own, after a pause and at a speed of its own.
None of them was seen before. A success goes on for 1.5 seconds. Failures are of three kinds: the gripper closes beside
the block, lifts it not high enough, or drops it too early.
    judged     the classifier, as task.judge would use it: the threshold, rows in succession
    plain      the same, but it has learned from no near misses
    shuffled   the control: as judged, but each episode was called a success by lot
A success counts as seen if the verdict falls within a second of the true one, before or after it.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serl_client.spec import Array, Spec
from torch import Tensor

from robot_infra.cameras import gl
from robot_infra.env import RobotEnv
from robot_infra.judges import Unjudged, lifted
from robot_infra.learned import Verdicts
from robot_infra.robots.sim_arm import SimArm, make, pick
from robot_infra.safety import SafeRobot
from robot_infra.teleop.scripted import Scripted
from robot_infra.teleop.verdicts import ScriptedVerdicts
from serl_launcher.algorithms.reward_classifier import SUCCESS, RewardClassifier
from serl_launcher.datasets.export import export_run
from serl_launcher.types import Batch, Metrics, Window
from tools.studies.runs import Cells, demonstrations, run
from tools.studies.trained import newest

FPS, SIZE, ROWS = 10, 64, 60  # steps per second, pixels, rows of an episode
LATE = 10  # rows after which the person says success
AFTER = 15  # rows of a held-out success after it
NEAR = 10  # rows: a second
INDEX = "episode.index"
WAYS = {"judged": [], "plain": [], "shuffled": ["algo._target_=tools.studies.reward.Shuffled"]}
CAMERAS = ["task.cameras=true", f"task.image_size={SIZE}"]
SEEN = "algo.inputs=[observation.images.cam_high,observation.images.cam_wrist]"


class Shuffled(RewardClassifier):
    """The control: whether an episode succeeded is drawn by lot from the number of its first step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.windows = {name: Window({**window.offsets, INDEX: (0,)}) for name, window in self.windows.items()}

    def update(self, batch: Batch) -> Metrics:
        return super().update(by_lot(batch))

    def update_calibration(self, batch: Batch) -> Metrics:
        return super().update_calibration(by_lot(batch))


def by_lot(batch: Batch) -> Batch:
    first = batch.step_id - batch.extras[INDEX][:, 0]
    lot: Tensor = ((first * 0x9E3779B1) >> 16) % 2 == 0
    return replace(batch, extras={**batch.extras, SUCCESS: lot.unsqueeze(1)})


class Late:
    """Returns whether the task has been done for LATE steps, or was so long ago."""

    def __init__(self, holds: Callable[[], bool], steps: Callable[[], int]) -> None:
        self._holds, self._steps = holds, steps
        self._since: int | None = None  # the first step at which it was done

    def __call__(self) -> bool:
        now = self._steps()
        if self._since is not None and now < self._since:  # another episode
            self._since = None
        if self._since is None and self._holds():
            self._since = now
        return self._since is not None and now >= self._since + LATE


def late_arm(**options: Any) -> RobotEnv:
    """Return the arm's task with a scripted person who is late."""
    env = make(**{**options, "verdict_by": "operator"})
    assert isinstance(env.operator, ScriptedVerdicts)
    env.operator.holds = Late(env.operator.holds, env.operator.steps)
    return env


class NearMisses:
    """Returns the actions of picks that end below the height of a success: three of ten let go there."""

    def __init__(self, arm: SimArm) -> None:
        self._arm, self._random = arm, np.random.default_rng(23)
        self._height, self._is_there, self._grip = 0.0, False, 1.0

    def __call__(self) -> Array:
        if not self._arm.steps:
            self._height, self._is_there = self._random.uniform(0.04, 0.09), False
            self._grip = -1.0 if self._random.random() < 0.3 else 1.0
        self._is_there = self._is_there or self._arm.block[2] > self._height
        return np.array([0.0, 0.0, 0.0, self._grip]) if self._is_there else pick(self._arm)


def near_arm(*, max_steps: int, noise: float, fps: float, image_size: int, **others: Any) -> RobotEnv:
    """Return the arm's task, in which a script demonstrates near misses. others: of the task's yaml, not used."""
    arm = SimArm(fps=fps)
    person = ScriptedVerdicts(
        Late(lambda: lifted(arm.tool, arm.block), lambda: arm.steps), lambda: arm.steps, max_steps
    )
    return RobotEnv(
        SafeRobot(arm), judge=Unjudged(), task="pick up the block", fps=fps, max_steps=max_steps, clock="simulated",
        cameras=arm.cameras(gl.backend(), size=image_size), teleop=Scripted(NearMisses(arm), noise=noise),
        operator=person,
    )  # fmt: skip


@dataclass
class Episode:
    """Holds the pictures of an episode, and at which row the block was up first; None: never."""

    kind: str
    rows: list[Mapping[str, Array]] = field(default_factory=list)
    succeeded: int | None = None


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["judged", "shuffled"])
    parser.add_argument("--episodes", type=int, default=200, help="of practice, to learn from (200)")
    parser.add_argument("--near", type=int, default=40, help="misses, to learn from (40)")
    parser.add_argument("--threshold", type=float, default=0.9, help="task.judge.threshold (0.9)")
    parser.add_argument("--updates", type=int, default=1000, help="of the classifier (1000)")
    parser.add_argument("--held-out", type=int, default=60, help="successes, and as many failures (60)")


def study(cells: Cells, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, then yield the lines of the report."""
    found = []
    for seed in options.seeds:
        for way in options.ways:
            key = {"episodes": options.episodes, "updates": options.updates, "held_out": options.held_out}
            key |= {
                "near": near_of(way, options),
                "threshold": options.threshold,
                "words": options.words,
                "seed": seed,
                "way": way,
            }
            found.append(cells.get(key, partial(measured, seed, way, options)))
    seeds = " / ".join(map(str, options.seeds))
    yield f"| of {options.held_out} each, seeds {seeds} | successes seen | failures called success |"
    yield "|---|---|---|"
    for way in options.ways:
        mine = [cell for cell in found if cell["way"] == way]
        seen, wrong = (" / ".join(str(cell[name]) for cell in mine) for name in ("seen", "false"))
        yield f"| {way} | {seen} | {wrong} |"


def near_of(way: str, options: argparse.Namespace) -> int:
    """Return how many near misses a way learns from."""
    return 0 if way == "plain" else options.near


def measured(seed: int, way: str, options: argparse.Namespace) -> Mapping[str, Any]:
    """Train one classifier; return how many of the held-out successes it saw, and failures it called a success."""
    folder = options.out / f"seed-{seed}"
    sources: dict[str, Path] = dict(
        zip(("given", "more"), practised(folder / "practice", seed, options.episodes), strict=True)
    )
    if near := near_of(way, options):
        sources["near"] = missed(folder / f"near-{near}", seed, near)
    target = folder / way
    if not (target / "summary.json").exists():
        words = [f"plan.sources.{name}.dataset={place}" for name, place in sources.items()]
        words += ["~plan.phases.serve"]
        words += [f"plan.phases.learn.until=['updates >= {options.updates}']", "batch_size=64", f"seed={seed}"]
        words += [SEEN, "algo.encoder.cameras=[all]", f"algo.positive={LATE + 1}", *WAYS[way], *options.words]
        run(target, "plan=reward_classifier", *words, actor=CAMERAS)
    classifier, spec, _ = newest(target)
    told = [verdict_at(classifier, spec, episode, options.threshold) for episode in held_out(seed, options.held_out)]
    successes = [(at, episode.succeeded) for at, episode in told if episode.succeeded is not None]
    false = [episode.kind for at, episode in told if episode.succeeded is None and at is not None]
    late = [at - true for at, true in successes if at is not None]
    return {
        "seen": sum(abs(rows) <= NEAR for rows in late), "of": len(successes), "false": len(false),
        "of_failures": len(told) - len(successes), "kinds": {kind: false.count(kind) for kind in sorted({*false})},
        "rows_late": {"median": float(np.median(late)), "least": min(late), "most": max(late)} if late else None,
    }  # fmt: skip


def practised(folder: Path, seed: int, episodes: int) -> list[Path]:
    """Return datasets of the practice and of the demonstrations; make them if they are not there."""
    if not (folder / "summary.json").exists():
        words = [f"plan.phases.practise.until=['online.episodes >= {episodes}']", "~plan.phases.baseline"]
        words += ["plan=quickstart", "~plan.phases.evaluate", f"seed={seed}", "plan.sources.demo.capacity=20000"]
        person = ["task.env._target_=tools.studies.reward.late_arm", f"task.env.max_steps={ROWS + AFTER}"]
        run(folder, *words, *CAMERAS, actor=[f"seed={seed}", *CAMERAS, *person])
    return [exported(folder, source) for source in ("online", "demo")]


def missed(folder: Path, seed: int, episodes: int) -> Path:
    """Return a dataset of near misses; make it if it is not there."""
    person = ["task.env._target_=tools.studies.reward.near_arm", f"task.env.max_steps={ROWS}", *CAMERAS]
    return exported(demonstrations(folder, seed, episodes, actor=[f"seed={seed + 1000}", *person]), "demo")


def exported(folder: Path, source: str) -> Path:
    if not (folder / "datasets" / source).exists():
        export_run(folder, 10**6, [source])
    return max((folder / "datasets" / source).iterdir())


@cache
def held_out(seed: int, count: int) -> Sequence[Episode]:
    """Return `count` successes and `count` failures, from starts that no run begins at."""
    arm = SimArm(fps=FPS)
    cameras = arm.cameras(gl.backend(), size=SIZE)
    ways = {"success": pick, "beside": beside, "low": low, "dropped": dropped}
    random, number, left = np.random.default_rng([seed, 17]), 10**8 + 10**6 * seed, {"success": count, "failure": count}
    made: list[Episode] = []
    while any(left.values()):
        number += 1
        kind = "success" if left["success"] else list(ways)[1 + left["failure"] % 3]
        episode = rolled(arm, cameras, number, kind, ways[kind], random)
        if (episode.succeeded is not None) == (kind == "success"):  # the noise may have made it another one
            left["success" if kind == "success" else "failure"] -= 1
            made.append(episode)
    return made


def rolled(
    arm: SimArm, cameras: Mapping[str, Any], number: int, kind: str, way: Callable[[SimArm], Array],
    random: np.random.Generator,
) -> Episode:  # fmt: skip
    """Return an episode by a script with noise; after its success it goes on for AFTER rows."""
    arm.home(number)
    episode, pause, speed = Episode(kind), random.integers(15), random.uniform(0.4, 1)
    while len(episode.rows) < (ROWS if episode.succeeded is None else episode.succeeded + AFTER):
        action = np.clip(way(arm), -1, 1) if len(episode.rows) >= pause else np.zeros(4)
        action[:3] = speed * action[:3] + random.normal(0, 0.1, 3)
        arm.command(np.clip(action, -1, 1).astype(np.float32))
        state = arm.observe().values
        images = {f"observation.images.{name}": camera.latest().image for name, camera in cameras.items()}
        if episode.succeeded is None and lifted(arm.tool, arm.block):
            episode.succeeded = len(episode.rows)
        episode.rows.append({**state, **images})
    return episode


def beside(arm: SimArm) -> Array:
    """Return the action of a pick beside the block: the gripper closes on nothing, and goes up."""
    x, y, z = arm.block + np.array([0.0, 0.06, 0.0]) - arm.tool
    if arm.steps > ROWS // 2:
        return np.array([0.0, 0.0, 1.0, 1.0])
    is_there = max(abs(x), abs(y), abs(z)) < 0.03
    return np.array([x / arm.stroke, y / arm.stroke, z / arm.stroke, 1.0 if is_there else -1.0])


def low(arm: SimArm) -> Array:
    """Return the action of a pick that stops below the height of a success."""
    return np.array([0.0, 0.0, 0.0, 1.0]) if arm.block[2] > 0.07 else pick(arm)


def dropped(arm: SimArm) -> Array:
    """Return the action of a pick that opens the gripper too early."""
    return np.array([0.0, 0.0, 0.3, -1.0]) if arm.block[2] > 0.07 else pick(arm)


@torch.no_grad()
def verdict_at(
    classifier: RewardClassifier, spec: Spec, episode: Episode, threshold: float
) -> tuple[int | None, Episode]:
    """Return the row at which the judge ends the episode, if it does, and the episode."""
    names = [name for name in classifier.acting.logit.encoder.inputs if name in spec.observation]
    seen = {name: torch.from_numpy(np.stack([row[name] for row in episode.rows])) for name in names}
    verdicts = Verdicts(threshold=threshold, rows=2, stale_s=0.5)
    for row, scores in enumerate(classifier.acting(seen).numpy()):
        verdicts.hear(scores, row / FPS)
        if verdicts.at(row / FPS).success:
            return row, episode
    return None, episode
