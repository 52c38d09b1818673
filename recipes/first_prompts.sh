# Read by run.sh of the comparisons: $prompts becomes the first $first prompts of a file; of another source, $first is a limit
# put before the words of the call.
if [ -f "$prompts" ]; then
  mkdir -p outputs
  head -n "$first" "$prompts" > "outputs/first_$first.jsonl"
  prompts="outputs/first_$first.jsonl"
elif [ "$first" -lt 1000 ]; then
  set -- "data.limit=$first" "$@"
fi
