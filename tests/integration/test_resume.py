"""An interrupted and resumed run ends as an uninterrupted one; nothing damaged is ever used."""

import json
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from interrupting import FORKS

from hamu import HamuError
from hamu.cli import main
from hamu.models import load_classifier
from hamu.unlearning.trainer.logs import ProgressBar

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
    "--per_device_train_batch_size 64 --max_steps 24 --stopping aggregate "
    "--constraint_mode relative --constraint 0.1"
)
LASTING = (*GOAL, "--lasting", "--lookahead_steps", "2")


@pytest.fixture
def signal_at(monkeypatch):
    """Sends this process a signal at the end of one step, once."""

    def arm(step, number):
        original = ProgressBar.on_step_end
        sent = []

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step and not sent:
                sent.append(step)
                os.kill(os.getpid(), number)
            original(self, args, state, control, **kwargs)

        monkeypatch.setattr(ProgressBar, "on_step_end", on_step_end)

    return arm


@pytest.fixture
def broken(cli, saved_model, signal_at):
    """Break a run off at the end of a step, by SIGTERM."""

    def at(step, *more, model=saved_model, folder="run"):
        signal_at(step, signal.SIGTERM)
        assert cli(*settings(model, *more), "--output_dir", folder)[0] == 143

    return at


def settings(saved_model, *more):
    """Six steps in two epochs."""
    return (
        *("unlearn", "--recipe", "digits", "--model", saved_model, "--num_train_epochs", 2),
        *("--per_device_train_batch_size", 512, "--max_eval_samples", 64, "--check_steps", 1),
        *DETERMINISTIC,
        *more,
    )


def resume(cli, folder="run", *more, command="unlearn"):
    return cli(command, "--resume", "--output_dir", folder, *more)


def outcome(folder):
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return (
        (folder / "model/model.safetensors").read_bytes(),
        json.loads((folder / "evaluation.json").read_text()),
        steps,
        (folder / "layers.jsonl").read_text(),
    )


@pytest.fixture(scope="module")
def whole(saved_model, tmp_path_factory):
    """Outcome of the uninterrupted run with these further settings; checkpoints change none."""
    known = {}

    def of(*more):
        if more not in known:
            folder = tmp_path_factory.mktemp("whole")
            words = [*settings(saved_model, *more), "--output_dir", folder / "run"]
            assert main([str(word) for word in words]) == 0
            known[more] = outcome(folder / "run")
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
        (3, signal.SIGTERM, ("--method", "pdu")),
        (3, signal.SIGTERM, ("--method", "gru-ema")),
    ],
)
def test_a_signal_saves_and_the_resumed_run_ends_alike(
    cli, tmp_path, saved_model, whole, signal_at, step, number, more
):
    expected = whole(*more)
    signal_at(step, number)
    code, _, err = cli(*settings(saved_model, *more), "--output_dir", "run")
    assert code == 128 + number
    assert err.strip() == (
        f"hamu unlearn: interrupted by {signal.Signals(number).name}; step {step} is saved in "
        f"run/checkpoint-{step}; go on with: hamu unlearn --resume --output_dir run"
    )
    assert not (tmp_path / "run/evaluation.json").exists()
    code, out, err = resume(cli)
    assert (code, err, f": going on after step {step} of " in out) == (0, "", True)
    assert outcome(tmp_path / "run") == expected
    if more == UNDONE:
        assert expected[2][0]["taken"] == 0, "the case is for a first step that is not taken"
    if more == BEST_OF_SAVED:
        record = json.loads((tmp_path / "run/record.json").read_text())
        best = int(record["steps"]["ended_because"].rpartition("best ones, of step ")[2])
        assert record["steps"]["in_model"] == best < record["steps"]["taken"]
        assert f"by {best} gradient updates of the method ga," in record["statement"][0]
        points = expected[1]["trajectory"]
        losses = {one["step"]: one["eval_retain_loss"] for one in points}
        saved = [step for step in losses if step and step % 2 == 0]
        assert best == min(saved, key=losses.__getitem__)
        assert expected[1]["after"]["retain"]["loss"] == pytest.approx(losses[best])
        assert len(losses) == len(points), "no point has the figures of other weights"
    assert resume(cli) == (0, "the run in run is complete", "")


