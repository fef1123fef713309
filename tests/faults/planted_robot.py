"""Mutants of what moves a robot, written as in planted.py."""

TABLE = r"""
== safety of the robot: test_robot_env test_intervention test_guard test_guard_motion

K1 killed Limiter.step: a robot outside of its range is sent further out
    - low, high = np.minimum(limits.low, start), np.maximum(limits.high, start)
    + low, high = limits.low - 9, limits.high + 9
K2 killed Motion._advance_home: on the way home the jump is counted from where the robot was before
    - self.point = self.target = point
    + self.point = point
K3 killed Limiter._keeps: the tool may leave its box
    - is_slow and self._outside(there) <= self._outside(here)
    + is_slow
K4 killed Motion.follow: the jump is counted from what was asked, not from what the robot took
    - self.target, self.mode, self.is_home = target, FOLLOW, False
    + self.target, self.mode, self.is_home = wanted, FOLLOW, False
K5 killed Motion.hold: each hold lets a heavy arm sink
    - if self.mode != HOLD:
    + if True:
K6 killed Motion.advance: an actor that hangs leaves the arm to its last target
    - self._silent > self._patience[self.mode]
    + False
K7 killed Motion.fail: an arm with a fault follows the next target
    - self.fault = self.fault or (kind, text)
    + self.fault = None
K8 killed Guard._listen: an actor that was killed leaves the arm on its way
    - self._cut_at = time.monotonic()
    - self._motion.hold()
    + self._cut_at = time.monotonic()
K9 equivalent GuardLink.call: an answer to an earlier question is taken for this one
    - if answer.number == self._number:
    + if answer:

== the loop in time: test_robot_env test_real_time test_faults test_intervention

M1 killed Pace.wait: after a late command the next one follows at once
    - (sent if sent > self._began + self.period / 2 else self._began) + self.period
    + self._began + self.period
M2 killed _Actor._row: windows join what came before a long wait and what came after it
    - (waited or sent - episode.observed > GAP / self._env.spec.fps)
    + waited
M3 killed Faults.add: a robot that fails again and again is started again and again
    - if len(self._times) == MOST and self._times[-1] - self._times[0] < WITHIN:
    + if False:
M4 killed _Actor._holds: the policy acts on what it saw before a pause
    - episode.teleop or episode.is_stale or
    + episode.teleop or
M5 killed Person.ask: a word from before the question moves the robot
    - self.is_ready = False
    + pass

== what a policy sees: test_history

M6 killed Frames.add: a policy sees what came before a long wait
    - if gap:
    + if False:

== people and cameras: test_hands test_alignment test_guard_motion

PC1 killed Alignment.look: an old image is recorded
    - if self._is_real and age > self._bound:
    + if False:
PC2 killed Alignment.look: a frozen camera is recorded
    - frame.time - frame.changed >= FROZEN
    + False
PC3 killed Alignment.wait: an episode's first image shows the way home
    - time.sleep(NAP)
    + return
PC4 killed Intervention.drive: the arm jumps at a takeover
    - self._was_theirs, self._left = is_theirs, self._ramp
    + self._was_theirs, self._left = is_theirs, 0
PC5 killed Hands._take: the gripper of an earlier takeover acts in this one
    - self._gripper, self._wished = 0, 0.0
    + self._wished = 0.0
PC6 killed Motion.hold: one wrong measurement becomes a set point
    - np.median(self._glances, axis=0)
    + self.measured
PC7 killed Gamepad._take: what a gamepad tells of itself at first presses a button
    - kind == BUTTON and is_new and value and number in WORDS
    + kind == BUTTON and value and number in WORDS
"""
