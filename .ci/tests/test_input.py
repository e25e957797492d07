"""What a user may get wrong: flags, folders, files of tasks, corpora, checkpoints, runs.

Protected: each is one sentence that names the flag, its value and what is expected, with exit code 2, before
a model is loaded (unless that is what is wrong), and no code of a checkpoint runs.
"""

import json
import os
import shutil
import time

import pytest
import torch
from child import FLAGS, POLICY, limit_flags, run
from safetensors.torch import load_file, save_file

import eval as evaluation
import harness
import train

GOOD = '{"question": "Who?", "answer": "Ada"}'


# ---- A place where everything is wrong ---------------------------------------------------------------------
class Evil:
    """what unpickling would execute"""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.system, (f"touch {self.folder}/ran",)


TASKS = {  # a file of tasks, and what the sentence says of it
    "missing.jsonl": (None, "missing.jsonl: expected"),
    "empty.jsonl": (b"", "expected at least one line"),
    "blank.jsonl": (b"\n  \n", "expected at least one line"),
    "torn.jsonl": (f'{GOOD}\n{{"question": "W'.encode(), "torn.jsonl:2: expected"),
    "list.jsonl": (b"[1, 2]", "list.jsonl:1: expected"),
    "nested.jsonl": (b"[" * 10**5, "nested.jsonl:1: expected"),
    "latin.jsonl": ('{"question": "Wer war J\xf6rg?", "answer": "x"}'.encode("latin-1"), "in UTF-8"),
    "schema.jsonl": (b'{"prompt": "Who?", "answer": "Ada"}', "texts question, answer"),
    "null.jsonl": (b'{"question": "Who?", "answer": null}', "null.jsonl:1: expected"),
    "number.jsonl": (b'{"question": "Who?", "answer": 7}', "number.jsonl:1: expected"),
    "no_text.jsonl": (f'{GOOD}\n{{"question": "Who?", "answer": ""}}'.encode(), "no_text.jsonl:2: expected"),
    "space.jsonl": (b'{"question": "Who?", "answer": " \\n "}', "space.jsonl:1: expected"),
    "twice.jsonl": (b'{"id": 1, "question": "a", "answer": "b"}\n' * 2, "twice.jsonl:2: expected"),
}


def tamper(folder, name):
    """A copy of the shipped policy with something wrong."""
    copy = folder / name
    shutil.copytree(POLICY, copy)
    weights = copy / "model.safetensors"
    if name == "no-weights":
        weights.unlink()
    if name == "torn":
        os.truncate(weights, 5000)
    if name == "no-template":
        (copy / "chat_template.jinja").unlink()
    if name == "no-tokenizer":
        for file in copy.glob("tokenizer*"):
            file.unlink()
    if name == "bad-config":
        (copy / "config.json").write_text('{"model_type": ')
    if name == "pickle":
        weights.unlink()
        torch.save({"x": Evil(folder)}, copy / "pytorch_model.bin")
    if name == "custom-code":
        (copy / "code.py").write_text(f"open('{folder}/ran', 'w')")
        config = json.loads((copy / "config.json").read_text()) | {"model_type": "custom"}
        config["auto_map"] = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
        (copy / "config.json").write_text(json.dumps(config))
    if name in ("fewer-weights", "other-shape"):
        tensors = load_file(weights)
        last = max(name for name in tensors if "layers" in name)
        if name == "fewer-weights":
            del tensors[last]
        else:
            tensors[last] = torch.zeros(3, 3)
        save_file(tensors, weights, metadata={"format": "pt"})


