#!/usr/bin/env bash
# Train on two CPU ranks. OUT: where everything goes. Arguments are the launcher's, such as --master_port.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-out/mindformers_llama}
export OMP_NUM_THREADS=1
mkdir -p "$OUT"
cd "$OUT"
[ -e data/train.mindrecord.db ] || python "$here/text_to_mindrecord.py" data

exec python -m lastgasp run --framework mindspore --worker_num=2 --local_worker_num=2 --log_dir=msrun --join=True "$@" \
  "$here/train.py" "$here/llama.yaml"
