"""Noise and sampling of the native engine: published SplitMix64 outputs, hand-made distributions."""

import math

import pytest
import torch

from megappo.engines.native.noise import splitmix64, uniform
from megappo.engines.native.sampling import draw, restricted
from megappo.engines.rollout import SamplingParams

MASK = (1 << 64) - 1


def test_splitmix64_gives_the_published_outputs():
    # The first five outputs for seed 1234567, as printed with the reference implementation on Rosetta Code.
    expected = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    outputs = splitmix64(torch.full((5,), 1234567), torch.arange(5))
    assert [value & MASK for value in outputs.tolist()] == expected


def mixed(bits: int) -> int:
    """SplitMix64's finaliser in Python integers."""
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1, -1, 2**70 + 5])
def test_uniform_is_the_top_bits_of_the_keys_stream(key: int):
    for index in (0, 1, 1000):
        bits = mixed((mixed(key & MASK) + (index + 1) * 0x9E3779B97F4A7C15) & MASK)
        assert uniform([key], [index]).item() == (bits >> 12) / 2**52


def test_uniform_is_uniform_over_keys_and_over_indices():
    for keys, indices in (([*range(20000)], [3] * 20000), ([7] * 20000, [*range(20000)])):
        noise = uniform(keys, indices)
        assert 0 <= noise.min() < noise.max() < 1
        # Mean of 20,000 uniforms: 1/2 ± 0.0020 (one sigma); the serial correlation: 0 ± 0.0071.
        assert abs(noise.mean().item() - 0.5) < 0.008
        assert abs(torch.corrcoef(torch.stack([noise[1:], noise[:-1]]))[0, 1].item()) < 0.028
        counts = torch.histc(noise, bins=20, min=0, max=1)
        # Chi-square with 19 degrees of freedom: 43.8 is exceeded once in a thousand.
        assert ((counts - 1000) ** 2 / 1000).sum().item() < 43.8


def test_noise_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    draw(torch.zeros(4, 10), uniform([1, 2, 3, 4], [0, 0, 0, 0]), SamplingParams())
    assert torch.equal(before, torch.get_rng_state())


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


@pytest.mark.parametrize(
    ("noise", "token"),
    [(0.0, 0), (0.0999, 0), (0.1001, 1), (0.2999, 1), (0.3001, 3), (0.5, 3), (0.9999999, 3)],
)
def test_a_token_is_drawn_where_the_noise_falls_in_the_cumulative_distribution(noise: float, token: int):
    # Cumulative 0.1, 0.3, 0.3, 1.0: token 2 has probability 0 and is never drawn.
    result = draw(logits_of(0.1, 0.2, 0.0, 0.7), torch.tensor([noise], dtype=torch.float64), SamplingParams())
    assert result.token_ids.item() == token
    assert result.log_probs.item() == pytest.approx(math.log([0.1, 0.2, 0.0, 0.7][token]), abs=1e-6)


def test_noise_zero_skips_a_first_token_of_probability_zero():
    result = draw(logits_of(0.0, 1.0), torch.zeros(1, dtype=torch.float64), SamplingParams())
    assert result.token_ids.item() == 1


def test_the_largest_noise_stays_inside_the_vocabulary():
    largest = torch.tensor([1 - 2.0**-52], dtype=torch.float64)
    for seed in range(20):
        logits = torch.randn(1, 5001, generator=torch.Generator().manual_seed(seed))
        result = draw(logits, largest, SamplingParams())
        assert result.token_ids.item() == 5000
        assert result.log_probs.isfinite().all()


def test_temperature_divides_the_logits_before_the_log_prob():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    scaled = [math.exp(value / 0.5) for value in (1.0, 3.0, 2.0)]
    result = draw(logits, torch.tensor([0.5], dtype=torch.float64), SamplingParams(temperature=0.5))
    assert result.token_ids.item() == 1
    assert result.log_probs.item() == pytest.approx(math.log(scaled[1] / sum(scaled)), abs=1e-6)


def test_greedy_takes_the_lowest_id_of_equals_and_reports_temperature_one():
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 5.0, 5.0]])
    result = draw(logits, torch.tensor([0.9, 0.9], dtype=torch.float64), SamplingParams(temperature=0.0))
    assert result.token_ids.tolist() == [1, 0]
    expected = [math.log(math.exp(2) / (1 + 2 * math.exp(2))), math.log(1 / 3)]
    assert result.log_probs.tolist() == pytest.approx(expected, abs=1e-6)


def kept(logits: torch.Tensor, top_k: int, top_p: float) -> list[int]:
    return restricted(logits, top_k, top_p)[0].isfinite().nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (0, 1.0, [0, 1, 2, 3]),
        (1, 1.0, [1]),
        (2, 1.0, [1, 3]),
        (9, 1.0, [0, 1, 2, 3]),
        (0, 0.39, [1]),  # 0.4 alone reaches 0.39
        (0, 0.41, [1, 3]),
        (0, 0.69, [1, 3]),
        (0, 0.71, [1, 2, 3]),
        (0, 1e-9, [1]),  # at least one
        (3, 0.75, [1, 3]),  # after top-k the first two have 0.7 / 0.9 = 0.78
    ],
)
def test_top_k_then_top_p_keep(top_k: int, top_p: float, expected: list[int]):
    assert kept(logits_of(0.1, 0.4, 0.2, 0.3), top_k, top_p) == expected


def test_top_k_keeps_ties_with_the_last_kept_token():
    assert kept(logits_of(0.3, 0.2, 0.3, 0.2), 3, 1.0) == [0, 1, 2, 3]


def test_restriction_renormalises_the_log_prob():
    # Kept: 0.4 and 0.3. With noise 0.5 the cumulative 4/7 of token 1 is reached first.
    sampling = SamplingParams(top_k=2)
    result = draw(logits_of(0.1, 0.4, 0.2, 0.3), torch.tensor([0.5], dtype=torch.float64), sampling)
    assert (result.token_ids.item(), result.log_probs.item()) == (1, pytest.approx(math.log(4 / 7), abs=1e-6))
    result = draw(logits_of(0.1, 0.4, 0.2, 0.3), torch.tensor([0.6], dtype=torch.float64), sampling)
    assert (result.token_ids.item(), result.log_probs.item()) == (3, pytest.approx(math.log(3 / 7), abs=1e-6))


def test_many_rows_are_drawn_like_single_ones(monkeypatch: pytest.MonkeyPatch):
    logits = torch.randn(37, 50, generator=torch.Generator().manual_seed(1))
    noise = uniform(list(range(37)), [5] * 37)
    together = draw(logits, noise, SamplingParams(temperature=0.8, top_k=20, top_p=0.9))
    monkeypatch.setattr("megappo.engines.native.sampling.BLOCK_ELEMENTS", 100)  # two rows at once
    in_blocks = draw(logits, noise, SamplingParams(temperature=0.8, top_k=20, top_p=0.9))
    assert torch.equal(together.token_ids, in_blocks.token_ids)
    torch.testing.assert_close(together.log_probs, in_blocks.log_probs, rtol=0, atol=1e-6)


def test_logits_that_are_not_numbers_show_in_the_log_prob():
    result = draw(torch.full((1, 4), torch.nan), torch.tensor([0.5], dtype=torch.float64), SamplingParams())
    assert result.token_ids.item() < 4
    assert result.log_probs.isnan().all()
