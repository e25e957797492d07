"""Models of other kinds: what is computed for them is what they compute themselves, or they are refused.

Protects Phi and the loss from models whose head, cache, stop tokens, range or weights are not those of the
model that the code was written with: silently wrong figures would train something else than the method says.
"""

import asyncio
import re
import subprocess
import sys

import pytest
import torch
import transformers
from common import (
    ROOT,
    inputs,
    is_clear,
    lines_of,
    offline_tasks,
    run_train,
    small_model,
    tiny_model,
    tokenizer,
    true_phi,
)

import eval as evaluation
import harness
import phi
import train

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "attn_layer_indices": [1]}
MAMBA |= {"mamba_n_groups": 1, "mamba_chunk_size": 16}
GEMMA = {"final_logit_softcapping": 10.0, "layer_types": ["sliding_attention", "full_attention"]}
KINDS = {  # what is special about it
    "Qwen3": ("nothing", 40.0, {}),
    "Llama": ("tied embeddings", 40.0, {"tie_word_embeddings": True}),
    "Granite": ("divides its logits", 40.0, {"logits_scaling": 8.0}),
    "Cohere": ("multiplies its logits", 40.0, {"logit_scale": 0.25}),
    "Gemma2": ("caps its logits", 40.0, GEMMA),
    "Qwen3_5Text": ("an exact recurrent cache", 40.0, LINEAR),
    "FalconMamba": ("a recurrent cache that is not exact", 10.0, {"state_size": 8}),
    "Bamba": ("some layers have one", 40.0, MAMBA),
}


# ---- Phi and log-probs are those of the model's own logits -------------------------------------------------
@pytest.fixture(scope="module", params=KINDS)
def loaded(request, tmp_path_factory):
    """(model, its tokenizer's Chat), of each kind, with logits as large as those of trained models."""
    _, boost, sizes = KINDS[request.param]
    folder = small_model(tmp_path_factory.mktemp(request.param), request.param, boost=boost, **sizes)
    return harness.load_policy(folder)


IDS = torch.randint(10, 250, (400,), generator=torch.Generator().manual_seed(1)).tolist()
CUE = IDS[:4]
ANSWER = IDS[4:7]
PLACES = [40, 120, 200, 300, 399]


def true_values(model) -> list[float]:
    return [true_phi(model, IDS[:place] + CUE, ANSWER) for place in PLACES]


def test_phi_at_places_of_a_segment_is_the_models_own(loaded):
    model, _ = loaded
    found = phi.segment_potentials(model, IDS, PLACES, CUE, ANSWER).tolist()
    assert found == pytest.approx(true_values(model), abs=1e-3)


def test_phi_of_contexts_is_the_models_own(loaded):
    model, _ = loaded
    contexts = [IDS[:place] + CUE for place in PLACES]
    found = phi.answer_logprob(model, contexts, [ANSWER] * len(PLACES)).tolist()
    assert found == pytest.approx(true_values(model), abs=1e-3)


def test_logprobs_of_the_loss_are_the_models_own(loaded):
    model, _ = loaded
    with torch.no_grad():
        rows = phi.token_logprobs(model, [IDS[:place] + CUE + ANSWER for place in PLACES])
    found = [row[-len(ANSWER) :].mean().item() for row in rows]
    assert found == pytest.approx(true_values(model), abs=1e-3)


def test_gradients_of_the_loss_are_the_models_own(loaded):
    model, _ = loaded
    ids = IDS[:50]
    logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor(ids[1:])[:, None]).sum()
    expected = torch.autograd.grad(own, list(model.parameters()), allow_unused=True)
    ours = phi.token_logprobs(model, [ids])[0].sum()
    found = torch.autograd.grad(ours, list(model.parameters()), allow_unused=True)
    for ours, own in zip(found, expected):
        if own is not None:
            torch.testing.assert_close(ours, own, atol=1e-3 * max(1.0, own.abs().max().item()), rtol=1e-3)


def draw_with(model, config, prompts, n=24):
    engine = harness.HFEngine(model, config)
    engine.reseed(0)

    async def all_at_once():
        return await asyncio.gather(*[engine.generate(ids, n, []) for ids in prompts])

    return asyncio.run(all_at_once())


