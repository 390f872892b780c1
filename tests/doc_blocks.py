"""Code blocks of the documentation, as its tests see them."""

import importlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from hamu.cli import main
from hamu.core import plugins
from hamu.data import read_text

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# the reason is visible where it serves a reader, else a comment
_NOT_RUN = re.compile(
    r"^(?:\*Not run by the tests: [^*\n]{10,}\.\*|<!-- not run by the tests: [^\n]{10,} -->)\n\n\Z",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A code block; the line above it says if it is not run."""

    language: str
    text: str
    is_run: bool

    @property
    def commands(self):
        """Lines of a shell block, joined at backslashes."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2], not _NOT_RUN.search(text[: found.start()]))
        for found in FENCE.finditer(text)
    ]


def install(folder, name, version, groups):
    """Write what pip leaves of a package: its name, and its entry points by group."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    importlib.invalidate_caches()
    plugins.points_of.cache_clear()


def run_shortened(argv, capsys):
    """A few steps and records show that commands go together."""
    command = argv[0]
    own_length = {"--resume", "--num_train_epochs"} & set(argv)
    if command in ("train", "unlearn", "assess", "compare") and not own_length:
        argv += ["--max_steps", "2"]
        argv += ["--max_eval_samples", "64"] if command in ("unlearn", "compare") else []
    if command == "compare" and "--methods" not in argv:
        argv += ["--methods", "hamu-q", "ft"]
    if command == "evaluate" and {"my-model", "my-model/"} & set(argv):
        argv += ["--generate", "4"]
    assert main(argv) in ((0, 3, 4) if command == "assess" else (0,)), capsys.readouterr().err


def save_what_readers_have(text_model):
    """Save what the pages assume in the working folder: images, records, a model."""
    rng = np.random.default_rng(0)
    for number in range(30):
        folder = Path("images", ("cat", "dog")[number % 2])
        folder.mkdir(parents=True, exist_ok=True)
        image = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(image).save(folder / f"{number}.png")
    known, unseen = (read_text("miniature", split).records for split in ("train", "test"))
    for name, chosen in (("records", known[:48]), ("gone", known[:6]), ("unseen", unseen[:24])):
        lines = [json.dumps({key: r.fields[key] for key in ("question", "answer")}) for r in chosen]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    shutil.copytree(text_model, "my-model")
