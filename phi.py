"""Log-likelihoods, batched: Phi for credit (M6, M7), token log-probabilities for the loss (M12).

Phi(v) = (1/|y*|) sum_t log pi(y*_t | v, cue, y*_<t), in nats per token, says how likely the policy holds the
reference answer y*, were it asked for it by a fixed cue right after context v. M7 wants it at the boundaries
of sessions: each of them is a row [context, cue, answer] of a padded batch. Only log-probs are kept.

Shapes: B rows, T tokens of a row, M those whose log-prob is wanted, C a chunk of the M, D hidden size, V
vocabulary. `options` of any function go to `token_logprobs`.
Left out on purpose: packed rows and caches shared between rows, which are silently wrong on hybrid models.
"""

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import MoeModelOutputWithPast


# ---- Token log-probabilities (M12) -------------------------------------------------------------------------
class Body(MoeModelOutputWithPast):  # hidden states of a model's body; what else its head asks for is None
    def __getattr__(self, name):
        return None


def forward_logprobs(model, ids_BT, wanted_BT, chunk=512, temperature=1.0):
    """log pi(token t+1 | tokens ..t) and the entropy there, in nats, at the M places where wanted_BT is True.
    ids_BT [B, T], wanted_BT [B, T-1] -> two float32 [M]."""
    # No attention mask: the padding is on the right, where no earlier token of a causal model sees it.
    body = model.base_model
    hidden_MD = body(ids_BT[:, :-1], use_cache=False).last_hidden_state[wanted_BT]
    targets_M = ids_BT[:, 1:][wanted_BT]

    def read_chunk(hidden_CD, targets_C):
        # Its own forward with the body passed over, since heads may scale or cap their logits.
        body.forward = lambda *_, **__: Body(last_hidden_state=hidden_CD[None])
        logits_CV = model.forward(inputs_embeds=hidden_CD[None]).logits[0]
        del body.forward
        # critical: float32 before the sum over the vocabulary; bf16 leaves a log-probability two digits.
        logprobs_CV = (logits_CV.float() / temperature).log_softmax(-1)
        fixed_CV = logprobs_CV.detach()
        return logprobs_CV.gather(-1, targets_C[:, None])[:, 0], -(fixed_CV.exp() * fixed_CV).sum(-1)

    # Checkpointed: only one chunk's logits exist at any time, the backward pass computes them anew.
    chunks = zip(hidden_MD.split(chunk), targets_M.split(chunk))
    logprobs, entropies = zip(*[checkpoint(read_chunk, *pair, use_reentrant=False) for pair in chunks])
    return torch.cat(logprobs), torch.cat(entropies)


def batches_by_length(lengths, token_budget):
    """Row indices, sorted by length, cut so that rows * longest <= token_budget; a longer row goes alone.
    >>> batches_by_length([3, 9, 2, 3], token_budget=8)
    [[2, 0], [3], [1]]
    """
    batches = []
    for k in sorted(range(len(lengths)), key=lambda k: lengths[k]):
        if not batches or (len(batches[-1]) + 1) * lengths[k] > token_budget:
            batches.append([])
        batches[-1].append(k)
    return batches


def token_logprobs(model, sequences, wanted=None, token_budget=16384, with_entropy=False,
                   forward=forward_logprobs, **options):  # fmt: skip
    """log pi(token t+1 | tokens ..t) in nats, with gradient: float32 [T-1] a sequence of ids [T], or only its
    entries where `wanted` (masks [T-1]) is True. with_entropy: (log-probs, entropies [n] in any order).
    forward: train.py has its own. options: temperature=1.0; chunk=512, tokens that have logits at once."""
    if wanted is None:
        wanted = [[True] * (len(ids) - 1) for ids in sequences]
    for ids, mask in zip(sequences, wanted, strict=True):
        if len(ids) < 2 or len(mask) != len(ids) - 1:
            raise ValueError("every sequence needs T >= 2 tokens and a mask of length T-1")
    rows = [None] * len(sequences)
    entropies = []
    for batch in batches_by_length([len(ids) for ids in sequences], token_budget):
        ids_BT = pad_sequence([torch.as_tensor(sequences[k]) for k in batch], batch_first=True)
        masks = [torch.as_tensor(wanted[k], dtype=torch.bool) for k in batch]
        wanted_BT = pad_sequence(masks, batch_first=True).to(model.device)
        logprobs_M, entropies_M = forward(model, ids_BT.to(model.device), wanted_BT, **options)
        entropies.append(entropies_M)
        for k, logprobs_T in zip(batch, logprobs_M.split([int(mask.sum()) for mask in masks])):
            rows[k] = logprobs_T
    return (rows, torch.cat(entropies)) if with_entropy else rows


