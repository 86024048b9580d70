#!/usr/bin/env bash
# What the GPUs of one machine have to show, from a bare checkout, and one table at the end.
#
#   tools/gpu_multi.sh [N] [LAYOUT …]      # N GPUs (default: all); layouts of whole steps, such as tp=2,dp=2 (default: those of N)
#   PARTS="step lora" LIMIT=240 tools/gpu_multi.sh 2
#   MEGAPPO_RANKS_PER_GPU=2 tools/gpu_multi.sh 2               # as 2 GPUs, by two ranks on one
#
#   PYTHON    the interpreter, with megappo's packages, vLLM and pytest (default: .venv/bin/python, else python3;
#             .venv-gpu/bin/python after make setup-gpu)
#   OUT       folder of the logs, the runs and table.md (default: runs/gpu-multi)
#   PARTS     which parts, of the list below (default: all; of one GPU: shapes, tests and experts, which alone need no second;
#             where ranks share a GPU: parity, lost, switch, vllm, experts and learn, whose results are as on GPUs of their
#             own; times and bytes in use are not)
#   LIMIT     seconds that a part may take, each of the side-by-side ones too (default: 300); one that is cut off keeps its log
#   SHAPE     the model of the switch and of whole steps (default: qwen2.5-1.5b); LORA_SHAPE that of the LoRA steps (qwen2.5-7b)
#   MODEL, DATA, STEPS   of the learning runs: SmolLM2's folder (models/smollm2), GSM8K's (data/gsm8k), steps (20)
#
#   shapes  a switch to vLLM, and its speed beside a stock vLLM, for three models: on one GPU, whatever number there is
#   tests   tests/gpu, but for those of several GPUs
#   parity  steps on layouts of the GPUs against one GPU's         lost    a rank that is killed, and the run that goes on
#   switch  weights from training to generation layouts            single  what step, lora and learn need of one GPU, side by side
#   step    whole steps of SHAPE, all weights                      lora    whole steps of LORA_SHAPE, adapters
#   vllm    ten steps with vLLM, CUDA graphs, sleep and wake       learn   GSM8K on one GPU, on DP N and on PP N
#   experts steps of qwen3-30b-a3b's shape, 12 layers and 16 experts, at EP 2 in both engines (EP 1 on one GPU): vLLM with
#           CUDA graphs, and where that fails (which counts as a failure) without them, unless it was cut off; two steps where
#           ranks share a GPU, which takes about 100 s a step
#
# A part that fails is told in the table, with the end of its log; the others go on. Parts of earlier calls stay in the table,
# and finished runs of one GPU are not repeated. The exit code is the number of this call's failures.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
gpus="${1:-$(nvidia-smi --list-gpus | wc -l)}"
shift || true
python="${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}"
out="${OUT:-runs/gpu-multi}"
limit="${LIMIT:-300}"
shape="${SHAPE:-qwen2.5-1.5b}"
lora_shape="${LORA_SHAPE:-qwen2.5-7b}"
model="${MODEL:-models/smollm2}"
data="${DATA:-data/gsm8k}"
num_steps="${STEPS:-20}"
learned="$out/learn-$num_steps-steps"
all_parts="shapes tests parity lost switch single step lora vllm experts learn"
parts_of_one="shapes tests experts"
parts="${PARTS:-$all_parts}"
[[ -z "${PARTS:-}" && "$gpus" == 1 ]] && parts="$parts_of_one"
visible="$(seq -s, 0 $((gpus - 1)))"
share=0.4 # of a GPU, for vLLM
flat=(--flat-mib 64)
expert_steps=3
ranks_per_gpu="${MEGAPPO_RANKS_PER_GPU:-1}"
if ((ranks_per_gpu > 1)); then
    parts="${PARTS:-parity lost switch vllm experts learn}"
    visible="$(seq -s, 0 $(((gpus - 1) / ranks_per_gpu)))"
    share="$(awk -v ranks="$ranks_per_gpu" 'BEGIN { printf "%.2f", 0.3 / ranks }')"
    flat=()
    expert_steps=2
fi
# Of logs; bars of progress, which write over themselves, are too.
noise='^(timing|Writing|WARNING|W[0-9]{4}|\[rank|\[W[0-9]{4}|\*+)|Warning|warnings\.warn|it/s[],]'
# The order of the table.
sections="shape-1.5b shape-7b shape-30b tests-vllm tests parity lost switch switch-experts step-one lora-one learn-one step lora vllm experts experts-eager learn-dp learn-pp learn"
for part in $parts; do
    if [[ " $all_parts " != *" $part "* ]]; then
        echo "gpu_multi.sh: PARTS: there is no part $part; there are: $all_parts" >&2
        exit 2
    fi
    if ((gpus < 2)) && [[ " $parts_of_one " != *" $part "* ]]; then
        echo "gpu_multi.sh: PARTS: $part needs two GPUs or more, and was given $gpus; for one there are: $parts_of_one" >&2
        exit 2
    fi
done
if ((gpus < 1)); then
    echo "gpu_multi.sh: needs a GPU, and was given $gpus" >&2
    exit 2
