"""Rules that look at files and ranks: model folders, data files, and whether the layout divides model and world."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from megappo.config.checkpoint_names import readable
from megappo.config.checks_pipeline import split_problems, stage_problems, virtual_problems
from megappo.config.data_names import HUB_PREFIX
from megappo.config.divisibility import choices, nearest
from megappo.config.experiment import ExperimentConfig
from megappo.config.layout import LayoutConfig
from megappo.config.model_folder import ModelFacts, ModelFolderError, read_model_facts
from megappo.config.pipeline import EVEN, PipelineSplit
from megappo.config.problem import Problem, typed


def file_problems(config: ExperimentConfig) -> list[Problem]:
    """Data files, tokenizer folder and checkpoint that are not there; model folders are looked at by the layout."""
    problems = []
    lists = [("train_files", config.data.train_files), ("val_files", config.data.val_files)]
    for number, one in enumerate(config.data.sets):
        lists += [(f"sets.{number}.files", one.files), (f"sets.{number}.val_files", one.val_files)]
    for key, files in lists:
        for index, file in enumerate(files):
            # FOLDER@SPLIT names a part of a saved data set.
            if (
                not file.startswith(HUB_PREFIX)
                and not Path(file).exists()
                and not Path(file.rpartition("@")[0] or file).is_dir()
            ):
                remedy = "give a JSONL or Parquet file, a saved data set's folder, or hub:NAME"
                problems.append(Problem(f"data.{key}.{index}", typed(file), _missing(file), remedy))
    tokenizer = config.model.tokenizer_path
    if tokenizer is not None and not readable(tokenizer).is_dir():
        remedy = "give the folder of the tokenizer, or null where model.path has it"
        problems.append(Problem("model.tokenizer_path", typed(tokenizer), _missing(tokenizer), remedy))
    resume = config.trainer.resume
    if resume not in ("auto", "never") and not readable(resume).exists():
        remedy = "give a folder such as runs/NAME/checkpoints/step-000010, auto, or never"
        problems.append(Problem("trainer.resume", typed(resume), _missing(resume), remedy))
    return problems


def layout_problems(config: ExperimentConfig) -> list[Problem]:
    """Model folders that can't be read, or that the parallel sizes do not divide."""
    problems = sequence_problems(config.layout)
    problems += split_problems(config.layout.split, config.layout.pp)
    problems += virtual_problems(config.layout.pp, config.layout.vpp)
    seen: dict[str, ModelFacts | None] = {}
    for path, folder in model_folders(config):
        if folder in seen:
            continue
        seen[folder] = None
        try:
            facts = seen[folder] = read_model_facts(folder)
        except ModelFolderError as error:
            problems.append(Problem(path, typed(folder), error.reason, error.remedy))
            continue
        problems += _model_problems(config, folder, facts)
        problems += _vocabulary_problems(config, path, folder, facts, seen[config.model.path])
    models = [facts for facts in seen.values() if facts is not None]
    return problems + dense_problems(config.layout, config.model.path, models)


def sequence_problems(layout: LayoutConfig) -> list[Problem]:
    """Sequence parallelism without ranks to shard over."""
    if not layout.sequence_parallel or layout.tp > 1:
        return []
    reason = "shards activations over the tensor-parallel ranks, and layout.tp is 1"
    return [Problem("layout.sequence_parallel", "true", reason, "set it to false, or layout.tp to 2")]


def model_parallel_problems(
    facts: ModelFacts,
    folder: str,
    tp: int,
    pp: int,
    tp_path: str = "layout.tp",
    pp_path: str = "layout.pp",
    split: PipelineSplit = EVEN,
    vpp: int = 1,
) -> list[Problem]:
    """Whether `tp` divides the heads of a model, and its layers can be split over `pp` · `vpp` stages."""
    problems = []
    if not facts.tp_fits(tp):
        reason = f"does not divide the {facts.num_heads} attention heads ({facts.num_kv_heads} KV heads) of {folder}"
        remedy = choices(nearest(tp, 1, facts.num_heads, facts.tp_fits))
        problems.append(Problem(tp_path, str(tp), reason, remedy))
    return problems + stage_problems(facts.num_layers, folder, pp, split, pp_path, vpp)


