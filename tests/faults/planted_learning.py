"""Mutants of algorithms, policies and networks, written as in planted.py."""

TABLE = r"""
== soft actor-critic: test_algorithms test_vision test_networks test_critics

C1 killed Critic.target: the mean of the critics is the target, not the least
    - value = lowest[0] if self.num_lowest == 1 else lowest.mean(0)  # [B]
    + value = values.mean(0)
C2 killed SAC.update: the next action is drawn with the noise of the loss
    - self._update_policy(batch, noise[1])
    + self._update_policy(batch, noise[0])
C3 killed hold_entropy: the temperature moves the wrong way
    - log_alpha * (entropy - target)
    + log_alpha * (target - entropy)
C4 killed SAC._update_policy: the policy's convolutions stay those of the beginning
    - follow(self.policy.encoder.trunks, self.critic.encoder.trunks, 1.0)
    + pass
C5 killed critic_loss: rows without weight move the critic
    - (critic_weight(batch) * critic.loss(prediction, target)).mean()
    + critic.loss(prediction, target).mean()
C6 killed HLGauss.__init__: erf gets the scale of the normal distribution's own function, so targets are wider
    - math.sqrt(2) * sigma * self.width
    + 2 * sigma * self.width
C7 killed HLGauss.encode: a target beyond the range is shared among no bins
    - value.clamp(self.low, self.high)
    + value
C8 killed C51.target: the distribution stays where it was, and its mean alone is learned
    - Spread(backup(self.centers.unsqueeze(-1) - penalty), shares.T)
    + backup(value)
C9 killed Binned.layer: an untrained critic promises the middle of its range
    - (self.encode(torch.zeros(())) + LEAST).log().expand_as(layer.bias)
    + torch.zeros(())

== imitation: test_flow test_algorithms test_replay test_mixture

D1 killed SFT.update: the average is nearly the newest weights
    - 1 - min(self.ema_decay, (1 + before) / (10 + before))
    + min(self.ema_decay, (1 + before) / (10 + before))
D2 killed Algorithm.calm: every policy is evaluated at noise zero
    - torch.zeros_like(noise) if self.acting.mode_at_zero else noise
    + torch.zeros_like(noise)
D3 killed SFT.loss: rows without weight are imitated
    - (batch.weight * loss).mean()
    + loss.mean()
D4 killed SFT.__init__: windows start where the robot stands still
    - Window(self.policy.offsets, idle_filter=_idle_filter(self.policy, **idle_filter))
    + Window(self.policy.offsets)

== flow policies that climb critics: test_sac_pi0 test_algorithms

F1 killed SACPI0.policy_loss: the distance is in the robot's units
    - (scale.to_unit(action) - scale.to_unit(reference))
    + (action - reference)
F2 killed Judged.executed: what an episode's end cut off lies outside of the bounds of actions
    - torch.where(batch.valid.unsqueeze(-1), batch.action, self.critic.scale.center)
    + batch.action
F3 killed SACPI0.update_clone: the reference is not what was cloned
    - follow(self.reference, self.policy, 1.0)
    + pass
F5 killed SACPI0.following_action: the next chunk is drawn with the noise of the loss
    - stream=NEXT
    + stream=0

== what critics improve: test_value_guided test_recap test_offline test_hybrid

VG1 killed Improved.climbed: a candidate is its last step, however bad
    - value.detach() > most
    + torch.ones_like(most, dtype=torch.bool)
VG2 killed Guidance.slope: the critic sees guesses outside of the bounds
    - guess[..., :numbers].detach().clamp(*scale.limits())
    + guess[..., :numbers].detach()
VG3 killed CalQL.gap: values sink without end
    - torch.maximum(policys, batch.extras[RETURN][:, 0])
    + policys
VG4 killed RECAP.update_advantage: an episode's end does not count
    - torch.where(ends, self.returns(batch), batch.length / self.lowest + following)
    + batch.length / self.lowest + following
VG5 killed PARL.update_candidates: the executed chunk is no candidate
    - torch.cat([kept[: max(1, improved.kept - 1)], executed.unsqueeze(0)])
    + kept
VG6 killed IQL.state_loss: the lower expectile is learned
    - (self.expectile - (target < value).float()).abs()
    + (self.expectile - (target > value).float()).abs()
VG7 killed Hybrid.grasp_target: a move of the gripper costs nothing
    - self.grasp_penalty * (choice != STAY)
    + 0.0

== chunks that continue the old one: test_prefix test_prefixes

X1 killed HeadPolicy.forward: rows of the old chunk have a loss
    - counted = counted & ~old
    + counted = counted
X2 killed Rows.kept: the committed actions do not come back bit by bit
    - torch.where(self.first().unsqueeze(-1), self.action, action)
    + action
X3 killed PolicyHost._check_prefix: a prefix that is not finite, or far out of bounds, is taken
    - if not ((prefix >= low) & (prefix <= high)).all():
    + if False:
X4 killed Flow.guided: the old chunk pushes the new one away
    - found.detach() - strength(t) * pull
    + found.detach() + strength(t) * pull

== flow matching: test_flow test_sac_pi0

H1 killed Flow.errors: times dwell at the wrong end
    - ** (1 / 1.5)
    + ** 1.5
H2 killed HeadPolicy.forward: the loss is averaged over steps after the end, too
    - return error.sum(-1) / (batch.length - first), {}
    + return error.mean(-1), {}
H3 killed Flow._integrate: the stochastic sampler leaves the flow's marginals
    - (chunk + (1 - t) * velocity)
    + (chunk - (1 - t) * velocity)
H4 killed Bounded.backward: a chunk beyond the bounds never comes back
    - ((inputs > high) & (gradient < 0)) | ((inputs < low) & (gradient > 0))
    + (inputs > high) | (inputs < low)

== heads of chunk policies: test_heads test_head_optima

H5 killed MIP.errors: both passes of MIP weigh as much
    - second / (1 - self.t_star) ** 2
    + second
H6 killed Autoregressive.errors: a number is learned with itself among what is given
    - (number < place)
    + (number <= place)
H7 killed Diffusion._denoised: the fresh noise of DDPM is too small
    - math.sqrt((1 - s_next) * b / (1 - s))
    + (1 - s_next) * b / (1 - s)
H8 killed MeanFlow.errors: the identity of the mean velocity has the wrong sign
    - (velocity - (t - r)
    + (velocity + (t - r)
H9 killed Gaussian.log_prob: the density does not integrate to one
    - - log_std - 0.5
    + + log_std - 0.5
H10 killed Flow._integrate: Heun's method looks at the near end of a step twice
    - velocity_at(chunk - velocity / self.steps, t - 1 / self.steps)
    + velocity_at(chunk, t)
H11 killed ChunkPolicy.predict: the network does not know which steps are the old chunk's
    - else old.to(chunk.dtype)
    + else torch.zeros_like(old, dtype=chunk.dtype)
H12 killed PolicyHost.check: a robot may ask for a task that the policy has not learned
    - if self.acting.tasks and ask.task not in self.acting.tasks:
    + if False:

== PI0: test_pi0

J1 killed PI0.velocity: the state sees actions
    - sees[0, 1:] = False
    + pass
J2 killed PI0.velocity: positions count the padding of the prompt
    - positions = there.sum(1, keepdim=True) +
    + positions = there.shape[1] +
J3 killed PI0.condition: the words are not scaled
    - self.language.embed_tokens(prepared[TOKENS]) * math.sqrt(self.sizes.width)
    + self.language.embed_tokens(prepared[TOKENS])
J4 killed fitted: the bars around an image are grey
    - value=-1.0)
    + value=0.0)
"""
