#!/usr/bin/env bash
# On a machine with a GPU that is lent without a network, in the root of the repository:
#   lent.sh keep              keeps the parts of onnxruntime-gpu that came in out/parts
#   lent.sh warm [OPTIONS…]   starts what torch.compile compiles for bench.speed's workloads, behind
#                             the next calls, for two minutes at most: it needs no onnxruntime-gpu
#   lent.sh run [OPTIONS…]    installs the wheel once, and runs tests.gpu.run; its results come back
#                             as $OUT/found.tar.gz
# What was found stays on the machine as well: the next `run` takes up there.
set -euo pipefail
kept=${KEPT:-/tmp/attngraph-gpu} python=${PYTHON:-python3}
mkdir -p "$kept/parts" "$kept/found"
if [ -d out/parts ]; then cp out/parts/* "$kept/parts/"; fi
if [ -d out/found ]; then cp -n out/found/* "$kept/found/"; fi  # of an earlier machine
case ${1:-} in
  keep)
    ls -la "$kept/parts"
    ;;
  warm)
    shift
    mkdir -p "$kept/tree"
    tar c --exclude=./out --exclude=./.git . | tar x -C "$kept/tree"
    for only in "bert_padded gpt2_prefill" "bert_long llama_prefill" "vit per_head"
    do
      # shellcheck disable=SC2086
      (cd "$kept/tree" && PYTHONPATH=$PWD HF_HUB_OFFLINE=1 OMP_NUM_THREADS=4 setsid nohup \
        timeout 120 "$python" -W ignore -m bench.speed --only $only --engine eager compile \
        --rounds 1 --seconds 0.01 --results "$kept/warm" "$@" >>"$kept/warm.log" 2>&1 &)
    done
    ;;
  run)
    shift
    if [ ! -d "$kept/site" ]; then
      packed=$kept/$(cat "$kept/parts/name")
      cat "$kept"/parts/part-* >"$packed"
      echo "$(cat "$kept/parts/sha256")  $packed" | sha256sum -c -
      case $packed in
        *.whl)
          "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
            --target "$kept/site.new" "$packed"
          ;;
        *) "$python" -m tarfile -e "$packed" "$kept/site.new" ;;
      esac
      # onnxruntime looks for the CUDA libraries beside itself.
      ln -sfn "$("$python" -c 'import nvidia; print(next(iter(nvidia.__path__)))')" \
        "$kept/site.new/nvidia"
      mv "$kept/site.new" "$kept/site"
    fi
    ATTNGRAPH_COMMIT=$(cat "$kept/parts/commit" 2>/dev/null || true)
    export ATTNGRAPH_COMMIT
    export PYTHONPATH=$kept/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
    code=0
    "$python" -m tests.gpu.run "$kept/found" --minutes 9 "$@" || code=$?
    mkdir -p "$OUT"
    tail -n 40 "$kept/warm.log" >"$kept/found/warm.log" 2>/dev/null || true
    tar czf "$OUT/found.tar.gz" -C "$kept/found" .
    exit $code
    ;;
  *)
    echo "usage: lent.sh keep | warm [options of bench.speed] | run [options of tests.gpu.run]" >&2
    exit 2
    ;;
esac
