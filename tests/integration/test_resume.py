"""An interrupted and resumed run ends as an uninterrupted one; nothing damaged is ever used."""

import json
import os
import random
import shutil
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from interrupting import FORKS, at_step
from run_files import contents, quota, read, read_rows
from safetensors.torch import load_file, save_file

from hamu import HamuError
from hamu.cli import main
from hamu.errors import Interrupted
from hamu.files import remove_whole
from hamu.unlearning.jobs import training
from hamu.unlearning.trainer.logs import ProgressBar, silent
from hamu.unlearning.trainer.resumable import ResumableTrainer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DETERMINISTIC = ("--full_determinism",) if torch.cuda.is_available() else ()


def words(line):
    return tuple(line.split())


EVERY_STEP = words("--save_strategy steps --save_steps 1")
ADAM = words("--optim adamw_torch --learning_rate 1e-3")
EVALUATED = "--eval_strategy steps --eval_steps 1"
DIVERGING = words(f"--learning_rate 0.5 --max_retain_loss 0.35 {EVALUATED}") + EVERY_STEP
BEST_OF_SAVED = words(
    "--method ga --load_best_model_at_end --metric_for_best_model retain_loss "
    f"--save_strategy steps --save_steps 2 {EVALUATED}"
)
BEST_OF_EPOCHS = words(
    "--load_best_model_at_end --save_strategy epoch --save_total_limit 1 --learning_rate 0.3"
)
UNDONE = words(
    "--method hamu-u --trust_region --stopping off --learning_rate 3 --num_train_epochs 3"
)
GOAL = words("--auto --target_forget_loss 1.5 --max_retain_increase 0.2 --max_steps 6")
SMALL = words(
    "--per_device_train_batch_size 32 --max_steps 24 --stopping aggregate "
    "--constraint_mode relative --constraint 0.1"
)
LASTING = (*GOAL, "--lasting", "--lookahead_steps", "2")


@pytest.fixture(scope="module")
def unlearn(saved_model, few_digits):
    """Six steps in two epochs."""
    job = words("unlearn --recipe digits --num_train_epochs 2 --per_device_train_batch_size 100")
    job += words("--max_eval_samples 32 --check_steps 1")
    return (*job, "--data", str(few_digits), "--model", str(saved_model), *DETERMINISTIC)


@pytest.fixture
def signal_at():
    """Sends this process a signal at the end of one step, once."""
    with ExitStack() as armed:

        def arm(step, number):
            waiting = [number]
            send = lambda: waiting and signal.raise_signal(waiting.pop())  # noqa: E731
            armed.enter_context(at_step(step, send))

        yield arm


@pytest.fixture
def broken(cli, unlearn, signal_at):
    """Break a run off at the end of a step, by SIGTERM."""

    def at(step, *more, folder="run"):
        signal_at(step, signal.SIGTERM)
        assert cli(*unlearn, *more, "--output_dir", folder)[0] == 143

    return at


@pytest.fixture
def resume(cli):
    return lambda folder="run", *more, command="unlearn": cli(
        command, "--resume", "--output_dir", folder, *more
    )


def outcome(folder):
    return (
        (folder / "model/model.safetensors").read_bytes(),
        read(folder / "evaluation.json"),
        read_rows(folder / "steps.jsonl"),
        (folder / "layers.jsonl").read_text(),
    )


@pytest.fixture(scope="module")
def whole(unlearn, tmp_path_factory):
    """Outcome of the uninterrupted run with these further settings; checkpoints change none."""
    known = {}

    def of(*more):
        if more not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            assert main([*unlearn, *more, "--output_dir", str(folder)]) == 0
            known[more] = outcome(folder)
        return known[more]

    return of


