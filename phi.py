"""Log-likelihoods: Phi for credit (M6, M7), token log-probabilities for the loss (M12).

Phi(v) = (1/|y*|) sum_t log pi(y*_t | v, cue, y*_<t), in nats per token, says how likely the policy holds the
reference answer y*, were it asked for it (by a fixed cue) right after context v. M7 wants it at every session
boundary, and `potentials` gets it, segment by segment, in the cheaper of two ways:
    rows   every boundary is a row [context, cue, answer] of a padded batch
    walk   the segment is read once into a cache; at every boundary a fork of the cache reads [cue, answer]
Left out on purpose: models that soft-cap their logits; packed rows and cropped caches, both silently wrong on
hybrid (Gated DeltaNet) models. Check it: python -m pytest --doctest-modules phi.py test_mosaic.py
"""

import copy
from functools import partial
from itertools import pairwise

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache, DynamicLayer

FORWARD_TOKENS = 64  # what reading a few tokens costs, in tokens of a long read (20-150 measured on a CPU)


# ---- Token log-probabilities (M12) ----
def forward_logprobs(model, ids_BT, wanted_BT, cache=None, chunk=512, temperature=1.0):
    """log pi(token t+1 | tokens ..t) and the entropy there (nats, [M] float32 each) at the M places where
    wanted_BT [B, T-1] is True. The tokens in `cache` come before; the T-1 tokens read extend it."""
    # No attention mask: the padding is on the right, where no earlier token of a causal model sees it.
    output = model.base_model(ids_BT[:, :-1], past_key_values=cache, use_cache=cache is not None)
    hidden_MD, targets_M = output.last_hidden_state[wanted_BT], ids_BT[:, 1:][wanted_BT]

    def head(hidden_CD, targets_C):
        # critical: float32 before the sum over the vocabulary; bf16 leaves a log-probability two digits.
        logp_CV = (model.get_output_embeddings()(hidden_CD).float() / temperature).log_softmax(-1)
        fixed_CV = logp_CV.detach()
        return logp_CV.gather(-1, targets_C[:, None])[:, 0], -(fixed_CV.exp() * fixed_CV).sum(-1)

    # Checkpointed: only one chunk's logits exist at any time, the backward pass computes them anew.
    chunks = zip(hidden_MD.split(chunk), targets_M.split(chunk))
    pairs = [checkpoint(head, *pair, use_reentrant=False, preserve_rng_state=False) for pair in chunks]
    return tuple(torch.cat(parts) for parts in zip(*pairs))


def batches_by_length(lengths, token_budget):
    """Row indices, sorted by length, cut so that rows * longest <= token_budget; a longer row goes alone.

    >>> batches_by_length([3, 9, 2, 3], token_budget=8)
    [[2, 0], [3], [1]]
    """
    batches = []
    for k in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not batches or (len(batches[-1]) + 1) * lengths[k] > token_budget:
            batches.append([])
        batches[-1].append(k)
    return batches


def token_logprobs(model, sequences, wanted=None, token_budget=16384, with_entropy=False, **options):
    """log pi(token t+1 | tokens ..t) in nats, with gradient: float32 [T-1] a sequence (ids [T]), or only
    the entries where `wanted` (bool masks [T-1]) is True; `with_entropy`, and entropies without gradient.
    `options`: temperature=1.0 divides the logits; chunk=512 is the number of tokens whose logits are held."""
    wanted = [[True] * (len(ids) - 1) for ids in sequences] if wanted is None else wanted
    if any(len(ids) < 2 or len(mask) != len(ids) - 1 for ids, mask in zip(sequences, wanted, strict=True)):
        raise ValueError("every sequence needs T >= 2 tokens and a mask of length T-1")
    logprobs, entropies = [None] * len(sequences), [None] * len(sequences)
    # A sharded model (train.py) has it as a method, before which FSDP gathers the weights.
    forward = getattr(model, "forward_logprobs", partial(forward_logprobs, model))
    for batch in batches_by_length([len(ids) for ids in sequences], token_budget):
        ids, masks = ([torch.as_tensor(rows[k]) for k in batch] for rows in (sequences, wanted))
        ids_BT, wanted_BT = (pad_sequence(rows, batch_first=True).to(model.device) for rows in (ids, masks))
        both = forward(ids_BT, wanted_BT.bool(), **options)
        parts = (values_M.split([int(mask.sum()) for mask in masks]) for values_M in both)
        for k, logprobs_M, entropies_M in zip(batch, *parts):
            logprobs[k], entropies[k] = logprobs_M, entropies_M
    return (logprobs, entropies) if with_entropy else logprobs


