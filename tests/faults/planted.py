"""The mutants: small faults, each of which at least one test should notice. mutants.py runs them.

A heading names an area and the test files that belong to it. Each mutant has a line
    ID KNOWN SYMBOL: what then goes wrong
and below it the text that occurs once within that class or function (-), and what takes its place (+). Further lines
are indented from the first one. KNOWN is what the tests do:
    killed      a test failed
    survives    none did
    chance      one failed that also failed now and then without the mutant
    equivalent  none did, and none needs to: a second defence holds
Where the text is gone, write the mutant anew with the same meaning. Ids are never used again.
"""

TABLE = r"""
== outbox: test_outbox test_outbox_damage test_failing_disk test_client test_wire

O1 equivalent Outbox._cut_back: what a failed write left at the end of a file stays there
    - os.ftruncate(descriptor, file.size)
    + pass
O2 killed Outbox.acknowledge: files after one that cannot be removed are removed, which looks like a loss
    - except OSError:  # none goes before it: a hole between two files is taken for a loss
    -     return
    + except OSError:
    +     continue
O3 killed Outbox.acknowledge: acknowledged bytes still count, so the outbox fills up for ever
    - self._bytes -= file.size
    + pass
O4 killed Outbox._load: a record that two files hold is read twice
    - del before.ends[max(0, file.first - before.first) :]
    + pass
O5 equivalent Outbox._looked_at: after one damaged record the others are not checked
    - self._doubted[file.session] = math.inf
    + pass
O6 killed RecentRecords.add: memory holds all that waits
    - if size >= LEAST_BYTES and self._bytes + size <= KEPT_BYTES:
    + if size >= LEAST_BYTES:
O7 killed Outbox.read: the rest of an episode that lacks a record is sent from memory
    - if recent and not is_doubted:
    + if recent:
O8 killed RecentRecords.take: what is in memory in part is sent without the rest
    - if not all(each in taken for each in range(seq, end)):
    -     return []
    - return wire.gathered(part for each in range(seq, end) for part in taken[each][1])
    + return wire.gathered(part for _, record in taken.values() for part in record)
O10 killed RecentRecords.take: what was sent stays in memory, which is full then
    - self._bytes -= sum(size for size, _ in taken.values())
    + pass
O11 killed Outbox.append: records of an earlier session are taken for those of this one
    - self._recent = RecentRecords()
    + pass
O9 killed _Reader.views: a buffer that is done with is read again
    - self._view, self._at = next(self._next), 0
    + self._at = 0

== sending: test_client test_outbox test_outbox_damage test_peer_faults test_protocol_model

S1 killed SendQueue.put: the end of an episode finds no room in a full queue
    - self._capacity * (2 if ends else 1)
    + self._capacity
S2 killed SendQueue.pushes: what stays without an answer is not sent again
    - if session != self._sending or (self._flying and time.monotonic() > self._heard + STALL):
    + if session != self._sending:
S3 killed SendQueue.acknowledge: what was acknowledged in the meantime is sent all the same
    - self._next = max(self._next, ack.expected)
    + pass
S4 killed SendQueue.acknowledge: an acknowledgement of an earlier session moves the current one
    - if ack.session != self._sending:
    + if False:
S5 killed SendQueue.resume: a store that has lost data is taken for a good one
    - if seq < first:
    + if seq < 0:

== network thread: test_client test_network test_runner test_remote_policy test_peer_faults

N1 killed Network._ask: several questions are on their way at once
    - if self._asked and time.monotonic() < self._asked_at + PATIENCE:
    + if False:
N2 killed Network._noticed: an older directive replaces a newer one
    - is_newer = notice.directive and notice.directive["number"] >= before.directive["number"]
    + is_newer = notice.directive
N3 killed Network._welcomed: a command is sent again after a cut, and may be carried out twice
    - self.commands.popleft().name)
    + self.commands[0].name)
N4 killed Network._answered: actions that are not finite reach the robot
    - or not np.isfinite(action).all()
    + or False
N5 killed Network._answered: an answer to another question is taken
    - if step == act.step:
    + if True:

== recorder: test_runner test_recorder test_remote_policy test_intervention

R1 killed Recorder.add: a segment holds steps of two versions of the weights
    - if self._state[0] and stamp != self._stamp:
    + if False:
R2 killed Recorder.add: an extra that a step lacks is what memory held before
    - array[row] = extras.get(name, 0)
    + if name in extras:
    +     array[row] = extras[name]
R4 killed Recorder._push: a signal within the push records the same steps twice
    - self._state = 0, self._state[1]
    - self._client.push(segment)
    + self._client.push(segment)
    + self._state = 0, self._state[1]

== store: test_store test_durability test_replay test_label test_limits test_protocol_model test_power_loss test_archive

T1 killed Store._make_room: an archived episode is evicted before it was exported
    - if (kept := self.kept.oldest(source.name)) is not None and kept[0] < source.tail:
    + if False:
T2 killed Store._make_room: rows are overwritten before the new tail is durable
    - self.index.commit()
    + pass
T3 killed Store._make_room: rows are overwritten before readers see the new tail
    - self._publish()
    + pass
T4 killed Sessions.over: lives of other actors of the same outbox are closed, too
    - living = self._living.get((now.outbox, now.actor), {})
    + living = [name for name, state in self.all.items() if state.outbox == now.outbox and not state.closed]
T5 killed Episodes._judge: the environment overrules the operator
    - if is_final or not (episode.judged_by == "operator" or was_aside):
    + if True:

== index: test_store test_durability test_power_loss test_failing_disk

I1 killed Index._begin: a commit is not synced
    - PRAGMA synchronous = FULL
    + PRAGMA synchronous = NORMAL
I2 killed Index.probe: the log is not written into the database anew
    - wal_checkpoint(TRUNCATE)
    + wal_checkpoint(PASSIVE)
I3 killed Index._check: a damaged database is opened
    - if report != "ok":
    + if False:

== server: test_service test_store_service test_peer_faults test_limits test_protocol_model

V1 killed Welcomes.take_over: the earlier lives of an actor stay open
    - self._keeper.ready.close_before(hello.session, peer.named)
    + pass
V2 killed StateUpdates.step_limit: each paced actor gets the share of all
    - return made + -(-left // max(1, paced))
    + return made + left
V4 killed Intake._take: a second gap of a session is not told, so delivery waits for STALL
    - incoming.has_gap = incoming.is_told = False
    + incoming.has_gap = False
V5 equivalent Intake.push: records for a full source are queued, although none is taken
    - if store is None or self._keeper.degraded or peer.incoming[push.session].full:
    + if store is None or self._keeper.degraded:
V6 killed Intake._reopen: gaps and full sources from before a disk failed are believed after it
    - incoming.has_gap = incoming.is_told = False
    - incoming.full = ""
    + pass

== who may say what: test_service test_security test_keys test_limits test_wire

E1 killed _check_version: a client of another version is let in
    - high < PROTOCOL[0] or low > PROTOCOL[1] or strange
    + high < PROTOCOL[0] and low > PROTOCOL[1] or strange
E2 killed _check_claim: a viewer's key appends
    - if hello.role == "actor" and owner.role == "viewer":
    + if False:
E3 killed check_hello: a client's name writes lines of the log
    - if not hello.actor.isprintable():
    + if False:
G1 killed AllowList.ban: a ban that cannot be written down does not hold
    - self._stamp = None
    + pass
G2 killed AccessControl.blame: a key that was lifted is banned again by its next bad message
    - self._causes.pop(whence, {})
    + self._causes.get(whence, {})
G3 killed AllowList._refresh: the second of two changes within one tick of the clock is not seen
    - self._stamp = stamp if max(stamp) < time.time_ns() - TICK_NS else None
    + self._stamp = stamp
G4 killed AccessControl._happened: there is no limit to connections
    - _cut(value)
    + pass
G5 killed AccessControl._asked: a key is refused for good while the list of keys cannot be read
    - b"300" if self.keys.fails else b"400"
    + b"400"

== progress of the plan: test_plan_state test_learner test_learner_faults

A1 killed RateLimiter._credit: a learner that is too slow owes all its updates
    - self.uncounted_steps += excess / pace.updates_per_step
    + pass
A3 killed PlanState.advance: a plan that is held goes on
    - (phase and not self.at.held and self._ended_by(phase, progress))
    + (phase and self._ended_by(phase, progress))
A4 killed PlanState._value: a phase that is entered again looks at what it had before
    - if min(len(recent), self._count("episodes", progress)) < term.window:
    + if len(recent) < term.window:
A5 killed PlanState._value: an assisted success counts as unassisted
    - success and not (alone and assisted) for
    + success for
A6 killed PlanState.step_limit: steps of an earlier visit to the phase count against this one
    - return None if allowed is None else allowed + int(self.at.base["env_steps"])
    + return allowed

== plan: test_plan test_plan_state test_plan_files

B1 killed Phase._bound: `episodes > n` takes one too few
    - math.floor(t.bound) + 1 if t.strict
    + math.floor(t.bound) if t.strict
B2 killed _without_operator: a view is left out although one of its sources is there
    - missing.issuperset(view.of)
    + missing & set(view.of)
B3 killed _without_operator: a source that a dataset fills counts as empty
    - filled |= {name for name, source in plan.sources.items() if source.dataset is not None}
    + pass
B4 killed _Reader.updates: an update that is listed twice may train on two kinds of data
    - if any((a.data, a.batch, a.order) != (b.data, b.batch, b.order) for a, b in twice):
    + if False:
B5 equivalent _Reader.actors: a phase that evaluates nothing may record into the source of evaluations
    - if (mode == "evaluate") != (into.value == EVAL):
    + if mode == "evaluate" and into.value != EVAL:

== acting on a GPU: test_graphs test_device

U1 killed Graphs._wrong: a recording that repeats one answer is believed
    - if apart > 0 and all(error <= TOLERANCE * apart for error in errors):  # False for NaN
    + if True:
U2 killed Recording.__call__: the next replay overwrites an answer
    - return self.result.clone()
    + return self.result
U3 killed PolicyHost.unrecorded: the smallest batch is recorded first, and memory is not shared
    - key=lambda size: (size > 1, -size)
    + key=lambda size: size
U4 killed Cuda.__init__: streams belong to the first GPU
    - with self.here():
    + if True:
U5 killed PolicyHost._answered: a batch without memory ends the process
    - if len(part) == 1:
    -     raise
    + raise
U6 killed Cpu._copied: staging memory is written before it was read
    - self.settle()
    + pass
U7 killed InferenceServer._load: a third copy of the weights is made
    - if notice and self._loaded is None and self._job is None:
    + if notice:

== chunks of an actor: test_chunks test_remote_policy test_local

Y1 killed AsyncChunks._waits: a tick waits for the next chunk although actions remain
    - return self._left(step) <= 0
    + return True
Y2 killed AsyncChunks.lead: the lead may be so long that the next chunk has too few actions
    - return min(most, sorted(self._delays)
    + return max(0, sorted(self._delays)
Y3 killed RealTimeChunks._first_step: an answer that comes early acts in place of committed actions
    - return answer.step + self._committed.get(answer.step, 0)
    + return answer.step
Y4 killed LocalSource._turn: an answer that was begun in one episode acts in the next
    - if number > self._forgotten:
    + if True:
Y5 killed RemotePolicy._take: where an episode begins a policy counts as one that began anew
    - if answer.reset and self._has_acted:
    + if answer.reset:

== ranks and heads: test_averaging test_attention

L1 killed GradientAverage._send: the gradients of all ranks are summed
    - gradients /= self._world.size
    + pass
L2 killed GradientAverage.finish: a weight that no rank has used gets a gradient
    - part.view_as(weight) if next(ranks) else None
    + part.view_as(weight)
L3 killed bias: tokens see the padding of the keys
    - (0, -sees.shape[-1] % ALIGNED))
    + (0, -sees.shape[-1] % ALIGNED), value=True)
"""
