"""Strategies for values and contents: plausible ones, and those that break things."""

import string

from hypothesis import strategies as st

from fuzzing.inputs import Damage

_TROUBLE = [
    "", " ", "\t", "a\nb", "[/]", "[bold]x", ":cat:", "%s", "{}", "{question}", "..", "/", "/dev/null", "~", "~/x",
    "null", "true", "False", "1", "-1", "0", "1e-3", "0.5", "nan", "inf", "-inf", "1e400", str(10**30), "9" * 5000,
    "--seed", "-", "=", "a=b", "1,2", "0,0", "1,,2", "3-5", "²", "\u202e", "é", "x" * 300, '{"a": 1}', "\x1b[31m",
]  # fmt: skip
_NAMES = [
    "a.npz", "t.jsonl", "b.jsonl", "image", "text", "adapter", "done", "nowhere", "hub:", "hub:a/b", "hub:../..",
    "digits", "miniature", "tiny-llama", "resnet8", "resnet9", "resnet99999998", "question=x", "question~(",
    "question~.", "no", "steps", "epoch", "best", "all", "none", "auto", "bfloat16",
]  # fmt: skip
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
    st.sampled_from(_TROUBLE + _NAMES),
)
NUMBERS = st.sampled_from([
    "-1", "0", "1", "2", "3", "7", "0.1", "0.5", "1.0", "1e-3", "1e-30", "1e30", "nan", "inf", "-inf", str(2**31),
    str(2**63), str(10**30), "-0.0", "0x10", "1_000", "1e3", "", "one", "True", "९",
])  # fmt: skip
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), TEXT, NUMBERS, st.dates(), st.datetimes(),
        st.binary(max_size=4), st.sampled_from([10**30, 2**64, float("nan"), float("inf")]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=5,
)  # fmt: skip
_YAML = [
    b"", b"\t", b"---\n---\n", b"- 1\n- 2", b"seed: 1\nseed: 2", b"seed:\t3", b"\xff\xfes", b"&a [*a]", b"a: *b",
    b"!!python/object/apply:os.mkdir [unpickled]", b"seed: !!python/name:os.system", b"seed: !x 1", b"? [1]\n: 2",
    b"[" * 2000, b"a: &a [x,x]\nb: &b [*a,*a]", b"seed: 1_0", b"seed: 0o17", b"seed: 1:30", b"<<: {seed: 1}",
    b"\xef\xbb\xbfseed: 1", "data: \u2028".encode(), b'data: "\\0"', b'data: "\\ud800"', b"output_dir: [a, b]",
    b"unlearn: 3", b"unlearn: [seed]", b"unlearn:\n  unlearn:\n    seed: 1", b"1: 2", b"null: 1", b"true: false",
    b"seed: !!int x", b"seed: !!timestamp x", b"seed: 2020-13-45", b"seed: &a\n  x: *a",
]  # fmt: skip
CONTENT = st.one_of(
    st.text(string.printable, max_size=60).map(str.encode),
    st.binary(max_size=60),
    st.sampled_from(_YAML),
)
DAMAGE = st.builds(
    Damage, st.floats(0, 1), st.sampled_from([0, 1, 4, 100, 10**9]), st.binary(max_size=8)
)


@st.composite
def maybe_damaged(draw, content):
    """As it is, or broken."""
    return content if draw(st.integers(0, 3)) else draw(DAMAGE).apply(content)
