"""BrowseComp's encrypted CSV becomes a file of tasks, or the line that cannot be read is named."""

import subprocess
import sys
from base64 import b64encode
from hashlib import sha256
from itertools import cycle

import pytest
from common import ROOT

import harness


def encrypted(text: str, canary: str) -> str:
    pairs = zip(text.encode(), cycle(sha256(canary.encode()).digest()))
    return b64encode(bytes(a ^ b for a, b in pairs)).decode()


def convert(folder, rows: str):
    (folder / "b.csv").write_text(rows)
    command = [sys.executable, str(ROOT / ".tools/browsecomp.py"), "b.csv", "b.jsonl"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_tasks_are_decrypted(tmp_path):
    question = 'Wer, "wo"\nund é warum ' * 9
    row = f"{encrypted(question, 'right')},{encrypted('Ada', 'right')},right\n"
    assert convert(tmp_path, "problem,answer,canary\n" + row).returncode == 0
    (task,) = harness.load_tasks(tmp_path / "b.jsonl")
    assert (task.question, task.answer) == (question.strip(), "Ada")


GOOD = f"{encrypted('Who?' * 9, 'right')},{encrypted('Ada', 'right')},right\n"
BAD = f"{encrypted('Wer é?' * 9, 'right')},{encrypted('Ada', 'right')},wrong\n"
WRONG = {"another canary": ("problem,answer,canary\n" + GOOD + BAD, ":3:"), "columns": ("a,b\n1,2\n", ":2:")}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_cannot_be_read_is_named(name, tmp_path):
    rows, where = WRONG[name]
    done = convert(tmp_path, rows)
    assert done.returncode == 1
    assert done.stderr.startswith(f"b.csv{where} expected problem, answer and canary")
    assert not (tmp_path / "b.jsonl").exists()
