"""Whether a trained classifier sees success."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serl_client.spec import Array, Spec
from torch import Tensor

from robot_infra.cameras import gl
from robot_infra.classifier_judge import Verdicts
from robot_infra.env import RobotEnv
from robot_infra.guard.robot import GuardedRobot
from robot_infra.judges import Unjudged, lifted
from robot_infra.tasks.sim_arm import Scene, guarded, make, pick
from robot_infra.teleop.scripted import Scripted
from robot_infra.teleop.verdicts import ScriptedVerdicts
from serl_launcher.algorithms.reward_classifier import SUCCESS, RewardClassifier
from serl_launcher.datasets.export import export_run
from serl_launcher.types import Batch, Metrics, Window
from tools.studies import runs
from tools.studies.cells import Study
from tools.studies.trained import newest

FPS, SIZE, ROWS = 10, 64, 60  # steps per second, pixels, rows of an episode
LATE = 10  # rows after which the person says success
AFTER = 15  # rows of a held-out success after it
NEAR = 10  # rows: a second
INDEX = "episode.index"
WORDS = {"judged": [], "plain": [], "shuffled": ["algo._target_=tools.studies.reward.Shuffled"]}
CAMERAS = ["task.cameras=true", f"task.image_size={SIZE}"]
SEEN = ["algo.inputs=[observation.images.cam_high,observation.images.cam_wrist]", "algo.encoder.cameras=[all]"]

Episode = tuple[str, list[Mapping[str, Array]], int | None]  # its kind, rows, and the first with the block up, if any


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


def late(arm: Scene) -> Callable[[], bool]:
    """Return what tells whether the block has been up for LATE steps, or was so long ago."""
    since: list[int] = []  # the first step at which it was

    def holds() -> bool:
        if since and arm.steps < since[0]:  # another episode
            since.clear()
        if not since and lifted(arm.tool, arm.block):
            since.append(arm.steps)
        return bool(since) and arm.steps >= since[0] + LATE

    return holds


def late_arm(**options: Any) -> RobotEnv:
    """Return the arm's task with a scripted person who is late."""
    env = make(**{**options, "verdict_by": "operator"})
    assert isinstance(env.operator, ScriptedVerdicts)
    assert isinstance(env.robot, GuardedRobot)
    env.operator.holds = late(Scene(env.robot))
    return env


def near_arm(*, max_steps: int, noise: float, fps: float, image_size: int, **_: Any) -> RobotEnv:
    """Return the arm's task, in which a script demonstrates picks that end below the height of a success.

    Three of ten let go there.
    """
    robot = guarded(fps=fps, backend=gl.backend(), image_size=image_size)
    arm, random, height, grip = Scene(robot), np.random.default_rng(23), 0.0, 1.0

    def miss() -> Array:
        nonlocal height, grip
        if not arm.steps:
            height, grip = random.uniform(0.04, 0.09), -1.0 if random.random() < 0.3 else 1.0
        if arm.block[2] > height:
            height = -1.0  # it was there
        return np.array([0.0, 0.0, 0.0, grip]) if height < 0 else pick(arm)

    person = ScriptedVerdicts(late(arm), lambda: arm.steps, max_steps)
    return RobotEnv(
        robot, judge=Unjudged(), task="pick up the block", fps=fps, max_steps=max_steps, clock="simulated",
        cameras=robot.cameras, teleop=Scripted(miss, noise=noise), operator=person,
    )  # fmt: skip


def measured(cell: Namespace) -> Mapping[str, Any]:
    """Does a trained classifier see success? On the simulated arm, from two cameras alone (docs/guides/rewards.md).

    It learns from --episodes of RLPD's practice, which begins by failing, from the demonstrations before it, and from
    --near misses (plain: from none), which a script lifts to a height of its own draw. A scripted person says success a
    second late. The control has learned from episodes that were called a success by lot (shuffled). Then --held-out
    episodes succeed and as many fail, by scripts with noise: the gripper closes beside the block, lifts it not high
    enough, or drops it too early. A success is seen if the verdict by --threshold falls within a second of it.
    """
    place, seed = cell.folder, f"seed={cell.seed}"
    words = ["plan=quickstart", *runs.without("baseline", "evaluate"), "plan.sources.demo.capacity=20000", *CAMERAS]
    words += [seed, "unread_images=true", f"plan.phases.practise.until=['online.episodes >= {cell.episodes}']"]
    actor = [seed, *CAMERAS, "task.env._target_=tools.studies.reward.late_arm", f"task.env.max_steps={ROWS + AFTER}"]
    practice = runs.finished(place / "practice", *words, actor=actor)
    data = {"given": exported(practice, "online"), "more": exported(practice, "demo")}
    if cell.near:
        actor = [*CAMERAS, "task.env._target_=tools.studies.reward.near_arm", f"task.env.max_steps={ROWS}"]
        actor += [f"seed={cell.seed + 1000}"]
        data["near"] = exported(runs.demonstrations(place / "near", cell.seed, cell.near, actor=actor), "demo")
    words = ["plan=reward_classifier", *runs.without("serve"), *SEEN, f"algo.positive={LATE + 1}", *WORDS[cell.way]]
    words += [f"plan.phases.learn.until=['updates >= {cell.updates}']", "batch_size=64", seed, *cell.words]
    words += [f"plan.sources.{name}.dataset={folder}" for name, folder in data.items()]
    classifier, spec, _ = newest(runs.finished(place / cell.way, *words, actor=CAMERAS))
    told = [
        (kind, verdict_at(classifier, spec, rows, cell.threshold), up)
        for kind, rows, up in held_out(cell.seed, cell.held_out)
    ]
    false = [kind for kind, at, up in told if up is None and at is not None]
    late = [at - up for _, at, up in told if at is not None and up is not None]
    return {
        "seen": sum(abs(rows) <= NEAR for rows in late), "of": cell.held_out, "false": len(false),
        "of_failures": cell.held_out, "kinds": {kind: false.count(kind) for kind in sorted({*false})},
        "rows_late": {"median": float(np.median(late)), "least": min(late), "most": max(late)} if late else None,
    }  # fmt: skip


