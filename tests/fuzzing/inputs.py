"""An input: a command, and the files of the world that were changed before it; values of any kind."""

import json
import os
import pickle
import shutil
import string
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from hamu.unlearning.trainer.resumable import seal


def remove(path):
    """Remove what is in the place of a file, if anything is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(path, to):
    """Put a symbolic link in the place of a file."""
    remove(path)
    os.symlink(to, path)


def change_keys(path, values):
    """Give a JSON object other values."""
    path.write_bytes(json.dumps(json.loads(path.read_bytes()) | values).encode())


def damage(path, **how):
    """Cut something from a file, and put something into it."""
    path.write_bytes(damaged(path.read_bytes(), **how))


def damaged(content, at, cut, put):
    """The bytes with others from a share of them on."""
    begin = int(at * len(content))
    return content[:begin] + put + content[begin + cut :]


def seal_again(path):
    """Give a checkpoint a manifest that fits its files as they are."""
    (path / "manifest.json").unlink()
    seal(path)


@dataclass(frozen=True)
class Input:
    """A command with the files that it meets.

    Attributes:
        kind: what was made up.
        argv: the command.
        changes: what is done to the world first: a path, and its new content or a function of it.
        out: the output folder, where alone the command may write.
    """

    kind: str
    argv: tuple[str, ...]
    changes: tuple[tuple[str, object], ...] = ()
    out: str = "out"

    def prepare(self):
        """Change the files in the working folder."""
        for name, change in self.changes:
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(change, bytes):
                remove(path)
                path.write_bytes(change)
            else:
                change(path)


class _Poison:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


POISON = pickle.dumps(_Poison(), protocol=2)  # unpickled, it leaves a folder behind


def words(text):
    """One of these words."""
    return st.sampled_from(text.split())


_TROUBLE = ["", " ", "\t", "a\nb", "[bold]x", "x" * 300, "9" * 5000, "\u202e", "\x1b[31m"]
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
    st.sampled_from(_TROUBLE),
    words(
        "[/] :cat: %s {} {question} .. / /dev/null ~ ~/x null true False 1 -1 0 1e-3 nan inf 1e400 "
        '--seed - = a=b 1,2 0,0 1,,2 3-5 ² é {"a":1}'
    ),
    words(
        "a.npz t.jsonl b.jsonl image text adapter done nowhere hub: hub:a/b hub:../.. digits "
        "miniature tiny-llama resnet8 resnet9 resnet99999998 question=x question~( question~. no "
        "steps epoch best all none auto bfloat16"
    ),
)
NUMBERS = words(
    f"-1 0 1 2 3 7 0.1 0.5 1.0 1e-3 1e-30 1e30 nan inf -inf {2**31} {2**63} {10**30} -0.0 0x10 "
    f"1_000 1e3 one True ९"
)
_SCALARS = [st.none(), st.booleans(), st.integers(), st.floats(), TEXT, NUMBERS, st.datetimes()]
VALUES = st.recursive(
    st.one_of(*_SCALARS, st.binary(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=5,
)
_YAML = [
    *(b"", b"\t", b"---\n---\n", b"- 1\n- 2", b"seed: 1\nseed: 2", b"seed:\t3", b"\xff\xfes"),
    *(b"&a [*a]", b"a: *b", b"seed: &a\n  x: *a", b"a: &a [x,x]\nb: &b [*a,*a]", b"[" * 2000),
    *(b"!!python/object/apply:os.mkdir [unpickled]", b"seed: !!python/name:os.system"),
    *(b"seed: !x 1", b"? [1]\n: 2", b"seed: 1_0", b"seed: 0o17", b"<<: {seed: 1}"),
    *(b"\xef\xbb\xbfseed: 1", b'data: "\\0"', b'data: "\\ud800"', b"output_dir: [a, b]"),
    *(b"unlearn: 3", b"unlearn: [seed]", b"unlearn:\n  unlearn:\n    seed: 1", b"1: 2", b"null: 1"),
]
CONTENT = st.one_of(
    st.text(string.printable, max_size=60).map(str.encode),
    st.binary(max_size=60),
    st.sampled_from(_YAML),
)
DAMAGE = st.fixed_dictionaries(
    {
        "at": st.floats(0, 1),
        "cut": st.sampled_from([0, 1, 4, 100, 10**9]),
        "put": st.binary(max_size=8),
    }
)


@st.composite
def maybe_damaged(draw, content):
    """As it is, or broken."""
    return content if draw(st.integers(0, 3)) else damaged(content, **draw(DAMAGE))