fi
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-$visible}" HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
. launch/env.sh
mkdir -p "$out"
rm -f "$out"/*.failed

# Two GPUs have one way to use both of a kind; more than that are fours, or pairs, with copies.
sp=sequence_parallel=true
copies() { (($1 > 1)) && echo ",dp=$1"; }
if ((gpus == 2)); then
    layouts=("dp=2" "tp=2,$sp" "pp=2" "cp=2")
    switches=("1-2-1:2,1" "1-1-2:2,1" "2-1-1:2,1")
    vllm_layout="tp=2,$sp"
elif ((gpus % 4 == 0)); then
    fours=$((gpus / 4))
    layouts=("dp=$gpus" "tp=4,$sp$(copies $fours)" "pp=4$(copies $fours)" "tp=2,$sp,pp=2$(copies $fours)" "cp=2,dp=$((gpus / 2))")
    switches=("1-4-$fours:4,1" "1-1-$gpus:4,1" "4-1-$fours:4,1" "2-2-$fours:4,2,1")
    vllm_layout="tp=4,$sp$(copies $fours)"
else
    layouts=("dp=$gpus")
    switches=("1-1-$gpus:1")
    vllm_layout="dp=$gpus"
fi
(($# > 0)) && layouts=("$@")

asked() { # asked NAME …: whether one of these parts is asked for
    local name
    for name in "$@"; do
        [[ " $parts " == *" $name "* ]] && return 0
    done
    return 1
}

cell() { # cell LOG: what the tools say in a line of the table
    { grep -hE '^summary: ' "$1" | sed 's/^summary: //'; grep -hE '^[0-9]+ (passed|failed|skipped|error).* in [0-9.]+s' "$1"; } |
        sed 's/|/\\|/g' | paste -sd '~' | sed 's/~/<br>/g'
}

assemble() { # the table of all sections that are there
    {
        printf '# %s %s: %s\n\n' "$gpus" "$( ((ranks_per_gpu > 1)) && echo 'ranks that share GPUs' || echo GPUs)" "$(nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c | tr -s ' ')"
        printf '| part | seconds | exit code | shows |\n|---|---|---|---|\n'
        for name in $sections; do cat "$out/$name.row" 2>/dev/null; done
        for name in $sections; do cat "$out/$name.section" 2>/dev/null; done
    } >"$out/table.md"
    cat "$out/table.md"
}

run() { # run NAME COMMAND …: within the time limit, into a log of its own; its row and its section of the table
    local name="$1" begin="$SECONDS" code told
    shift
    rm -f "$out/$name.section"
    printf '| %s | - | - | interrupted; %s/%s.log is what there is |\n' "$name" "$out" "$name" >"$out/$name.row"
    echo "$name …" >&2
    "$python" tools/limited.py "$limit" "$@" >"$out/$name.log" 2>&1 &
    wait $!
    code=$?
    told="$(cell "$out/$name.log")"
    ((code == 124)) && told="cut off after $limit s<br>$told"
    ((code == 0)) || touch "$out/$name.failed"
    printf '| %s | %d | %d | %s |\n' "$name" "$((SECONDS - begin))" "$code" "$told" >"$out/$name.row"
    {
        printf '\n## %s\n\n```\n' "$name"
        if ((code == 0)); then
            sed 's/.*\r//' "$out/$name.log" | grep -vE "$noise" | tail -n 90
        else
            tail -n 60 "$out/$name.log" | sed 's/.*\r//'
        fi
        printf '```\n'
    } >"$out/$name.section"
    echo "$name: exit code $code after $((SECONDS - begin)) s" >&2
}

end_children() { # at a signal: what runs is ended (limited.py ends what it has started), what is there is told
    trap '' TERM INT
    # shellcheck disable=SC2046
    kill $(jobs -p) 2>/dev/null
    wait
    [[ -n "${1:-}" ]] && assemble
    exit 143
}
trap 'end_children table' TERM INT

on_gpu() { # on_gpu I COMMAND …: sees that one of the visible GPUs alone
    local device
    device="$(cut -d, -f$(($1 + 1)) <<<"$CUDA_VISIBLE_DEVICES")"
    shift
    CUDA_VISIBLE_DEVICES="$device" "$@"
}

steps() { # steps NAME FOLDER SHAPE LAYOUT … [-- OVERRIDE …]
    local name="$1" folder="$2" of="$3"
    shift 3
    local these=()
    while (($# > 0)) && [[ "$1" != -- ]]; do
        these+=("$1")
        shift
    done
    run "$name" "$python" tools/bench_step.py --shape "$of" --steps 3 --prompts 32 --lengths 768 256 \
        --limit "$((limit / 2))" --out "$out/$folder" --layouts "${these[@]}" "$@"
}
lora=(-- model.lora.rank=32 algorithm.adv_estimator=grpo)

shape() { # shape NAME OPTION …: a switch to vLLM, and its speed beside a stock vLLM
    local name="$1"
    shift
    on_gpu 0 run "shape-$name" "$python" tools/bench_vllm.py --utilization 0.15 --tokens 64 --rounds 200 \
        --seconds "$((limit * 7 / 10))" "$@"
}

experts() { # experts NAME [OVERRIDE …]: trained and generated at EP 2, whatever number of GPUs there is from two on
    local name="$1" ep=$((gpus < 2 ? 1 : 2))
    shift
    run "$name" "$python" tools/bench_step.py --shape qwen3-30b-a3b --experts 16 --layers 12 --steps "$expert_steps" --out "$out/$name" \
        --limit "$((limit * 9 / 10))" --each-step \
        --metrics hybrid/bytes_aliased hybrid/bytes_copied hybrid/probe_diff_mean rollout/log_prob_diff_mean \
        --layouts "ep=$ep,dp=$gpus" model.experts=grouped rollout.engine=vllm "rollout.gpu_memory_utilization=$share" \
        "rollout.tensor_model_parallel_size=$ep" "$@"
}

learn() { # learn NAME SIZES [OVERRIDE …]: one run on GSM8K
    local name="$1" sizes="$2" words=() size
    shift 2
    for size in ${sizes//,/ }; do words+=("layout.$size"); done
    grep -q '"state": "done"' "$learned/$name/status.json" 2>/dev/null && return
    rm -rf "${learned:?}/$name"
    run "learn-$name" "$python" -m megappo train yaml/gsm8k_smollm2_gpu.yaml "${words[@]}" "$@" "model.path=$model" \
        "data.train_files=[$data/train.jsonl]" "data.val_files=[$data/test.jsonl]" "trainer.run_dir=$learned/$name" \
        "trainer.total_steps=$num_steps" trainer.save_last=false
}
can_learn() { [[ -e "$model/config.json" && -e "$data/train.jsonl" ]]; }

if asked shapes; then
    # One step of the smallest takes less time on the GPU than its launch on a slow core.
    shape 1.5b --shape qwen2.5-1.5b --stock-utilization 0.17 --cores 2
    shape 7b --shape qwen2.5-7b --stock-utilization 0.25
    shape 30b --shape qwen3-30b-a3b --layers 24 --stock-utilization 0.35 --prompts 128
fi
if asked tests; then
    run tests-vllm "$python" -m pytest -q -rs -s -m gpu tests/gpu/test_vllm.py
    run tests "$python" -m pytest -q -rs -s -m gpu tests/gpu --ignore tests/gpu/test_vllm.py --ignore tests/gpu/test_many_gpus.py
fi
asked parity && run parity "$python" -m pytest -q -rs -s -m gpu tests/gpu/test_many_gpus.py -k "not lost"
asked lost && run lost "$python" -m pytest -q -rs -s -m gpu tests/gpu/test_many_gpus.py -k lost
if asked switch; then
    run switch "$python" tools/bench_reshard.py --shape "$shape" --dtype bfloat16 --engine vllm "${switches[@]}"
    run switch-experts "$python" tools/bench_reshard.py --shape qwen3-30b-a3b --layers 8 --dtype bfloat16 --engine vllm \
        "1-1-$gpus@ep$gpus:$gpus,1"
fi
if asked single; then
    (
        trap end_children TERM INT
        on_gpu 0 steps step-one step "$shape" tp=1
        on_gpu 0 steps lora-one lora "$lora_shape" tp=1 "${lora[@]}"
    ) &
    (
        trap end_children TERM INT
        can_learn && on_gpu 1 learn one tp=1,pp=1,dp=1
    ) &
    wait
fi
asked step && steps step step "$shape" tp=1 "${layouts[@]}"
asked lora && steps lora lora "$lora_shape" tp=1 "${layouts[@]}" "${lora[@]}"
asked vllm && run vllm "$python" tools/bench_step.py --shape "$shape" --steps 10 --prompts 32 --out "$out/vllm" --layouts "$vllm_layout" --each-step \
    "${flat[@]}" rollout.engine=vllm "rollout.gpu_memory_utilization=$share"
if asked experts; then
    experts experts
    # Without graphs what was cut off would take longer still.
    [[ ! -e "$out/experts.failed" ]] || grep -q 'cut off' "$out"/experts.{row,log} ||
        experts experts-eager rollout.enforce_eager=true
fi
if asked learn && ! can_learn; then
    printf '| learn | 0 | - | not run: %s or %s is missing (README, "A real model") |\n' "$model" "$data" >"$out/learn.row"
    touch "$out/learn.failed"
elif asked learn; then
    learn one tp=1,pp=1,dp=1
    learn dp "tp=1,pp=1,dp=$gpus"
    # 30 layers divide over 4 and 8 stages with the embedding and the output layer counted.
    learn pp "tp=1,pp=$gpus,dp=1,account_for_embedding_in_pipeline_split=true,account_for_loss_in_pipeline_split=true"
    run learn "$python" tools/compare_runs.py "$learned"/{one,dp,pp} --learned reward/score --metrics reward/score \
        reward/parts/correct reward/parts/form eval/test/exact_match response_length/mean time/step
fi
assemble
exit "$(find "$out" -maxdepth 1 -name '*.failed' | wc -l)"
