#!/usr/bin/env bash
# Trains the five drafters that ship for smollm2-135m. Stop it at any time; run it again to go on.
#   recipes/smollm2-135m/run.sh ANSWERS.jsonl[.gz] [EXCLUDE_DIR]
# ANSWERS: answers of the target (docs/training.md). EXCLUDE_DIR: *.jsonl of prompts that must not be trained on.
# METHODS="mtp dspark" trains these only.
set -euo pipefail
answers=${1:?usage: $0 ANSWERS.jsonl[.gz] [EXCLUDE_DIR]}
exclude=${2:+--exclude $2}
here=$(dirname "$(realpath "$0")")
out=${OUT:-runs/smollm2-135m}
mkdir -p "$out"

# Large tensors are freed and allocated again at every step: keep their pages instead of asking the kernel anew.
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296

# Answers in the styles that ANSWERS lacks: NAME COUNT SEED KEPT.
answer() {
    [ -s "$out/$1.jsonl" ] && return
    python "$here/make_prompts.py" --output "$out/$1-all-prompts.jsonl" --count "$2" --seed "$3" \
        --exclude "$here/../../src/foredraft/benchmark/prompts" $exclude
    head -n "$4" "$out/$1-all-prompts.jsonl" > "$out/$1-prompts.jsonl"
    foredraft synthesize smollm2-135m --prompts "$out/$1-prompts.jsonl" --output "$out/$1.jsonl" \
        --temperature 0,0,0.8 --max-tokens 224 --max-num-seqs 48
}
answer first 1200 1 512
answer second 3600 11 1400
[ -s "$out/mix.jsonl" ] || python "$here/mix.py" "$out/mix.jsonl" 7000 "$answers" "$out/second.jsonl" "$out/first.jsonl"

train() {
    local method=$1
    shift
    foredraft train smollm2-135m --method "$method" --anchors 96 --answers-per-step 2 \
        --max-answer-tokens 224 --held-out 64 --gamma 2.5 "$@"
}
# The five see the same texts in the same order, and share the target's features on disk.
shared=(--data "$out/mix.jsonl" --feature-dir "$out/features" --feature-taps 1,10,19,26,28,29)

for method in ${METHODS:-dflash dspark mtp eagle3 gemma4_mtp}; do
    steps=2200
    case $method in
    dflash)
        train dflash --data "$answers" --data "$out/first.jsonl" --output "$out/dflash-first" \
            --draft-vocab-size 12288 --layers 3 --taps 1,10,19,26 --draft-tokens 5,5,5,7,7,7,7,15 --loss 0.5,0.5,0 \
            --learning-rate 1e-3 --warmup 100 --decay 0.6 --steps 5000 --evaluate-every 300
        train dflash "${shared[@]}" --output "$out/dflash" --init "$out/dflash-first" \
            --draft-tokens 5,5,7,7,7,7,15 --loss 0.5,0.5,0 \
            --learning-rate 6e-4 --warmup 40 --decay 1.0 --steps 1200 --evaluate-every 300
        ;;
    dspark)
        train dspark "${shared[@]}" --output "$out/dspark" --init "$out/dflash" --markov-rank 64 \
            --draft-tokens 3,5,7,7,8 --learning-rate 1e-3 --warmup 60 --decay 0.6 --steps 2000 --evaluate-every 400
        ;;
    *)
        [ "$method" = gemma4_mtp ] && steps=1800
        taps=$([ "$method" = eagle3 ] && echo --taps 1,19,28 || true)
        train "$method" "${shared[@]}" --output "$out/$method" --draft-vocab-size 12288 $taps \
            --draft-tokens 5,7,7 --loss 0.5,0.5,0 --learning-rate 1e-3 --warmup 100 --decay 0.6 --steps "$steps" --evaluate-every 300
        ;;
    esac
    # What ships: in 8 bits, calibrated on prompts that nobody was trained on.
    foredraft export smollm2-135m --method "$method" --drafter "$out/$method" --format compact \
        --output "$out/shipped/$method-smollm2-135m"
    tail -n 240 "$out/second-all-prompts.jsonl" > "$out/calibration-prompts.jsonl"
    foredraft calibrate smollm2-135m --method "$method" --drafter "$out/shipped/$method-smollm2-135m" \
        --data "$out/calibration-prompts.jsonl" --num-prompts 60 --output "$out/shipped/$method-smollm2-135m"
done
