"""What a new vLLM engine says of a Hugging Face folder, without megappo in the engine: greedy tokens and log-probs."""

import argparse
import json
from pathlib import Path

from megappo.engines.vllm.environment import prepare_environment


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=json.loads, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    prepare_environment()
    from vllm import LLM, SamplingParams

    config = json.loads((arguments.model / "config.json").read_text())
    # vLLM's kernel for RoPE on a CPU is wrong for the heads of latent attention (0.32.0).
    operators = ["all", "-rotary_embedding"] if "kv_lora_rank" in config else []
    llm = LLM(
        str(arguments.model), skip_tokenizer_init=True, dtype="float32", max_model_len=256, enforce_eager=True,
        logprobs_mode="processed_logprobs", compilation_config={"custom_ops": operators},
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[2], logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in arguments.prompts], sampling, use_tqdm=False)
    responses = [output.outputs[0] for output in outputs]
    result = [
        {
            "tokens": list(response.token_ids),
            "log_probs": [at[token].logprob for at, token in zip(response.logprobs, response.token_ids, strict=True)],
        }
        for response in responses
    ]
    arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
