"""Credit in training: from the advantages of sessions or turns to those of tokens, and their weights in M12.

Protects that each token that the policy drew has the advantage of its session (or turn), that each trajectory
has one vote whatever its length, and that what was not computed is None and never a number. Of the formulas
alone, two properties; test_mosaic.py has them against plain loops.
"""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from common import Scripted, attempts, offline_chat, offline_tasks, run_train, tiny_model

import eval as evaluation
import harness
import mosaic
import phi
import train
from test_mosaic import random_groups

MODES = ["single", "compaction", "subagent", "both"]
TASK = offline_tasks(1, 0)[0]
MODEL, CHAT = tiny_model(seed=1)
SIZE = 6  # of a group


def group_of(mode: str) -> list[harness.Trajectory]:
    """A group of the scripted agent's, with rewards of both kinds."""
    group = attempts([TASK] * SIZE, Scripted(CHAT, seed=1), CHAT, mode=mode)
    for k, trajectory in enumerate(group):
        trajectory.reward = float(k % 2)
    return group


def give_credit(group, advantage: str, **options) -> None:
    """As a step of train.py does."""
    config = train.make_config([])
    config.advantage = advantage
    for name, value in options.items():
        setattr(config, name, value)
    turn_probs = None
    if advantage == "mosaic":
        evaluation.score_gains(MODEL, group, CHAT.cue)
    if advantage == "igpo":
        turn_probs = phi.turn_probabilities(MODEL, group, CHAT.cue)
    train.credit(group, turn_probs, config)


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


@pytest.fixture(scope="module", params=["mosaic", "broadcast", "igpo"])
def credited(request, mode):
    """A group of that mode with that credit."""
    group = group_of(mode)
    give_credit(group, request.param)
    return group


# ---- Tokens ------------------------------------------------------------------------------------------------
def test_every_token_has_an_advantage(credited):
    for trajectory in credited:
        for segment in trajectory.segments:
            assert len(segment.advantage) == len(segment.token_ids)
            for advantage in segment.advantage:
                assert math.isfinite(advantage)


def test_every_trajectory_has_one_vote(credited):
    for trajectory in credited:
        total = 0.0
        for _, columns in train.rows_of(trajectory, len(credited)):
            _, _, weights = columns
            assert len(set(weights.tolist())) <= 1
            total += weights.sum().item()
        assert total == pytest.approx(1 / len(credited))


def test_rows_hold_what_was_drawn_in_its_order(credited):
    for trajectory in credited:
        rows = train.rows_of(trajectory, len(credited))
        assert len(rows) == len(trajectory.segments)
        for (segment, columns), expected in zip(rows, trajectory.segments):
            places = [t for t, sampled in enumerate(expected.sampled) if sampled]
            old_logprobs, advantages, _ = columns
            assert segment is expected
            assert torch.equal(old_logprobs, torch.tensor([segment.logprobs[t] for t in places]))
            assert torch.equal(advantages, torch.tensor([segment.advantage[t] for t in places]))


@pytest.mark.parametrize("advantage", ["mosaic", "broadcast"])
def test_a_token_has_the_advantage_of_its_session(mode, advantage):
    group = group_of(mode)
    give_credit(group, advantage)
    for trajectory in group:
        for session in trajectory.sessions:
            segment = trajectory.segments[session.segment]
            for value in segment.advantage[session.start : session.stop]:
                assert value == session.advantage


def test_broadcast_gives_all_tokens_of_a_trajectory_the_same(mode):
    group = group_of(mode)
    give_credit(group, "broadcast")
    expected = mosaic.grpo_advantage([trajectory.reward for trajectory in group]).tolist()
    for trajectory, advantage in zip(group, expected):
        for segment in trajectory.segments:
            assert set(segment.advantage) == {advantage}


def test_mosaic_gives_what_its_formulas_say(mode):
    group = group_of(mode)
    give_credit(group, "mosaic", lam=0.7, rho=0.3)
    rewards = [trajectory.reward for trajectory in group]
    kinds = [[session.kind for session in trajectory.sessions] for trajectory in group]
    gains = []
    for trajectory in group:
        row = [session.phi_after - session.phi_before for session in trajectory.sessions[:-1]]
        gains.append([*row, 0.0])
    expected = mosaic.mosaic_advantage(rewards, kinds, gains, rho=0.3, lam=0.7)
    for trajectory, row in zip(group, expected):
        found = [session.advantage for session in trajectory.sessions]
        assert found == pytest.approx(row.tolist(), abs=1e-5)