def test_the_engine_draws_from_the_models_own_policy(loaded):
    model, _ = loaded
    prompts = [IDS[:150], IDS[50:90]]  # of unequal length: one of them is padded
    for prompt, (drawn, logprobs, _) in zip(prompts, draw_with(model, harness.Setup(), prompts)):
        row = phi.token_logprobs(model, [prompt + drawn])[0][-len(drawn) :]
        torch.testing.assert_close(torch.tensor(logprobs), row.detach(), atol=1e-3, rtol=0)


def check(model, chat) -> None:
    """The check that both programs make at load; UserError: not passed."""
    limits = {"max_context": 4000, "max_turn_tokens": 100, "max_response_tokens": 300}
    config = harness.Setup(mode="single", **limits)
    engine = harness.HFEngine(model, config)
    evaluation.check_paths(model, chat, engine, config, offline_tasks(1, 0)[0])


def test_a_model_that_agrees_with_the_engine_and_with_phi_is_taken(loaded):
    check(*loaded)


# ---- The check at load -------------------------------------------------------------------------------------
class Shifted(harness.HFEngine):
    """An engine whose log-probs are those of another policy."""

    shift = -0.3

    async def generate(self, token_ids, max_new_tokens, stop):
        ids, logprobs, finish = await super().generate(token_ids, max_new_tokens, stop)
        return ids, [logprob + self.shift for logprob in logprobs], finish


@pytest.mark.parametrize("shift", [0.5, -0.01, float("nan")])
def test_an_engine_that_says_other_logprobs_is_refused(shift, monkeypatch):
    monkeypatch.setattr(harness, "HFEngine", Shifted)
    monkeypatch.setattr(Shifted, "shift", shift)
    with pytest.raises(harness.UserError, match=r"the engine .* differ") as error:
        check(*tiny_model(seed=1))
    assert is_clear(str(error.value))


def test_an_engine_whose_logprobs_are_wrong_by_turns_is_refused(monkeypatch):
    real = harness.HFEngine.generate

    async def generate(self, token_ids, max_new_tokens, stop):
        ids, logprobs, finish = await real(self, token_ids, max_new_tokens, stop)
        return ids, [value + 0.1 * (-1) ** k for k, value in enumerate(logprobs)], finish

    monkeypatch.setattr(harness.HFEngine, "generate", generate)
    with pytest.raises(harness.UserError, match=r"the engine .* differ"):
        check(*tiny_model(seed=1))


def test_log_probs_of_phi_that_differ_from_the_models_are_refused(monkeypatch):
    real = phi.token_logprobs
    monkeypatch.setattr(phi, "token_logprobs", lambda *a, **o: [row + 0.1 for row in real(*a, **o)])
    with pytest.raises(harness.UserError, match=r"phi\.py .* differ") as error:
        check(*tiny_model(seed=1))
    assert is_clear(str(error.value))


def refusal(program, argv, capsys) -> str:
    """The sentence with which a program ends."""
    with pytest.raises(SystemExit) as end:
        program.main(argv)
    said = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert end.value.code == 2 and len(said) == 1
    return said[0].split("error: ", 1)[1]


@pytest.mark.parametrize("program", [train, evaluation], ids=["train", "eval"])
def test_programs_refuse_a_model_that_its_engine_does_not_draw_from(program, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(harness, "HFEngine", Shifted)
    monkeypatch.setitem(harness.ENGINES, "hf", Shifted)
    sentence = refusal(program, [f"--out={tmp_path}/run"], capsys)
    assert "--model" in sentence and "the engine" in sentence
    assert is_clear(sentence)


# ---- Stop tokens -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def two_stops(tmp_path_factory):
    """(model, Chat, tokenizer) where generation_config has a second stop token."""
    tok = tokenizer()
    stops = tok.convert_tokens_to_ids(["<|end|>", "<|stop|>"])
    folder = small_model(tmp_path_factory.mktemp("stops"), tok=tok, stops=stops)
    return *harness.load_policy(folder), tok


def speak(model, tok, text: str) -> None:
    """Make a model draw the ids of that text, whatever it reads."""
    wanted = tok.encode(text, add_special_tokens=False)
    place = [0]

    def forward(ids, *args, **options):
        logits = torch.full((ids.shape[0], 1, len(tok)), -30.0)
        logits[:, :, wanted[place[0]]] = 30.0
        place[0] += 1
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)

    model.forward = forward


