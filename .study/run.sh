#!/usr/bin/env bash
# Runs the arms of the study with today's code, into runs/study/MODE-ARM-SEED:
#     .study/run.sh MODE ["SEED ..."] [flags of train.py, for all runs]
#     .study/run.sh compaction                                  # in one terminal
#     .study/run.sh subagent                                    # in another one
#     .study/run.sh compaction "1 2" --steps 2 --eval-tasks 8   # a look at it, in a few minutes
# A run takes some 5 minutes on one core, and each mode has 22 of them: two hours. Seeds are 10 to 14; Mosaic and
# broadcast run with all seeds, the other arms with the first three. A run that is finished is skipped, and one that
# was stopped goes on, so the script can be started again at any time with the same flags.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

case ${1:-} in
compaction | subagent) mode=$1 ;;
*)
  echo "run.sh: error: expected a mode, compaction or subagent" >&2
  exit 2
  ;;
esac
seeds=${2:-10 11 12 13 14}
shift $(($# < 2 ? $# : 2))
flags=(--eval-tasks 512 "$@")

is_finished() { # FOLDER
  grep -qs '"after"' "$1/eval.json" && echo "$1 is finished"
}

train() { # FOLDER [flags of the arm]
  local resume=()
  if [ -e "$1/checkpoint" ] || [ -e "$1/checkpoint.old" ]; then
    resume=(--resume)
  fi
  python train.py --out "$1" "${@:2}" ${resume[@]+"${resume[@]}"}
}

run() { # ARM SEED [flags of the arm]
  local out=runs/study/$mode-$1-$2
  is_finished "$out" || train "$out" --mode "$mode" --seed "$2" "${@:3}" "${flags[@]}"
}

# Trained in single sessions from the policy and with the limits of the mode, and evaluated in the mode as Mosaic's
# run of that seed was. Its gains are scored by the trained policy, and not by the one that RL started from.
run_single() { # SEED
  local out=runs/study/$mode-single-broadcast-$1
  local like=runs/study/$mode-mosaic-$1
  is_finished "$out" && return
  # shellcheck disable=SC2046  # a flag a word
  train "$out" --mode single --model ".world/$mode" $(limits_of ".world/$mode") --seed "$1" --advantage broadcast \
    "${flags[@]}" --eval-tasks 0
  local how=(--like "$like" --model "$out/checkpoint" --n "$(lines_of "$like/after-sampled.jsonl")" --resume)
  python eval.py "${how[@]}" --greedy --out "$out/after-greedy.jsonl" >"$out/greedy.json"
  python eval.py "${how[@]}" --out "$out/after-sampled.jsonl" >"$out/sampled.json"
  python - "$out" "$(lines_of "$out/metrics.jsonl")" <<'END'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1])
after = json.loads((out / "sampled.json").read_text()) | {"steps": int(sys.argv[2])}
(out / "eval.json").write_text(json.dumps({"after": after}, indent=1))
END
}

limits_of() { # the flags for which the policy of a folder was made
  python - "$1/limits.json" <<'END'
import json
import sys

for name, value in json.load(open(sys.argv[1])).items():
    print(f"--{name.replace('_', '-')}={value}")
END
}

lines_of() {
  grep -c . "$1"
}

# broadcast needs no Phi, and igpo needs it at turns: --measure-gains logs the gains of their sessions all the same.
# The seconds of a step have Phi in them then, in all arms.
n=0
for seed in $seeds; do
  run mosaic "$seed"
  run broadcast "$seed" --advantage broadcast --measure-gains
  n=$((n + 1))
  if [ "$n" -le 3 ]; then
    run igpo "$seed" --advantage igpo --measure-gains
    run mosaic-no-session-aware "$seed" --no-session-aware
    run mosaic-no-shaping "$seed" --no-shaping
    run_single "$seed"
  fi
done
