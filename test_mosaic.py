"""Formulas against plain loops, which come first: python -m pytest -q. All else is tested in .ci/tests."""

import random
from statistics import mean, stdev

import pytest
import torch

import mosaic

torch.set_num_threads(1)
close = torch.testing.assert_close


# ---- The method in plain loops -----------------------------------------------------------------------------
def z_score(x):
    spread = stdev(x) if len(x) > 1 else 0.0
    return [(value - mean(x)) / (spread + 1e-6) if spread > 1e-6 else 0.0 for value in x]


def by_hand(rewards, kinds, gains, rho, beta0, beta1, lam, session_aware, shaping):
    """M1 to M11 for one group: rewards a number per trajectory, kinds and gains a list per trajectory."""
    advantages = []
    for i, names in enumerate(kinds):
        # M3: the rank of the session count among the trajectories with the same outcome, from -1 to 1
        mates = [len(other) for other, reward in zip(kinds, rewards) if reward == rewards[i]]
        fewer = sum(n < len(names) for n in mates)
        ties = sum(n == len(names) for n in mates) - 1
        u = 2 * (fewer + 0.5 * ties) / (len(mates) - 1) - 1 if len(mates) > 1 else 0.0
        base = z_score(rewards)[i]  # M1
        if session_aware and len(mates) < len(kinds):
            base = (1 - rho * u) * base  # M4
        elif session_aware:
            base = -beta1 * u if rewards[i] else beta0 * min(u, 0)  # M5
        row = []
        for j, name in enumerate(names):
            same = []  # M8: places of all sessions of this kind but the final ones
            for a, others in enumerate(kinds):
                same += [(a, b) for b in range(len(others) - 1) if others[b] == name]
            scores = z_score([gains[a][b] for a, b in same])
            gain = scores[same.index((i, j))] if (i, j) in same else 0.0
            gain = gain if any(rewards) else min(gain, 0)  # M9
            total = base + lam * gain if shaping else base  # M11
            row.append(base if base and base * total <= 0 else total)  # M10
        advantages.append(row)
    return advantages


def random_groups():
    for rng in map(random.Random, range(120)):  # rewards mixed, all 1, all 0; gains wide, narrow, alike
        luck = rng.choice((0.5, 0.5, 0, 1))
        scale = rng.choice((0.02, 1, 1, 1e-8))
        size = rng.randint(1, 8)
        kinds = [rng.choices(mosaic.KINDS, k=rng.randint(0, 4)) + ["normal"] for _ in range(size)]
        gains = [[rng.gauss(0.3, scale) for _ in names[1:]] + [0.0] for names in kinds]
        yield [int(rng.random() < luck) for _ in kinds], kinds, gains


# ---- Credit ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("switches", [(1, 1), (0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("rates", [(0.2, 0.1, 0.2, 0.1), (0.3, 0.4, 0.5, 1.0)])
def test_credit_equals_the_plain_loops(rates, switches):
    for rewards, kinds, gains in random_groups():
        got = mosaic.mosaic_advantage(rewards, kinds, gains, *rates, *switches)
        close(got, [torch.tensor(row) for row in by_hand(rewards, kinds, gains, *rates, *switches)])


@pytest.mark.parametrize("cuts", [[5], [2, 0, 3], [1] * 5])
def test_loss_is_the_objective_however_the_batch_is_cut(cuts):
    policy = torch.randn(4, 6, generator=torch.manual_seed(0), requires_grad=True)
    new = (torch.randn(5, 4) @ policy).log_softmax(1)[range(5), [0, 3, 1, 5, 2]]
    old = new - torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1]).log()  # shares the graph of the new one
    rows = (new, old, torch.tensor([1.0, -1, 1, -1, 2]), torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4]))
    loss = 0.0
    for part in torch.randperm(5).split(cuts):
        loss = loss + mosaic.policy_loss(*[row[part] for row in rows], 0.3, 0.28)
    close(loss, torch.tensor(-(1.28 - 1.5 + 0.5) / 6 - (-0.7 + 2.2) / 4))
    slope = new @ torch.tensor([0, 1.5 / 6, -0.5 / 6, 0, -2.2 / 4])
    close(torch.autograd.grad(loss, policy, retain_graph=True), torch.autograd.grad(slope, policy))
