"""What the wiring refuses before a model is built."""

from pathlib import Path
from typing import cast

import pytest

from megappo.errors import ConfigError, DataError
from megappo.models.architecture import ModelSpec
from megappo.models.families.llama import Llama
from megappo.parallel.mesh import Mesh
from megappo.trainer.build import load_evaluation_sets, refuse_foreign_tokens
from megappo.trainer.roles import RoleBuilder, TrainedRole
from tests.support.experiments import small_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer


def test_two_evaluation_sets_of_one_name(tmp_path: Path) -> None:
    from megappo.data.tokenizer import load_tokenizer

    (tmp_path / "more").mkdir()
    for folder in (tmp_path, tmp_path / "more"):
        (folder / "held.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    files = [f"{tmp_path}/held.jsonl", f"{tmp_path}/more/held.jsonl"]
    tokenizer = load_tokenizer(tiny_tokenizer(tmp_path / "tokenizer"))
    plain = "data.apply_chat_template=false"
    one = small_experiment(tmp_path, f"data.val_files=[{files[0]}]", plain)
    assert [len(prompts) for prompts in load_evaluation_sets(one, tokenizer).values()] == [1]
    both = small_experiment(tmp_path, f"data.val_files=[{', '.join(files)}]", plain)
    with pytest.raises(ConfigError, match=r"more/held\.jsonl would be the second data set named 'held'"):
        load_evaluation_sets(both, tokenizer)


def test_a_classifier_is_no_policy(tmp_path: Path) -> None:
    """Not even where its embeddings are tied, and so nothing is missing in it; refused before ranks are asked."""
    mesh = cast(Mesh, None)
    classifier = tiny_model(tmp_path / "classifier", tied=True, value_head=True)
    config = small_experiment(tmp_path, f"model.path={classifier}")
    with pytest.raises(DataError, match=r"classifier: a sequence classifier \(it has score.weight\).* critic.path"):
        RoleBuilder(config, mesh).actor(total_steps=1)
    policy = tiny_model(tmp_path / "policy", tied=True)
    config = small_experiment(tmp_path, f"model.path={policy}", f"ref.path={classifier}")
    with pytest.raises(DataError, match=r"classifier: a sequence classifier"):
        RoleBuilder(config, mesh).reference(cast(TrainedRole, None))


def test_tokens_that_the_model_lacks(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 100,
        "max_position_embeddings": 8, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    spec = ModelSpec(Llama(), Llama().shape(sizes), tmp_path, sizes)
    config = small_experiment(tmp_path)
    refuse_foreign_tokens([[3, 99], [1]], config, spec)
    with pytest.raises(DataError, match=r"gives token 100, and the vocabulary of .* ends at 99"):
        refuse_foreign_tokens([[3, 99], [100]], config, spec)
