"""Mutants of what moves a robot, written as in planted.py."""

TABLE = r"""
== safety of the robot: test_robot_env test_intervention test_guard test_guard_motion

K1 killed Limiter.begin: the first set point of an arm that is out of its range lies out of it, too
    - start = np.clip(stands, limits.low, limits.high)
    + start = stands
K2 killed Motion._advance_home: on the way home the jump is counted from where the robot was before
    - self.point = self.target = self._limiter.step
    + self.point = self._limiter.step
K3 killed Limiter._keeps: the tool may leave its box
    - (self._outside(there) <= self._outside(here)).all()
    + True
K4 killed Motion.follow: the jump is counted from what was asked, not from what the robot took
    - self.target, self.mode, self.is_home = target, FOLLOW, False
    + self.target, self.mode, self.is_home = wanted, FOLLOW, False
K5 killed Motion.hold: each hold lets a heavy arm sink
    - if self.mode != HOLD and self.point is not None:
    + if self.point is not None:
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

== Dobot arms: test_dobot test_dobot_protocol

DB1 killed DobotArm._connect: set points that were on their way when the link died move the arm later
    - link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, FORGET)
    + pass
DB2 killed DobotArm.write: an arm moves before a person has said ready
    - if self._is_ready:
    + if True:
DB3 killed DobotArm._failing: after a fault the next set point is sent
    - self._is_ready = False
    + pass
DB4 killed DobotArm._check: an alarm stays hidden
    - if self._is_alarmed:
    + if False:
DB5 killed DobotArm.enable: after a recovery the arm gets no set points
    - self._is_ready = True
    + pass
DB6 killed Feedback.feed: a torn packet swallows the next one
    - follower is not None and follower < end
    + False
DB7 killed Replies._matched: a reply is taken for that of another command
    - (each for each in self._asked if said and each.lower() == said[3].lower())
    + iter(self._asked)

== the judge that learned: test_learned test_reward_classifier test_stages

LJ1 killed Verdicts.at: what came too late counts
    - if now - self._seen > self.stale_s:
    + if False:
LJ2 killed Verdicts.hear: a row that shows no success does not begin the succession anew
    - self._counts + 1, 0), seen
    + self._counts + 1, self._counts), seen
LJ3 killed Learned.reset: an answer on the episode before ends the new one
    - self._first, self._is_open, self._unanswered = self._number + 1, False, None
    + self._is_open, self._unanswered = False, None
LJ4 killed Learned.__call__: the control loop waits for an answer
    - while self._waits and
    + while
LJ5 killed RewardClassifier.labels: a failure shows success at its end
    - batch.extras[SUCCESS] & (
    + (
LJ6 killed RewardClassifier.is_known: rows of which nobody knows count as no success
    - (left >= self.positive + self.unsure)
    + (left >= self.positive)
LJ7 killed Verdicts.at: a stage is rewarded as long as it is there
    - self._rewarded += new
    + pass
LJ8 killed Staged.reset: an episode begins at the stage of the one before
    - self._keys.told = None
    + pass
LJ9 killed RewardClassifier.labels: a success shows none of the stages before it
    - before | success
    + before
"""