def exported(folder: Path, source: str) -> Path:
    """Return the dataset of a run's source; export it if it is not there."""
    if not (folder / "datasets" / source).exists():
        export_run(folder, 10**6, [source])
    return max((folder / "datasets" / source).iterdir())


def held_out(seed: int, count: int) -> Iterator[Episode]:
    """Yield `count` successes and `count` failures, from starts that no run begins at."""
    robot = guarded(fps=FPS, backend=gl.backend(), image_size=SIZE)
    random, number, left = np.random.default_rng([seed, 17]), 10**8 + 10**6 * seed, {True: count, False: count}
    while any(left.values()):
        number += 1
        kind = "success" if left[True] else list(SCRIPTS)[1 + left[False] % 3]
        robot.home(number)
        episode = rolled(robot, kind, random)
        if (succeeded := episode[2] is not None) == (kind == "success"):  # the noise may have made it another one
            left[succeeded] -= 1
            yield episode


def rolled(robot: GuardedRobot, kind: str, random: np.random.Generator) -> Episode:
    """Return an episode by a script with noise; after its success it goes on for AFTER rows."""
    arm = Scene(robot)
    robot.observe()
    rows, up, pause, speed = list[Mapping[str, Array]](), None, random.integers(15), random.uniform(0.4, 1)
    while len(rows) < (ROWS if up is None else up + AFTER):
        action = np.clip(SCRIPTS[kind](arm), -1, 1) if len(rows) >= pause else np.zeros(4)
        action[:3] = speed * action[:3] + random.normal(0, 0.1, 3)
        robot.command(np.clip(action, -1, 1).astype(np.float32))
        observed = robot.observe().values
        if up is None and lifted(arm.tool, arm.block):
            up = len(rows)
        images = {f"observation.images.{name}": camera.latest().image for name, camera in robot.cameras.items()}
        rows.append({**observed, **images})
    return kind, rows, up


def beside(arm: Scene) -> Array:
    """Return the action of a pick beside the block: the gripper closes on nothing, and goes up."""
    x, y, z = arm.block + np.array([0.0, 0.06, 0.0]) - arm.tool
    if arm.steps > ROWS // 2:
        return np.array([0.0, 0.0, 1.0, 1.0])
    is_there = max(abs(x), abs(y), abs(z)) < 0.03
    return np.array([x / arm.stroke, y / arm.stroke, z / arm.stroke, 1.0 if is_there else -1.0])


def ended(*action: float) -> Callable[[Scene], Array]:
    """Return a pick that does this instead below the height of a success."""
    return lambda arm: np.array(action) if arm.block[2] > 0.07 else pick(arm)


SCRIPTS = {"success": pick, "beside": beside, "low": ended(0, 0, 0, 1), "dropped": ended(0, 0, 0.3, -1)}


@torch.no_grad()
def verdict_at(
    classifier: RewardClassifier, spec: Spec, rows: list[Mapping[str, Array]], threshold: float
) -> int | None:  # fmt: skip
    """Return the row at which the judge ends the episode, if it does."""
    names = [name for name in classifier.acting.logit.encoder.inputs if name in spec.observation]
    seen = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in names}
    verdicts = Verdicts(threshold=threshold, rows=2, stale_s=0.5)
    for row, scores in enumerate(classifier.acting(seen).numpy()):
        verdicts.hear(scores, row / FPS)
        if verdicts.at(row / FPS).success:
            return row
    return None


WAYS = {way: {"way": way, **({"near": 0} if way == "plain" else {})} for way in ("judged", "shuffled", "plain")}
STUDIES = {
    "reward": Study(
        measured, {"episodes": 200, "near": 40, "threshold": 0.9, "updates": 1000, "held_out": 60}, WAYS, usual=2,
        columns=lambda _: {"successes seen": lambda cell: cell["seen"]}, of="held_out",
        more={"failures called success": lambda cell: cell["false"]},
    )
}  # fmt: skip