@pytest.mark.parametrize("end", ["<|end|>", "<|stop|>"])
def test_each_stop_token_ends_a_turn_and_is_its_last_one(two_stops, end, monkeypatch):
    model, chat, tok = two_stops
    said = "<answer>an oak</answer>" + end
    monkeypatch.setattr(model, "forward", model.forward)
    speak(model, tok, said + "\n" + "And so on, in a new text. " * 50)
    sizes = {"max_context": 1500, "max_turn_tokens": 200, "max_response_tokens": 300}
    limits = harness.Limits(mode="single", **sizes)
    engine = harness.HFEngine(model, harness.Setup(max_context=1500))
    engine.temperature = 0.0
    task = harness.Task("What did Mira plant?", "an oak", {"b": "Mira planted an oak."}, "t")
    trajectory = asyncio.run(harness.rollout(task, engine, chat, limits=limits))
    assert (trajectory.stop, trajectory.reward) == ("answer", 1)
    segment = trajectory.segments[0]
    drawn = [id for id, sampled in zip(segment.token_ids, segment.sampled) if sampled]
    assert drawn == tok.encode(said, add_special_tokens=False)


def test_after_another_stop_token_the_templates_own_end_follows(two_stops):
    _, chat, tok = two_stops
    stop = tok.convert_tokens_to_ids("<|stop|>")
    assert set(chat.stops) == {stop, chat.close[0]}


# ---- Adapters ----------------------------------------------------------------------------------------------
def test_an_adapter_is_merged_or_refused_with_a_sentence(tmp_path):
    peft = pytest.importorskip("peft")
    base = small_model(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora)
    for name, weights in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weights, std=0.5)
    folder = tmp_path / "adapter"
    adapted.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    ids = torch.arange(20, 60)[None]
    wanted = adapted.eval()(ids).logits.detach()
    try:
        found, _ = harness.load_policy(str(folder))
    except harness.UserError as error:
        assert is_clear(str(error), "adapter", "peft", "lora", "trainable", "frozen", "merge"), str(error)
        return
    for name, weights in found.named_parameters():
        assert weights.requires_grad and "lora" not in name
    torch.testing.assert_close(found(ids).logits, wanted, atol=1e-4, rtol=1e-4)


# ---- Range -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def short_model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("short"), max_position_embeddings=256)


def test_a_context_of_all_positions_of_the_model_is_taken(short_model):
    harness.load_policy(short_model, 256)


@pytest.mark.parametrize("program", [train, evaluation], ids=["train", "eval"])
def test_a_context_longer_than_the_model_is_refused(program, short_model, tmp_path, capsys):
    argv = [f"--model={short_model}", *inputs(tmp_path), f"--out={tmp_path}/run"]  # --max-context 1500
    sentence = refusal(program, argv, capsys)
    assert "--max-context 1500" in sentence and "256" in sentence
    assert is_clear(sentence)


# ---- Dropout -----------------------------------------------------------------------------------------------
def test_a_model_with_dropout_is_read_without_it(tmp_path):
    model, _ = harness.load_policy(small_model(tmp_path, attention_dropout=0.5))
    first, second = (phi.token_logprobs(model, [IDS[:90]])[0].detach() for _ in range(2))
    assert not model.training
    assert torch.equal(first, second)


def test_an_update_leaves_the_model_in_eval_mode(tmp_path):
    model = small_model(tmp_path / "model", attention_dropout=0.5)
    run_train(f"--model={model}", *inputs(tmp_path), f"--out={tmp_path}/run", "--steps=2")
    rows = lines_of(tmp_path / "run", "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert row["engine_gap"] < 1e-4


# ---- Under torchrun ----------------------------------------------------------------------------------------
def torchrun(*argv: str) -> tuple[int, str]:
    """A run of train.py by one rank of torchrun -> (exit code, what it printed)."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("kind", "sizes"), [("GPT2", {}), ("Qwen3", {"attention_dropout": 0.1})])
def test_a_rank_of_torchrun_trains_it_and_draws_from_what_it_trains(kind, sizes, tmp_path):
    model = small_model(tmp_path / "model", kind, **sizes)
    argv = [f"--model={model}", *inputs(tmp_path), f"--out={tmp_path}/run", "--steps=1"]
    code, said = torchrun(*argv)
    if code:  # a kind whose blocks are not found may be refused, with a sentence
        refusals = re.findall(r"train\.py: error: (.*)", said)
        assert kind == "GPT2" and refusals and is_clear(refusals[-1], "blocks", "torchrun"), said[-2000:]
        return
    (row,) = lines_of(tmp_path / "run", "metrics.jsonl")
    assert row["engine_gap"] < 1e-4