def test_sessions_of_a_trajectory_differ_under_mosaic():
    group = group_of("both")
    give_credit(group, "mosaic")
    assert any(len({session.advantage for session in trajectory.sessions}) > 1 for trajectory in group)


# ---- Properties of the formulas ----------------------------------------------------------------------------
def test_no_gate_is_passed():
    for rewards, kinds, gains in random_groups():
        for row in mosaic.mosaic_advantage(rewards, kinds, gains, lam=1.0):
            own = row[-1]  # the final session has the trajectory's own advantage
            assert own == 0 or (row * own > 0).all()
            assert any(rewards) or (row <= own).all()


def test_orderings_by_outcome_and_session_count():
    for rewards, kinds, _ in random_groups():
        if len(set(rewards)) == 2:
            counts = [len(names) for names in kinds]
            sat = mosaic.session_aware_advantage(rewards, counts, rho=0.99).tolist()
            worth = [(reward, -n if reward else n) for reward, n in zip(rewards, counts)]
            ranked = sorted(zip(worth, sat))  # C1 to C3: from the worst trajectory to the best
            for (low, low_sat), (high, high_sat) in zip(ranked, ranked[1:]):
                assert low_sat < high_sat or low == high
            assert abs(sum(sat)) < 1e-5


# ---- Turns (IGPO) ------------------------------------------------------------------------------------------
def test_igpo_gives_each_turn_of_the_main_agent_its_own(mode):
    group = group_of(mode)
    give_credit(group, "igpo")
    rewards = [trajectory.reward for trajectory in group]
    expected = mosaic.igpo_advantage(rewards, phi.turn_probabilities(MODEL, group, CHAT.cue))
    for trajectory, row in zip(group, expected):
        turns = trajectory.main_turns()
        assert len(turns) == len(row)
        for (index, start, stop), advantage in zip(turns, row.tolist()):
            values = trajectory.segments[index].advantage[start:stop]
            assert set(values) == {advantage}


def test_every_turn_of_the_main_agent_is_counted_once(mode):
    for trajectory in group_of(mode):
        n_turns = 0
        for session in trajectory.sessions:
            if session.kind == "normal":
                n_turns += len(trajectory.segments[session.segment].turns)
        turns = trajectory.main_turns()
        assert len(set(turns)) == len(turns) == n_turns
        for index, start, stop in turns:
            assert any(trajectory.segments[index].sampled[start:stop])


@pytest.mark.parametrize("mode", ["subagent", "both"], scope="module")
def test_under_igpo_a_subagent_shares_the_turn_that_sent_it(mode):
    group = group_of(mode)
    give_credit(group, "igpo")
    n_forks = 0
    for trajectory in group:
        for session in trajectory.sessions:
            if session.kind != "subagent":
                continue
            n_forks += 1
            for index, start, stop in trajectory.main_turns():
                if index == session.before[0] and start < session.before[1] <= stop:
                    sender = trajectory.segments[index].advantage[start]
            assert set(trajectory.segments[session.segment].advantage) == {sender}
    assert n_forks > 0


def test_turn_probabilities_begin_at_the_prompt_and_are_probabilities(mode):
    group = group_of(mode)
    rows = phi.turn_probabilities(MODEL, group, CHAT.cue)
    for trajectory, row in zip(group, rows):
        prompt = trajectory.segments[trajectory.main_turns()[0][0]].token_ids
        prompt = prompt[: trajectory.main_turns()[0][1]]
        first = phi.answer_logprob(MODEL, [prompt + CHAT.cue], [trajectory.reference_ids]).exp()
        assert len(row) == len(trajectory.main_turns()) + 1
        assert row[0].item() == pytest.approx(first.item(), rel=1e-4)
        assert row.min() >= 0 and row.max() <= 1


