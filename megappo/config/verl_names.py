"""Keys of verl's experiment files that are called otherwise here, and what to write instead: docs/from-verl.md."""

_PARTS = "add a part to reward.parts"
_RANKS = "leave it out; ranks are counted by --nproc, torchrun or srun"
_LAYOUT = "parallel sizes are those of all roles: layout.tp, layout.pp, layout.cp, layout.ep, layout.etp"
_SECTIONS = "actor, rollout, ref and model are sections of their own: actor.optim.lr"

VERL_NAMES = {
    "actor_rollout_ref": _SECTIONS,
    "custom_reward_function": f"{_PARTS}: kind function, function MODULE:NAME",
    "reward_model": f"{_PARTS}: kind model, path FOLDER",
    "actor.grad_clip": "set actor.optim.clip_grad",
    "actor.megatron": _LAYOUT,
    "actor.ppo_micro_batch_size": "set actor.ppo_micro_batch_size_per_gpu",
    "critic.grad_clip": "set critic.optim.clip_grad",
    "critic.megatron": _LAYOUT,
    "critic.model": "set critic.path",
    "critic.ppo_micro_batch_size": "set critic.ppo_micro_batch_size_per_gpu",
    "model.lora_adapter_path": "set model.lora.adapter_path",
    "model.lora_alpha": "set model.lora.alpha",
    "model.lora_rank": "set model.lora.rank",
    "model.target_modules": "set model.lora.target_modules",
    "ref.megatron": _LAYOUT,
    "rollout.dtype": "set model.dtype",
    "rollout.name": "set rollout.engine to native or vllm",
    "rollout.prompt_length": "set data.max_prompt_length",
    "rollout.response_length": "set data.max_response_length",
    "rollout.val_kwargs": "set trainer.evaluation",
    "data.filter_overlong_prompts": "set data.overlong_prompts to filter",
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
