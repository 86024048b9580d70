"""Rules of section `reward`: what each kind of part needs, and the shaping of scores."""

from urllib.parse import urlsplit

from megappo.config.checkpoint_names import readable
from megappo.config.checks_layout import expert_layout_problems, model_parallel_problems
from megappo.config.experiment import ExperimentConfig
from megappo.config.model_folder import ModelFolderError, read_model_facts
from megappo.config.problem import Problem, typed
from megappo.config.reward import RULES, RewardConfig, RewardPartConfig

NEEDS = {"function": "function", "http": "url", "model": "path", "implicit": "policy"}
"""Kind → the setting that it needs, and that no other kind takes."""
OF_KIND = {
    "token_env": ("http",),
    "batch_size": ("http",),
    "max_concurrent": ("http",),
    "retries": ("http",),
    "tokenizer_path": ("model",),
    "apply_chat_template": ("model",),
    "micro_batch_size_per_gpu": ("model", "implicit"),
    "reference": ("implicit",),
    "beta": ("implicit",),
    "at_end": ("implicit",),
}
"""Setting that may be left out → the kinds that read it."""


def reward_problems(config: ExperimentConfig) -> list[Problem]:
    """Every error and warning of the section; none where it is left out."""
    if config.reward is None:
        return []
    problems: list[Problem] = []
    names: set[str] = set()
    for index, part in enumerate(config.reward.parts):
        path = f"reward.parts.{index}"
        if part.name in names:
            remedy = f"for example {part.name}_{index}"
            problems.append(Problem(f"{path}.name", typed(part.name), "another part has this name", remedy))
        names.add(part.name)
        problems += _kind_problems(path, part)
        if part.kind == "model" and part.path is not None:
            problems += _folder_problems(config, f"{path}.path", part.path)
        if part.kind == "implicit":
            problems += _implicit_problems(config, path, part)
        if part.kind in RULES and config.data.answer_key is None:
            reason = f"kind {part.kind} compares with an answer, and data.answer_key is null"
            remedy = "set data.answer_key to the column of the answer"
            problems.append(Problem(f"{path}.kind", typed(part.kind), reason, remedy))
    return problems + _training_problems(config, config.reward) + _shaping_problems(config, config.reward)


def _training_problems(config: ExperimentConfig, reward: RewardConfig) -> list[Problem]:
    """Whether PPO, and each of its prompt sets, has a part to learn from."""
    if config.trainer.kind != "ppo":
        return []
    learned = [part.name for part in reward.training_parts]
    if not learned:
        reason = "is true for every part, and training needs a reward"
        return [Problem("reward.parts.0.evaluation_only", "true", reason, "false, or add a part")]
    reason, remedy = "has parts for evaluations alone, and training needs a reward", f"add one of {', '.join(learned)}"
    return [
        Problem(f"data.sets.{index}.reward", typed(list(one.reward)), reason, remedy)
        for index, one in enumerate(config.data.sets)
        if one.reward and not any(name in learned for name in one.reward)
    ]


def _kind_problems(path: str, part: RewardPartConfig) -> list[Problem]:
    """Settings that the part's kind needs, and such as belong to other kinds."""
    problems: list[Problem] = []
    if part.kind == "function":
        problems += _function_problems(f"{path}.function", part.function)
    if part.kind == "http":
        problems += _url_problems(f"{path}.url", part.url)
    if part.kind == "model" and part.path is None:
        remedy = "for example models/my-reward-model"
        problems.append(Problem(f"{path}.path", None, "is missing, and kind model needs it", remedy))
    if part.kind == "implicit" and part.policy is None:
        remedy = "for example runs/my-dpo/hf/latest"
        problems.append(Problem(f"{path}.policy", None, "is missing, and kind implicit needs it", remedy))
    for kind, setting in NEEDS.items():
        value = getattr(part, setting)
        if part.kind != kind and value is not None:
            reason, remedy = f"kind {part.kind} takes no {setting}", f"set kind to {kind}, or drop it"
            problems.append(Problem(f"{path}.{setting}", typed(value), reason, remedy))
    for setting, kinds in OF_KIND.items():
        value = getattr(part, setting)
        if part.kind not in kinds and value != type(part).model_fields[setting].default:
            reason = f"is for parts of kind {' or '.join(kinds)}, and this one is of kind {part.kind}"
            problems.append(Problem(f"{path}.{setting}", typed(value), reason, "leave it out"))
    return problems


def _function_problems(path: str, function: str | None) -> list[Problem]:
    remedy = "for example my_rewards:short_answer"
    if function is None:
        return [Problem(path, None, "is missing, and kind function needs it", remedy)]
    module, colon, name = function.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return [Problem(path, typed(function), "has to be of the form module:function", remedy)]
    return []


def _url_problems(path: str, url: str | None) -> list[Problem]:
    remedy = "for example http://localhost:8000/score"
    if url is None:
        return [Problem(path, None, "is missing, and kind http needs it", remedy)]
    parsed = urlsplit(url)
    if parsed.scheme not in ("http", "https") or not parsed.hostname:
        return [Problem(path, typed(url), "has to be an address of http or https", remedy)]
    return []


def _implicit_problems(config: ExperimentConfig, path: str, part: RewardPartConfig) -> list[Problem]:
    """Whether the two policies are there and can read the actor's sequences; `model.path` is looked at elsewhere."""
    problems: list[Problem] = []
    for setting, folder in (("policy", part.policy), ("reference", part.reference)):
        if folder is None:
            continue
        found = _folder_problems(config, f"{path}.{setting}", folder)
        problems += found
        positions = None if found else read_model_facts(_inside(folder)).max_positions
        if positions is not None and positions < config.max_length:
            reason = f"was made for {positions} tokens, and prompt and response have up to {config.max_length}"
            remedy = "shorten data.max_prompt_length or data.max_response_length"
            problems.append(Problem(f"{path}.{setting}", typed(folder), reason, remedy))
    return problems


def _inside(folder: str) -> str:
    """Where a model's configuration is: a checkpoint has it in `model`."""
    inside = readable(folder) / "model"
    return str(inside) if inside.is_dir() else folder


def _folder_problems(config: ExperimentConfig, path: str, folder: str) -> list[Problem]:
    """Whether there is a model that the training layout divides."""
    try:
        facts = read_model_facts(_inside(folder))
    except ModelFolderError as error:
        return [Problem(path, typed(folder), error.reason, error.remedy)]
    layout = config.layout
    problems = model_parallel_problems(facts, folder, layout.tp, layout.pp, split=layout.split, vpp=layout.vpp)
    return problems + expert_layout_problems(layout, folder, facts)


def _shaping_problems(config: ExperimentConfig, reward: RewardConfig) -> list[Problem]:
    problems: list[Problem] = []
    if reward.clip_range is not None and reward.clip_range[0] >= reward.clip_range[1]:
        reason = "has to be a lower and a higher score"
        problems.append(Problem("reward.clip_range", typed(list(reward.clip_range)), reason, "for example [-5, 5]"))
    buffer, limit = reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and buffer.len > limit:
        reason = f"is longer than data.max_response_length {limit}"
        problems.append(Problem("reward.overlong_buffer.len", str(buffer.len), reason, f"at most {limit}"))
    return problems