# ---- Phi and gains -----------------------------------------------------------------------------------------
def test_gains_are_differences_of_phi_and_the_final_session_has_none(mode):
    group = group_of(mode)
    evaluation.score_gains(MODEL, group, CHAT.cue)
    for trajectory in group:
        final = trajectory.sessions[-1]
        assert (final.phi_before, final.phi_after, final.gain) == (None, None, 0.0)
        for session in trajectory.sessions[:-1]:
            assert session.gain == pytest.approx(session.phi_after - session.phi_before, abs=1e-5)


def test_phi_is_that_of_the_contexts_around_each_session(mode):
    group = group_of(mode)
    evaluation.score_gains(MODEL, group, CHAT.cue)
    contexts = []
    answers = []
    found = []
    for trajectory in group:
        for session in trajectory.sessions[:-1]:
            for segment, position in (session.before, session.after):
                contexts.append(trajectory.segments[segment].token_ids[:position] + CHAT.cue)
                answers.append(trajectory.reference_ids)
            found += [session.phi_before, session.phi_after]
    if mode == "single":
        assert found == []
    else:
        expected = phi.answer_logprob(MODEL, contexts, answers).tolist()
        assert found == pytest.approx(expected, abs=1e-4)


def test_phi_that_is_not_finite_gives_no_gain(monkeypatch):
    group = group_of("both")

    def broken(model, contexts, *args, **options):
        values = torch.zeros(len(contexts))
        values[0] = float("nan")
        values[3] = float("-inf")
        return values

    monkeypatch.setattr(phi, "answer_logprob", broken)
    evaluation.score_gains(MODEL, group, CHAT.cue)
    for trajectory in group:
        for session in trajectory.sessions:
            assert session.gain == 0.0


# ---- What was not computed ---------------------------------------------------------------------------------
def test_after_a_rollout_nothing_of_the_credit_is_set(mode):
    for trajectory in group_of(mode):
        for session in trajectory.sessions:
            values = (
                session.phi_before,
                session.phi_after,
                session.gain,
                session.normalised,
                session.advantage,
            )
            assert values == (None,) * 5
        for segment in trajectory.segments:
            assert segment.advantage == []


@pytest.mark.parametrize("advantage", ["broadcast", "igpo"])
def test_a_credit_without_phi_at_sessions_leaves_gains_unset(mode, advantage):
    group = group_of(mode)
    give_credit(group, advantage)
    for trajectory in group:
        for session in trajectory.sessions:
            assert (session.phi_before, session.phi_after, session.gain, session.normalised) == (None,) * 4
            assert session.advantage is not None


def test_a_trajectory_without_a_reward_has_no_vote():
    rolled = group_of("both")
    rolled[1].reward = None
    rolled[1].stop = "infra"
    run = SimpleNamespace(config=train.make_config(["--group-size=3"]))
    groups = train.groups_of(run, rolled, 0)
    assert groups == [[rolled[0], rolled[2]], rolled[3:]]


def test_a_step_that_lost_more_than_half_of_its_trajectories_ends_the_run():
    rolled = group_of("both")
    for trajectory in rolled[:4]:
        trajectory.reward = None
        trajectory.stop = "infra"
    run = SimpleNamespace(config=train.make_config(["--group-size=3", "--tasks-per-step=2"]))
    with pytest.raises(harness.UserError, match="lost"):
        train.groups_of(run, rolled, 0)


def test_broadcast_pays_for_no_phi(tmp_path, monkeypatch):
    monkeypatch.setattr(train.phi, "answer_logprob", None)
    flags = ["--steps=1", "--tasks-per-step=1", "--minibatches=1", "--eval-tasks=0"]
    run_train(*flags, "--advantage=broadcast", f"--out={tmp_path}/run")


# ---- Refusals ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rho", [1.0, -0.1, float("nan")])
def test_rho_that_could_turn_an_outcome_is_refused(rho):
    with pytest.raises(ValueError, match="rho"):
        mosaic.session_aware_advantage([1, 0], [1, 1], rho=rho)
    with pytest.raises(harness.UserError, match="--rho"):
        train.make_config([f"--rho={rho}"])


@pytest.mark.parametrize(("position", "answer"), [(9, [1]), (-1, [1]), (2, [])])
def test_phi_beyond_a_segment_or_of_nothing_is_refused(position, answer):
    with pytest.raises(ValueError, match="Phi needs"):
        phi.segment_potentials(MODEL, [1] * 8, [position], [2], answer)


