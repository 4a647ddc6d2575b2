#!/usr/bin/env bash
# Trains the DFlash drafter that ships for smollm2-135m. Stop it at any time; run it again to go on.
#   recipes/dflash-smollm2-135m/run.sh ANSWERS.jsonl[.gz] [EXCLUDE_DIR]
# ANSWERS: answers of the target (docs/training.md). EXCLUDE_DIR: *.jsonl of prompts that must not be trained on.
set -euo pipefail
answers=${1:?usage: $0 ANSWERS.jsonl[.gz] [EXCLUDE_DIR]}
exclude=${2:+--exclude $2}
here=$(dirname "$(realpath "$0")")
out=${OUT:-runs/dflash-smollm2-135m}
mkdir -p "$out"

# Large tensors are freed and allocated again at every step: keep their pages instead of asking the kernel anew.
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296

python "$here/make_prompts.py" --output "$out/all-prompts.jsonl" --count 1200 --seed 1 \
    --exclude "$here/../../src/foredraft/benchmark/prompts" $exclude
head -n 512 "$out/all-prompts.jsonl" > "$out/prompts.jsonl"
foredraft synthesize smollm2-135m --prompts "$out/prompts.jsonl" --output "$out/answers.jsonl" \
    --temperature 0,0,0.8 --max-tokens 224 --max-num-seqs 48
foredraft train smollm2-135m --method dflash --data "$answers" --data "$out/answers.jsonl" --output "$out/drafter" \
    --layers 3 --taps 1,10,19,26 --draft-vocab-size 12288 --block-sizes 6,6,6,8,8,8,8,16 --anchors 96 \
    --gamma 2.5 --distillation 0.5 --learning-rate 1e-3 --warmup 100 --decay 0.6 \
    --answers-per-step 2 --steps 5000 --max-answer-tokens 224 --held-out 64 --evaluate-every 300
