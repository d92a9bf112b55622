#!/usr/bin/env bash
# Tests and benchmarks that need a GPU, most important first, for a machine that is there for minutes.
#
#     bench/gpu_day.sh --packages DIR RESULTS          on a GPU; RESULTS is $OUT where it is not given
#     bench/gpu_day.sh --dry-run --python P RESULTS    every step in small, where P has vLLM for the CPU
#
# Each step has a time limit. RESULTS gets `steps` (one line a step), `log` and figures as JSON, all as they come. A
# second call with the same RESULTS leaves out steps that are done, and repeats failed ones after all others. What a step
# has measured before its limit stays; figures name their machine.
set -euo pipefail

usage="usage: $0 [--packages DIR] [--python PROGRAM] [--peer ARM] [--trace PATH] [--seconds N] [--dry-run] [RESULTS]
  --packages DIR    vLLM and all that PROGRAM lacks: a folder for PYTHONPATH, or of wheels and archives
                    (bench.gpu_pack makes one of vLLM)
  --python PROGRAM  Python with PyTorch (default: python3)
  --peer ARM        arm of bench.gpu_vllm beside kvferry's: 'simple lazy' (default), 'simple eager', 'offloading'
  --trace PATH      sessions of agents for bench.gpu_vllm (default: generated ones)
  --seconds N       no step runs longer than this from the beginning (default: 900)"
python=python3 packages="" peer="simple lazy" trace=() seconds=900 dry=0 results=${OUT:-}
while (($#)); do
    case $1 in
    --packages) packages=$(realpath -e "$2") && shift ;;
    --python) python=$2 && shift ;;
    --peer) peer=$2 && shift ;;
    --trace) trace=(--trace "$(realpath -e "$2")") && shift ;;
    --seconds) seconds=$2 && shift ;;
    --dry-run) dry=1 ;;
    -*) echo "$usage" >&2 && exit 2 ;;
    *) results=$1 ;;
    esac
    shift
done
[[ $results ]] || { echo "$usage" >&2 && exit 2; }
mkdir -p "$results"
results=$(realpath "$results")
touch "$results/steps" "$results/log"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The checkout as the package `kvferry`, with the entry point by which vLLM finds the connector.
imports=$(mktemp -d)
trap 'rm -rf "$imports"' EXIT
ln -s "$PWD" "$imports/kvferry"
mkdir "$imports/kvferry-0.dist-info"
printf 'Metadata-Version: 2.1\nName: kvferry\nVersion: 0\n' >"$imports/kvferry-0.dist-info/METADATA"
printf '[vllm.general_plugins]\nkvferry = kvferry.app.engines.vllm:register\n' \
    >"$imports/kvferry-0.dist-info/entry_points.txt"
