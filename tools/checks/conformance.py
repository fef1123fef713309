"""What any robot of Retake has to do, tried on one: shapes, bounds, hold, stop, rate, recover."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from serl_client.env import Observation
from serl_client.errors import RetakeError, RobotFault
from serl_client.spec import Array

from robot_infra.guard.robot import STATE
from robot_infra.teleop.hands import Hands

from .common import Finding
from .driver import explained
from .robot import stepped, watched

log = logging.getLogger(__name__)

Check = Callable[[Any], Finding]
STEPS = 5  # of holding
ENOUGH = 0.95  # of the wanted rate
CLOSE = 1e-3  # of an action's range: closer is the same
PAUSE = 0.02  # seconds between two readings of a device
MOVED = 0.1  # the most that a simulated state may change while it holds
FAR = 3.0  # ranges: an action that is far out of its bounds


def tried(env: Any, *, move: bool, seconds: float, most: Array | None = None) -> Iterator[tuple[str, Finding]]:
    """(name of the check, what it found) of all checks of an open Env, which is closed at the end.

    move: the robot may go home and take small steps; else a robot on the real clock is only looked at.
    most: by which each position [J] may change while it holds; None: a number for all, as simulations need no more.
    """
    checks: dict[str, Check] = {"observe": seen}
    beside: dict[str, Check] = {"people": partial(heard, seconds=seconds)} if _hands(env) else {}
    if env.clock == "real":
        for name, camera in getattr(env, "cameras", {}).items():
            short = name.rpartition(".")[2]
            beside[f"camera {short}"] = lambda env, name=short, camera=camera: watched(
                name, camera, env.spec.fps, seconds
            )
    may_move = move or env.clock == "simulated"
    if may_move:
        checks = {
            "recover": partial(recovered, most=most), "shapes": shapes, "hold": partial(held, most=most),
            "bounds": bounded, "stop": stopped, "rate": partial(rated, seconds=seconds),
        }  # fmt: skip
    try:
        for name, check in [*checks.items(), *beside.items(), ("close", closed)]:
            finding = _found(check, env, recovers=may_move)
            yield name, finding
            if finding.state == "FAIL" and name in ("observe", "recover", "shapes"):
                break  # the others would only fail, too
    finally:
        env.close()


def _found(check: Check, env: Any, *, recovers: bool) -> Finding:
    """Return what this check found. A fault does not fail the next checks, too: the robot recovers from it, if it may:
    that switches the motors of a real arm on."""
    try:
        return check(env)
    except RobotFault as error:
        with suppress(Exception):  # else the next check says so
            if recovers:
                env.recover()
        return Finding("FAIL", str(error))
    except RetakeError as error:
        return Finding("FAIL", str(error))
    except Exception as error:  # a robot may raise anything
        return Finding("FAIL", explained(error))


def recovered(env: Any, *, most: Array | None) -> Finding:
    """`recover` without a fault does nothing; it moves nothing in any case."""
    before = _state(env)
    env.recover()
    env.recover()
    return _stayed(env, before, "recover twice", most)


def shapes(env: Any) -> Finding:
    """The observation of an episode's start is what the Spec says, and finite."""
    observation = env.reset(0)
    _check(env, observation)
    parts = ", ".join(f"{name} {list(array.shape)}" for name, array in sorted(observation.items()))
    return Finding("ok", f"{parts}; action {list(env.spec.action.shape)}")


def heard(env: Any, *, seconds: float) -> Finding:
    """What a person's devices say while somebody moves each of them."""
    hands, said, led, end = _hands(env), set[str](), list[Array](), time.monotonic() + seconds
    assert hands is not None
    log.info("move each device for %g s: %s", seconds, "; ".join(hands.legend.values()))
    while time.monotonic() < end:
        env.robot.observe()  # a leader arm is seen by the robot's driver
        for hand in hands.look():
            said.update(hand.motion, hand.words, ["gripper"] * bool(hand.gripper))
            if hand.positions is not None:
                led.append(hand.positions)
        said.update(hands.poll())
        time.sleep(PAUSE)
    hands.read(env.robot.hold_action())  # a device that is gone says so
    if led and (way := np.ptp(led, axis=0)).any():
        said.add(f"leader moved by {np.round(way, 2).tolist()}")
    names = ", ".join(hands.legend)
    if not said:
        return Finding("WARN", f"{names}: nothing was heard in {seconds:g} s", "move each device while this runs")
    return Finding("ok", f"{names}: {', '.join(sorted(said))}")


