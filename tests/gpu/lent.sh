#!/usr/bin/env bash
# On a machine with a GPU that is lent without a network, in the root of the repository:
#   lent.sh keep              keeps the parts of onnxruntime-gpu's wheel that came in out/parts
#   lent.sh run [OPTIONS…]    installs the wheel once, and runs tests.gpu.run into $OUT
# What was found stays on the machine as well: the next `run` takes up there.
set -euo pipefail
kept=${KEPT:-/tmp/attngraph-gpu} python=${PYTHON:-python3}
mkdir -p "$kept/parts" "$kept/found"
if [ -d out/parts ]; then cp out/parts/* "$kept/parts/"; fi
case ${1:-} in
  keep)
    ls -la "$kept/parts"
    ;;
  run)
    shift
    if [ ! -d "$kept/site" ]; then
      wheel=$kept/$(cat "$kept/parts/name")
      cat "$kept"/parts/part-* >"$wheel"
      echo "$(cat "$kept/parts/sha256")  $wheel" | sha256sum -c -
      "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
        --target "$kept/site.new" "$wheel"
      # onnxruntime looks for the CUDA libraries beside itself.
      ln -sfn "$("$python" -c 'import nvidia; print(next(iter(nvidia.__path__)))')" \
        "$kept/site.new/nvidia"
      mv "$kept/site.new" "$kept/site"
    fi
    export PYTHONPATH=$kept/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
    mkdir -p "$OUT"
    cp -a "$kept/found/." "$OUT/"
    code=0
    "$python" -m tests.gpu.run "$OUT" --minutes 9 "$@" || code=$?
    cp -a "$OUT/." "$kept/found/"
    exit $code
    ;;
  *)
    echo "usage: lent.sh keep | run [options of tests.gpu.run]" >&2
    exit 2
    ;;
esac
