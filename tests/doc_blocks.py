"""The code blocks of the documentation, as its tests see them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# where a reader is served by the reason it is shown, else it stands in a comment
_NOT_RUN = re.compile(
    r"^(?:\*Not run by the tests: [^*\n]{10,}\.\*|<!-- not run by the tests: [^\n]{10,} -->)\n\n\Z",
    re.M,
)


@dataclass(frozen=True)
class Block:
    """A code block, and whether the line above it says that it is not run."""

    language: str
    text: str
    is_run: bool

    @property
    def commands(self):
        """Of a shell block, its commands; a backslash goes on with a line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks_of(page):
    """All blocks of a Markdown file."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2], not _NOT_RUN.search(text[: found.start()]))
        for found in FENCE.finditer(text)
    ]