def world_problems(layout: LayoutConfig, world_size: int | None) -> list[Problem]:
    """Whether the world size is tp · pp · cp · dp; nothing where it isn't known."""
    model_parallel = layout.model_parallel_size
    if world_size is None:
        return _stage_problems(layout, layout.dp)
    product = layout.product()
    if world_size % model_parallel:
        counts = choices(
            nearest(world_size, model_parallel, world_size + model_parallel, lambda n: n % model_parallel == 0)
        )
        reason = (
            f"{product} = {model_parallel} ranks hold a copy of the model, which does not divide {world_size} ranks"
        )
        tps = nearest(layout.tp, 1, world_size, lambda tp: world_size % (tp * layout.pp * layout.cp) == 0)
        remedy = f"start another number of ranks ({counts})"
        remedy += f", or set another tp ({choices(tps)})" if tps else ""
        return [Problem("layout.tp", str(layout.tp), reason, remedy)]
    if layout.dp is not None and layout.dp * model_parallel != world_size:
        reason = f"{product} · dp {layout.dp} = {layout.dp * model_parallel} ranks, and {world_size} are started"
        remedy = f"set it to {world_size // model_parallel}, or leave it out"
        return [Problem("layout.dp", str(layout.dp), reason, remedy)]
    return _stage_problems(layout, world_size // model_parallel)


def _stage_problems(layout: LayoutConfig, dp: int | None) -> list[Problem]:
    """Whether ep · etp ranks divide the ranks of a pipeline stage; nothing where dp isn't known."""
    if dp is None or layout.tp * layout.cp * dp % (layout.ep * layout.expert_tp) == 0:
        return []
    ranks = layout.tp * layout.cp * dp
    product = f"tp {layout.tp} · " + (f"cp {layout.cp} · " if layout.cp > 1 else "") + f"dp {dp}"
    reason = f"times etp {layout.expert_tp} does not divide the {product} = {ranks} ranks of a stage"
    sizes = nearest(layout.ep, 1, ranks, lambda ep: ranks % (ep * layout.expert_tp) == 0)
    if sizes:
        return [Problem("layout.ep", str(layout.ep), reason, choices(sizes))]
    sizes = nearest(layout.expert_tp, 1, ranks, lambda etp: ranks % (layout.ep * etp) == 0)
    remedy = choices(sizes) if sizes else "set layout.ep and layout.etp to 1"
    reason = f"times ep {layout.ep} does not divide the {product} = {ranks} ranks of a stage"
    return [Problem("layout.etp", str(layout.etp), reason, remedy)]


def dense_problems(layout: LayoutConfig, folder: str, models: Sequence[ModelFacts]) -> list[Problem]:
    """Sizes for experts, where no model of the run has any; `folder` is that of the first."""
    if not models or any(facts.num_experts is not None for facts in models):
        return []
    reason = f"is for experts, and {folder} is a dense model ({models[0].model_type})"
    return [
        Problem(f"layout.{name}", str(size), reason, remedy)
        for name, size, remedy in (("ep", layout.ep, "set it to 1"), ("etp", layout.etp, "leave it out"))
        if size is not None and size > 1
    ]


def expert_layout_problems(layout: LayoutConfig, folder: str, facts: ModelFacts) -> list[Problem]:
    """Whether the experts of a model divide over the layout."""
    num_experts, rows = facts.num_experts, facts.expert_rows
    if num_experts is None or rows is None:
        return []
    problems = []
    if num_experts % layout.ep:
        reason = f"does not divide the {num_experts} experts of {folder}"
        remedy = choices(nearest(layout.ep, 1, num_experts, lambda size: num_experts % size == 0))
        problems.append(Problem("layout.ep", str(layout.ep), reason, remedy))
    if rows % layout.expert_tp:
        reason = f"does not divide the {rows} rows (moe_intermediate_size) of an expert of {folder}"
        remedy = choices(nearest(layout.expert_tp, 1, rows, lambda size: rows % size == 0))
        problems.append(Problem("layout.etp", str(layout.etp), reason, remedy))
    return problems


def _token_problems(layout: LayoutConfig, folder: str, facts: ModelFacts) -> list[Problem]:
    """Experts that would be trained on each token several times."""
    if facts.num_experts is None or layout.tp == 1 or layout.sequence_parallel:
        return []
    reason = f"{folder} has experts, and with tp {layout.tp} every rank would send them the same tokens"
    return [Problem("layout.sequence_parallel", "false", reason, "set it to true, or layout.tp to 1")]


def model_folders(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """(YAML path, folder) of every model that the run will read."""
    yield "model.path", config.model.path
    if config.trainer.kind == "dpo" and config.ref.path is not None:
        yield "ref.path", config.ref.path
    if config.trainer.kind == "ppo":
        if config.critic.path is not None and config.needs_critic:
            yield "critic.path", config.critic.path
        if config.ref.path is not None and config.needs_reference:
            yield "ref.path", config.ref.path


def _model_problems(config: ExperimentConfig, folder: str, facts: ModelFacts) -> list[Problem]:
    layout = config.layout
    problems = model_parallel_problems(facts, folder, layout.tp, layout.pp, split=layout.split, vpp=layout.vpp)
    problems += expert_layout_problems(layout, folder, facts) + _token_problems(layout, folder, facts)
    if facts.max_positions is not None and config.max_length > facts.max_positions:
        left = facts.max_positions - config.data.max_prompt_length
        reason = (
            f"with data.max_prompt_length {config.data.max_prompt_length} a sequence has {config.max_length} tokens, "
            f"and {folder} was made for {facts.max_positions} (max_position_embeddings)"
        )
        remedy = f"at most {left}" if left >= 1 else f"shorten data.max_prompt_length below {facts.max_positions} first"
        problems.append(Problem("data.max_response_length", str(config.data.max_response_length), reason, remedy))
    return problems


def _vocabulary_problems(
    config: ExperimentConfig, path: str, folder: str, facts: ModelFacts, actor: ModelFacts | None
) -> list[Problem]:
    """Critic and reference read the tokens that the actor writes; an exact KL compares all of them, one by one."""
    if actor is None or actor.vocab_size is None or facts.vocab_size is None or facts.vocab_size == actor.vocab_size:
        return []
    if facts.vocab_size > actor.vocab_size:
        # The folder may be the critic's too, which then is looked at first.
        if config.trainer.kind != "ppo" or not config.needs_exact_kl or folder != config.ref.path:
            return []
        reason = (
            f"its vocabulary has {facts.vocab_size} tokens, and an exact KL (full) needs the {actor.vocab_size} of "
            f"model.path {config.model.path}, of both alike"
        )
        remedy = (
            "give a reference with as many, or take an estimator such as low_var_kl for actor.kl_loss_type and "
            "algorithm.kl_penalty"
        )
        return [Problem("ref.path", typed(folder), reason, remedy)]
    reason = (
        f"its vocabulary has {facts.vocab_size} tokens, and it has to read the {actor.vocab_size} of model.path "
        f"{config.model.path}"
    )
    return [
        Problem(path, typed(folder), reason, "give a model with the actor's tokenizer, or null for the actor's weights")
    ]


def _missing(path: str) -> str:
    """What is missing: the file itself, or already its folder."""
    parent = Path(path).parent
    if parent.is_dir():
        return f"there is no such file in {parent}" if str(parent) != "." else f"there is no such file in {Path.cwd()}"
    return f"there is no folder {parent}"
