#!/usr/bin/env bash
# What several GPUs of one machine have to show, from a bare checkout, and one table at the end.
#
#   tools/gpu_multi.sh [N] [LAYOUT …]      # N GPUs (default: all); layouts of whole steps, such as tp=2 dp=2 (default: those of N)
#
#   PYTHON    the interpreter, with megappo's packages, vLLM and pytest (default: .venv/bin/python, else python3)
#   OUT       folder of the logs and of table.md (default: runs/gpu-multi)
#   PARTS     which parts (default: parity switch step lora vllm learn)
#   SHAPE     the model of the switch and of whole steps (default: qwen2.5-1.5b); LORA_SHAPE that of the LoRA steps (qwen2.5-7b)
#
# A part that fails is told in the table, with the end of its log; the others go on. The exit code is the number of failures.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
gpus="${1:-$(nvidia-smi --list-gpus | wc -l)}"
shift || true
python="${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}"
out="${OUT:-runs/gpu-multi}"
shape="${SHAPE:-qwen2.5-1.5b}"
lora_shape="${LORA_SHAPE:-qwen2.5-7b}"
layouts=("$@")
if ((${#layouts[@]} == 0)); then
    layouts=("dp=$gpus" "tp=$gpus,sequence_parallel=true" "pp=$gpus" "cp=$gpus")
fi
if ((gpus < 2)); then
    echo "gpu_multi.sh: needs two GPUs or more, and was given $gpus" >&2
    exit 2
fi
visible="$(seq -s, 0 $((gpus - 1)))"
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$visible}" HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
. launch/env.sh
mkdir -p "$out"
failures=0
table="$out/table.md"
printf '# %s GPUs: %s\n' "$gpus" "$(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | tr -s ' ')" >"$table"

part() { # part NAME COMMAND …: runs it into a log of its own, if it is asked for; its output goes into the table
    local name="$1" begin="$SECONDS" code
    shift
    [[ " ${PARTS:-parity switch step lora vllm learn} " == *" ${name%%-*} "* ]] || return 0
    echo "$name …" >&2
    "$@" >"$out/$name.log" 2>&1
    code=$?
    {
        printf '\n## %s (%d s, exit code %d)\n\n```\n' "$name" "$((SECONDS - begin))" "$code"
        if ((code == 0)); then
            grep -vE '^(timing|Writing|W[0-9]{4}|\[rank|\*+)|Warning|warnings\.warn' "$out/$name.log" | tail -n 60
        else
            tail -n 15 "$out/$name.log"
        fi
        printf '```\n'
    } >>"$table"
    ((code == 0)) || failures=$((failures + 1))
}

# From p-t-d to replicas of g: the layouts whose switch says something on so many GPUs.
half=$((gpus / 2))
switches=("1-$gpus-1:$gpus,1" "1-1-$gpus:$gpus,1" "$gpus-1-1:1,$gpus")
((half > 1)) && switches+=("1-$half-2:$gpus,$half,1" "2-$half-1:$gpus,$half,1")

part parity "$python" -m pytest -q -rs -s -m gpu tests/gpu/test_many_gpus.py
part switch "$python" tools/bench_reshard.py --shape "$shape" --dtype bfloat16 --engine vllm "${switches[@]}"
part switch-experts "$python" tools/bench_reshard.py --shape qwen3-30b-a3b --layers 8 --dtype bfloat16 --engine vllm \
    "1-1-$gpus@ep$gpus:$gpus,1"
part step "$python" tools/bench_step.py --shape "$shape" --steps 4 --prompts 32 --layouts tp=1 "${layouts[@]}"
part lora "$python" tools/bench_step.py --shape "$lora_shape" --steps 3 --layouts tp=1 "${layouts[@]}" \
    model.lora.rank=32 algorithm.adv_estimator=grpo
part vllm "$python" tools/bench_step.py --shape "$shape" --steps 10 --layouts "tp=$gpus" --each-step \
    rollout.engine=vllm rollout.gpu_memory_utilization=0.4
if [[ -e models/smollm2/config.json && -e data/gsm8k/train.jsonl ]]; then
    for layout in tp=1 "dp=$gpus" "pp=$gpus"; do
        part "learn-$layout" "$python" -m megappo train yaml/gsm8k_smollm2.yaml "layout.${layout}" \
            "trainer.run_dir=$out/learn-$layout" trainer.total_steps=20
    done
else
    printf '\n## learn\n\nnot run: models/smollm2 or data/gsm8k is missing (README, "A real model")\n' >>"$table"
fi
cat "$table"
exit "$failures"
