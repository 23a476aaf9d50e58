#!/usr/bin/env bash
# Train on two CPU ranks. OUT: where everything goes. Further arguments are Megatron's.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-out/megatron_gpt}
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=1
[ -e "$OUT/data/topics.idx" ] || python "$here/prepare.py" "$OUT/data"

model=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64)
data=(--data-path "$OUT/data/topics" --data-cache-path "$OUT/data/cache" --split 95,5,0
  --tokenizer-type NullTokenizer --vocab-size 512 --make-vocab-size-divisible-by 8 --num-workers 0)
training=(--micro-batch-size 4 --global-batch-size 16 --train-iters 60 --lr 0.003 --min-lr 0.0003
  --lr-decay-style cosine --lr-warmup-iters 5 --clip-grad 1.0 --log-interval 1 --eval-interval 60 --eval-iters 2
  --bf16 --use-distributed-optimizer --num-distributed-optimizer-instances 2)
saving=(--save "$OUT/ckpt" --load "$OUT/ckpt" --save-interval 20 --ckpt-format torch)
cpu=(--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
  --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion --no-rope-fusion
  --no-persist-layer-norm)

exec python -m lastgasp run --framework megatron --nproc-per-node 2 "$here/pretrain_gpt.py" \
  "${model[@]}" "${data[@]}" "${training[@]}" "${saving[@]}" "${cpu[@]}" "$@"
