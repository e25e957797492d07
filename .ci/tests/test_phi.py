"""Log-probs, their gradient and entropy, and Phi: batched and chunked against the model's own logits."""

import pytest
import torch
import transformers

import phi

close = torch.testing.assert_close


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
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("token_budget", [1, 400, 16384])
def test_phi_is_the_mean_logprob_of_the_answer(lm, token_budget):
    places = [150, 1, 77, 0, 150, 20]
    got = phi.segment_potentials(lm, IDS[:150], places, CUE, ANSWER, token_budget=token_budget)
    for value, p in zip(got, places):
        logprobs = lm(torch.tensor([IDS[:p] + CUE + ANSWER])).logits[0, :-1].log_softmax(-1)[-4:]
        assert value == pytest.approx(logprobs[range(4), ANSWER].mean().item(), abs=1e-5)


@pytest.mark.parametrize("token_budget", [1, 130, 16384])
def test_token_logprobs_their_gradient_and_entropy(lm, token_budget):
    sequences = [IDS[:60], IDS[:2], IDS[100:165]]
    wanted = [[True] * 59, [False], [t % 3 > 0 for t in range(64)]]
    options = {"token_budget": token_budget, "with_entropy": True, "chunk": 17, "temperature": 0.7}
    logprobs, entropies = phi.token_logprobs(lm, sequences, wanted, **options)
    rows = [lm(torch.tensor([ids])).logits[0, :-1][mask] / 0.7 for ids, mask in zip(sequences, wanted)]
    targets = torch.cat([torch.tensor(ids[1:])[mask] for ids, mask in zip(sequences, wanted)])
    naive = torch.distributions.Categorical(logits=torch.cat(rows))
    close(torch.cat(logprobs), naive.log_prob(targets), atol=1e-5, rtol=1e-5)
    close(entropies.sort()[0], naive.entropy().detach().sort()[0], atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad(torch.cat(logprobs).square().sum(), list(lm.parameters()))
    theirs = torch.autograd.grad(naive.log_prob(targets).square().sum(), list(lm.parameters()))
    for a, b in zip(ours, theirs):
        close(a, b, atol=2e-5 * max(1, b.abs().max().item()), rtol=1e-4)