# ---- Phi (M6) ----------------------------------------------------------------------------------------------
@torch.no_grad()
def answer_logprob(model, contexts, answers, token_budget=16384, **options):
    """Phi, the mean log-likelihood in nats per token of answers[k] after contexts[k] (lists of token ids; the
    cue ends the context): [n] float32 on the CPU. Equal pairs (a group's task prompt) are computed once."""
    if len(contexts) != len(answers) or not all(map(len, [*contexts, *answers])):
        raise ValueError("Phi needs as many answers as contexts, and neither may be empty")
    pairs = [(tuple(context), tuple(answer)) for context, answer in zip(contexts, answers)]
    distinct = list(dict.fromkeys(pairs))
    # critical: the mean is over the answer alone. Its first token is predicted at the context's last.
    wanted = [[False] * (len(context) - 1) + [True] * len(answer) for context, answer in distinct]
    rows = [context + answer for context, answer in distinct]
    logprobs = token_logprobs(model, rows, wanted, token_budget, **options)
    phi_of = {pair: logprobs_A.mean().item() for pair, logprobs_A in zip(distinct, logprobs)}
    return torch.tensor([phi_of[pair] for pair in pairs])


def potentials(model, requests, cue, token_budget=16384, **options):
    """Phi of segment_ids[:p] + cue for requests (segment_ids, p, answer): [n] float32 on the CPU."""
    if not all(0 <= p <= len(ids) for ids, p, _ in requests):
        raise ValueError("Phi needs positions that lie in their segment")
    contexts = [[*ids[:p], *cue] for ids, p, _ in requests]
    return answer_logprob(model, contexts, [answer for _, _, answer in requests], token_budget, **options)


def segment_potentials(model, segment_ids, positions, cue, answer, **options):
    """Phi of segment_ids[:p] + cue for every p of `positions`: [len(positions)] float32 on the CPU."""
    return potentials(model, [(segment_ids, p, answer) for p in positions], cue, **options)


# ---- Phi of trajectories (M7), of which only the fields are known here -------------------------------------
def score_sessions(model, trajectories, cue, **options):
    """Write phi_before and phi_after into every session but the final one, where both are finite."""
    pairs = [(t, session) for t in trajectories for session in t.sessions[:-1]]
    places = [(t, *edge) for t, session in pairs for edge in (session.before, session.after)]
    requests = [(t.segments[k].token_ids, position, t.reference_ids) for t, k, position in places]
    phi_2n = potentials(model, requests, cue, **options).tolist()
    for (_, session), before, after in zip(pairs, phi_2n[::2], phi_2n[1::2]):
        if abs(before + after) < float("inf"):
            session.phi_before = before
            session.phi_after = after


def turn_probabilities(model, trajectories, cue, **options):
    """For IGPO: exp(Phi) where each turn of the main agent begins, and the last of them again, since the last
    turn earns the outcome and what follows it is never used -> rows [turns + 1]."""
    places = [(t, k, start) for t in trajectories for k, start, _ in t.main_turns()]
    requests = [(t.segments[k].token_ids, start, t.reference_ids) for t, k, start in places]
    lengths = [len(t.main_turns()) for t in trajectories]
    rows = potentials(model, requests, cue, **options).exp().split(lengths)
    return [torch.cat([row, row[-1:]]) for row in rows]
