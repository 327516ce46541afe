# Sourced by the other scripts: what a SCALE means, tiny (a laptop, two minutes), smollm2, 1b or 8b (a cluster).
SCALE=${SCALE:-tiny}
case "$SCALE" in
  tiny) scale=(model=tiny train.steps=6 data.sequence_length=64 data.global_batch_size=4 evaluation.window=64
               evaluation.max_windows=8 tracker=jsonl launch.threads=1 sweep.jobs_at_once=2) ;;
  smollm2) scale=(model=smollm2_135m data=wikitext2 data.sequence_length=1024 evaluation.window=1024) ;;
  1b) scale=(model=llama3_2_1b data=wikitext2 data.sequence_length=2048 evaluation.window=2048 model.dtype=bfloat16) ;;
  8b) scale=(model=llama3_1_8b data=wikitext2 data.sequence_length=2048 evaluation.window=2048 model.dtype=bfloat16) ;;
  *) echo "SCALE=$SCALE: must be one of tiny, smollm2, 1b, 8b" >&2; exit 2 ;;
esac

# Run a sweep with the options of the scale, but for those to which an argument gives another value.
sweep() {
  local option options=()
  for option in "${scale[@]}"; do
    [[ " $*" == *" ${option%%=*}="* ]] || options+=("$option")
  done
  python -m rotexp.train -m "${options[@]}" "$@"
}
