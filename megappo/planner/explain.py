"""The split of a step in words and numbers, for `megappo validate`."""

from megappo.config.experiment import ExperimentConfig
from megappo.planner.batch import BatchPlan, MiniBatchPlan, plan_batches, plan_supervised


def explain_batches(config: ExperimentConfig, dp: int) -> str:
    """Prompts → sequences → minibatches → data-parallel shares → micro-batches, a line each."""
    cp = config.layout.cp
    if config.trainer.kind != "ppo":
        supervised = plan_supervised(config, dp)
        unit = "sequences" if config.trainer.kind == "sft" else "pairs"
        lines = [
            ("step", f"{supervised.sequences} {unit}, one optimizer step"),
            ("rank", _rank_line(supervised, cp, unit)),
        ]
    else:
        plan = plan_batches(config, dp)
        lines = [
            ("step", f"{plan.prompts} prompts × {plan.n} responses = {plan.sequences} sequences"),
            ("ranks", _ownership_line(plan)),
            *_role_lines("actor", config.actor.ppo_mini_batch_size, plan, plan.actor, cp),
        ]
        if config.needs_critic:
            lines += _role_lines("critic", plan.critic.sequences // plan.n, plan, plan.critic, cp)
    lines.append(("length", _length_line(config)))
    lines.append(("layout", _layout_line(config, dp)))
    return "\n".join(f"{name:<8}{text}" for name, text in lines)


def _role_lines(name: str, mini_batch: int, plan: BatchPlan, role: MiniBatchPlan, cp: int) -> list[tuple[str, str]]:
    minibatches = _count(role.num_minibatches, "minibatch", "minibatches")
    first = f"{plan.sequences} sequences = {minibatches} of {role.sequences} ({mini_batch} prompts × {plan.n})"
    steps = _count(role.optimizer_steps, "optimizer step", "optimizer steps")
    last = f"{minibatches} × {_count(role.epochs, 'pass', 'passes')} = {steps} in a step of the run"
    idle = f", after {_count(role.idle_steps, 'step', 'steps')} without" if role.idle_steps else ""
    return [(name, first), ("", _rank_line(role, cp)), ("", last + idle)]


def _rank_line(role: MiniBatchPlan, cp: int, unit: str = "sequences") -> str:
    passes = f"= {_count(role.num_micro_batches, 'micro-batch', 'micro-batches')} of {role.micro_batch}"
    if role.max_tokens is not None:
        passes = f"in micro-batches of at most {role.max_tokens * cp} tokens"
    return f"a minibatch on each data-parallel rank: {role.sequences_per_rank} {unit} {passes}"


def _ownership_line(plan: BatchPlan) -> str:
    if plan.dp == 1:
        return f"1 data-parallel rank has all {plan.sequences} sequences"
    turns = (
        "sequences go to the ranks in turn" if plan.block == 1 else f"blocks of {plan.block} go to the ranks in turn"
    )
    return f"{plan.dp} data-parallel ranks have {plan.sequences_per_rank} sequences each; {turns}"


def _length_line(config: ExperimentConfig) -> str:
    data = config.data
    return f"{data.max_prompt_length} prompt + {data.max_response_length} response = {config.max_length} tokens at most"


def _layout_line(config: ExperimentConfig, dp: int) -> str:
    layout = config.layout
    line = f"{layout.product()} · dp {dp} = {_count(layout.model_parallel_size * dp, 'rank', 'ranks')}"
    line += f", {layout.vpp} virtual stages on each" if layout.vpp > 1 else ""
    aligned = f", sequences padded to multiples of {layout.sequence_alignment}" if layout.sequence_alignment > 1 else ""
    experts = f", experts over ep {layout.ep} · etp {layout.expert_tp}" if layout.ep * layout.expert_tp > 1 else ""
    return line + experts + aligned


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
