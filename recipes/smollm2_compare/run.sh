#!/bin/sh
# Trains seven kinds of head with an equal budget on the same answers and puts them into one table.
# Words after the script are further settings. Stopped or extended by a head, the same command goes on where it was.
# PROMPTS: a file of training prompts, only the prompts are used (default: the built-in ones).
# FIRST:   so many prompts from its beginning (default 4000).
# EVAL:    held-out sets or files, separated by commas (default: MT-bench, HumanEval and GSM8K from the Hub).
# SIZE:    small = 200 prompts and 60,000 tokens for each head, a rehearsal of some minutes a head.
# BUDGET and VALUE: of what every head gets equally much, and how much (default: tokens, 2000000).
set -eu
prompts=${PROMPTS:-builtin} first=${FIRST:-4000} value=${VALUE:-2000000} rows=all
if [ "${SIZE:-full}" = small ]; then
  first=${FIRST:-200} value=${VALUE:-60000} rows=8
fi
. "$(dirname "$0")/../first_prompts.sh"
[ "$rows" = all ] || set -- "eval.limit=$rows" "$@"
specdraft compare "name=${NAME:-recipe_smollm2_compare}" \
  "compare.budget=${BUDGET:-tokens}" "compare.value=$value" \
  "heads=[medusa, hydra_chain, 'eagle loss=feature', \
'eagle3 optim=muon optim.weight_decay=0.1 loss.step_decay=0.45', 'peagle head.num_layers=2', \
'dflash head.num_layers=2 head.max_anchors=64', 'mlp optim.lr=5e-3']" \
  "data.sources=[$prompts]" data.max_new_tokens=128 data.generate_batch_size=64 data.batch_size=4 \
  head.num_draft_tokens=5 head.draft_vocab_size=8192 optim.lr=1e-3 \
  target.dtype=bfloat16 trainer.feature_memory_gib=6.0 trainer.eval_max_new_tokens=48 \
  decode.head_dtype=bfloat16 decode.max_new_tokens=128 eval.dtype=float32 \
  "eval.prompts=[${EVAL:-mt_bench,humaneval,gsm8k}]" "$@"
