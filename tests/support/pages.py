"""The project's pages, taken apart: fenced blocks, words in code style, links. The tests say what they must satisfy."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.ranks import ROOT

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the page and line where it begins."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One line of a `bash` block as the shell splits it, without comment and assignments."""

    block: Block
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.block}: {' '.join(self.words)}"


def blocks(language: str) -> list[Block]:
    """All blocks of a language."""
    return [
        Block(page, text[: match.start()].count("\n") + 1, match[1], match[2])
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for match in FENCE.finditer(text)
        if match[1] == language
    ]


def commands() -> list[Command]:
    """Every command of every `bash` block."""
    found = []
    for block in blocks("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and ASSIGNMENT.fullmatch(words[0]):
                words.pop(0)
            if words:
                found.append(Command(block, tuple(words)))
    return found


def code_words() -> Iterator[tuple[str, str]]:
    """(page, text) of everything `in code style` outside of fenced blocks."""
    for page in PAGES:
        for match in re.finditer(r"`([^`\n]+)`", prose(page)):
            yield page.name, match[1]


def links() -> Iterator[tuple[Path, str]]:
    """(page, target) of every link to a file of the project."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
            if "://" not in target:
                yield page, target


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))
