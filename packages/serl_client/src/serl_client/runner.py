"""Runs the actor's control loop: way home, reset, action, step, record, end of episode, pauses, robot faults."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import serl_client.clock as clock
from serl_client.client import TrainerClient
from serl_client.controller import Controller, by_chance
from serl_client.env import KEPT, OPERATOR, RESETS, Env, Resets
from serl_client.episode import Stamp
from serl_client.episode_state import EpisodeState
from serl_client.errors import ConfigError, RetakeError, RobotFault, TrainerError
from serl_client.faults import Faults, as_fault
from serl_client.frames import Frames
from serl_client.names import cleaned
from serl_client.person import VERDICTS, Operator, Person
from serl_client.recorder import Recorder, Unrecorded
from serl_client.signals import interrupted_by_signals, without_long_collections
from serl_client.spec import Array
from serl_client.starts import Starts, alone
from serl_client.status import ActorStatus
from serl_client.ticks import Ticks
from serl_client.way_home import NAP, WayHome

log = logging.getLogger(__name__)

SILENCE = 5.0  # seconds without an action until the episode is cut off; the next begins with the next action
AGAIN = 1.0  # seconds until the next reset, after a reset whose observation cannot be
ROOM_PATIENCE = 1.0  # seconds that a simulated robot waits for the outbox
FAREWELL = 30.0  # seconds at the end to deliver the rest of the outbox
MODES = ("collect", "teleop", "evaluate")  # modes with episodes; the other two are idle and stop
GAP = 2.0  # periods between an observation and the command that answers it, until the row is marked as a gap


def run_actor(
    env: Env, controller: Controller, client: TrainerClient, *, seed: int, operator: Operator | None = None,
    reset: str = "auto", on_episode: Callable[[Mapping[str, Any]], None] = lambda episode: None,
    status: ActorStatus | None = None, share: Callable[[], tuple[int, int]] = alone, resets: Resets | None = None,
) -> None:  # fmt: skip
    """Follow the learner's directives until one says stop. The robot is stopped however this ends.

    seed: of the run. operator: is polled for events in each step. status: is kept up to date for the console.
    reset: `operator`: before each episode the robot holds until the operator says ready; else it does not wait. With
        `waypoints`, `other_task` and `policy` it is `resets` that brings the scene back. Where it cannot, the operator
        does; a simulation sets the scene up itself.
    on_episode: is called with the numbers of each finished episode. share: see Starts.

    A demonstration waits until the operator says ready, or moves a device that drives the robot. One that nobody drove
    is discarded. A RobotFault, or whatever else the environment raises, cuts the episode off. A real robot holds until
    the operator says ready; then it goes home. A simulated one is made again (Env.recover).

    Raises RobotFault if no operator of a real robot has a terminal for it or for a scene, or for the third one within a
    minute, once what was recorded is delivered. Raises TrainerError when the learner refuses this actor,
    KeyboardInterrupt for SIGINT, SIGTERM and SIGHUP, and ConfigError if `reset` is unknown, or needs an operator or
    `resets` and there is none.
    """
    if reset not in RESETS:
        raise ConfigError(f"reset={reset} is unknown; use {' or '.join(RESETS)}")
    if (reset in KEPT) != (resets is not None):
        raise ConfigError(f"reset={reset} is for an environment that leaves the scene as it is, and for no other")
    if reset == OPERATOR and not (operator and operator.has_terminal):
        raise ConfigError("reset=operator needs a person: start the actor in a terminal (over SSH: ssh -t)")
    status = status or ActorStatus()
    client.report(vars(status))
    starts = Starts(seed, client.session, share)
    policies = {"trained": controller, **by_chance(env.spec, seed)}
    actor = _Actor(env, policies, client, starts, Person(operator, client, status), reset, resets, on_episode, status)
    with interrupted_by_signals(), without_long_collections():
        cause = None
        try:
            actor.run()
        except (RobotFault, KeyboardInterrupt) as error:  # a second KeyboardInterrupt ends the delivery
            cause = error
            if isinstance(error, RobotFault):
                status.warn(f"{error}. The actor ends")
        finally:
            status.driver = "IDLE"
            env.stop()
        if not client.drain(FAREWELL, patient=not isinstance(cause, KeyboardInterrupt)):
            records, size = client.pending
            status.warn(f"{records} records ({size >> 20} MiB) stay in the outbox; they are sent at the next start")
        if cause:
            raise cause


class _Actor:
    def __init__(
        self, env: Env, policies: Mapping[str, Controller], client: TrainerClient, starts: Starts, person: Person,
        reset: str, resets: Resets | None, on_episode: Callable[[Mapping[str, Any]], None], status: ActorStatus,
    ) -> None:  # fmt: skip
        self._env, self._policies, self._client = env, policies, client
        self._controller = policies["trained"]
        self._person, self._on_episode, self._status = person, on_episode, status
        self._directive, self._starts = client.state.directive, starts
        self._is_real, self._resets = env.clock == "real", resets
        self._way = WayHome(env, client, person, status, resets, asks=reset == OPERATOR)
        self._faults = Faults()
        self._unanswered: Frames | None = None  # the last ones of an episode that silence cut off
        self._ticks = Ticks(env, status)

    def run(self) -> None:
        while (mode := self._next_mode()) != "stop":
            try:
                if self._faults.is_open:
                    self._recover()
                elif mode != "idle":
                    self._run_episode(mode)
                else:
                    self._way.wait_as("PAUSED" if self._person.is_paused else "IDLE")
            except Exception as error:
                if isinstance(error, RetakeError) and not isinstance(error, RobotFault):
                    raise
                self._fail(as_fault(error))

    def _fail(self, fault: RobotFault) -> None:
        """Say what happened and what to do. Raises the fault if nobody is there who could look at a real robot, or if
        it happens too often."""
        if self._is_real and not self._person.is_there:
            raise fault
        self._faults.add(fault)
        cure = "The robot holds. Look at it, then press r: it goes home and on"
        self._status.warn(f"{fault.kind}: {fault}. {cure if self._is_real else 'It goes on with another episode'}")
        self._way.begin_waiting()
        self._person.ask()

    def _recover(self) -> None:
        """Clear the fault; a real robot holds until a person says ready."""
        if self._is_real and not self._person.is_ready:
            self._way.wait_as("FAULT")
            return self._way.count_waiting()
        self._env.recover()
        self._faults.is_open = False
        return self._status.calm() if self._is_real else None

    def _next_mode(self) -> str:
        """Apply the newest directive between two episodes; return its mode, or idle while no episode may begin."""
        directive, status = self._client.state.directive, self._status
        is_new, mode = directive["number"] != status.directive, directive["mode"]
        self._directive = directive
        status.directive, status.phase, status.mode = directive["number"], directive["phase"], mode
        status.because = directive.get("because", "")
        policy = directive.get("policy", "trained")
        is_wild = self._is_real and policy != "trained"
        able = mode in MODES and policy in self._policies and not is_wild
        able &= mode != "teleop" or self._env.has_operator
        if is_new and mode != "stop" and not self._faults.is_open:
            status.calm()
        if is_new and not able and mode not in ("idle", "stop"):
            asked = "random actions on a real clock" if is_wild else mode
            status.warn(f"phase {status.phase} asks for {asked}, which this robot cannot do: it idles")
        if is_new and self._unanswered:  # other weights may have to answer
            self._controller.begin(status.episode, directive, cleaned(self._env.task))
        may_begin = able and self._starts.remain(directive, is_heard=self._client.connected)
        may_begin &= self._client.has_room and not self._person.is_paused and not self._client.over
        return mode if mode == "stop" or (may_begin and (mode == "teleop" or self._answers())) else "idle"

    def _answers(self) -> bool:
        """Return whether the policy gives actions, after it was silent. Until then the robot does not move, not even
        home, because the cause may be a fault."""
        if self._unanswered is not None:
            seen = self._unanswered.newest(self._client.history)
            action = self._controller.act(seen, step=0, previous_action=None, reset=True)
            self._unanswered = self._unanswered if action is None else None
        return self._unanswered is None

    @property
    def _returns(self) -> bool:
        """Whether the policy has to bring the scene back before the next episode."""
        return self._resets is not None and self._resets.returns

    # -- one episode
    def _run_episode(self, mode: str) -> None:
        """Run an episode, or the policy's way back, of which nothing is recorded."""
        client, number, back = self._client, self._status.episodes, {"mode": "collect"} if self._returns else {}
        seed = self._starts.seed({**self._directive, **back}, client.state.ordinal, number)
        if not self._way.go(seed, self._directive):
            return
        is_back = self._returns  # False, too, if the scene was set up meanwhile
        mode = "collect" if is_back else mode
        name = f"{client.actor}-{client.session[:8]}-{number:06d}" + "-back" * is_back
        recorder = (Unrecorded if is_back else Recorder)(client, name, self._env.task)
        self._status.episodes += not is_back
        self._controller = self._policies["trained" if is_back else self._directive.get("policy", "trained")]
        self._controller.begin(recorder.episode, self._directive, cleaned(self._env.task))
        self._status.episode = recorder.episode
        observation = self._env.reset(
            seed, teleop=mode == "teleop", intervene=mode == "collect" and self._directive.get("intervene", False)
        )
        began, observed, warning = clock.monotonic(), self._ticks.observed(), self._status.warning
        self._person.listen(observation)
        self._person.judge_latest()
        if bad := recorder.limits.broken({**observation, "time": observed}):
            self._status.warn(f"{bad} after the reset; {recorder.episode} does not begin")
            client.wait(AGAIN)
            return
        frames = Frames(observation, client.history)
        episode = EpisodeState(recorder, frames, mode == "teleop", began=began, observed=observed, is_back=is_back)
        self._ticks.begin()
        try:
            while not recorder.ended:
                self._row(episode)
        except BaseException:
            try:
                self._env.stop()
            finally:
                with suppress(TrainerError):
                    self._cut_off(episode)
                    self._report(episode)
            raise
        self._report(episode)
        if self._status.warning == warning:  # so nothing went wrong in this one
            self._status.calm()
        if episode.teleop and not self._is_real:  # a scripted operator would begin needless demonstrations
            client.drain(ROOM_PATIENCE)
            client.wait(NAP)

    def _row(self, episode: EpisodeState) -> None:
        goes_on, waited, action = self._action(episode)
        if not goes_on:
            self._status.episodes -= episode.last is None and not episode.is_back  # its number goes to the next one
            self._cut_off(episode)
            return
        sent = clock.monotonic()
        is_gap = self._is_real and (waited or sent - episode.observed > GAP / self._env.spec.fps)
        step, observed = self._env.step(action), self._ticks.observed()
        version = 0 if episode.teleop else self._controller.version
        stamp = Stamp(self._directive["number"], self._directive["phase"], version)
        is_policys = action is not None and not step.intervened
        extras = {**self._controller.extras, **step.extras} if is_policys else step.extras
        recorder = episode.recorder
        bad = "" if step.stale else recorder.add(
            stamp, episode.observation, episode.observed, step, extras, gap=is_gap,
            chunk_start=is_policys and self._controller.chunk_start,
            chunk_delay=self._controller.chunk_delay if is_policys else 0,
        )  # fmt: skip
        if step.stale or bad:
            self._status.warn(f"{step.stale or bad}; {recorder.episode} is cut off before row {recorder.steps}")
            self._env.stop()
            self._cut_off(episode)
            return
        self._hand_over(episode, step.intervened)
        episode.last, episode.observed = step, observed
        episode.driven |= step.driven
        episode.frames.add(step.observation, gap=recorder.gap)
        episode.is_theirs, episode.is_stale = None, False
        episode.reward += step.reward
        episode.intervened += step.intervened
        self._status.driver = "HUMAN" if step.intervened else "POLICY" if is_policys else "WAITING"
        self._ticks.count(sent)
        self._status.steps += not episode.is_back
        self._status.reset_s += (episode.is_back and step.intervened) / self._env.spec.fps
        self._person.listen(step.observation)
        self._close(episode)

    def _hand_over(self, episode: EpisodeState, is_human: bool) -> None:
        """Note a takeover or a hand-back. The policy begins anew after it, since it did not cause what came before."""
        if episode.teleop:
            return
        where = f"{episode.recorder.episode}, row {episode.recorder.steps - 1}"
        if is_human and not episode.human:
            self._status.takeovers += 1
            log.info("%s: the operator takes over", where)
        elif episode.human and not is_human:
            log.info("%s: the operator hands back after %d rows", where, episode.human)
        episode.reset = episode.reset or is_human
        episode.human = episode.human + 1 if is_human else 0
        episode.held = 0 if is_human else episode.held

    def _action(self, episode: EpisodeState) -> tuple[bool, bool, Array | None]:
        """Return (whether the episode goes on, whether the next step had to wait, its action). Waits for the operator,
        for the step limit, and in simulation or before the first step for the action."""
        waited = False
        while not self._called_off(episode, waited) and not episode.recorder.ended:
            if self._blocked(episode):
                episode.held = 0
            else:
                if self._holds(episode):
                    return True, waited, None
                action = self._ask(episode)
                if action is not None or (self._is_real and episode.last is not None):
                    return True, waited, action
            waited = True
            self._ticks.begin()
            self._way.nap()
            if episode.last is None:
                self._person.judge_latest()  # of this one there is nothing to judge yet
            elif self._person.verdict and not episode.recorder.is_empty:
                self._close(episode)
        return False, waited, None

    def _holds(self, episode: EpisodeState) -> bool:
        """Return whether the policy need not be asked: the operator drives the next step, or it only looks again."""
        begins = self._is_real and episode.last is None  # here the device is read until somebody acts
        if begins or (episode.human and episode.is_theirs is None):
            episode.is_theirs = self._env.look()
        return episode.teleop or episode.is_stale or bool(episode.is_theirs)

    def _ask(self, episode: EpisodeState) -> Array | None:
        previous = None if episode.last is None else episode.last.executed
        seen = episode.frames.newest(self._client.history)
        action = self._controller.act(seen, step=episode.recorder.steps, previous_action=previous, reset=episode.reset)
        if action is None:
            episode.held_since = episode.held_since if episode.held else clock.monotonic()
            episode.held += 1
            self._status.driver = "WAITING"
        else:
            episode.held, episode.reset = 0, False
        self._status.carry_resets = self._policies["trained"].carry_resets
        return action

    def _blocked(self, episode: EpisodeState) -> bool:
        if self._person.is_paused:
            if self._status.driver != "PAUSED":
                self._env.stop()
            self._status.driver, episode.reset = "PAUSED", True
            episode.is_stale = self._is_real
            return True
        allowed = self._client.state.step_limit
        if self._is_real or allowed is None or self._status.steps < allowed:
            return False
        episode.recorder.flush()  # the learner raises the limit by what it has received
        return True

    def _called_off(self, episode: EpisodeState, waited: bool) -> bool:
        """Return True if the directive is over, and that ends the episode now: nothing is recorded yet, the person or a
        newer directive says so, or this step waits, but for an answer that may still come."""
        newer = self._client.state.directive
        if episode.last is None or self._client.over == "stop":
            return self._way.is_over(self._directive)
        if newer["number"] == self._directive["number"]:
            return False
        at_once = newer.get("boundary") == "now"
        if at_once or not waited:
            return at_once
        if newer["mode"] == "stop" or self._directive["mode"] == "evaluate":
            return True  # the policy, or the weights under evaluation, may no longer be served
        answers = episode.held > 0 and clock.monotonic() - episode.held_since <= SILENCE  # no limit, and no pause
        return newer["mode"] == "idle" and not answers

    def _close(self, episode: EpisodeState) -> None:
        """End the episode if the operator or the environment says so, no action comes, or the outbox is full."""
        recorder, step = episode.recorder, episode.last
        assert step is not None
        verdict = self._person.verdict
        if verdict or step.terminated or step.truncated:
            self._end(episode, terminated=verdict != "discard" if verdict else step.terminated, success=step.success)
        elif self._is_real and episode.held > SILENCE * self._env.spec.fps:
            self._status.warn(f"no action came for {SILENCE:.0f} s; {recorder.episode} is cut off")
            self._end(episode)
            self._unanswered = episode.frames
        elif not self._client.has_room and not self._has_room():
            self._status.warn(f"{self._client.fault or 'the disk is too slow'}; {recorder.episode} is cut off")
            self._end(episode)

    def _cut_off(self, episode: EpisodeState) -> None:
        """Truncate the episode, if it is not over, and push a verdict that still waits."""
        if not episode.recorder.ended:
            self._end(episode)

    def _end(self, episode: EpisodeState, *, terminated: bool = False, success: bool | None = None) -> None:
        """Push the verdicts and the last rows. A demonstration that nobody drove is discarded here, for good."""
        recorder = episode.recorder
        if episode.is_unattended:
            self._status.warn(f"nobody drove: {recorder.episode} is no demonstration, and is discarded")
            self._person.disown(recorder.episode)
        elif not episode.is_back:
            self._person.pronounce(recorder.episode, success)
        recorder.end(terminated=terminated)

    def _has_room(self) -> bool:
        deadline = clock.monotonic() + (0.0 if self._is_real else ROOM_PATIENCE)
        while not self._client.has_room and clock.monotonic() < deadline:
            self._client.wait(0.002)
        return self._client.has_room

    def _report(self, episode: EpisodeState) -> None:
        recorder, step = episode.recorder, episode.last
        if step is None:
            self._person.verdict = ""
            return
        if episode.is_back and self._resets:
            self._resets.ended(VERDICTS.get(self._person.verdict, step.success))
            self._person.verdict = ""
            return
        self._starts.end(self._directive)
        verdict = self._person.close(recorder.episode, is_unattended=episode.is_unattended)
        success = VERDICTS.get(verdict, step.success)
        if self._resets:
            self._resets.ended(success)
        if not episode.teleop:
            self._person.count(recorder.episode, success, assisted=episode.intervened > 0)
        seconds = clock.monotonic() - episode.began
        self._on_episode({
            "episode": recorder.episode, "phase": self._directive["phase"], "mode": self._directive["mode"],
            "steps": recorder.steps, "reward": episode.reward, "seconds": seconds,
            "success": success, "discard": verdict == "discard",
            "intervened": episode.intervened / recorder.steps, "weights": self._controller.version,
        })  # fmt: skip
