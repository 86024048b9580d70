"""Samples made by hand."""

from megappo.experience.sample import Prompt, RolloutSample


def make_sample(text: str, answer: str | None = "5", position: int = 0) -> RolloutSample:
    """A response with `text` to a prompt with `answer`."""
    prompt = Prompt(index=0, source="made", token_ids=(1,), text="prompt", answer=answer, extra={"level": 3})
    return RolloutSample(prompt, position, 0, (2,), (0.0,), text, "stop")