def test_training_resumes_with_its_batch(cli, tmp_path, signal_at):
    """A closed terminal ends it in order, unless it is to live on, as nohup wants it."""
    train = words("train --data digits --model resnet8 --num_train_epochs 2")
    train += (*DETERMINISTIC, "--per_device_train_batch_size", 512, "--output_dir")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may be to live on
    signal_at(4, signal.SIGHUP)
    code, _, err = cli(*train, "run")
    assert (code, "hamu train: interrupted by SIGHUP; step 4 is saved in" in err) == (129, True)
    assert "go on with: hamu train --resume --output_dir run" in err
    code, _, err = resume(cli, "run", "--per_device_train_batch_size", 7, command="train")
    assert (code, "records, now they would be of 7" in err) == (2, True)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signal_at(5, signal.SIGHUP)
        assert resume(cli, command="train")[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert cli(*train, "whole")[0] == 0
    models = [tmp_path / name / "model/model.safetensors" for name in ("run", "whole")]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_training_of_texts_resumes_with_the_data_that_it_began_with(cli, tmp_path, signal_at):
    """In the second epoch, which has an order of its own by the records' lengths."""
    lines = [
        json.dumps({"question": f"What is {n}?", "answer": f"It is {n}." * (1 + n % 3)}) + "\n"
        for n in range(20)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(lines))
    train = (
        *("train", "--data", "data.jsonl", "--model", "tiny-llama", "--max_length", 64),
        *("--max_steps", 5, "--per_device_train_batch_size", 8),
        *("--train_sampling_strategy", "group_by_length", "--output_dir"),
    )
    assert cli(*train, "whole")[0] == 0
    signal_at(4, signal.SIGTERM)
    assert cli(*train, "run")[0] == 143
    spaced = [line.replace('"It is', '"  It is') for line in lines]
    for changed, what in (
        (lines[:-1], "training set"),
        (lines[::-1], "order of the training set"),
        (spaced, "tokenization of the training set"),
    ):
        data.write_text("".join(changed))
        code, _, err = resume(cli, command="train")
        assert (code, f"began with another {what} than there is now" in err) == (2, True)
    data.write_text("".join(lines))
    assert resume(cli, command="train")[0] == 0
    models = [tmp_path / name / "model/model.safetensors" for name in ("whole", "run")]
    assert models[0].read_bytes() == models[1].read_bytes()


@pytest.mark.parametrize("moment", ["on_train_begin", "on_step_end"])
def test_a_signal_before_a_step_was_taken_leaves_nothing(
    cli, tmp_path, saved_model, monkeypatch, moment
):
    at = getattr(ProgressBar, moment)

    def interrupted(self, *args, **kwargs):
        at(self, *args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ProgressBar, moment, interrupted)
    impossible = ("--constraint_mode", "absolute", "--constraint", "1e6", "--on_infeasible", "skip")
    code, _, err = cli(*settings(saved_model, *impossible), "--output_dir", "run")
    assert (code, err) == (143, "hamu unlearn: interrupted before a step was taken\n")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_lost_its_best_or_only_checkpoint_goes_on(cli, tmp_path, whole, broken):
    broken(5, *BEST_OF_SAVED, "--max_steps", 9)
    shutil.rmtree(tmp_path / "run/checkpoint-2")
    assert resume(cli)[0] == 0
    found = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert found["ended"].endswith("; the weights are the best ones, of step 6"), "which is there"
    broken(2, *GOAL, folder="goal")
    shutil.rmtree(tmp_path / "goal/checkpoint-2")
    assert resume(cli, "goal")[0] == 0
    assert outcome(tmp_path / "goal") == whole(*GOAL)


def test_a_second_signal_ends_a_run_at_once(cli, saved_model, monkeypatch):
    def on_step_end(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ProgressBar, "on_step_end", on_step_end)
    code, _, err = cli(*settings(saved_model), "--output_dir", "run")
    assert code == 130
    assert "interrupted again; what was done since the last checkpoint is lost" in err


def test_a_damaged_checkpoint_is_named_and_passed_over(cli, tmp_path, whole, broken, caplog):
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
    assert resume(cli)[0] == 0
    assert "checkpoint-5 is damaged: model.safetensors is not as it was written; " in caplog.text
    assert "checkpoint-4 is damaged: optimizer.pt is missing; it is skipped" in caplog.text
    assert outcome(run) == whole()
    assert not (run / ".checkpoint-abc").exists()


@pytest.mark.parametrize(
    ("log", "lines"), [("steps.jsonl", "4 of its 5"), ("layers.jsonl", "5 of its 6")]
)
def test_a_run_does_not_go_on_without_the_lines_of_its_steps(cli, tmp_path, broken, log, lines):
    broken(5, *EVERY_STEP)
    path = tmp_path / "run" / log
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    code, _, err = resume(cli)
    assert (code, f"run/{log} has {lines} lines up to step 5; put it back" in err) == (2, True)


def test_settings_of_a_run_stay_but_for_those_that_change_no_result(cli, broken):
    none = "hamu unlearn: there is no run to resume in none: it has no config.yaml"
    assert resume(cli, "none")[2].startswith(none)
    broken(2)
    for more, message in [
        (("--learning_rate", "3"), "with learning_rate 0.1; leave out --learning_rate 3.0, or"),
        (("--trust_region",), "with trust_region None; leave out --trust_region True"),
        (("--recipe", "digits"), "with recipe None; leave out --recipe digits"),
        (("--per_device_train_batch_size", "100"), "of 512 records, now they would be of 100"),
    ]:
        code, _, err = resume(cli, "run", *more)
        assert (code, message in err) == (2, True), err
    halves = ("--per_device_train_batch_size", 256, "--gradient_accumulation_steps", 2)
    assert resume(cli, "run", *halves)[0] == 0


def test_a_run_does_not_go_on_with_another_model_or_other_data(cli, tmp_path, saved_model, broken):
    load_classifier(str(saved_model)).save_pretrained("model")
    broken(2, model="model")
    run = tmp_path / "run"
    log, inputs = (run / "steps.jsonl").read_bytes(), (run / "inputs.json").read_bytes()
    config = (run / "config.yaml").read_text()
    changed = load_classifier("model")
    with torch.no_grad():
        changed.conv.weight *= 1.01
    changed.save_pretrained("model")
    said = resume(cli)[2]
    assert "the run in run began with another original model than there is now; put back" in said
    load_classifier(str(saved_model)).save_pretrained("model")
    place = tmp_path / "model/config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"image_mean": [0.7]}))
    assert "began with another configuration of the original model than" in resume(cli)[2]
    load_classifier(str(saved_model)).save_pretrained("renamed")
    (run / "inputs.json").write_bytes(inputs[:100])
    assert "run/inputs.json does not say what that run has read: " in resume(cli)[2]
    (run / "inputs.json").write_bytes(inputs)
    for was, now, key in (
        ("num_train_epochs: 2.0", "num_train_epochs: 6", "num_train_epochs"),
        ("forget_class: '3'\n", "", "forget_class"),
    ):
        assert was in config
        (run / "config.yaml").write_text(config.replace(was, now))
        said = resume(cli)[2]
        assert f"run/config.yaml has another {key} than the run began with; put back what" in said
        assert (run / "steps.jsonl").read_bytes() == log
    moved = config.replace("\nmodel: model\n", "\nmodel: renamed\n")
    assert moved != config
    (run / "config.yaml").write_text(moved + "save_strategy: epoch\n")  # which changes no result
    assert resume(cli)[0] == 0, "the model that it began with has moved"


def test_a_folder_may_be_moved_and_a_run_be_interrupted_again(
    cli, tmp_path, whole, broken, signal_at
):
    broken(4, *BEST_OF_EPOCHS)
    assert (tmp_path / "run/checkpoint-4").is_dir()
    # damaged, and newer: --save_total_limit 1 must not prefer it
    (tmp_path / "run/checkpoint-9").mkdir()
    (tmp_path / "run").rename(tmp_path / "moved")
    signal_at(5, signal.SIGINT)
    assert resume(cli, "moved")[0] == 130
    assert (tmp_path / "moved/checkpoint-5").is_dir()
    assert not (tmp_path / "moved/checkpoint-9").exists()
    assert resume(cli, "moved")[0] == 0
    assert outcome(tmp_path / "moved") == whole(*BEST_OF_EPOCHS)


def test_a_damaged_checkpoint_that_is_asked_for_is_refused(trainer_of, saved_model, tmp_path):
    checkpoint = tmp_path / "run/checkpoint-1"
    saves = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer_of(load_classifier(str(saved_model)), **saves).train()
    (checkpoint / "scheduler.pt").write_bytes(b"")
    again = trainer_of(load_classifier(str(saved_model)))
    with pytest.raises(HamuError, match=r"checkpoint-1 is damaged: scheduler\.pt is not as it was"):
        again.train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(HamuError, match="there is no whole checkpoint in"):
        again.train(resume_from_checkpoint=True)


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


def test_a_full_disk_ends_the_run_with_the_last_checkpoint_whole(cli, tmp_path, whole, broken):
    broken(2, *EVERY_STEP, *ADAM)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    earlier = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # a quota: model files are larger, logs are not
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        code, _, err = resume(cli)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, earlier)
    assert (code, err.count("\n")) == (2, 1)
    assert "hamu unlearn: the checkpoint of step 3 cannot be written into run: " in err
    assert "make room, and go on from the one before with --resume" in err
    left = sorted(p.name for p in (tmp_path / "run").glob("*checkpoint*"))
    assert left == ["checkpoint-1", "checkpoint-2"]
    assert resume(cli)[0] == 0
    assert outcome(tmp_path / "run") == whole(*ADAM)


@FORKS
def test_runs_that_are_killed_end_alike(saved_model, tmp_path, monkeypatch):
    """With SIGKILL, four times each, at random moments."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kill_resume

    unlearn = [str(word) for word in settings(saved_model, *EVERY_STEP, *ADAM)[1:]]
    train = [*words("--data digits --model resnet8 --max_steps 6"), *EVERY_STEP, *DETERMINISTIC]
    for name, asked in (("unlearn", unlearn), ("train", train)):
        case = kill_resume.Case(name, name, asked)
        begin = time.monotonic()
        kill_resume.command([name, *asked, "--output_dir", str(tmp_path / f"{name} whole")])
        seconds = time.monotonic() - begin
        broken = tmp_path / f"{name} broken"
        killed = kill_resume.run_with_kills(case, broken, 4, seconds, random.Random(0))
        assert killed > 0
        assert kill_resume.ends_alike(tmp_path / f"{name} whole", broken) == []
