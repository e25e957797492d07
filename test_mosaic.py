"""Formulas against plain loops, fast paths against naive ones, agents in any limits: python -m pytest -q"""

import asyncio
import random
import re
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
import transformers

import harness
import mosaic
import phi

torch.set_num_threads(1)
close = torch.testing.assert_close
CHAT = harness.Chat(harness.offline_tokenizer())


def random_groups():
    for rng in map(random.Random, range(120)):  # rewards mixed, all 1, all 0; gains wide, narrow, alike
        size, luck, scale = rng.randint(1, 8), rng.choice((0.5, 0.5, 0, 1)), rng.choice((0.02, 1, 1, 1e-8))
        kinds = [rng.choices(mosaic.KINDS, k=rng.randint(0, 4)) + ["normal"] for _ in range(size)]
        gains = [[0.3 + scale * rng.gauss(0, 1) for _ in names[:-1]] + [0.0] for names in kinds]
        yield [int(rng.random() < luck) for _ in kinds], kinds, gains, rng.sample(range(size), size)


# The method in plain loops stands in the README, for its readers; the formulas are tested against that.
LOOPS = {}
exec(Path(__file__).with_name("README.md").read_text("utf-8").split("```python\n")[1].split("```")[0], LOOPS)
by_hand = LOOPS["mosaic"]