@pytest.mark.parametrize(
    ("step", "number", "more"),
    [
        (3, signal.SIGINT, ADAM),  # the last step of an epoch
        (4, signal.SIGTERM, ("--trust_region", "--correct_steps", *ADAM)),
        (2, signal.SIGTERM, GOAL),
        (3, signal.SIGTERM, LASTING),
        (18, signal.SIGTERM, SMALL),  # between two estimates for the criterion
        (6, signal.SIGTERM, ()),  # when all steps are done
        (2, signal.SIGTERM, DIVERGING),
        (6, signal.SIGTERM, UNDONE),
        (2, signal.SIGTERM, ("--method", "kl", "--gradient_accumulation_steps", "2")),
        (5, signal.SIGTERM, BEST_OF_SAVED),
    ],
)
def test_a_signal_saves_and_the_resumed_run_ends_alike(
    cli, tmp_path, unlearn, whole, signal_at, resume, step, number, more
):
    expected = whole(*more)
    signal_at(step, number)
    code, _, err = cli(*unlearn, *more, "--output_dir", "run")
    assert code == 128 + number
    assert err.strip() == (
        f"hamu unlearn: interrupted by {signal.Signals(number).name}; step {step} is saved in "
        f"run/checkpoint-{step}; go on with: hamu unlearn --resume --output_dir run"
    )
    assert not (tmp_path / "run/evaluation.json").exists()
    code, out, err = resume()
    assert (code, err, f": going on after step {step} of " in out) == (0, "", True)
    assert outcome(tmp_path / "run") == expected
    assert resume() == (0, "the run in run is complete", "")
    if more == UNDONE:
        assert expected[2][0]["taken"] == 0, "the case is for a first step that is not taken"
    if more == DIVERGING:
        assert expected[1]["ended_kind"] == "retain loss"
    if more == BEST_OF_SAVED:
        record = read(tmp_path / "run/record.json")
        best = int(record["steps"]["ended_because"].rpartition("best ones, of step ")[2])
        assert record["steps"]["in_model"] == best < record["steps"]["taken"]
        assert f"by {best} gradient updates of the method ga," in record["statement"][0]
        points = expected[1]["trajectory"]
        losses = {one["step"]: one["eval_retain_loss"] for one in points}
        saved = [step for step in losses if step and step % 2 == 0]
        assert best == min(saved, key=losses.__getitem__)
        assert expected[1]["after"]["retain"]["loss"] == pytest.approx(losses[best])
        assert len(losses) == len(points), "no point has the figures of other weights"


def test_a_signal_behind_the_last_step_waits_for_the_model_and_a_second_does_not(
    cli, tmp_path, unlearn, whole, monkeypatch
):
    expected, write = whole(), training.record.write_record

    def interrupted(*given, **settings):
        signal.raise_signal(signal.SIGTERM)
        return write(*given, **settings)

    monkeypatch.setattr(training.record, "write_record", interrupted)
    code, out, _ = cli(*unlearn, "--output_dir", "run")
    assert (code, outcome(tmp_path / "run")) == (0, expected)
    assert "SIGTERM: all steps are done; it ends when" in " ".join(out.split())
    with training.finishing(silent()):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="had not saved is lost"):
            signal.raise_signal(signal.SIGTERM)