# ---- Phi (M6) ----
@torch.no_grad()
def answer_logprob(model, contexts, answers, token_budget=16384):
    """Phi, the mean log-likelihood in nats per token of answers[k] after contexts[k] (lists of token ids; the
    cue ends the context): [n] float32 on the CPU. Equal pairs (a group's task prompt) are computed once."""
    if len(contexts) != len(answers) or not all(map(len, [*contexts, *answers])):
        raise ValueError("Phi needs as many answers as contexts, and neither may be empty")
    pairs = [(tuple(context), tuple(answer)) for context, answer in zip(contexts, answers)]
    distinct = list(dict.fromkeys(pairs))
    # critical: the mean is over the answer alone; its first token is predicted at the context's last.
    wanted = [[False] * (len(context) - 1) + [True] * len(answer) for context, answer in distinct]
    logprobs = token_logprobs(model, [context + answer for context, answer in distinct], wanted, token_budget)
    phi = {pair: logprobs_A.mean() for pair, logprobs_A in zip(distinct, logprobs)}
    return torch.tensor([phi[pair] for pair in pairs])


@torch.no_grad()
def segment_potentials(model, segment_ids, positions, cue, answer):
    """Phi of segment_ids[:p] + cue for every p of `positions`, in one walk: [len(positions)] float32, CPU."""
    if not answer or not all(0 <= p <= len(segment_ids) and p + len(cue) > 0 for p in positions):
        raise ValueError(f"Phi needs an answer, and positions that lie in the segment, not {positions}")
    cache, walked, phi = DynamicCache(config=model.config), 0, {}
    # Keys and values can be cropped, so a plain model reads the segment at once; recurrent states cannot.
    plain = all(type(layer) is DynamicLayer for layer in cache.layers)

    def read(ids, n_wanted, cache):
        ids_BT = torch.tensor([ids], device=model.device)
        wanted_BT = torch.arange(len(ids) - 1, 0, -1, device=model.device)[None] <= n_wanted
        return forward(ids_BT, wanted_BT, cache)[0]

    forward, training = getattr(model, "forward_logprobs", partial(forward_logprobs, model)), model.training
    model.eval()  # critical: in training mode, gradient checkpointing drops the cache, with a mere warning.
    for p in sorted(set(positions)):
        goal = max(positions) if plain else p
        while walked < goal - 1:  # in pieces: a mask over a cache has piece x context entries
            read(segment_ids[walked : min(walked + 4096, goal)], 0, cache)
            walked = min(walked + 4096, goal) - 1
        # critical: a probe writes recurrent states in place; keys and values are rebound and can be shared.
        kv = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
        fork = copy.deepcopy(cache, {id(tensor): tensor for tensor in kv})
        start = min(walked, max(p - 1, 0))  # with no cue it is token p - 1 that predicts the answer
        if start < walked:
            fork.crop(start - walked)  # so many tokens fewer
        phi[p] = read([*segment_ids[start:p], *cue, *answer], len(answer), fork).mean()
    model.train(training)
    return torch.tensor([phi[p] for p in positions])


def potentials(model, requests, cue, token_budget=16384):
    """Phi of segment_ids[:p] + cue for requests (segment_ids, p, answer): [n] float32 on the CPU. A segment
    is walked, or its contexts join one batch of rows, whichever reads fewer tokens."""
    of_segment, rows, phi = {}, [], torch.zeros(len(requests))
    for k, (segment_ids, _, answer) in enumerate(requests):
        of_segment.setdefault((id(segment_ids), *answer), []).append(k)
    for members in of_segment.values():
        segment_ids, _, answer = requests[members[0]]
        positions, probe = [requests[k][1] for k in members], len(cue) + len(answer)
        stops = sorted(set(positions))
        walk = sum(max(b - a, FORWARD_TOKENS) + max(probe, FORWARD_TOKENS) for a, b in pairwise([0, *stops]))
        if walk < sum(stop + probe for stop in stops):
            phi[members] = segment_potentials(model, segment_ids, positions, cue, answer)
        else:
            rows += members
    contexts = [[*requests[k][0][: requests[k][1]], *cue] for k in rows]
    phi[rows] = answer_logprob(model, contexts, [requests[k][2] for k in rows], token_budget)
    return phi
