"""`switch.py` on vLLM's kernels for latent attention, which megappo leaves alone on a CPU: for the parameters that they
want, which are those of a GPU. Its own arguments are those of `switch.py`."""

import os
from functools import partial

os.environ["VLLM_MLA_DISABLE"] = "0"  # before anything asks

from megappo.engines.vllm import start
from megappo.engines.vllm.environment import prepare_environment
from tests.vllm.programs import switch


def main() -> None:
    prepare_environment()
    import vllm

    start.has_latent_kernels = lambda: False  # type: ignore[assignment]  # the refusal on a CPU
    # Those of 512 + 64 numbers that keep their weights as they are; with AMX they would be packed (0.32.0).
    vllm.LLM = partial(vllm.LLM, attention_config={"backend": "CPU_MLA"})
    switch.main()


if __name__ == "__main__":
    main()
