"""Makes the moving picture (GIF) of a run of the simulated arm: before training, a takeover, and after training.

tools/picture.py RUN [--out FILE] [--size PIXELS] [--seconds S]

The actions are those that the run's store holds. The simulator repeats them, and each observation must come out as it
was recorded. It needs the extras `learner` and `sim`, and a machine that can draw (libegl1 or libosmesa6).
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from importlib.resources import files
from itertools import islice, product, repeat
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from serl_client.errors import ConfigError
from serl_client.spec import Array
from serl_client.starts import evaluation_seed, training_seed

from robot_infra.cameras import gl
from robot_infra.cameras.mujoco import Renderer
from robot_infra.guard.robot import GuardedRobot
from robot_infra.tasks.sim_arm import FPS, guarded
from serl_launcher.datasets.episodes import open_run
from serl_launcher.error_log import in_one_sentence
from serl_launcher.store.index import Index
from serl_launcher.training.plan import EVAL
from serl_launcher.training.report import read, share_of

CAMERA = {"name": "picture", "pos": [1.15, -0.75, 0.72], "xyaxes": [0.62, 0.78, 0, -0.32, 0.25, 0.91], "fovy": 34}
SKY = {"name": "sky", "rgb1": [0.93, 0.95, 0.98], "rgb2": [0.62, 0.7, 0.8], "width": 256, "height": 256}
DRAWN = 2  # each pixel is the mean of so many by so many
BAR = 44  # pixels of the caption above
LETTERS = 1 / 18  # height of the caption's letters, of the image's width
TEXT, PAPER, GREEN, RED, ORANGE = (30, 30, 35), (255, 255, 255), (0, 150, 60), (200, 40, 40), (245, 150, 0)
POLICY, OPERATOR = "practice: the policy drives", "practice: the operator drives"
PAUSE = 4  # frames that an episode's end stands still
STARTS = 100  # starts of an actor, and episodes of one evaluation, among which the recorded start is looked for
TOLERANCE = 1e-3  # of the scaled state: 0.2 mm
COLOURS = 240  # of a gif, chosen from so many of its frames:
SAMPLED = 12


@in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run that was evaluated twice (plan=quickstart, hiors)")
    parser.add_argument("--out", type=Path, help="the .gif or .webp to write (RUN/before_after.gif)")
    parser.add_argument("--size", type=int, default=288, help="width and height of each part in pixels (288)")
    parser.add_argument("--seconds", type=float, default=6.4, help="how long the picture is (6.4)")
    options = parser.parse_args()
    out = options.out or options.run / "before_after.gif"
    count = picture(options.run, out, options.size, round(options.seconds * FPS))
    print(f"{out}: {count} frames, {out.stat().st_size / 1e6:.1f} MB")


def picture(run: Path, out: Path, size: int, length: int) -> int:
    """Write the picture of `length` frames and return how many it has.

    Raises ConfigError when the run was not evaluated twice, is of another robot, or does not replay.
    """
    backend = gl.choose_backend(True)
    before, after = evaluations(run)
    practice = [(POLICY, episodes)] if (episodes := takeovers(run)) else []
    scene = Scene(backend, size)
    parts = [part(scene, episodes, title, length) for title, episodes in (before, *practice, after)]
    frames = [np.concatenate(moment, axis=1) for moment in zip(*parts, strict=True)]
    scene.close()
    save(out, frames)
    return len(frames)


# -- what the run holds
Evaluation = tuple[str, list[dict[str, Any]]]


def evaluations(run: Path) -> tuple[Evaluation, Evaluation]:
    """(caption, rows of each episode) of the first and of the last evaluation. Raises ConfigError without two."""
    if not (run / "store" / "index.sqlite").exists():
        raise ConfigError(f"{run} holds no store: name the folder of a run")
    _, readers, infos = open_run(run)
    evaluated = [info for info in infos if info.source == EVAL and info.closed and info.success is not None]
    evaluated.sort(key=lambda info: info.number)
    phases = list(dict.fromkeys(info.phase for info in evaluated))
    if len(phases) < 2:
        raise ConfigError(
            f"{run} has {len(phases)} phases with evaluated episodes; a picture needs two: before and after training"
        )

    summary, places = read(run / "summary.json"), range(STARTS)
    seeds = [evaluation_seed(ordinal, number) for ordinal, number in product(places, places)]

    def of(phase: str, title: str, name: str) -> Evaluation:
        mine = [info for info in evaluated if info.phase == phase]
        won = f"{sum(bool(info.success) for info in mine)} of {len(mine)}"
        if result := summary.get(name):  # it leaves out who came after its last trial
            won = str(share_of(result))
        return f"{title}: {won} picked up", [
            readers[EVAL].rows(info) | {"success": bool(info.success), "seeds": seeds} for info in mine[:STARTS]
        ]

    return of(phases[0], "before training", "before"), of(phases[-1], "after training", "eval")


def takeovers(run: Path) -> list[dict[str, Any]]:
    """Read the rows of each episode in which the policy drove, and the operator took over; `seeds`: of its start."""
    _, readers, infos = open_run(run)
    found = [info for info in infos if info.closed and 0 < info.intervened < info.steps][:STARTS]
    if not found:
        return []
    with closing(Index(run / "store/index.sqlite")) as index:
        sessions = index.sessions()
    seed = yaml.safe_load((run / "config.yaml").read_text())["seed"]

    def starts(episode: str) -> list[int]:
        return [training_seed(seed, session, int(episode.rpartition("-")[2])) for session in sessions]

    return [
        readers[info.source].rows(info) | {"success": bool(info.success), "seeds": starts(info.id)} for info in found
    ]


# -- what is drawn
class Scene:
    """The simulated arm, and the same arm with a sky, shadows and a camera that shows all of it."""

    def __init__(self, backend: str, size: int) -> None:
        import mujoco

        self._mujoco: Any = mujoco
        drawn = self._mujoco.MjSpec.from_string(files("robot_infra.sim").joinpath("arm.xml").read_text())
        drawn.worldbody.add_camera(**CAMERA)
        drawn.add_texture(
            type=self._mujoco.mjtTexture.mjTEXTURE_SKYBOX, builtin=self._mujoco.mjtBuiltin.mjBUILTIN_GRADIENT, **SKY
        )
        drawn.visual.quality.shadowsize, drawn.visual.headlight.ambient = 4096, [0.5] * 3
        for light in drawn.lights:
            light.castshadow = True
        self._model = drawn.compile()
        self._data = self._mujoco.MjData(self._model)
        self._camera = self._model.camera(CAMERA["name"]).id
        self._renderer, self.arm, self.size = Renderer(self._model, backend, size=size * DRAWN), guarded(), size
        self._simulated: Any = self.arm.guard

    def draw(self) -> Array:
        """[size, size, 3] uint8: the arm as it is now."""
        self._data.qpos[:] = self._simulated.arm.pose
        self._mujoco.mj_forward(self._model, self._data)
        image = self._renderer.draw(self._data, self._camera)
        return image.reshape(self.size, DRAWN, self.size, DRAWN, 3).mean(axis=(1, 3)).astype(np.uint8)

    def close(self) -> None:
        self._renderer.close()


def part(scene: Scene, episodes: Iterable[dict[str, Any]], title: str, length: int) -> list[Array]:
    """`length` frames of one episode after the other, under a caption, which says when the operator drives."""
    shown = (
        (*moment, bool(is_driven))
        for rows in episodes
        for moment, is_driven in zip(played(scene, rows), np.pad(rows["intervened"], (0, PAUSE), "edge"), strict=True)
    )
    return [
        captioned(image, OPERATOR if is_driven else title, success, is_driven)
        for image, success, is_driven in islice(shown, length)
    ]


def played(scene: Scene, rows: dict[str, Array]) -> Iterator[tuple[Array, bool | None]]:
    """(image, how it ended) of each moment of an episode; its end stands still for PAUSE frames.

    Raises ConfigError when the simulator does not repeat what was recorded.
    """
    states, succeeded = rows["observation.state"], bool(rows["success"])
    start(scene.arm, states[0], rows["seeds"])
    for action, state in zip(rows["action"], states[1:], strict=False):
        yield scene.draw(), None
        scene.arm.command(action)
        if not np.allclose(scene.arm.observe().values["observation.state"], state, atol=TOLERANCE):
            raise ConfigError("the simulator does not repeat this run: another version of it, or of the arm, made it")
    image = scene.draw()
    yield from repeat((image, succeeded), PAUSE)


def start(arm: GuardedRobot, state: Array, seeds: Iterable[int]) -> None:
    """Bring the arm to that start of these which looks like this. Raises ConfigError when none does."""
    for seed in seeds:
        arm.home(seed)
        found = arm.observe().values["observation.state"]
        if found.shape == state.shape and np.allclose(found, state, atol=TOLERANCE):
            return
    raise ConfigError("an episode began at no start that this run gives the simulated arm (task=sim_arm)")


def captioned(image: Array, title: str, success: bool | None, is_driven: bool) -> Array:
    """The image under a bar with its title, framed in green or red at an episode's end, orange if it is driven.

    success: how the episode ended; None: it goes on. is_driven: by the operator.
    """
    from PIL import Image, ImageDraw, ImageFont

    height, width, _ = image.shape
    canvas = Image.new("RGB", (width, height + BAR), PAPER)
    canvas.paste(Image.fromarray(image), (0, BAR))
    draw = ImageDraw.Draw(canvas)
    draw.text((width / 2, BAR / 2), title, fill=TEXT, font=ImageFont.load_default(width * LETTERS), anchor="mm")
    if success is not None or is_driven:
        colour = ORANGE if success is None else GREEN if success else RED
        draw.rectangle((0, BAR, width - 1, BAR + height - 1), outline=colour, width=6)
    return np.asarray(canvas)


def save(out: Path, frames: Sequence[Array]) -> None:
    """Write an animation that repeats; all frames of a gif share the colours of some of them."""
    from PIL import Image

    images = [Image.fromarray(frame) for frame in frames]
    if out.suffix == ".gif":
        palette = Image.fromarray(np.concatenate(frames[:: max(1, len(frames) // SAMPLED)])).quantize(COLOURS)
        images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    images[0].save(out, save_all=True, append_images=images[1:], duration=1000 / FPS, loop=0, optimize=False)


if __name__ == "__main__":
    main()
