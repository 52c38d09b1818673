#!/bin/sh
# Trains one EAGLE-3 head with the settings of experiment=smollm2_eagle3 and of three published trainers: the same rows in the
# same order, the same number of steps, the same size, the same trainer and decoder. Words after the script are further
# settings. Stopped, the same command goes on where it was.
# PROMPTS: a file of training prompts, only the prompts are used (default: the built-in ones).
# FIRST:   so many prompts from its beginning (default 4000).
# EVAL:    held-out sets or files, separated by commas (default: MT-bench, HumanEval and GSM8K from the Hub).
# VALUE:   tokens of training for each, prompts and repeated epochs counted (default 812816, which is each once).
# HEADS:   another list of heads, e.g. to train some of them in a second process.
set -eu
prompts=${PROMPTS:-builtin} first=${FIRST:-4000}
. "$(dirname "$0")/../first_prompts.sh"
# What their files or papers set, where it is a setting here; the layers they fuse by default, and no start from the target.
theirs='head.layer_init=random head.aux_layers=[3,16,28]'
ours="eagle3 name=specdraft optim=muon optim.weight_decay=0.1 loss.step_decay=0.45"
specforge="eagle3 name=specforge $theirs optim.lr=1e-4 optim.betas=[0.9,0.999] optim.warmup_ratio=0.015 \
optim.max_grad_norm=0.5 loss.normalize=legacy_bt"
speculators="eagle3 name=speculators $theirs head.unroll_steps=3 optim=muon optim.schedule=linear \
optim.warmup_ratio=0.01 optim.weight_decay=0.1 loss.step_decay=1.0"
eagle="eagle3 name=eagle $theirs optim.lr=5e-5 optim.schedule=linear optim.warmup_ratio=0.015 \
optim.max_grad_norm=0.5 loss.normalize=legacy_bt"
specdraft compare "name=${NAME:-recipe_smollm2_peers}" compare.budget=tokens "compare.value=${VALUE:-812816}" \
  "heads=${HEADS:-['$ours', '$speculators', '$specforge', '$eagle']}" \
  "data.sources=[$prompts]" data.max_new_tokens=128 data.generate_batch_size=64 data.batch_size=2 \
  head.num_draft_tokens=5 head.draft_vocab_size=8192 target.dtype=bfloat16 \
  decode.head_dtype=bfloat16 decode.max_new_tokens=64 eval.dtype=bfloat16 eval.limit=20 \
  "eval.prompts=[${EVAL:-mt_bench,humaneval,gsm8k}]" "$@"