if [[ $packages ]] && compgen -G "$packages/*.whl" >/dev/null; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$imports" "$packages"/*.whl
fi
for archive in ${packages:+"$packages"/*.tar.xz}; do
    [[ ! -e $archive ]] || tar -xJf "$archive" -C "$imports"
done
export PYTHONPATH="$imports${packages:+:$packages}${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 TEST_VLLM=1 HF_HUB_OFFLINE=1
small=() prompts=100
if ((dry)); then
    small=(--reduced) prompts=6
    export TEST_GPU_ON_CPU=1 OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 CUDA_VISIBLE_DEVICES=""
    # An import that needs more than that the driver's library can be found fails here, not on the GPU.
    if command -v gcc >/dev/null; then
        gcc -shared -Wl,-soname,libcuda.so.1 -x c /dev/null -o "$imports/libcuda.so.1"
        export LD_LIBRARY_PATH="$imports${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    fi
fi

repeated=$(awk -F'\t' '{last[$1] = $2} END {for (name in last) if (last[name] != "done") print name}' "$results/steps")
is_listed() { grep -qxF -- "$1" <<<"$2"; }

# step NAME LIMIT_S COMMAND...: run a command whose turn it is, and note how it ended.
step() {
    local name=$1 limit=$2 left=$((seconds - SECONDS)) began=$SECONDS status=0 ended size
    shift 2
    if [[ $pass == repeated ]]; then
        is_listed "$name" "$repeated" || return 0
    else
        ! is_listed "$name" "$(cut -f1 "$results/steps")" || return 0
    fi
    ((left >= 20)) || { left_out+=("'$name'") && return 0; }
    ((limit <= left)) || limit=$left
    printf '\n===== %s, %s, at most %s s: %s\n' "$name" "$(date -u +%H:%M:%S)" "$limit" "$*" | tee -a "$results/log"
    size=$(stat -c %s "$results/log")
    timeout --kill-after=10 "$limit" "$@" >>"$results/log" 2>&1 </dev/null || status=$?
    tail -c "+$((size + 1))" "$results/log" | tail -n 14
    case $status in 0) ended="done" ;; 124 | 137) ended="timeout" ;; *) ended="failed" ;; esac
    printf '%s\t%s\t%s s\texit status %s\n' "$name" "$ended" $((SECONDS - began)) "$status" >>"$results/steps"
}

arm() {
    step "$1" 210 "$python" -m bench.gpu_vllm "${small[@]}" "${trace[@]}" --arms "$1" --results "$results/vllm" \
        --budget-s 180
}

all_steps() {
    step tests 300 "$python" -m pytest tests/vllm/test_gpu.py -v -rs --tb=short --durations=0
    step bfloat16 300 "$python" -m bench.vllm_bfloat16 "${small[@]}" --layers 8 --prompts $prompts
    # vLLM's CPU backend has no such mode.
    ((dry)) || step "bfloat16, batch-invariant" 300 env VLLM_BATCH_INVARIANT=1 \
        "$python" -m bench.vllm_bfloat16 --layers 8 --prompts $prompts
    arm none
    if ((dry)); then
        # Peers need CUDA: the CPU backend gets as far as their caches.
        step "$peer" 170 bash -c '"$@" 2>&1 | tee /dev/stderr | grep -q register_kv_caches' - \
            "$python" -m bench.gpu_vllm --reduced "${trace[@]}" --arms "$peer"
    else
        arm "$peer"
    fi
    arm "kvferry eager"
    arm "kvferry lazy"
    arm "none again"
    step copies 270 "$python" -m bench.gpu "${small[@]}" --json "$results/copies.json" --budget-s 220
}

left_out=() pass=new
! command -v nvidia-smi >/dev/null || nvidia-smi >>"$results/log" 2>&1 || true
# Nothing works without these, and the machine is better given back.
cat >"$imports/check.py" <<EOF
import sys
sys.path.insert(0, "")
import numba, psutil, pytest, torch, transformers, vllm
import bench.gpu, bench.gpu_vllm, tests.vllm.engines
from kvferry.app.engines.vllm.connector import KVFerryConnector
from vllm.platforms import current_platform
if not $dry:
    import vllm._C_stable_libtorch, vllm.vllm_flash_attn._vllm_fa3_C, vllm.cumem_allocator
    assert torch.cuda.is_available() and current_platform.is_cuda(), current_platform
print(sys.version, torch.__version__, vllm.__version__, current_platform.device_name)
EOF
SECONDS=0
sed -i '/^imports\t/d' "$results/steps"
step imports 90 "$python" "$imports/check.py"
if [[ $(tail -n 1 "$results/steps" | cut -f 1,2) == $'imports\tdone' ]]; then
    for pass in new repeated; do all_steps; done
fi
printf '\n%s\n' "----- steps in $SECONDS s${left_out[*]:+; no time for: ${left_out[*]}}"
column -t -s $'\t' "$results/steps" 2>/dev/null || cat "$results/steps"
((!${#left_out[@]})) &&
    awk -F'\t' '{last[$1] = $2} END {for (name in last) if (last[name] != "done") exit 1}' "$results/steps"
