"""Checks of the robot of a task: that it opens, its cameras, and the rate at which it can be controlled."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from serl_client.errors import ConfigError
from serl_client.spec import Spec

from robot_infra.alignment import FROZEN
from robot_infra.interfaces import Camera
from robot_infra.pace import Pace
from serl_launcher.config import factory
from serl_launcher.store.index import Index

from .common import Finding, Run

STALE = 1.0  # seconds: an image this old shows that its camera stands still
LOOKS = 8  # at a camera, at least
ENOUGH = 0.95  # of the wanted rate
LATE = 1.5  # of a tick's time, as the actor's console counts


def robot(run: Run) -> Iterator[Finding]:
    """Open the task's environment; its Spec is what the learner will be told."""
    run.env = factory(run.config, "task.env")()
    run.spec = run.env.spec
    yield Finding("ok", f"{run.config.task.name}: {_described(run.env.spec)}")


def described_robot(run: Run) -> Iterator[Finding]:
    """What the learner will be told: by the store that is there, or by a simulated robot; a real one is not here."""
    store = Path(str(run.config.run_dir)) / "store" / "index.sqlite"
    if store.exists():
        index = Index(store)
        spec = run.spec = Spec.from_dict(index.meta("spec"))
        index.close()
        yield Finding("ok", f"the store is for {_described(spec)}")
    elif OmegaConf.select(run.config, "task.env.driver"):
        yield Finding("ok", f"{run.config.task.name}: its arm is at the actor")
    elif OmegaConf.select(run.config, "task.env.clock") in (None, "simulated"):
        try:
            with factory(run.config, "task.env")() as env:
                spec = run.spec = env.spec
        except ConfigError as error:
            yield Finding("WARN", f"what the robot is like is not known here: {error}", "run the doctor of the actor")
            return
        yield Finding("ok", f"{run.config.task.name}: {_described(spec)}")


def _described(spec: Spec) -> str:
    shapes = ", ".join(f"{name} {list(feature.shape)}" for name, feature in spec.observation.items())
    return f"{shapes}, action {list(spec.action.shape)}, {spec.fps:g} Hz"


def cameras(run: Run) -> Iterator[Finding]:
    """Each camera: what it gives, how old and how often."""
    found = getattr(run.env, "cameras", {})
    for name, camera in found.items():
        yield watched(name.rpartition(".")[2], camera, run.env.spec.fps, run.seconds / len(found))


def watched(name: str, camera: Camera, fps: float, seconds: float) -> Finding:
    """Look at one camera for a while: what it gives, how old, how often, and whether it changes."""
    frame, begin = camera.latest(), time.monotonic()
    times, ages, took = {frame.time}, [], []
    while (now := time.monotonic()) < begin + seconds or len(took) < LOOKS:
        frame = camera.latest()
        took.append(time.monotonic() - now)
        times.add(frame.time)
        ages.append(time.monotonic() - frame.time)
        time.sleep(max(0.0, 0.25 / fps - took[-1]))
    new, elapsed, shape = len(times) - 1, time.monotonic() - begin, frame.image.shape
    rate, keeps_up = new / elapsed, new >= ENOUGH * len(took)  # it had a new one whenever we looked
    text = f"{name}: {'x'.join(map(str, shape))}, {rate:.0f} new images a second, {np.median(ages) * 1e3:.0f} ms old"
    cable = "look at its cable (USB 3), its light (exposure) and whether another program has it open"
    if shape != camera.feature.shape or frame.image.dtype != camera.feature.dtype:
        text += f"; declared are {camera.feature.dtype} {list(camera.feature.shape)}"
        return Finding("FAIL", text, "say the resolution in the task's yaml that the camera really gives")
    if max(ages) > STALE:
        return Finding("FAIL", f"{text}: it stands still", cable)
    if frame.changed is not None and frame.time - frame.changed >= min(FROZEN, seconds / 2):
        return Finding("FAIL", f"{text}; each image is the same, so it is frozen", cable)
    if frame.image.min() == frame.image.max():
        return Finding("WARN", f"{text}; the image is all of one colour", "look whether its lens is covered")
    if rate < ENOUGH * fps and not keeps_up:
        state = "FAIL" if rate < ENOUGH * fps / 2 else "WARN"
        return Finding(state, f"{text}; rows come at {fps:g} Hz, so some show one twice", f"{cable}; or lower the fps")
    if np.median(took) > 0.5 / fps:
        text += f"; to ask for one takes {np.median(took) * 1e3:.0f} ms"
        return Finding("WARN", text, "it should not wait for the next image: lower the image size, or the task's fps")
    return Finding("ok", text)


def control(run: Run) -> Iterator[Finding]:
    """The rate that the loop reaches. A robot on the real clock is only observed, unless it may be moved."""
    if run.env is None:
        return
    fps, parts = run.env.spec.fps, ""
    if run.env.clock == "real" and not run.move:
        watch = _Observed(run)
        periods, how = _paced(watch.tick, fps, run.seconds), "observed only: --move also commands it"
        parts = f" ({watch})"
    else:
        run.env.recover()  # --move is the word of a person
        periods, how = stepped(run.env, run.seconds), "held where it is"
        run.env.stop()
    rate, late = len(periods) / sum(periods), sum(period > LATE / fps for period in periods)
    if run.env.clock == "simulated":
        yield Finding("ok", f"{rate:.0f} steps a second, {rate / fps:.1f} times real time ({how})")
        return
    text = f"{rate:.1f} of {fps:g} Hz, {late} of {len(periods)} ticks late{parts}, {how}"
    advice = "close other programs; lower the image size or the task's fps; look which part takes long"
    state = "FAIL" if rate < ENOUGH * fps else "WARN" if late > len(periods) / 50 else "ok"
    yield Finding(state, text, advice if state != "ok" else "")


class _Observed:
    """One row's observation, with the time of each part."""

    def __init__(self, run: Run) -> None:
        self._calls: dict[str, Callable[[], object]] = {"robot": run.env.robot.observe}
        self._calls |= {name.rpartition(".")[2]: camera.latest for name, camera in run.env.cameras.items()}
        self._times: dict[str, list[float]] = {name: [] for name in self._calls}

    def tick(self) -> None:
        for name, call in self._calls.items():
            begin = time.perf_counter()
            call()
            self._times[name].append(time.perf_counter() - begin)

    def __str__(self) -> str:
        return ", ".join(f"{name} {np.median(times) * 1e3:.1f} ms" for name, times in self._times.items())


def _paced(tick: Callable[[], None], fps: float, seconds: float) -> list[float]:
    """How long each tick of a loop at this rate lasted."""
    pace, times = Pace("real", fps), [time.monotonic()]
    pace.begin()
    for _ in range(max(2, int(seconds * fps))):
        tick()
        pace.wait(0.0)
        times.append(time.monotonic())
    return np.diff(times).tolist()


def stepped(env: Any, seconds: float) -> list[float]:
    """How long each step of episodes in which the robot holds lasted."""
    periods, ended, begin = list[float](), True, time.monotonic()
    while len(periods) < 2 or time.monotonic() < begin + seconds:
        if ended:
            env.reset(len(periods))
        before = time.monotonic()
        step = env.step(None)
        periods.append(time.monotonic() - before)
        ended = step.terminated or step.truncated
    return periods
