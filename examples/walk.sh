#!/usr/bin/env bash
# A walk from a plan to a page: plan a run, look at the machine, train with AdamW, go on with Muon at another ZeRO stage,
# and look at the run's health. `examples/walk.sh` takes about three minutes on two CPU cores; its pictures are in runs/walk.
# STEPS, OUT and PYTHON (the interpreter) can be set.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
STEPS=${STEPS:-100}
OUT=${OUT:-runs/walk}
if ! "$PYTHON" -c 'import torch, sys; sys.exit(torch.cuda.device_count() < 2)'; then
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
fi
mkdir -p "$OUT"

say() { printf '\n=== %s\n' "$*"; }

say "What would a 1B model on 8 GPUs compute, send and keep? ($OUT/plan.png)"
"$PYTHON" -m deepspeed_muon plan examples/llama_1b.json --world-size 8 --stage 1 --gpu h100 \
    --params ds_configs/1b_8gpus.hjson --plot "$OUT/plan.png" | tail -n 24

say "What can this machine build and run?"
"$PYTHON" -m deepspeed_muon report

train() {
    "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 2 examples/train_gpt.py \
        --dim 64 --layers 2 --seq_len 64 --batch_size 8 --steps "$STEPS" --eval_every "$STEPS" --metrics_dir "$OUT" "$@"
}

rm -rf "$OUT/adamw" "$OUT/muon" "$OUT/saved" "$OUT/set"
say "AdamW at ZeRO 1, with a checkpoint at the end"
train --deepspeed_config ds_configs/zero1.json --optimizer AdamW --lr 0.003 --run_name adamw --save_dir "$OUT/saved"

say "Its weights and moments become a set for Muon: AdamW's exp_avg is the first momentum"
"$PYTHON" -m deepspeed_muon checkpoint consolidate "$OUT/saved" "$OUT/set"

say "Muon goes on from there at ZeRO 3"
# Rates and schedule are the new run's own: AdamW's count for another optimizer and a schedule that has ended.
"$PYTHON" - "$OUT" <<'PYTHON'
import json
import sys

out = sys.argv[1]
config = json.load(open("ds_configs/zero3.json"))
config["optimizer"]["params"] |= {
    "restore_from": {"path": f"{out}/set", "progress": False},
    "health": 5,
}
json.dump(config, open(f"{out}/muon.json", "w"), indent=2)
PYTHON
train --deepspeed_config "$OUT/muon.json" --muon_lr 0.02 --adam_lr 0.004 --run_name muon

say "What does its health say? ($OUT/muon/health.html)"
"$PYTHON" -m deepspeed_muon health --html "$OUT/muon"
