"""Code blocks of the documentation and the notebook run; of blocks that cannot run here the options are parsed."""

import importlib
import json
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from doc_blocks import FENCE, ROOT, blocks_of, install, run_shortened, save_what_readers_have

from hamu.cli import COMMANDS
from hamu.cli.commands import given_flags
from hamu.cli.demo import NEXT
from hamu.core import plugins
from hamu.core.methods import method_classes
from hamu.data import read_text
from hamu.unlearning.jobs.options import BY_HAND, TYPES
from hamu.unlearning.jobs.settings import settings_of

READ = ("math", "text")  # nothing to run
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_to_run(page):
    return [block for block in blocks_of(page) if block.is_run and block.language not in READ]


def pages(chosen):
    return pytest.mark.parametrize("page", chosen, ids=lambda page: str(page.relative_to(ROOT)))


@pages(PAGES)
def test_every_block_names_its_language_and_its_options_exist(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unfenced = FENCE.sub("", page.read_text(encoding="utf-8"))
    assert not re.search(r"\n\n {4}\S", unfenced), "an indented block is not run"
    for block in blocks_of(page):
        assert block.language in ("python", "sh", "yaml", "json", "toml", *READ), block.text
        for line in block.commands if block.language == "sh" else ():
            program, *argv = shlex.split(line, comments=True)
            if block.is_run:
                assert program == "hamu", f"nothing else is run by these tests: {line}"
            elif program == "hamu":
                parse_options(argv)
            else:
                check_other_program(program, argv)


def check_other_program(program, argv):
    if program in ("torchrun", "accelerate"):
        module = argv.index("-m")
        assert argv[module + 1] == "hamu"
        number = "--nproc_per_node" if program == "torchrun" else "--num_processes"
        parse_options(argv[module + 2 :], processes=argv[argv.index(number) + 1])
    elif program == "python" and argv[0] != "-m":
        source = (ROOT / argv[0]).read_text(encoding="utf-8")
        for flag in (word for word in argv[1:] if word.startswith("--")):
            assert f'"{flag}"' in source, f"{argv[0]} has no {flag}"
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(argv) <= set(targets)
    elif not re.fullmatch(r"\w+=\S+", program):
        assert program in ("python", "pip", "bash", "tensorboard"), f"{program} is not known"


def parse_options(argv, processes="1"):
    """Let a command parse its options, and do no more."""
    command, *rest = argv
    assert command in COMMANDS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hamu.unlearning.trainer.config.world_size", lambda: int(processes))
        patch.setenv("MASTER_ADDR", "127.0.0.1")  # as a launcher sets
        if "--report_to" in rest:
            patch.setattr("hamu.unlearning.trainer.config.named_trackers", str)
        if "--resume" in rest:
            begun = Path(rest[rest.index("--output_dir") + 1]) / "config.yaml"
            begun.parent.mkdir(parents=True, exist_ok=True)
            begun.write_text("{}")
        given = given_flags(command, rest) if command != "methods" else rest
        if command in TYPES:
            settings_of(command, given)


@pytest.mark.parametrize("kind", ["image", "text"])
def test_the_commands_that_a_demo_prints_exist(kind):
    lines = NEXT[kind].replace("\\\n", " ").splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("  hamu ")]
    by_hand = {f"--{name}" for name in BY_HAND}
    assert [argv for argv in commands if argv[0] == "unlearn" and not by_hand & set(argv)]
    for argv in commands:
        parse_options(argv)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of trained models, by their commands: pages that train alike share one."""
    return {}, tmp_path_factory.mktemp("trained")


@pytest.fixture
def place(tmp_path, monkeypatch, saved_text_model):
    """A folder with what the pages assume."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    save_what_readers_have(saved_text_model)
    yield tmp_path
    plugins.points_of.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_unlearning"]:
        del sys.modules[name]


@pages([page for page in PAGES[2:] if blocks_to_run(page)])
def test_the_page_runs(page, place, trained, forked_runs, capsys):
    names = {"__name__": page.stem}
    for block in blocks_to_run(page):
        named = re.match(r"# (\S+\.(?:py|yaml))\n", block.text)
        if block.language == "sh":
            for line in block.commands:
                run_once(shlex.split(line, comments=True)[1:], trained, capsys)
        elif block.language == "python" and not named:
            exec(compile(block.text, str(page), "exec"), names)
        elif block.language in ("python", "yaml"):
            file = place / (named[1] if named else "run.yaml")
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.text)
            importlib.invalidate_caches()
            if block.language == "yaml":
                parse_options(["compare", "--config", file.name])
        elif block.language == "toml":
            project = tomllib.loads(block.text)["project"]
            install(place, project["name"], project["version"], project["entry-points"])
        else:
            for line in block.text.splitlines():
                (place / "one.jsonl").write_text(line)
                assert len(read_text("one.jsonl")) == 1


def run_once(argv, trained, capsys):
    """Run a command; one that has trained a model leaves it for the same one of another page."""
    given = tuple(argv)
    if given in trained[0]:
        shutil.copytree(trained[0][given], argv[argv.index("--output_dir") + 1])
        return
    run_shortened(argv, capsys)
    if argv[0] == "train":
        trained[0][given] = trained[1] / str(len(trained[0]))
        shutil.copytree(argv[argv.index("--output_dir") + 1], trained[0][given])


def test_the_loop_of_the_readme_unlearns():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    loss = torch.nn.functional.cross_entropy
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    names = {
        "model": model,
        "loss": loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "retain_batches": [(x[:30], y[:30])] * 5,
        "forget_batches": [(x[30:], y[30:])] * 5,
    }
    before = loss(model(x[30:]), y[30:]).item()
    [block] = [one for one in blocks_to_run(README) if one.language == "python"]
    exec(block.text, names)
    assert names["step"].decision == "step"
    assert loss(model(x[30:]), y[30:]).item() > before


def test_the_commands_of_the_readme_run(place, capsys, forked_runs):
    of_images = ("check/evaluation.json", "assess/frontier.png", "unlearned/report.html")
    of_images += ("unlearned/model/model.safetensors",)
    blocks = [one for one in blocks_to_run(README) if one.language == "sh"]
    for block, files in zip(blocks, (["check/answers.html"], of_images), strict=True):
        shutil.rmtree("runs", ignore_errors=True)
        for line in block.commands:
            run_shortened(shlex.split(line)[1:], capsys)
        assert [name for name in files if not Path("runs", name).is_file()] == []


def test_the_readme_names_every_method():
    named = re.findall(r"`([\w-]+)`", README.read_text(encoding="utf-8").partition("## Methods")[2])
    assert [name for name in method_classes() if name not in named] == []


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples/unlearn_a_class.ipynb").read_text())["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["hamu"].verify(names["run"].folder).count(False) == 0
    assert names["run"].figures["goal"]["reached"]
    assert names["checked"].report["forget"]["accuracy"] <= 0.05
    after = names["attacked"].result.outcomes["relearn-retain"]
    assert set(after) == {"unlearned", "original", "retrained"}