def test_training_resumes_with_its_batch(cli, tmp_path, few_digits, signal_at, resume):
    """A closed terminal ends it in order, unless it is to live on, as nohup wants it."""
    train = words("train --model resnet8 --num_train_epochs 2 --per_device_train_batch_size 100")
    train += (*DETERMINISTIC, "--data", few_digits, "--output_dir")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may be to live on
    signal_at(4, signal.SIGHUP)
    code, _, err = cli(*train, "run")
    assert (code, "hamu train: interrupted by SIGHUP; step 4 is saved in" in err) == (129, True)
    assert "go on with: hamu train --resume --output_dir run" in err
    code, _, err = resume("run", "--per_device_train_batch_size", 7, command="train")
    assert (code, "records, now they would be of 7" in err) == (2, True)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signal_at(5, signal.SIGHUP)
        assert resume(command="train")[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert cli(*train, "whole")[0] == 0
    run, whole = (tmp_path / name / "model/model.safetensors" for name in ("run", "whole"))
    assert run.read_bytes() == whole.read_bytes()


def test_training_of_texts_resumes_with_the_data_that_it_began_with(
    cli, tmp_path, signal_at, resume
):
    """In the second epoch, which has an order of its own by the records' lengths."""
    lines = [
        json.dumps({"question": f"What is {n}?", "answer": f"It is {n}." * (1 + n % 3)}) + "\n"
        for n in range(20)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(lines))
    train = words("train --data data.jsonl --model tiny-llama --max_length 64 --max_steps 5")
    train += words("--per_device_train_batch_size 8 --train_sampling_strategy group_by_length")
    assert cli(*train, "--output_dir", "whole")[0] == 0
    signal_at(4, signal.SIGTERM)
    assert cli(*train, "--output_dir", "run")[0] == 143
    spaced = [line.replace('"It is', '"  It is') for line in lines]
    for changed, what in (
        (lines[:-1], "training set"),
        (lines[::-1], "order of the training set"),
        (spaced, "tokenization of the training set"),
    ):
        data.write_text("".join(changed))
        code, _, err = resume(command="train")
        assert (code, f"began with another {what} than there is now" in err) == (2, True)
    data.write_text("".join(lines))
    assert resume(command="train")[0] == 0
    run, whole = (tmp_path / name / "model/model.safetensors" for name in ("run", "whole"))
    assert run.read_bytes() == whole.read_bytes()


IMPOSSIBLE = words("--constraint_mode absolute --constraint 1e6 --on_infeasible skip")
NO_STEP = "hamu unlearn: interrupted before this process took a step\n"
AT_ONCE = "interrupted again; what was done since the last checkpoint is lost"


@pytest.mark.parametrize(("moment", "signals", "more", "message"), [
    ("on_train_begin", [signal.SIGTERM], IMPOSSIBLE, NO_STEP),
    ("on_step_end", [signal.SIGTERM], IMPOSSIBLE, NO_STEP),
    ("on_step_end", [signal.SIGINT] * 2, (), AT_ONCE),
])  # fmt: skip
def test_a_signal_before_a_step_was_taken_leaves_nothing_and_a_second_one_ends_a_run_at_once(
    cli, tmp_path, unlearn, monkeypatch, moment, signals, more, message
):
    at = getattr(ProgressBar, moment)

    def interrupted(self, *args, **kwargs):
        at(self, *args, **kwargs)
        for number in signals:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(ProgressBar, moment, interrupted)
    code, _, err = cli(*unlearn, *more, "--output_dir", "run")
    assert (code, message in err) == (128 + signals[0], True)
    assert more == () or list(tmp_path.iterdir()) == []


def test_a_signal_before_the_checkpoint_is_read_leaves_it(
    tmp_path, whole, broken, resume, monkeypatch
):
    broken(2)
    with monkeypatch.context() as patch:
        killed = partial(os.kill, os.getpid(), signal.SIGTERM)
        patch.setattr(ResumableTrainer, "_load_from_checkpoint", lambda *given, **how: killed())
        code, _, err = resume()
    assert (code, err) == (143, NO_STEP)
    assert resume()[0] == 0
    assert outcome(tmp_path / "run") == whole()


def test_a_run_that_lost_its_best_or_only_checkpoint_goes_on(tmp_path, whole, broken, resume):
    broken(5, *BEST_OF_SAVED, "--max_steps", 9)
    shutil.rmtree(tmp_path / "run/checkpoint-2")
    assert resume()[0] == 0
    ended = read(tmp_path / "run/evaluation.json")["ended"]
    assert ended.endswith("; the weights are the best ones, of step 6"), "which is there"
    broken(2, *GOAL, folder="goal")
    shutil.rmtree(tmp_path / "goal/checkpoint-2")
    assert resume("goal")[0] == 0
    assert outcome(tmp_path / "goal") == whole(*GOAL)


def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, whole, broken, resume, caplog):
    broken(5, *EVERY_STEP, "--save_total_limit", "3")
    run = tmp_path / "run"
    kept = sorted(p.name for p in run.glob("checkpoint-*"))
    assert kept == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]
    content = bytearray((run / "checkpoint-5/model.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "checkpoint-5/model.safetensors").write_bytes(content)
    (run / "checkpoint-4/optimizer.pt").unlink()
    (run / ".checkpoint-abc").mkdir()  # of an interrupted save
    with open(run / "steps.jsonl", "a") as log:
        log.write('{"step": 6, "ta')
    assert resume()[0] == 0
    assert "checkpoint-5 is damaged: model.safetensors is not as it was written; " in caplog.text
    assert "checkpoint-4 is damaged: optimizer.pt is missing; it is removed" in caplog.text
    assert outcome(run) == whole()
    assert not (run / ".checkpoint-abc").exists()


def replaced(name, old, new):
    text = Path(name).read_text()
    assert old in text
    Path(name).write_text(text.replace(old, new))


def without_first_line(name):
    Path(name).write_text(Path(name).read_text().partition("\n")[2])


def other_weights():
    weights = load_file("model/model.safetensors")
    weights["conv.weight"] *= 1.01
    save_file(weights, "model/model.safetensors", {"format": "pt"})


LEFT_OUT = "run/config.yaml has another {} than the run began with; put back what"
REFUSED = [  # a change, flags, the message
    ("", "--learning_rate 3", "with learning_rate 0.1; leave out --learning_rate 3.0, or"),
    ("", "--trust_region", "without trust_region; leave out --trust_region True"),
    ("", "--recipe digits", "without recipe; leave out --recipe digits"),
    ("", "--per_device_train_batch_size 10", "of 100 records, now they would be of 10"),
    (other_weights, "", "the run in run began with another original model than there is now; put back"),
    (lambda: replaced("model/config.json", '"image_mean": [\n    0.', '"image_mean": [\n    1.'), "",
     "began with another configuration of the original model than"),
    (lambda: replaced("run/inputs.json", '"', ""), "", "run/inputs.json does not say what that run has read: "),
    (lambda: replaced("run/config.yaml", "num_train_epochs: 2.0", "num_train_epochs: 6"), "",
     LEFT_OUT.format("num_train_epochs")),
    (lambda: replaced("run/config.yaml", "forget_class: '3'\n", ""), "", LEFT_OUT.format("forget_class")),
]  # fmt: skip


def test_a_run_goes_on_without_lines_of_its_log_that_are_lost(
    cli, broken, resume, saved_model, caplog
):
    shutil.copytree(saved_model, "model")
    broken(2, "--model", "model")
    steps = Path("run/steps.jsonl").read_text().splitlines()
    Path("run/steps.jsonl").write_text(f"{steps[0][:-9]}\n{steps[1]}\n")
    without_first_line("run/layers.jsonl")
    code, out, err = resume("run")
    assert code == 0, err
    assert "steps.jsonl has 1 of its 2 lines up to step 2; the log" in caplog.text
    logged = [row["step"] for row in read_rows("run/steps.jsonl")]
    assert logged == list(range(2, logged[-1] + 1))
    names, *layers = read_rows("run/layers.jsonl")
    assert (names["step"], [row["step"] for row in layers]) == (0, logged[1:])
    code, out, _ = cli("verify", "run", "--no_models")
    assert (code, "does not" in out) == (0, False), out
    assert cli("report", "run")[0] == 0
    broken(2, "--model", "model", folder="other")
    names, _, *layers = Path("other/layers.jsonl").read_text().splitlines()
    Path("other/layers.jsonl").write_text("\n".join([names, *layers, ""]))
    assert resume("other")[0] == 0
    assert Path("other/layers.jsonl").read_text().splitlines()[: 1 + len(layers)] == [
        names,
        *layers,
    ]


def test_a_run_goes_on_as_it_began_or_not_at_all(tmp_path, saved_model, broken, resume):
    none = "hamu unlearn: there is no run to resume in none: it has no config.yaml"
    assert resume("none")[2].startswith(none)
    shutil.copytree(saved_model, "model")
    broken(2, "--model", "model")
    whole = contents(tmp_path)
    for change, more, message in REFUSED:
        if change:
            change()
        before = contents(tmp_path)
        code, _, err = resume("run", *more.split())
        assert (code, message in err) == (2, True), err
        assert contents(tmp_path) == before
        for path, content in whole.items():
            if content:
                path.write_bytes(content)
    # what changes no result may change
    Path("model").rename("renamed")
    replaced("run/config.yaml", "\nmodel: model\n", "\nmodel: renamed\nsave_strategy: epoch\n")
    halves = "--per_device_train_batch_size 50 --gradient_accumulation_steps 2"
    assert resume("run", *halves.split())[0] == 0


def test_a_folder_may_be_moved_and_a_run_be_interrupted_again(
    tmp_path, whole, broken, signal_at, resume
):
    broken(4, *BEST_OF_EPOCHS)
    assert (tmp_path / "run/checkpoint-4").is_dir()
    # damaged, and newer: --save_total_limit 1 must not prefer it
    (tmp_path / "run/checkpoint-9").mkdir()
    (tmp_path / "run").rename(tmp_path / "moved")
    signal_at(5, signal.SIGINT)
    assert resume("moved")[0] == 130
    assert (tmp_path / "moved/checkpoint-5").is_dir()
    assert not (tmp_path / "moved/checkpoint-9").exists()
    assert resume("moved")[0] == 0
    assert outcome(tmp_path / "moved") == whole(*BEST_OF_EPOCHS)


@pytest.fixture
def continued(model, trainer_of):
    """Saves a run after one step; makes a trainer that may go on with it."""
    trainer_of(model, max_steps=1, save_strategy="steps", save_steps=1).train()
    return lambda **settings: trainer_of(model, max_steps=2, **settings)


def test_a_damaged_checkpoint_that_is_asked_for_is_refused(continued, tmp_path):
    checkpoint = tmp_path / "run/checkpoint-1"
    (checkpoint / "scheduler.pt").write_bytes(b"")
    again = continued()
    with pytest.raises(HamuError, match=r"checkpoint-1 is damaged: scheduler\.pt is not as it was"):
        again.train(resume_from_checkpoint=str(checkpoint))
    for asked, message in (
        (True, "there is no whole checkpoint in"),
        (str(tmp_path / "run/checkpoint-2"), r"no checkpoint .*run/checkpoint-2; check the path"),
        (str(tmp_path / "run"), "run holds checkpoints and is none; .* is .*checkpoint-1$"),
    ):
        with pytest.raises(HamuError, match=message):
            again.train(resume_from_checkpoint=asked)


@pytest.mark.parametrize(("name", "value"), [
    ("learning_rate", 0.5), ("seed", 1), ("optim", "adamw_torch"), ("forget_objective", "npo"), ("forget records", 30),
])  # fmt: skip
def test_a_trainer_resumes_by_no_other_settings_or_records(continued, problem, name, value):
    given = {"forget": problem.forget.select(range(value))} if " " in name else {name: value}
    with pytest.raises(HamuError, match=f"the run began with {name} .*, not {value}"):
        continued(**given).train(resume_from_checkpoint=True)


def test_a_module_of_ones_own_with_shared_and_buffered_tensors_resumes(trainer_of):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = torch.nn.Linear(64, 10)
            self.second = torch.nn.Linear(10, 10)
            self.third = self.second
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, pixels):
            self.seen += self.training
            return self.third(self.second(self.first(pixels.flatten(1))))

    one, broken, resumed = Own(), Own(), Own()
    trainer_of(one, max_steps=4, save_strategy="no").train()
    trainer_of(broken, max_steps=2, save_strategy="steps", save_steps=2).train()
    trainer_of(resumed, max_steps=4, save_strategy="no").train(resume_from_checkpoint=True)
    for name, value in one.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_full_disk_ends_the_run_with_the_last_checkpoint_whole(tmp_path, whole, broken, resume):
    broken(2, *EVERY_STEP, *ADAM)
    with quota(100_000):  # model files are larger, logs are not
        code, _, err = resume()
    assert (code, err.count("\n")) == (2, 1)
    assert "hamu unlearn: the checkpoint of step 3 cannot be written into run: " in err
    assert "; make room, and give the same command again; if the folder holds this run, -" in err
    left = sorted(p.name for p in (tmp_path / "run").glob("*checkpoint*"))
    assert left == ["checkpoint-1", "checkpoint-2"]
    assert resume()[0] == 0
    assert outcome(tmp_path / "run") == whole(*ADAM)


def test_a_complete_run_makes_again_what_it_has_lost(tmp_path, whole, broken, resume):
    broken(2, *EVERY_STEP, *ADAM)
    assert resume()[0] == 0
    for lost in ("model", "evaluation.json"):
        remove_whole(tmp_path / "run" / lost)
        assert resume()[0] == 0
        assert outcome(tmp_path / "run") == whole(*ADAM)


@FORKS
def test_runs_that_are_killed_end_alike(unlearn, few_digits, tmp_path, monkeypatch):
    """With SIGKILL, twice each, at random moments."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kill_resume

    train = (*words(f"--data {few_digits} --model resnet8 --max_steps 6"), *EVERY_STEP)
    for name, asked in (
        ("unlearn", [*unlearn[1:], *EVERY_STEP, *ADAM]),
        ("train", [*train, *DETERMINISTIC]),
    ):
        case = kill_resume.Case(name, name, asked)
        begin = time.monotonic()
        kill_resume.command([name, *asked, "--output_dir", str(tmp_path / f"{name} whole")])
        seconds = time.monotonic() - begin
        broken = tmp_path / f"{name} broken"
        killed = kill_resume.run_with_kills(case, broken, 2, seconds, random.Random(0))
        assert killed > 0
        assert kill_resume.ends_alike(tmp_path / f"{name} whole", broken) == []