@pytest.mark.parametrize("switches", [(1, 1), (0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("rates", [(0.2, 0.1, 0.2, 0.1), (0.3, 0.4, 0.5, 1.0)])
def test_credit_equals_plain_loops_and_keeps_its_gates(rates, switches):
    for rewards, kinds, gains, order in random_groups():
        probs = [torch.tensor([0.5] + row).sigmoid().tolist() for row in gains]
        turns = mosaic.igpo_advantage(rewards, probs, gamma=0.7)
        close(turns, list(map(torch.tensor, LOOPS["igpo"](rewards, probs, 0.7))))
        got = mosaic.mosaic_advantage(rewards, kinds, gains, *rates, *switches)
        close(got, list(map(torch.tensor, by_hand(rewards, kinds, gains, *rates, *switches))))
        for row in got:  # its last entry, the final session's, is the trajectory's own advantage
            assert (any(rewards) or (row <= row[-1]).all()) and (row[-1] == 0 or (row * row[-1] > 0).all())
        shuffled = [[x[i] for i in order] for x in (rewards, kinds, [row[:-1] + [len(row)] for row in gains])]
        close(mosaic.mosaic_advantage(*shuffled, *rates, *switches), [got[i] for i in order])
        assert any(switches) or all(map(torch.equal, got, mosaic.broadcast_advantage(rewards, kinds)))
        counts = list(map(len, kinds))  # C1 to C3: the orderings by outcome and session count
        sat, u = mosaic.session_aware_advantage(rewards, counts, rho=0.99), mosaic.centred_rank(counts)
        assert abs(u.mean()) < 1e-6 and mosaic.centred_rank([0, *counts, 9])[[0, -1]].tolist() == [-1, 1]
        if len(set(rewards)) == 2:
            worth = [(reward, -n if reward else n) for reward, n in zip(rewards, counts)]
            assert all(a > b for a, v in zip(sat, worth) for b, w in zip(sat, worth) if v > w)
            assert all(a * (r - 0.5) > 0 for a, r in zip(sat, rewards)) and abs(sat.sum()) < 1e-5


@pytest.mark.parametrize("cuts", [[5], [2, 0, 3], [1] * 5])
def test_loss_is_the_objective_however_the_batch_is_cut(cuts):
    policy = torch.randn(4, 6, generator=torch.manual_seed(0), requires_grad=True)
    new = (torch.randn(5, 4) @ policy).log_softmax(1)[range(5), [0, 3, 1, 5, 2]]
    old = new - torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1]).log()  # shares the graph of the new one
    rows = new, old, *torch.tensor([[1.0, -1, 1, -1, 2], [1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4]])  # 1/(G T_i)
    loss = sum(mosaic.policy_loss(*(r[p] for r in rows), 0.3, 0.28) for p in torch.randperm(5).split(cuts))
    close(loss, torch.tensor(-(1.28 - 1.5 + 0.5) / 6 - (-0.7 + 2.2) / 4))
    slope = new @ torch.tensor([0, 1.5 / 6, -0.5 / 6, 0, -2.2 / 4])
    close(torch.autograd.grad(loss, policy, retain_graph=True), torch.autograd.grad(slope, policy))


IDS = torch.randint(1, 80, (300,), generator=torch.Generator().manual_seed(0)).tolist()
CUE, ANSWER = IDS[200:205], IDS[205:209]


@pytest.fixture(scope="module", params=["Qwen3Config", "Qwen3_5TextConfig", "LlamaConfig"])
def lm(request):
    sizes = {"vocab_size": 80, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1}
    if "5" in request.param:
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
        sizes |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 2}
    torch.manual_seed(0)
    config = getattr(transformers, request.param)(tie_word_embeddings="Llama" in request.param, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("forward_tokens", [0, 64, 10**6])  # all walks, a mixture, all rows
def test_phi_in_rows_and_in_walks(lm, monkeypatch, forward_tokens):
    monkeypatch.setattr(phi, "FORWARD_TOKENS", forward_tokens)
    a, b = (IDS[:150], ANSWER), (IDS[9:], CUE)
    places = [(a, 150), (b, 291), (a, 1), (a, 77), (b, 250), (a, 0), (a, 150), (a, 20), (b, 260)]
    requests = [(ids, p, answer) for (ids, answer), p in places]
    lm.gradient_checkpointing_enable()
    lm.train()  # as in the middle of training: the cache must survive it
    got = phi.potentials(lm, requests, CUE, token_budget=400)
    lm.gradient_checkpointing_disable()
    for value, (ids, p, answer) in zip(got, requests):
        logp = lm(torch.tensor([ids[:p] + CUE + answer])).logits[0, :-1].log_softmax(-1)[-len(answer) :]
        assert value == pytest.approx(logp[range(len(answer)), answer].mean().item(), abs=1e-5)


@pytest.mark.parametrize("token_budget", [1, 130, 16384])
def test_token_logprobs_their_gradient_and_entropy(lm, token_budget):
    sequences = [IDS[:60], IDS[:2], IDS[100:165]]
    wanted = [[True] * 59, [False], [t % 3 > 0 for t in range(64)]]
    options = {"token_budget": token_budget, "with_entropy": True, "chunk": 17, "temperature": 0.7}
    logps, entropies = phi.token_logprobs(lm, sequences, wanted, **options)
    assert list(map(len, logps)) == list(map(len, entropies)) == list(map(sum, wanted))
    rows = [lm(torch.tensor([ids])).logits[0, :-1][mask] / 0.7 for ids, mask in zip(sequences, wanted)]
    targets = torch.cat([torch.tensor(ids[1:])[mask] for ids, mask in zip(sequences, wanted)])
    naive = torch.distributions.Categorical(logits=torch.cat(rows))
    both = torch.cat(logps), naive.log_prob(targets)
    close(*both, atol=1e-5, rtol=1e-5)
    close(torch.cat(entropies), naive.entropy().detach(), atol=1e-5, rtol=1e-5)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), list(lm.parameters())) for x in both)):
        close(a, b, atol=2e-5 * max(1, b.abs().max().item()), rtol=1e-4)


TASK, MODES = harness.offline_tasks(1, 0)[0], ["single", "compaction", "subagent", "both"]
CALL = '<tool_call>{"name": "%s", "arguments": {"%s": "%s"}}</tool_call>'