def _hands(env: Any) -> Hands | None:
    teleop = getattr(env, "teleop", None)
    return teleop if isinstance(teleop, Hands) else None


def seen(env: Any) -> Finding:
    """The robot's observation is what the Spec says, and finite; nothing was moved."""
    observation = env.robot.observe().values | {name: camera.latest().image for name, camera in env.cameras.items()}
    _check(env, observation)
    return Finding("ok", "observed only, as the Spec says; --move tries the rest")


def held(env: Any, *, most: Array | None) -> Finding:
    """Without an action it holds, and says so."""
    before = _state(env)
    steps = [env.step(None) for _ in range(STEPS)]
    executed = np.array([step.executed for step in steps])  # [T, A]
    env.spec.action.check("executed", steps[0].executed)
    apart = float((np.ptp(executed, axis=0) / _range(env)).max())
    if apart > CLOSE:
        return Finding("FAIL", f"{STEPS} times hold: what it did differs by {apart:.1%} of the action's range")
    return _stayed(env, before, f"{STEPS} times hold: the same action each time", most)


def bounded(env: Any) -> Finding:
    """An action out of bounds is brought within, and one that is not finite does not move the robot."""
    action = env.spec.action
    executed = env.step((action.high + FAR * _range(env)).astype(action.dtype)).executed
    if not (np.isfinite(executed).all() and (executed >= action.low).all() and (executed <= action.high).all()):
        return Finding("FAIL", f"an action out of bounds was executed as {executed}")
    before = [env.step(None) for _ in range(STEPS)][-1].executed  # it has arrived: at a low servo_hz that takes a while
    with suppress(ValueError):  # to refuse it is as good
        executed = env.step(np.full(action.shape, np.nan, action.dtype)).executed
        if not np.isfinite(executed).all() or (np.abs(executed - before) > CLOSE * _range(env)).any():
            return Finding("FAIL", f"an action of NaN was executed as {executed}, and the one before as {before}")
    return Finding("ok", "an action out of bounds is brought within them, and NaN holds")


def stopped(env: Any) -> Finding:
    """`stop` may be called twice, and afterwards it goes on."""
    env.stop()
    env.stop()
    _check(env, env.step(None).observation)
    return Finding("ok", "stop twice, then one step")


def rated(env: Any, *, seconds: float) -> Finding:
    """A real robot keeps its rate while it holds."""
    fps, periods = env.spec.fps, stepped(env, seconds)
    rate, count = len(periods) / sum(periods), len(periods)
    text = f"{rate:.1f} steps a second over {count} steps, {fps:g} are wanted"
    return Finding("FAIL" if env.clock == "real" and rate < ENOUGH * fps else "ok", text)


def closed(env: Any) -> Finding:
    """`close` may be called twice."""
    env.close()
    env.close()
    return Finding("ok", "close twice")


def _check(env: Any, observation: Observation) -> None:
    if sorted(observation) != sorted(env.spec.observation):
        raise ValueError(f"observed are {sorted(observation)}, and the Spec says {sorted(env.spec.observation)}")
    for name, feature in env.spec.observation.items():
        feature.check(name, observation[name])
        if not np.isfinite(observation[name]).all():
            raise ValueError(f"{name} holds a value that is not finite")


def _state(env: Any) -> Array | None:
    """The robot's state [S], if it has one."""
    robot = getattr(env, "robot", None)
    return robot.observe().values.get(STATE) if robot else None


def _stayed(env: Any, before: Array | None, what: str, most: Array | None) -> Finding:
    """Whether the robot's state is nearly where it was before; `tried` says what `most` is."""
    if before is None or (after := _state(env)) is None:
        return Finding("ok", what)
    moved = np.abs(after - before)
    if most is None:
        most = np.full(moved.shape, MOVED)
    elif most.shape != moved.shape:  # the state is more than its positions
        most = np.full(moved.shape, np.inf)
    i = int(np.argmax(moved / most))
    text = f"{what}: the state changed by {moved.max():.3g}"
    if not moved[i] <= most[i]:
        name = env.robot.observation[STATE].names[i : i + 1] or (f"entry {i}",)
        text += f"; {name[0]} by {moved[i]:.3g}, and by {most[i]:.3g} at most may one that holds"
        return Finding("FAIL", text, "press the emergency stop if it still moves")
    return Finding("ok", text)


def _range(env: Any) -> Array:
    return env.spec.action.high - env.spec.action.low
