#!/bin/sh
# Trains and measures the head of this recipe. Words after the script are further overrides.
# PROMPTS: file or Hub id of training prompts, only the prompts are used (default: the built-in ones).
# EVAL: held-out set or file (default: MT-bench from the Hub).
set -eu
specdraft run experiment=smollm2_eagle3 name=recipe_smollm2_eagle3 resume=auto \
  "data.sources=[${PROMPTS:-builtin}]" data.limit=1000 data.max_new_tokens=128 data.generate_batch_size=64 \
  head.num_draft_tokens=4 head.draft_vocab_size=8192 \
  data.batch_size=4 trainer.epochs=5 trainer.feature_memory_gib=3.0 \
  trainer.eval_prompts=16 trainer.eval_max_new_tokens=48 \
  "eval.prompts=[${EVAL:-mt_bench}]" eval.limit=20 decode.max_new_tokens=64 "$@"
