#!/usr/bin/env bash
# Runs the arms of the study with today's code:
#     .study/run.sh MODE ["SEED ..."] [flags of train.py, for all runs]
#     .study/run.sh compaction                               # in one terminal
#     .study/run.sh subagent                                 # in another one
#     .study/run.sh compaction "1 2" --steps 2 --eval-tasks 8   # a look at it in a few minutes
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
flags=("$@")

run() { # ARM SEED [flags of the arm]
  local out=runs/study/$mode-$1-$2
  local resume=()
  if grep -qs '"after"' "$out/eval.json"; then
    echo "$out is finished"
    return
  fi
  if [ -e "$out/checkpoint" ] || [ -e "$out/checkpoint.old" ]; then
    resume=(--resume)
  fi
  python train.py --eval-tasks 512 --seed "$2" --out "$out" "${@:3}" ${flags[@]+"${flags[@]}"} ${resume[@]+"${resume[@]}"}
}

# broadcast needs no Phi, and igpo needs it at turns: --measure-gains logs the gains of their sessions all the same.
# Phi is then in the seconds of a step of all arms.
n=0
for seed in $seeds; do
  run mosaic "$seed" --mode "$mode"
  run broadcast "$seed" --mode "$mode" --advantage broadcast --measure-gains
  n=$((n + 1))
  if [ "$n" -le 3 ]; then
    run igpo "$seed" --mode "$mode" --advantage igpo --measure-gains
    run mosaic-no-session-aware "$seed" --mode "$mode" --no-session-aware
    run mosaic-no-shaping "$seed" --mode "$mode" --no-shaping
    # It trains in single sessions, where there is no gain to measure.
    run single-broadcast "$seed" --mode single --eval-mode "$mode" --advantage broadcast
  fi
done
