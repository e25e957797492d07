"""BrowseComp's CSV as JSONL for --tasks: base64, XOR with SHA-256 of the canary.
    python .tools/browsecomp.py browse_comp_test_set.csv browsecomp.jsonl
Keep the result to yourself: its makers encrypted it so that no model trains on it.
"""

import csv
import json
import sys
from base64 import b64decode
from hashlib import sha256
from itertools import cycle
from pathlib import Path


def decrypt(text: str, canary: str) -> str:
    key = sha256(canary.encode()).digest()
    return bytes(a ^ b for a, b in zip(b64decode(text), cycle(key))).decode()


def main(source: str, target: str) -> None:
    lines = []
    try:
        for row in csv.DictReader(Path(source).read_text().split("\n")):
            task = {"question": decrypt(row["problem"], row["canary"])}
            task["answer"] = decrypt(row["answer"], row["canary"])
            lines.append(json.dumps(task, ensure_ascii=False) + "\n")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, csv.Error) as error:
        sys.exit(f"{source}:{len(lines) + 2}: expected problem, answer and canary ({error!r})")
    Path(target).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
