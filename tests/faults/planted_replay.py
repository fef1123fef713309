"""Mutants of what the trainer reads and counts, written as in planted.py."""

TABLE = r"""
== replay: test_replay test_mixture test_store

P1 killed ReplayBuffer._take_in: rows that are overwritten during the refresh count as whole
    - whole = (records["number"] == numbers) & (numbers >= int(self._published[0]))
    + whole = records["number"] == numbers
P2 killed ReplayBuffer._link: a step is linked to one that was evicted, so windows cross episodes
    - indices[begin] > 0 and before >= self.tail
    + indices[begin] > 0
P3 killed ReplayBuffer._usable: steps of an episode that is evicted in part are drawn
    - usable = (self._first[slots] >= self.tail) & (numbers >= self.tail)
    + usable = numbers >= self.tail
P4 killed ReplayBuffer._still_there: what is overwritten while it is copied is used
    - return tail <= self.tail or bool((self._first[slots] >= tail).all())
    + return True
P5 killed ReplayBuffer._resolve: after the last step comes its own row, not the final observation
    - after = np.where(self._final[last_slot] == NONE, self._row[last_slot], self._final[last_slot])
    + after = self._row[last_slot]
P6 killed ReplayMixture.sample: a batch is drawn over the last one while a GPU still copies that
    - memory.copied.synchronize()
    + pass

== verdicts: test_verdicts

VR1 killed VerdictRewards.last_of: each part of an episode gets the reward of its verdict
    - not episode.closed or episode.continued
    + not episode.closed
VR2 killed ReplayBuffer.judge: what an operator takes back stays
    - reward if is_judged else records["reward"]
    + reward if is_judged else self._reward[slots]
VR3 killed ReplayBuffer.judge: the verdict on what a dead actor left is never drawn
    - own = self._row[slots] if is_judged else NONE
    + own = NONE
VR4 killed ReplayMixture._take: a verdict that is corrected keeps its first reward
    - if last != last_before:
    + if last_before is None:
VR5 killed Episodes.begin: an earlier part is still told to be the last
    - part.continued = True
    + pass

== episode columns: test_episode_columns

EC1 killed ReplayMixture._know: a word that comes after the end changes no column
    - if episode.source in self._known and episode.closed:
    + if episode.source in self._known and episode.closed and episode.judged_by != "operator":
EC2 killed EpisodeColumns.known: a slot that another step has taken over still counts
    - known = (self._number[slots] == numbers) if needs_end else np.ones(numbers.shape, bool)
    + known = (self._number[slots] != NOWHERE) if needs_end else np.ones(numbers.shape, bool)
EC3 killed EpisodeColumns.known: what nobody has judged counts as a failure
    - return known & (self._success[slots] != UNKNOWN) if SUCCESS in names else known
    + return known

== sources and counters: test_replay test_mixture test_counters test_learner

Q1 killed ReplayMixture._take: an episode that has left a view is still drawn
    - (holds := view.holds(now)) != (before is not None and view.holds(before))
    + (holds := view.holds(now))
Q2 killed ReplayMixture._fill: each part of a view gives the same share, however much it holds
    - np.array(sizes) / sum(sizes)
    + np.ones(len(sizes)) / len(sizes)
Q3 killed ReplayMixture._refresh: evicted episodes count in the size of a view
    - self._count(episode, -1)
    + pass
Q4 killed RunCounters.take: the newest episodes are in another order after a restart
    - insort(phase.recent, now, key=NUMBER)
    + phase.recent.append(now)
Q5 killed ReplayMixture._fill: steps of two sources have the same ids
    - ids[ids >= 0] += self._offsets[part]
    + pass

== derived columns, order once: test_derived

DV1 killed DerivedColumns.known: a step has what was computed of the evicted one in its place
    - known &= self._numbers[name][slots] == numbers
    + known &= self._numbers[name][slots] != NOWHERE
DV2 killed following: an episode that is still open is passed over for good
    - if not count or not episode.closed:
    + if not count:
DV3 killed ReplayMixture.unseen: the rows that fill up the last batch count
    - weight=(torch.arange(count) < filled)
    + weight=(torch.arange(count) < count)
"""