@pytest.mark.parametrize(
    ("contexts", "answers"), [([[1], [1]], [[2], []]), ([[]], [[2]]), ([[1]], [[2], [2]])]
)
def test_phi_of_an_empty_context_or_answer_is_refused(contexts, answers):
    with pytest.raises(ValueError, match="Phi needs"):
        phi.answer_logprob(MODEL, contexts, answers)


@pytest.mark.parametrize("rewards", [[], [1.0, None], [1.0, float("nan")], [[1.0, 0.0]]])
def test_rewards_that_are_no_numbers_are_refused(rewards):
    with pytest.raises(ValueError, match="rewards"):
        mosaic.grpo_advantage(rewards)


# ---- The loss of a batch -----------------------------------------------------------------------------------
def test_a_step_follows_the_gradient_of_m12_written_out():
    flags = ["--mode=both", "--minibatches=1", "--parity-tolerance=9", "--temperature=0.8", "--clip-low=0.3"]
    config = train.make_config(flags)
    model, _ = tiny_model(seed=2)
    group = attempts([TASK] * 4, Scripted(CHAT, seed=1), CHAT, mode="both")
    rng = random.Random(0)
    loss = 0.0
    for trajectory in group:
        n_sampled = sum(sum(segment.sampled) for segment in trajectory.segments)
        for segment in trajectory.segments:
            logits = model(torch.tensor([segment.token_ids])).logits[0, :-1]
            logprobs = (logits / 0.8).log_softmax(-1)
            segment.advantage = [rng.uniform(-1, 1) for _ in segment.token_ids]
            for t, sampled in enumerate(segment.sampled):
                if not sampled:
                    continue
                logprob = logprobs[t - 1, segment.token_ids[t]]
                segment.logprobs[t] = logprob.item() + rng.uniform(-0.5, 0.5)
                ratio = (logprob - segment.logprobs[t]).exp()
                clipped = ratio.clamp(0.7, 1.2)
                advantage = segment.advantage[t]
                smaller = torch.minimum(ratio * advantage, clipped * advantage)
                loss = loss - smaller / len(group) / n_sampled
    weights = list(model.parameters())
    before = [weight.detach().clone() for weight in weights]
    gradients = torch.autograd.grad(loss, weights)
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    row = train.update(model, torch.optim.SGD(weights, lr=1.0), group, 0, config)
    assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert 0.1 < row["engine_gap"] < 1
    assert 0.1 < row["clip_fraction"] < 0.9
    for weight, old, gradient in zip(weights, before, gradients):
        step = -gradient / max(1.0, norm)  # the norm is clipped at 1
        torch.testing.assert_close(weight.detach() - old, step, atol=1e-5, rtol=1e-3)


def test_log_probs_of_engine_and_trainer_that_differ_end_the_run():
    config = train.make_config(["--minibatches=1", "--parity-tolerance=0.01"])
    group = group_of("both")
    give_credit(group, "broadcast")
    model, _ = tiny_model(seed=2)
    with pytest.raises(harness.UserError, match="engine and trainer differ by"):
        train.update(model, torch.optim.SGD(model.parameters(), lr=1.0), group, 0, config)


def test_an_update_does_not_depend_on_how_the_batch_is_cut():
    steps = []
    for token_budget in (1, 10**6):
        group = group_of("both")
        give_credit(group, "mosaic")
        model, _ = tiny_model(seed=2)
        before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
        config = train.make_config(
            ["--minibatches=1", "--parity-tolerance=1e9", f"--token-budget={token_budget}"]
        )
        train.update(model, torch.optim.SGD(model.parameters(), lr=1.0), group, 0, config)
        steps.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]) - before)
    assert steps[0].abs().max() > 1e-4
    torch.testing.assert_close(steps[0], steps[1], atol=1e-5, rtol=1e-3)


def test_a_group_whose_rewards_are_alike_and_sessions_as_many_has_no_credit():
    group = attempts([TASK] * 3, Scripted(offline_chat(), seed=1), CHAT, mode="single")
    for trajectory in group:
        trajectory.reward = 0.0
    give_credit(group, "mosaic")
    for trajectory in group:
        assert not any(any(segment.advantage) for segment in trajectory.segments)
