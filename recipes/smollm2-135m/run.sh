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

# Everything the five have in common. They see the same texts, and share the target's features on disk.
train() {
    local method=$1
    shift
    foredraft train smollm2-135m --method "$method" --anchors 96 --answers-per-step 2 --max-answer-tokens 224 \
        --held-out 64 --gamma 2.5 "$@"
}
shared=(--data "$out/mix.jsonl" --feature-dir "$out/features" --feature-taps 1,10,19,26,28,29)
plateau=(--learning-rate 1e-3 --decay 0.6)
half=(--draft-tokens 5,7,7 --loss 0.5,0.5,0)

# sequential METHOD STEPS "STEPS..." SHAPE...: a new drafter, then on from it with a fresh schedule, once for each further STEPS.
sequential() {
    local method=$1 steps=$2 before=$out/$1-0 seed=0
    shift 2
    local more=$1
    shift
    train "$method" "${shared[@]}" "${plateau[@]}" "${half[@]}" --output "$before" --draft-vocab-size 12288 "$@" \
        --warmup 100 --steps "$steps" --evaluate-every 300
    for steps in $more; do
        seed=$((seed + 1))
        train "$method" "${shared[@]}" "${plateau[@]}" "${half[@]}" --output "$out/$method-$seed" --init "$before" \
            --warmup 60 --steps "$steps" --seed "$seed" --evaluate-every 300
        before=$out/$method-$seed
    done
    ln -sfn "$(basename "$before")" "$out/$method"
}

for method in ${METHODS:-dflash dspark mtp eagle3 gemma4_mtp}; do
    case $method in
    dflash)
        train dflash --data "$answers" --data "$out/first.jsonl" --output "$out/dflash-0" "${plateau[@]}" \
            --draft-vocab-size 12288 --layers 3 --taps 1,10,19,26 --draft-tokens 5,5,5,7,7,7,7,15 --loss 0.5,0.5,0 \
            --warmup 100 --steps 5000 --evaluate-every 300
        train dflash "${shared[@]}" --output "$out/dflash" --init "$out/dflash-0" --draft-tokens 5,5,7,7,7,7,15 \
            --loss 0.5,0.5,0 --learning-rate 6e-4 --warmup 40 --decay 1.0 --steps 1200 --evaluate-every 300
        ;;
    dspark)
        train dspark "${shared[@]}" "${plateau[@]}" --output "$out/dspark-0" --init "$out/dflash" --markov-rank 64 \
            --draft-tokens 3,5,7,7,8 --warmup 60 --steps 2000 --evaluate-every 400
        train dspark "${shared[@]}" "${plateau[@]}" --output "$out/dspark" --init "$out/dspark-0" \
            --draft-tokens 3,5,7,7,8 --warmup 60 --steps 2000 --seed 1 --evaluate-every 500
        ;;
    mtp) sequential mtp 2200 "4000" ;;
    gemma4_mtp) sequential gemma4_mtp 1800 "5000" ;;
    eagle3) sequential eagle3 2200 "1200 2800" --taps 1,19,28 ;;
    esac
    # What ships: in 8 bits, calibrated on prompts that nobody was trained on.
    foredraft export smollm2-135m --method "$method" --drafter "$out/$method" --format compact \
        --output "$out/shipped/$method-smollm2-135m"
    tail -n 240 "$out/second-all-prompts.jsonl" > "$out/calibration-prompts.jsonl"
    foredraft calibrate smollm2-135m --method "$method" --drafter "$out/shipped/$method-smollm2-135m" \
        --data "$out/calibration-prompts.jsonl" --num-prompts 100 --output "$out/shipped/$method-smollm2-135m"
done