def attempt(chat, reply, task=TASK, prompts="offline", **limits):
    """A rollout by a policy that writes what `reply(context, room)` returns, and what holds of every one."""
    log, limits = [], harness.Limits(prompts=prompts, **limits)

    class Writer:
        async def generate(self, ids, room, stop):
            new = await reply(chat.decode(ids), room)
            new = [*(chat.own(new) if isinstance(new, str) else new), *stop]
            new = new[: min(room, new.index(stop[0]) + 1)]
            log.append((ids, new, [-random.random() for _ in new]))
            return new[:], log[-1][2][:], "stop" if new[-1] == stop[0] else "length"

    t = asyncio.run(harness.rollout(task, Writer(), chat, limits=limits))
    assert sum(sum(segment.sampled) for segment in t.segments) == sum(len(new) for _, new, _ in log)
    for ids, new, logprobs in log:  # no two log-probs are alike: each is found in one place only
        a, b = len(ids), len(ids) + len(new)
        found = [s for s in t.segments if s.token_ids[:b] == ids + new and s.logprobs[a:b] == logprobs]
        assert len(found) == 1 and all(found[0].sampled[a:b]) and b <= limits.max_context
    for i, segment in enumerate(t.segments):
        owners = [[j] * (s.stop - s.start) for j, s in enumerate(t.sessions) if s.segment == i]
        assert segment.session == [*chain(*owners)] and len(segment.session) <= limits.max_context
        assert len(segment.session) == len(segment.token_ids) == len(segment.sampled) == len(segment.logprobs)
    main = [s for s in t.sessions if s.kind != "subagent"]  # M7: contexts chain along the main agent ...
    assert t.sessions[-1] is main[-1] and [s.kind for s in main] == (["normal", "compact"] * 9)[: len(main)]
    assert main[-1].kind == "normal" or t.stop == "truncated"
    for a, b in pairwise(main):
        assert a.after == b.before == (b.segment, b.start if b.kind == "compact" else b.before[1])
    for s, following in zip(main[1::2], main[2::2]):  # a summary stands in the next prefix as it was drawn
        opened = t.segments[s.segment].turns[-1] + len(chat.generation)
        drawn = [i for i in t.segments[s.segment].token_ids[opened : s.stop] if i not in chat.control]
        drawn = drawn[: len(drawn) - len(chat.close) + 1] + chat.close
        assert t.segments[following.segment].token_ids[: following.before[1]][-len(drawn) :] == drawn
    forks = [s for s in t.sessions if s.kind == "subagent"]  # merged as called, and chained by contexts
    assert all(a.segment < b.segment and a.after <= b.before for a, b in pairwise(forks))
    assert len(t.segments) == len(forks + main[::2])
    return t


@pytest.mark.parametrize("mode", MODES)
def test_any_policy_in_any_limits(mode):
    async def reply(context, room):
        busy.append(len(busy))
        for _ in range(rng.randint(0, 3)):
            await asyncio.sleep(0)
        together.add(len(busy))
        busy.pop()
        if greedy:  # takes all the room there is, for turns, responses and summaries
            asked = re.search(r"(Summarize|Shorter)\.<.im_end.>\n<.im_start.>assistant\n$", context)
            ids = [] if asked else CHAT.own("".join(visits[: limits["max_parallel_calls"]]))
            return ids + [40] * (room - len(ids) - 1 + bool(asked and asked[1] == "Summarize"))
        name = rng.choice([*harness.NAMES, "From", "<tool_call>", "<|im_start|>"])
        calls = [CALL % (n, harness.TOOLS.get(n, "x"), name) for n in rng.choices([*harness.TOOLS, "x"], k=3)]
        junk = rng.choices(range(len(CHAT.tokenizer)), k=rng.choice((0, 3, room - 1, room, room + 9)))
        return rng.choice([*calls, *[call * 2 for call in calls], f"<answer>{name}</answer>", name, junk])

    stops, kinds, busy, together = set(), set(), [], set()
    visits = [CALL % ("visit", "id", id) for id in TASK.docs]
    for rng in map(random.Random, range(500)):
        limits = {k: rng.randint(1, 9) for k in ("max_turns", "max_sessions", "max_calls", "max_malformed")}
        limits |= {"max_parallel_calls": rng.randint(1, 3), "max_response_tokens": 54, "mode": mode}
        limits |= {"max_turn_tokens": rng.randint(12, 30), "max_summary_tokens": rng.randint(2, 20)}
        greedy = rng.random() < 0.3
        with pytest.raises(ValueError, match="--max-context 40: expected") as error:
            attempt(CHAT, None, max_context=40, **limits)
        least = int(re.search(r"expected (\d+)", str(error.value))[1])  # which must do, and is tried too
        t = attempt(CHAT, reply, max_context=least + rng.choice((0, 0, 20, 90, 300)), **limits)
        assert len(t.sessions) <= limits["max_sessions"] and t.reward in (0, 1)
        stops, kinds = stops | {t.stop}, kinds | {s.kind for s in t.sessions}
    assert stops == {"answer", "turns", "context", "truncated", "malformed"}
    assert (max(together) > 1) == (mode in MODES[2:])  # only forks of one turn run at the same time
    assert kinds == {"normal", *["compact"] * (mode in MODES[1::2]), *["subagent"] * (mode in MODES[2:])}
