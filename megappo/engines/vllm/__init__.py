"""Parts of the vLLM engine (`../vllm_rollout.py`): only these files import vllm, and only once an engine is made."""
