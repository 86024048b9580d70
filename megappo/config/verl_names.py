"""Keys of verl's experiment files that are called otherwise here, and what to write instead: docs/from-verl.md."""

_PARTS = "add a part to reward.parts"
_RANKS = "leave it out; ranks are counted by --nproc, torchrun or srun"
_LAYOUT = "parallel sizes are those of all roles: layout.tp, layout.pp, layout.cp, layout.ep, layout.etp"
_MICRO = "set {role}.ppo_micro_batch_size_per_gpu, this number divided by the data-parallel ranks"
_MEGATRON = f"{_LAYOUT}; param_offload, grad_offload and optimizer_offload: actor.offload, critic.offload, ref.offload"
_REPLAY = "set section replay: size, fraction and filtration"
_SECTIONS = "actor, rollout, ref and model are sections of their own: actor.optim.lr"

VERL_NAMES = {
    "actor_rollout_ref": _SECTIONS,
    "custom_reward_function": f"{_PARTS}: kind function, function MODULE:NAME",
    "reward_model": f"{_PARTS}: kind model, path FOLDER",
    "actor.grad_clip": "set actor.optim.clip_grad",
    "actor.entropy_from_logits_with_chunking": "set actor.entropy_chunk_tokens",
    "actor.grad_offload": "set actor.offload.grads",
    "actor.megatron": _MEGATRON,
    "actor.optim.warmup_style": "set actor.optim.lr_scheduler_type",
    "actor.optimizer_offload": "set actor.offload.optimizer",
    "actor.param_offload": "set actor.offload.params",
    "actor.ppo_micro_batch_size": _MICRO.format(role="actor"),
    "actor.tis_imp_ratio_cap": "set algorithm.rollout_correction",
    "critic.grad_clip": "set critic.optim.clip_grad",
    "critic.megatron": _MEGATRON,
    "critic.model": "set critic.path",
    "critic.optim.warmup_style": "set critic.optim.lr_scheduler_type",
    "critic.ppo_micro_batch_size": _MICRO.format(role="critic"),
    "model.enable_gradient_checkpointing": "set model.recompute_granularity to full or selective",
    "model.lora_adapter_path": "set model.lora.adapter_path",
    "model.lora_alpha": "set model.lora.alpha",
    "model.lora_rank": "set model.lora.rank",
    "model.target_modules": "set model.lora.target_modules",
    "ref.megatron": _MEGATRON,
    "rollout.dtype": "set model.dtype",
    "rollout.name": "set rollout.engine to native or vllm",
    "rollout.prompt_length": "set data.max_prompt_length",
    "rollout.response_length": "set data.max_response_length",
    "rollout.val_kwargs": "set trainer.evaluation",
    "data.filter_overlong_prompts": "set data.overlong_prompts to filter",
    "data.val_max_samples": "set data.max_val_samples",
    "algorithm.pf_ppo": _REPLAY,
    "algorithm.use_pf_ppo": _REPLAY,
    "data.reward_fn_key": "leave it out; a set of data.sets names the parts that score it",
    "data.truncation": "set data.overlong_prompts to error, left, right or filter",
    "data.val_batch_size": "leave it out; rollout.max_num_seqs is how many responses are generated at once",
    "trainer.default_local_dir": "set trainer.run_dir",
    "trainer.experiment_name": "set trainer.run_dir",
    "trainer.logger": "leave it out; observe.console and observe.tensorboard say what is written",
    "trainer.max_actor_ckpt_to_keep": "set trainer.max_checkpoints",
    "trainer.max_critic_ckpt_to_keep": "set trainer.max_checkpoints",
    "trainer.n_gpus_per_node": _RANKS,
    "trainer.nnodes": _RANKS,
    "trainer.project_name": "set trainer.run_dir",
    "trainer.resume_from_path": "set trainer.resume to the checkpoint's folder",
    "trainer.resume_mode": "set trainer.resume to auto or never",
    "trainer.total_training_steps": "set trainer.total_steps",
}
"""Path in the tree as megappo has it → the way out."""