WRONG_MODELS = ["no-weights", "torn", "no-template", "no-tokenizer", "bad-config", "pickle", "custom-code"]
WRONG_MODELS += ["fewer-weights", "other-shape"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    for name in ("texts", "no-texts"):
        (folder / name).mkdir()
        (folder / name / "a.md").write_text("Ada." if name == "texts" else " \n")
    (folder / "good.jsonl").write_text(GOOD)
    for name, (content, _) in TASKS.items():
        if content is not None:
            (folder / name).write_bytes(content)
    for name in WRONG_MODELS:
        tamper(folder, name)
    assert run(FLAGS.replace("--steps 4", "--steps 1"), folder / "run")[0] == 0
    return folder


class ModelLoaded(BaseException):
    """not caught by load_policy"""


@pytest.fixture
def no_model(monkeypatch):
    def fail(*_, **__):
        raise ModelLoaded("a model is loaded before its flags are known to be good")

    monkeypatch.setattr(harness.AutoModelForCausalLM, "from_pretrained", fail)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """a folder to write to, and no keys"""
    monkeypatch.chdir(tmp_path)
    for name in ("SERPER_KEY_ID", "JINA_API_KEYS", "API_BASE", "API_KEY"):
        monkeypatch.delenv(name, raising=False)


def sentence(program, flags, capsys):
    """The one sentence with which a program ends."""
    began = time.time()
    with pytest.raises(SystemExit) as end:
        program.main(flags.split())
    said = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert end.value.code == 2
    assert len(said) == 1
    assert time.time() - began < 20
    return said[0]


def own(place):
    return f"--model {POLICY} --tasks {place}/good.jsonl {limit_flags()}"


# ---- Flags -------------------------------------------------------------------------------------------------
WRONG = {  # flags, and what the sentence says of them
    "--bogus": "unrecognized arguments: --bogus",
    "--steps two": "--steps",
    "--mode nope": "--mode",
    "--world nope": "--world",
    "--engine nope": "--engine",
    "--prompts nope": "--prompts",
    "--preset nope": "--preset",
    "--advantage nope": "--advantage nope: expected one of mosaic, broadcast, igpo",
    "--reward nope": "--reward nope: expected one of exact_match, judge",
    "--rho 1": "--rho 1.0: expected",
    "--rho -0.1": "--rho -0.1: expected",
    "--rho nan": "--rho nan: expected",
    "--lam -0.1": "--lam -0.1: expected 0 or more",
    "--lam nan": "--lam nan: expected",
    "--beta0 -1": "--beta0 -1.0: expected",
    "--beta1 nan": "--beta1 nan: expected",
    "--clip-low nan": "--clip-low nan: expected",
    "--clip-high -1": "--clip-high -1.0: expected",
    "--group-size 1": "--group-size 1: expected 2 or more",
    "--steps 0": "--steps 0: expected 1 or more",
    "--tasks-per-step 0": "--tasks-per-step 0: expected",
    "--checkpoint-every 0": "--checkpoint-every 0: expected",
    "--eval-tasks -1": "--eval-tasks -1: expected",
    "--lr 0": "--lr 0.0: expected",
    "--lr nan": "--lr nan: expected",
    "--temperature -1": "--temperature -1.0: expected",
    "--temperature 0": "--temperature 0.0: expected",
    "--temperature nan": "--temperature nan: expected",
    "--token-budget 0": "--token-budget 0: expected",
    "--minibatches 0": "--minibatches 0: expected",
    "--minibatches 65": "--minibatches 65: expected at most",
    "--max-turns 0": "--max-turns 0: expected 1 or more",
    "--max-context 0": "--max-context 0: expected 1 or more",
    "--top-k 0": "--top-k 0: expected 1 or more",
    "--max-summary-tokens 1": "--max-summary-tokens 1: expected 2 or more",
    "--search-url http://a/": "--search-url http://a/: expected an http address, --tasks",
    "--corpus {0}/texts": "--corpus {0}/texts: expected --tasks",
    "--tasks {0}/good.jsonl --corpus {0}/texts": "--model",
}


@pytest.mark.parametrize("flags", WRONG)
def test_a_wrong_flag_is_named_with_its_value_and_what_is_expected(flags, place, capsys, no_model):
    assert WRONG[flags].format(place) in sentence(train, flags.format(place), capsys)


WRONG_EVALUATIONS = {
    "--bogus": "unrecognized arguments: --bogus",
    "--n 0": "--n 0: expected 1 or more",
    "--n x": "--n",
    "--line x": "--line",
    "--mode nope": "--mode",
    "--temperature 0": "--temperature 0.0: expected",
    "--like {0}/nowhere": "--like {0}/nowhere: expected the folder of a run",
    "--tasks {0}/good.jsonl --corpus {0}/texts": "--model",
    "--corpus {0}/texts": "--corpus {0}/texts: expected --tasks",
}


@pytest.mark.parametrize("flags", WRONG_EVALUATIONS)
def test_a_wrong_flag_of_an_evaluation_is_named(flags, place, capsys, no_model):
    said = sentence(evaluation, flags.format(place), capsys)
    assert WRONG_EVALUATIONS[flags].format(place) in said


def test_vllm_that_is_not_installed_is_named_with_its_command(capsys, no_model, monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    said = sentence(train, "--engine vllm", capsys)
    assert "--engine vllm: expected pip install vllm==" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_the_papers_preset_needs_a_gpu(capsys, no_model):
    assert "--preset paper: expected a GPU" in sentence(train, "--preset paper --engine hf", capsys)


WRONG_LIMITS = {
    "max_context": (90, "--max-context 90: expected"),
    "max_summary_tokens": (300, "--max-context"),
    "max_turn_tokens": (220, "--max-context"),
    "max_response_tokens": (5, "--max-response-tokens 5: expected"),
}


@pytest.mark.parametrize("name", WRONG_LIMITS)
@pytest.mark.parametrize("program", [train, evaluation])
def test_limits_in_which_a_task_does_not_fit_are_refused_with_what_they_need(name, program, place, capsys):
    value, words = WRONG_LIMITS[name]
    flags = f"--model {POLICY} --tasks {place}/good.jsonl --corpus {place}/texts"
    said = sentence(program, f"{flags} {limit_flags(**{name: value})}", capsys)
    assert words in said
    assert "or more for" in said


def test_a_context_beyond_the_positions_of_the_model_is_refused(place, capsys, no_model):
    flags = f"{own(place)} --corpus {place}/texts --max-context 99999999"
    assert "--max-context 99999999: expected at most" in sentence(train, flags, capsys)


@pytest.mark.parametrize("program", [train, evaluation])
@pytest.mark.parametrize("flags", ["--max-turns 14", "--max-context 300", "--max-summary-tokens 14"])
def test_the_shipped_policy_refuses_other_limits_and_names_its_maker(program, flags, capsys, no_model):
    said = sentence(program, flags, capsys)
    assert f"{flags}: expected" in said
    assert "make.py" in said


# ---- Tasks, documents, services ----------------------------------------------------------------------------
@pytest.mark.parametrize("program", [train, evaluation])
@pytest.mark.parametrize("name", TASKS)
def test_a_wrong_file_of_tasks_is_named_with_its_line(name, program, place, capsys, no_model):
    flags = f"--model {POLICY} --corpus {place}/texts --tasks {place}/{name} {limit_flags()}"
    assert TASKS[name][1] in sentence(program, flags, capsys)


WRONG_WORLDS = {
    "--corpus {0}/nope": "nope: expected",
    "--corpus {0}/no-texts": "no-texts: expected a folder with .txt or .md files",
    "--corpus {0}/empty.jsonl": "expected at least one line",
    "--corpus {0}/torn.jsonl": "torn.jsonl:2: expected",
    "--corpus {0}/good.jsonl": "good.jsonl:1: expected texts id, text",
    "--corpus {0}/texts --search-url http://a/": "no --corpus",
    "--search-url localhost:8000": "--search-url localhost:8000: expected an http address",
    "--search-url http://name:password@host/": "--search-url",
    "--corpus {0}/texts --reward judge": "API_BASE: expected in the environment",
    "": "SERPER_KEY_ID, JINA_API_KEYS: expected in the environment",
}


@pytest.mark.parametrize("program", [train, evaluation])
@pytest.mark.parametrize("flags", WRONG_WORLDS)
def test_a_world_that_cannot_be_searched_or_judged_is_refused(flags, program, place, capsys, no_model):
    said = sentence(program, f"{own(place)} {flags.format(place)}", capsys)
    assert WRONG_WORLDS[flags].format(place) in said


def test_documents_with_one_id_are_refused(tmp_path):
    (tmp_path / "docs.jsonl").write_text('{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}')
    with pytest.raises(harness.UserError, match=r"docs\.jsonl:2: expected a unique id"):
        harness.load_corpus(str(tmp_path / "docs.jsonl"))


def test_more_held_out_tasks_than_there_are_is_refused(place, capsys, no_model):
    said = sentence(train, f"{own(place)} --corpus {place}/texts --eval-tasks 1", capsys)
    assert "--eval-tasks 1: expected fewer than the 1 of --tasks" in said


# ---- Models ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("program", [train, evaluation])
@pytest.mark.parametrize("name", [*WRONG_MODELS, "nope", "texts"])
def test_a_wrong_model_is_named_and_none_of_its_code_runs(name, program, place, capsys):
    said = sentence(program, f"--model {place}/{name}", capsys)
    assert f"{place}/{name}: expected" in said
    assert not (place / "ran").exists()


def test_a_hub_id_that_cannot_be_had_is_named(capsys):
    assert "--model nobody/nothing: expected" in sentence(train, "--model nobody/nothing", capsys)


# ---- The folder of a run, and --resume ---------------------------------------------------------------------
def test_a_folder_with_a_run_is_not_overwritten(place, capsys, no_model):
    before = (place / "run/metrics.jsonl").read_bytes()
    said = sentence(train, f"--out {place}/run", capsys)
    assert f"--out {place}/run: " in said
    assert "expected --resume or another folder" in said
    assert (place / "run/metrics.jsonl").read_bytes() == before


def test_a_folder_with_a_checkpoint_alone_is_not_overwritten(place, tmp_path, capsys, no_model):
    shutil.copytree(place / "run/checkpoint", tmp_path / "only/checkpoint")
    assert "expected --resume" in sentence(train, f"--out {tmp_path}/only", capsys)


def test_a_file_in_the_place_of_the_folder_is_refused(place, capsys):
    assert "Not a directory" in sentence(train, f"--out {place}/good.jsonl/run", capsys)


def test_resume_without_a_run_is_refused(place, capsys, no_model):
    said = sentence(train, f"--resume --out {place}/nowhere", capsys)
    assert f"--resume: expected a run in {place}/nowhere" in said


OTHERS = {  # another value of each of these flags
    "seed": "3",
    "lr": "0.001",
    "lam": "0.2",
    "rho": "0.1",
    "beta0": "0.3",
    "beta1": "0.3",
    "clip_low": "0.3",
    "clip_high": "0.3",
    "mode": "single",
    "advantage": "igpo",
    "reward": "judge",
    "temperature": "0.7",
    "group_size": "5",
    "tasks_per_step": "3",
    "minibatches": "1",
    "eval_tasks": "7",
    "max_turns": "41",
    "parity_tolerance": "0.5",
}


@pytest.mark.parametrize("name", OTHERS)
def test_resume_with_another_value_is_refused_by_name(name, place, capsys, no_model):
    flag = f"--{name.replace('_', '-')} {OTHERS[name]}"
    said = sentence(train, f"--resume {flag} --out {place}/run", capsys)
    began = json.loads((place / "run/config.json").read_text())[name]
    assert f"{flag}: expected {began!r}, with which {place}/run was begun" in said


def test_resume_with_a_switch_turned_is_refused_by_name(place, capsys, no_model):
    said = sentence(train, f"--resume --no-shaping --out {place}/run", capsys)
    assert "--shaping False: expected True" in said


def test_resume_takes_new_values_of_the_free_flags(place):
    flags = "--steps 9 --checkpoint-every 3 --token-budget 999 --engine-memory 0.7"
    config = train.make_config(f"--resume {flags} --out {place}/run".split())
    assert (config.steps, config.checkpoint_every) == (9, 3)
    assert (config.token_budget, config.engine_memory) == (999, 0.7)
    assert (config.mode, config.group_size, config.temperature) == ("both", 4, 0.8)


def test_resume_takes_the_values_with_which_the_run_was_begun(place):
    config = train.make_config(f"--resume --group-size 4 --temperature 0.8 --out {place}/run".split())
    assert (config.group_size, config.steps) == (4, 1)


# ---- Tasks of one's own ------------------------------------------------------------------------------------
@pytest.fixture
def ten(tmp_path):
    rows = [json.dumps({"question": f"Who is {k}?", "answer": str(k), "id": str(k)}) for k in range(10)]
    (tmp_path / "ten.jsonl").write_text("\n".join(rows))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.txt").write_text("Ada.")
    return f"--model {POLICY} --tasks {tmp_path}/ten.jsonl --corpus {tmp_path}/docs {limit_flags()}"


def test_a_run_on_tasks_of_ones_own_goes_to_a_folder_of_their_name(ten):
    assert train.make_config(ten.split()).out == "runs/ten-compaction-mosaic-0"
    assert train.make_config([]).out == "runs/compaction-mosaic-0"


def test_of_tasks_of_ones_own_as_many_are_held_out_as_one_asks_for(ten):
    tasks, held_out = train.split_tasks(train.make_config([*ten.split(), "--eval-tasks", "3"]))
    ids = [task.id for task in held_out]
    assert len(ids) == 3
    assert sorted(ids + [task.id for task in tasks]) == [str(k) for k in range(10)]
    for seed in ("1", "2"):  # the same ones for every seed
        flags = [*ten.split(), "--eval-tasks", "3", "--seed", seed]
        assert [task.id for task in train.split_tasks(train.make_config(flags))[1]] == ids


def test_no_tasks_of_ones_own_are_held_out_unless_one_asks_for_it(ten):
    tasks, held_out = train.split_tasks(train.make_config(ten.split()))
    assert (len(tasks), held_out) == (10, [])


def test_a_run_on_tasks_of_ones_own_is_resumed_by_its_folder_alone(ten, tmp_path):
    config = train.make_config([*ten.split(), "--out", f"{tmp_path}/run"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps(vars(config)))
    resumed = train.make_config(["--resume", "--out", f"{tmp_path}/run", "--steps", "99"])
    assert vars(resumed) == vars(config) | {"resume": True, "steps": 99}


def test_the_evaluation_of_a_checkpoint_takes_the_tasks_and_limits_of_its_run(ten, tmp_path):
    flags = f"{ten} --mode single --max-turns 5 --steps 1 --eval-tasks 2 --out "
    assert run(flags, tmp_path / "run")[0] == 0
    config = evaluation.make_config({"model": f"{tmp_path}/run/checkpoint"})
    assert config.tasks == f"{tmp_path}/ten.jsonl"
    assert config.corpus == f"{tmp_path}/docs"
    assert (config.mode, config.max_turns) == ("single", 5)
    figures = json.loads((tmp_path / "run/eval.json").read_text())
    assert (figures["before"]["n"], figures["after"]["n"]) == (2, 2)


def test_flags_of_an_evaluation_go_before_the_settings_of_the_run(place):
    config = evaluation.make_config({"model": f"{place}/run/checkpoint", "mode": "single"})
    assert (config.mode, config.temperature) == ("single", 0.8)


def test_an_evaluation_like_a_run_takes_its_settings(place):
    config = evaluation.make_config({"like": f"{place}/run", "model": str(POLICY)})
    assert (config.mode, config.temperature, config.model) == ("both", 0.8, str(POLICY))


# ---- --show and --compare ----------------------------------------------------------------------------------
WRONG_SHOWS = {
    "--show {0}/missing.jsonl": "missing.jsonl: expected",
    "--show {0}/empty.jsonl": "empty.jsonl: expected at least one line",
    "--show {0}/torn.jsonl": "torn.jsonl:2: expected",
    "--show {0}/good.jsonl": "good.jsonl:1: expected the line of a trajectory",
    "--show {0}/run/metrics.jsonl": "metrics.jsonl:1: expected the line of a trajectory",
    "--show {0}/run/trajectories.jsonl --line 9": "--line 9: expected 1 to 8",
    "--show {0}/run/trajectories.jsonl --line -1": "--line -1: expected 1 to 8",
    "--compare {0}/texts": "--compare {0}/texts: expected a finished run with an eval.json",
}


@pytest.mark.parametrize("flags", WRONG_SHOWS)
def test_what_cannot_be_shown_or_compared_is_named(flags, place, capsys, no_model):
    said = sentence(evaluation, flags.format(place), capsys)
    assert WRONG_SHOWS[flags].format(place) in said


def test_show_prints_the_line_that_was_asked_for(place, capsys):
    evaluation.main(["--show", f"{place}/run/trajectories.jsonl", "--line", "3"])
    printed = capsys.readouterr().out
    row = json.loads((place / "run/trajectories.jsonl").read_text().splitlines()[2])
    assert printed.startswith(f"{place}/run/trajectories.jsonl:3\n")
    assert row["question"] in printed
    assert printed.count("--- session ") == len(row["sessions"])


def finished(folder, name, **changes):
    """The folder of a run that was evaluated so."""
    figures = {"limits": {"mode": "both"}, "steps": 4, "n": 8, "accuracy": 0.5, "sessions": 2.0}
    (folder / name).mkdir()
    (folder / name / "eval.json").write_text(json.dumps({"after": figures | changes}))
    return f"{folder}/{name}"


@pytest.mark.parametrize("change", [{"limits": {"mode": "single"}}, {"steps": 5}, {"n": 9}])
def test_runs_of_other_limits_or_steps_are_not_compared(change, tmp_path, capsys):
    first = finished(tmp_path, "a-0")
    second = finished(tmp_path, "b-0", **change)
    said = sentence(evaluation, f"--compare {first} {second}", capsys)
    assert first in said
    assert second in said
    assert "limits" in said
    assert "steps" in said


def test_runs_are_compared_by_arm_and_paired_by_seed(tmp_path, capsys):
    paths = []
    for seed, accuracy in enumerate((0.2, 0.4)):
        paths.append(finished(tmp_path, f"a-{seed}", accuracy=accuracy))
        paths.append(finished(tmp_path, f"b-{seed}", accuracy=accuracy + 0.25))
    evaluation.main(["--compare", *paths])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert "(2)" in lines[2]
    assert "| 0.300 ± " in lines[2]
    assert "| 0.250 ± 0.000 |" in lines[4]
