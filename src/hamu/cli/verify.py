"""`hamu verify`: check the record of a run against its files, its model and its data."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from hamu.cli.named_sources import NamedSources, add_permissions
from hamu.cli.parser import Parser
from hamu.files import file_digest
from hamu.unlearning.record import TOLERANCE, Finding, verify

_DESCRIPTION = """Check the record of a run against its files, its model, and the data and models that its config.yaml
names, as far as they are still there. Prints a line for each statement of the record: holds, does not hold, or cannot
be checked. Exit code 1 if something does not hold. Nothing is written."""
_WORDS = {True: "holds", False: "does not hold", None: "cannot be checked"}


def run(argv: list[str], console: Console) -> int:
    """Check, print what was found."""
    parser = Parser((), prog="hamu verify", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("run", help="the --output_dir of a `hamu unlearn`")
    parser.add_argument(
        "--no_models",
        action="store_true",
        help="do not evaluate the models again, which takes most of the time",
    )
    add_permissions(parser)
    args = parser.parse_args(argv)
    sources = NamedSources(Path(args.run), args.hub, trust_remote_code=args.trust_remote_code)
    counts = dict.fromkeys(_WORDS, 0)
    for finding in verify(Path(args.run), sources, evaluate=not args.no_models):
        counts[finding.holds] += 1
        _show(finding, console)
    near = " and ".join(f"{value:g} ({precision})" for precision, value in TOLERANCE.items())
    console.print(
        f"\n{counts[True]} hold, {counts[False]} do not hold, {counts[None]} cannot be checked; figures may differ by "
        f"{near}, relatively if above 1\nthe SHA-256 of record.json is {file_digest(Path(args.run) / 'record.json')}",
        soft_wrap=True,
    )
    return 1 if counts[False] else 0


def _show(finding: Finding, console: Console) -> None:
    why = f": {finding.why}" if finding.why else ""
    console.print(f"{_WORDS[finding.holds]:18} {finding.statement}{why}", soft_wrap=True)
