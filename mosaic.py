"""Mosaic's advantages: every formula of the method, M1 to M12, as pure functions of tensors.

A trajectory is a set of sessions. GRPO gives all of them the same credit; Mosaic changes that on two levels:
- trajectory level (M3 to M5): fewer sessions earn a success more, giving up early costs a failure more.
- session level (M7 to M10): the gain in the likelihood of the right answer, among sessions of the same kind.
Their sum (M11) is one advantage per session, given to all its tokens in the clipped policy loss (M12).
_G trajectories of a group, _N sessions of one, _T tokens; ragged things are lists of G tensors [N_i]. Lists
or tensors go in; statistics are in float64; float32 without gradient comes out. Wrong input is a ValueError.
Left out on purpose: Phi itself (M6, see phi.py); a KL term, an entropy bonus, a critic.
"""

import torch

KINDS = ("normal", "compact", "subagent")
SUCCESS = 0.5  # a reward above this is a success
NOISE = 4 * torch.finfo(torch.float32).eps  # relative size below which a difference is float32 rounding


def _check(condition, message):
    if not condition:
        raise ValueError(message)


def _vector(values, name):
    try:
        vector = torch.as_tensor(values, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be numbers: {error}") from None
    good = vector.dim() == 1 and len(vector) > 0 and torch.isfinite(vector).all()
    _check(good, f"{name} must be a non-empty row of finite numbers, not {vector.tolist()}")
    return vector


def _standardise(x):
    deviation = x - x.mean()
    # critical: equal float32 values can differ in the last bit; over 1e-6 that noise would be a signal.
    if len(x) < 2 or deviation.abs().max() <= NOISE * max(1.0, x.abs().max().item()):
        return torch.zeros_like(x)
    return deviation / (x.std() + 1e-6)


# ---- M1, M2: one advantage per trajectory, the same for all its sessions -----------------------------------
def grpo_advantage(rewards):
    """M1: A_i = (R_i - mean(R)) / (std(R) + 1e-6), std with n-1; 0 where all rewards are equal.
    rewards [G] -> [G]. ValueError: empty group; a reward that is None, NaN or infinite.
    >>> grpo_advantage([1, 0, 0, 0])
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])
    """
    return _standardise(_vector(rewards, "rewards")).float()


def broadcast_advantage(rewards, kinds):
    """M2, the baseline: A_ij = A_i for every session.
    rewards [G], kinds G lists [N_i] -> G tensors [N_i].
    >>> broadcast_advantage([1, 0], [["normal", "compact", "normal"], ["normal"]])
    [tensor([0.7071, 0.7071, 0.7071]), tensor([-0.7071])]
    """
    return [advantage.repeat(len(k)) for advantage, k in zip(grpo_advantage(rewards), kinds, strict=True)]


# ---- M3 to M5: the session-count signal, at trajectory level -----------------------------------------------
def centred_rank(counts):
    """M3: u_i = 2 f_i - 1, f_i = (#{k: N_k < N_i} + 0.5 #{k != i: N_k = N_i}) / (n - 1), f = 0.5 if n = 1.
    counts [n], sessions of each success (or failure) of a group -> u [n]. ValueError: empty, not finite.
    >>> centred_rank([1, 2, 2, 5])
    tensor([-1.,  0.,  0.,  1.])
    """
    counts = _vector(counts, "counts")
    # The same as 2 f_i - 1: the others that have fewer, less those that have more, among n - 1.
    lead = torch.sign(counts[:, None] - counts[None, :]).sum(1)
    return (lead / max(1, len(counts) - 1)).float()


def session_aware_advantage(rewards, counts, rho=0.2, beta0=0.1, beta1=0.2):
    """M4: A_i^sat = (1 - rho u_i) A_i. M5, for a homogeneous group: all succeed, A_i^sat = -beta1 u_i;
    all fail, A_i^sat = beta0 min(u_i, 0), so giving up early is penalised and wandering never rewarded.
    M4's orderings are promised for rewards 0 and 1; graded ones all above 0.5, or none, take M5 as well.
    rewards [G], counts [G] -> [G]. ValueError: rho outside 0 <= rho < 1.
    >>> session_aware_advantage([1, 1, 0, 0], [1, 3, 1, 3])
    tensor([ 1.0392,  0.6928, -1.0392, -0.6928])
    """
    rewards_G, counts_G = _vector(rewards, "rewards"), _vector(counts, "counts")
    _check(0 <= rho < 1, f"rho must be in [0, 1), else it can turn the sign of the outcome; it is {rho}")
    success_G = rewards_G > SUCCESS
    u_G = torch.zeros_like(rewards_G)
    # critical: two ranks, not one, else u carries the outcome and the group mean of M4 is not 0.
    for part_G in (success_G, ~success_G):
        if part_G.any():
            u_G[part_G] = centred_rank(counts_G[part_G]).double()
    if success_G.all():
        return (-beta1 * u_G).float()
    if not success_G.any():
        return (beta0 * u_G.clamp(max=0)).float()
    return ((1 - rho * u_G) * grpo_advantage(rewards_G)).float()


# ---- M7, M8: the marginal information gain, at session level (M6, the potential Phi, is phi.py) ------------
def information_gain(before, after):
    """M7: r_j = Phi(v_j) - Phi(v_j-1), and 0 for the final session, which states the answer.
    before, after [N], Phi around each session of a trajectory -> [N]. ValueError: empty, unequal, not finite.
    >>> information_gain([-4.0, -2.5, -3.0], [-2.5, -3.0, -0.1])
    tensor([ 1.5000, -0.5000,  0.0000])
    """
    before_N, after_N = _vector(before, "before"), _vector(after, "after")
    _check(len(before_N) == len(after_N), f"Phi before {len(before_N)} sessions and after {len(after_N)}")
    gain_N = after_N - before_N
    gain_N[-1] = 0  # critical: stating an answer makes it likely; the outcome reward pays for that already.
    return gain_N.float()


def normalise_by_kind(gains, kinds):
    """M8: r^_ij = (r_ij - mean) / (std + 1e-6) over all non-final sessions of that kind in the group.
    A kind seen once or without spread gets 0. Final sessions are in no statistic and get 0.
    gains G tensors [N_i], kinds G lists [N_i] -> G tensors [N_i].
    >>> kinds = [["normal", "compact", "normal"], ["normal", "compact", "normal"]]
    >>> normalise_by_kind([[2.0, -0.5, 0.0], [1.0, -0.1, 0.0]], kinds)
    [tensor([ 0.7071, -0.7071,  0.0000]), tensor([-0.7071,  0.7071,  0.0000])]
    """
    gains = [_vector(gain_N, "gains of a trajectory") for gain_N in gains]
    _check([*map(len, gains)] == [*map(len, kinds)], "gains and kinds must have one entry per session")
    normalised = [torch.zeros_like(gain_N).float() for gain_N in gains]
    # critical: without final sessions, else their zeros, set and not measured, pull their kind's mean.
    names = [(i, j, name) for i, kinds_N in enumerate(kinds) for j, name in enumerate(kinds_N[:-1])]
    for kind in {name for *_, name in names}:
        places = [(i, j) for i, j, name in names if name == kind]
        for (i, j), score in zip(places, _standardise(torch.stack([gains[i][j] for i, j in places]))):
            normalised[i][j] = score
    return normalised


# ---- M9 to M11: both levels together -----------------------------------------------------------------------
def mosaic_advantage(rewards, kinds, gains, rho=0.2, beta0=0.1, beta1=0.2, lam=0.1,
                     session_aware=True, shaping=True):  # fmt: skip
    """M11: A_ij = A_i^sat + lam r^_ij after M9, failure gate: in an all-failure group r^ <- min(r^, 0), and
    M10, direction gate: a sum that is 0, or not on A_i^sat's side of 0, is dropped for A_i^sat itself.
    rewards [G], kinds G lists [N_i], gains G tensors [N_i] from M7 -> G tensors [N_i].
    Ablations: session_aware=False has M1's A_i for A_i^sat; shaping=False leaves r^ out; both off are M2.
    >>> kinds = [["normal", "compact", "normal"], ["normal", "compact", "normal"]]
    >>> mosaic_advantage([1, 0], kinds, [[2.0, -0.5, 0.0], [1.0, -0.1, 0.0]])
    [tensor([0.7778, 0.6364, 0.7071]), tensor([-0.7778, -0.6364, -0.7071])]
    """
    base_GN = broadcast_advantage(rewards, kinds)
    if session_aware:
        sat_G = session_aware_advantage(rewards, [len(kinds_N) for kinds_N in kinds], rho, beta0, beta1)
        base_GN = [sat.repeat(len(kinds_N)) for sat, kinds_N in zip(sat_G, kinds)]
    if not shaping:
        return base_GN
    gain_GN = normalise_by_kind(gains, kinds)
    # critical: the gate follows the z-score; clipped first, zeros can come out of it above 0.
    if not any(reward > SUCCESS for reward in rewards):
        gain_GN = [gain_N.clamp(max=0) for gain_N in gain_GN]
    pairs = [(base_N, base_N + lam * gain_N) for base_N, gain_N in zip(base_GN, gain_GN)]
    # critical: a sum that cancels down to rounding is 0 and has no sign; a base of 0 has none to keep.
    return [torch.where((base_N == 0) | (sum_N / base_N > NOISE), sum_N, base_N) for base_N, sum_N in pairs]


# ---- M12: the objective ------------------------------------------------------------------------------------
def policy_loss(logprobs, old_logprobs, advantages, weights, clip_low=0.2, clip_high=0.2):
    """M12: -J = -sum_t weights_t min(w_t A_t, clip(w_t, 1-clip_low, 1+clip_high) A_t), w = exp(new - old).
    All tensors [T], the sampled tokens of any part of the batch -> scalar to minimise.
    weights are 1 / (G T_i), T_i the sampled tokens of the whole trajectory: the losses of all parts add up.
    >>> logprobs, old_logprobs = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.5, 0.125]).log()
    >>> policy_loss(logprobs, old_logprobs, torch.ones(2), torch.tensor([0.5, 0.5]))
    tensor(-1.1000)
    """
    shapes = [tuple(row.shape) for row in (logprobs, old_logprobs, advantages, weights)]
    _check(len(set(shapes)) == 1 and logprobs.dim() == 1, f"all four must be [T], not {shapes}")
    # critical: detached, else an old that shares the graph of the new cancels its gradient, silently.
    ratio = torch.exp(logprobs - old_logprobs.detach())
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    # critical: a sum, never a mean: the denominators are in the weights, counted before any split.
    return -(weights * torch.minimum(ratio * advantages, clipped * advantages)).sum()


# ---- IGPO (arXiv 2510.14967), the turn-level baseline ------------------------------------------------------
def igpo_advantage(rewards, turn_probs, gamma=1.0):
    """Turns t < n earn p_t - p_t-1, z-scored over all of those in the group, p = exp(Phi) the probability of
    the reference answer; turn n earns A_i of M1. A_it = sum over s >= t of gamma^(s - t) earned_is.
    rewards [G], turn_probs G tensors [turns_i + 1], entry 0 at the prompt -> G tensors [turns_i].
    >>> igpo_advantage([1, 0], [[0.1, 0.4, 0.9], [0.1, 0.2, 0.2]])
    [tensor([1.4142, 0.7071]), tensor([-1.4142, -0.7071])]
    """
    probs = [_vector(prob, "turn_probs of a trajectory") for prob in turn_probs]
    good = all(len(prob) >= 2 and prob.min() >= 0 and prob.max() <= 1 + NOISE for prob in probs)
    _check(good, "turn_probs must be rows of two or more probabilities exp(Phi)")
    advantages, changes = [], [prob[1:-1] - prob[:-2] for prob in probs]  # without the last turn's
    scores = _standardise(torch.cat(changes)).split([len(change) for change in changes])
    for score, outcome in zip(scores, _standardise(_vector(rewards, "rewards")), strict=True):
        advantages.append(torch.cat([score, outcome[None]]))
        for t in reversed(range(len(score))):
            advantages[-1][t] += gamma * advantages[-1][t + 1]
    return [advantage.float() for advantage in advantages]
