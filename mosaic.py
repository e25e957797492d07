"""Mosaic's credit: every formula of the method but Phi (M6, phi.py), as pure functions of tensors.

A trajectory is a set of sessions. Broadcast GRPO gives all of them one advantage. Mosaic changes that twice:
- at trajectory level (M3 to M5) a success with fewer sessions earns more, one that gave up early loses more;
- at session level (M7 to M10) a session earns by how much likelier it made the right answer, in its kind.
The sum (M11) is one advantage per session, and all its tokens get it in the clipped policy loss (M12).

Shapes: _G trajectories of a group, _N sessions of one, _T tokens, _n any row. What has an entry per session
is "ragged", a list of G tensors [N_i]. To M11, lists or tensors go in, statistics are in float64,
float32 without gradient comes out, and wrong input is a ValueError.
"""

from typing import NamedTuple

import torch

KINDS = ("normal", "compact", "subagent")
SUCCESS = 0.5  # a reward above this is a success
ROUNDING = 4 * torch.finfo(torch.float32).eps  # relative size of a difference that is only float32 rounding


def check(condition, message):
    if not condition:
        raise ValueError(message)


def as_row(values, name):
    """A non-empty row of finite numbers, in float64 and without gradient."""
    try:
        row = torch.as_tensor(values, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be numbers: {error}") from None
    is_row = row.dim() == 1 and len(row) > 0 and torch.isfinite(row).all()
    check(is_row, f"{name} must be a non-empty row of finite numbers, not {values}")
    return row


def standardise(x_n):
    """(x - mean) / (std + 1e-6), std with n - 1; zeros where there is no spread to speak of."""
    deviation_n = x_n - x_n.mean()
    # critical: equal float32 values can differ in the last bit; over 1e-6 that would look like a signal.
    if len(x_n) < 2 or deviation_n.abs().max() <= ROUNDING * max(1.0, x_n.abs().max().item()):
        return torch.zeros_like(x_n)
    return deviation_n / (x_n.std() + 1e-6)


# ---- M1, M2: one advantage per trajectory, the same for all its sessions -----------------------------------
def grpo_advantage(rewards):
    """M1: A_i = (R_i - mean(R)) / (std(R) + 1e-6), std with n - 1; 0 where all rewards are equal.
    rewards [G] -> [G]. ValueError: an empty group; a reward that is None, NaN or infinite.
    >>> grpo_advantage([1, 0, 0, 0])
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])
    """
    return standardise(as_row(rewards, "rewards")).float()


def broadcast_advantage(rewards, kinds):
    """M2, the baseline: A_ij = A_i for every session j. rewards [G], kinds G lists [N_i] -> ragged [N_i].
    >>> broadcast_advantage([1, 0], [["normal", "compact", "normal"], ["normal"]])
    [tensor([0.7071, 0.7071, 0.7071]), tensor([-0.7071])]
    """
    return [a.repeat(len(kinds_N)) for a, kinds_N in zip(grpo_advantage(rewards), kinds, strict=True)]


# ---- M3 to M5: the session-count signal, at trajectory level -----------------------------------------------
def centred_rank(counts):
    """M3: u_i = 2 f_i - 1, f_i = (#{k: N_k < N_i} + 0.5 #{k != i: N_k = N_i}) / (n - 1), f = 0.5 where n = 1.
    counts [n], the session counts of a group's successes (or of its failures) -> u [n] in [-1, 1].
    >>> centred_rank([1, 2, 2, 5])
    tensor([-1.,  0.,  0.,  1.])
    """
    counts_n = as_row(counts, "counts")
    if len(counts_n) == 1:
        return torch.zeros(1)
    fewer_n = (counts_n[None, :] < counts_n[:, None]).sum(1)
    ties_n = (counts_n[None, :] == counts_n[:, None]).sum(1) - 1  # without itself
    return (2 * (fewer_n + 0.5 * ties_n) / (len(counts_n) - 1) - 1).float()


def session_aware_advantage(rewards, counts, rho=0.2, beta0=0.1, beta1=0.2):
    """M4: A_i^sat = (1 - rho u_i) A_i, u_i the rank of the session count among equal outcomes.
    M5, where all end alike (above .5 or not): all succeed, A_i^sat = -beta1 u_i; all fail, A_i^sat = beta0
    min(u_i, 0): wandering is never rewarded. rewards [G], counts [G] -> [G]. ValueError: rho outside [0, 1).
    >>> session_aware_advantage([1, 1, 0, 0], [1, 3, 1, 3])
    tensor([ 1.0392,  0.6928, -1.0392, -0.6928])
    """
    rewards_G = as_row(rewards, "rewards")
    counts_G = as_row(counts, "counts")
    check(len(rewards_G) == len(counts_G), f"{len(rewards_G)} rewards but {len(counts_G)} session counts")
    check(0 <= rho < 1, f"rho must be in [0, 1), else it can turn the sign of the outcome; it is {rho}")
    success_G = rewards_G > SUCCESS
    u_G = torch.zeros_like(rewards_G)
    # critical: two rankings and not one, else u carries the outcome and the group's mean of M4 is not 0.
    for part_G in (success_G, ~success_G):
        if part_G.any():
            u_G[part_G] = centred_rank(counts_G[part_G]).double()
    if success_G.all():
        return (-beta1 * u_G).float()
    if not success_G.any():
        return (beta0 * u_G.clamp(max=0)).float()
    return ((1 - rho * u_G) * grpo_advantage(rewards_G)).float()


# ---- M7, M8: the marginal information gain, at session level -----------------------------------------------
def information_gain(before, after):
    """M7: r_j = Phi(v_j) - Phi(v_j-1), and 0 for the final session, which states the answer.
    before, after [N], Phi in nats per token around each session of one trajectory -> [N].
    >>> information_gain([-4.0, -2.5, -3.0], [-2.5, -3.0, -0.1])
    tensor([ 1.5000, -0.5000,  0.0000])
    """
    check(len(before) == len(after), f"Phi before {len(before)} sessions but after {len(after)}")
    gain_N = as_row(after, "after") - as_row(before, "before")
    # critical: stating an answer makes it likely, and the outcome reward pays for that already.
    gain_N[-1] = 0
    return gain_N.float()


def normalise_by_kind(gains, kinds):
    """M8: r^_ij = (r_ij - mean) / (std + 1e-6), over the non-final sessions of that kind in the group.
    Final ones, and kinds seen once or without spread, get 0. gains ragged [N_i], kinds G lists -> ragged.
    >>> kinds = [["normal", "compact", "normal"], ["normal", "compact", "normal"]]
    >>> normalise_by_kind([[2.0, -0.5, 0.0], [1.0, -0.1, 0.0]], kinds)
    [tensor([ 0.7071, -0.7071,  0.0000]), tensor([-0.7071,  0.7071,  0.0000])]
    """
    gains = [as_row(gain_N, "gains of a trajectory") for gain_N in gains]
    lengths = [len(gain_N) for gain_N in gains]
    check(lengths == [len(kinds_N) for kinds_N in kinds], "gains and kinds must have one entry per session")
    # critical: without the final session, whose 0 was set and not measured: it would pull the mean.
    names = [name for kinds_N in kinds for name in [*kinds_N[:-1], "final"]]
    scores_n = torch.zeros(len(names))
    for kind in set(names) - {"final"}:
        same_n = torch.tensor([name == kind for name in names])
        scores_n[same_n] = standardise(torch.cat(gains)[same_n]).float()
    return list(scores_n.split(lengths))


# ---- M9 to M11: both levels together -----------------------------------------------------------------------
def direction_gate(base_N, total_N):
    """M10: where the total is not on the base's side of 0, take the base. A base of 0 has no side.
    base_N [N] the trajectory's advantage, total_N [N] the same with the gain added -> [N].
    >>> direction_gate(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.6, -0.1, -0.1]))
    tensor([ 0.6000,  0.5000, -0.1000])
    """
    # critical: a total that cancels down to float32 rounding is 0, whatever its sign.
    same_side_N = total_N * base_N > ROUNDING * base_N**2
    return torch.where(same_side_N | (base_N == 0), total_N, base_N)


def mosaic_advantage(rewards, kinds, gains, rho=0.2, beta0=0.1, beta1=0.2, lam=0.1,
                     session_aware=True, shaping=True, normalised=None):  # fmt: skip
    """M11: A_ij = A_i^sat + lam r^_ij through the direction gate (M10), r^ after the failure gate (M9): where
    all fail, r^_ij <- min(r^_ij, 0), so that none of its sessions is reinforced.
    rewards [G], kinds G lists [N_i], gains ragged [N_i] (M7) -> ragged [N_i]. normalised: M8 of the gains,
    where known. The paper's ablations: without session_aware A_i (M1) is A_i^sat, without shaping r^ is out.
    >>> kinds = [["normal", "compact", "normal"], ["normal", "compact", "normal"]]
    >>> mosaic_advantage([1, 0], kinds, [[2.0, -0.5, 0.0], [1.0, -0.1, 0.0]])
    [tensor([0.7778, 0.6364, 0.7071]), tensor([-0.7778, -0.6364, -0.7071])]
    """
    advantages = broadcast_advantage(rewards, kinds)
    if session_aware:
        sat_G = session_aware_advantage(rewards, [len(kinds_N) for kinds_N in kinds], rho, beta0, beta1)
        advantages = [sat.repeat(len(kinds_N)) for sat, kinds_N in zip(sat_G, kinds)]
    if not shaping:
        return advantages
    if normalised is None:
        normalised = normalise_by_kind(gains, kinds)
    # critical: the failure gate comes after the z-score. Clipped first, zeros could end up above 0.
    if not any(reward > SUCCESS for reward in rewards):
        normalised = [normalised_N.clamp(max=0) for normalised_N in normalised]
    return [direction_gate(a_N, a_N + lam * r_N) for a_N, r_N in zip(advantages, normalised, strict=True)]


# ---- M12: the objective ------------------------------------------------------------------------------------
def policy_loss(logprobs, old_logprobs, advantages, weights, clip_low=0.2, clip_high=0.2):
    """M12: -J = -sum_t weight_t min(w_t A_t, clip(w_t, 1 - clip_low, 1 + clip_high) A_t), w = exp(new - old).
    All four [T], the sampled tokens of any part of a batch -> a scalar to minimise. weights are 1 / (G T_i),
    T_i the sampled tokens of the whole trajectory: however the batch is cut, the parts' losses add up.
    >>> new = torch.tensor([0.5, 0.25]).log()
    >>> old = torch.tensor([0.5, 0.125]).log()
    >>> policy_loss(new, old, advantages=torch.ones(2), weights=torch.tensor([0.5, 0.5]))
    tensor(-1.1000)
    """
    shapes = [tuple(values.shape) for values in (logprobs, old_logprobs, advantages, weights)]
    are_rows = len(set(shapes)) == 1 and logprobs.dim() == 1
    check(are_rows, f"all four must be [T], not {shapes}")
    # critical: detached, since an old log-prob that shares the new one's graph would cancel its gradient.
    ratio_T = torch.exp(logprobs - old_logprobs.detach())
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    # critical: a sum and never a mean. The denominators are in the weights, counted before any split.
    return -(weights * torch.minimum(ratio_T * advantages, clipped_T * advantages)).sum()


# ---- IGPO (arXiv 2510.14967), the turn-level baseline ------------------------------------------------------
def igpo_advantage(rewards, turn_probs, gamma=1.0):
    """Turn t < n earns p_t - p_t-1, z-scored over all such turns of the group; p = exp(Phi), the probability
    of the reference answer. The last turn earns A_i of M1 instead. A_it = sum_{s >= t} gamma^(s-t) earned_is.
    rewards [G], turn_probs G rows [turns_i + 1], entry 0 at the prompt -> G tensors [turns_i].
    >>> igpo_advantage([1, 0], [[0.1, 0.4, 0.9], [0.1, 0.2, 0.2]])
    [tensor([1.4142, 0.7071]), tensor([-1.4142, -0.7071])]
    """
    probs = [as_row(prob_n, "turn_probs of a trajectory") for prob_n in turn_probs]
    for prob_n in probs:
        good = len(prob_n) >= 2 and prob_n.min() >= 0 and prob_n.max() <= 1 + ROUNDING
        check(good, "turn_probs must be rows of two or more probabilities")
    changes = [prob_n[1:-1] - prob_n[:-2] for prob_n in probs]  # of all turns but the last
    scores = standardise(torch.cat(changes)).split([len(change_n) for change_n in changes])
    advantages = []
    for score_n, outcome in zip(scores, standardise(as_row(rewards, "rewards")), strict=True):
        advantage_n = torch.cat([score_n, outcome[None]])
        for t in reversed(range(len(score_n))):
            advantage_n[t] += gamma * advantage_n[t + 1]
        advantages.append(advantage_n.float())
    return advantages


# ---- The credits that --advantage can name -----------------------------------------------------------------
class Group(NamedTuple):  # one group as a credit sees it; what was not computed is None
    rewards: list  # [G]
    kinds: list  # G lists [N_i]
    gains: list | None  # M7, ragged [N_i]
    normalised: list | None  # M8, ragged [N_i]
    turn_probs: list | None  # G tensors [turns_i + 1]


def mosaic_credit(group, config):
    rates = (config.rho, config.beta0, config.beta1, config.lam, config.session_aware, config.shaping)
    return mosaic_advantage(group.rewards, group.kinds, group.gains, *rates, group.normalised)


ADVANTAGES = {  # functions (group, config) -> ragged [N_i], igpo [turns_i]; train.py gives broadcast no gains
    "mosaic": mosaic_credit,
    "broadcast": lambda group, config: broadcast_advantage(group.rewards, group.kinds),
    "igpo": lambda group, config: igpo_advantage(group.rewards, group.turn_probs),
}
