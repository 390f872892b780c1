"""A run that is broken off and resumed ends where the uninterrupted one does; nothing damaged is ever used."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from hamu import HamuError
from hamu.cli import main
from hamu.models import load_classifier
from hamu.unlearning.jobs.progress import ProgressBar

KILLS = Path(__file__).parents[2] / "benchmarks" / "kill_resume.py"


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


def settings(saved_model, *more):
    return ("unlearn", "--recipe", "digits", "--model", saved_model, "--num_train_epochs", 2,
            "--per_device_train_batch_size", 512, *more)  # fmt: skip


def outcome(folder):
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return (
        (folder / "model/model.safetensors").read_bytes(),
        json.loads((folder / "evaluation.json").read_text()),
        steps,
        (folder / "layers.jsonl").read_text(),
    )


DIVERGING = ("--learning_rate", "0.5", "--max_retain_loss", "0.35", "--eval_strategy", "steps", "--eval_steps", "1",
             "--save_strategy", "steps", "--save_steps", "1")  # fmt: skip
BEST_OF_SAVED = ("--load_best_model_at_end", "--eval_strategy", "steps", "--eval_steps", "1", "--save_strategy",
                 "steps", "--save_steps", "2", "--metric_for_best_model", "retain_loss", "--method", "ga")  # fmt: skip
UNDONE = (
    "--method",
    "hamu-u",
    "--trust_region",
    "--stopping",
    "off",
    "--learning_rate",
    "3",
    "--num_train_epochs",
    "3",
)
GOAL = ("--auto", "--target_forget_loss", "1.5", "--max_retain_increase", "0.2", "--max_steps", "6")
LASTING = (*GOAL, "--lasting", "--lookahead_steps", "2")


@pytest.mark.parametrize(
    ("step", "number", "more"),
    [
        (2, signal.SIGTERM, ()),
        (
            3,
            signal.SIGINT,
            ("--optim", "adamw_torch", "--learning_rate", "1e-3"),
        ),  # the last step of an epoch
        (
            4,
            signal.SIGTERM,
            (
                "--trust_region",
                "--correct_steps",
                "--optim",
                "adamw_torch",
                "--learning_rate",
                "1e-4",
            ),
        ),
        (2, signal.SIGTERM, GOAL),
        (3, signal.SIGTERM, LASTING),
        (6, signal.SIGTERM, ()),  # when all steps are done
        (4, signal.SIGTERM, ("--max_steps", "4")),  # likewise, within an epoch
        (
            6,
            signal.SIGTERM,
            ("--load_best_model_at_end", "--save_strategy", "epoch", "--save_total_limit", "1"),
        ),
        (2, signal.SIGTERM, DIVERGING),
        (6, signal.SIGTERM, UNDONE),
        (3, signal.SIGTERM, ("--load_best_model_at_end", "--save_strategy", "epoch")),
        (2, signal.SIGTERM, ("--method", "kl", "--gradient_accumulation_steps", "2")),
        (5, signal.SIGTERM, BEST_OF_SAVED),
    ],
)
def test_a_signal_saves_and_the_resumed_run_ends_alike(
    cli, tmp_path, saved_model, signal_at, step, number, more
):
    assert cli(*settings(saved_model, *more), "--output_dir", "whole")[0] == 0
    signal_at(step, number)
    code, _, err = cli(*settings(saved_model, *more), "--output_dir", "broken")
    assert code == 128 + number
    name = signal.Signals(number).name
    assert err.strip() == (
        f"hamu unlearn: interrupted by {name}; step {step} is saved in broken/checkpoint-{step}; go on with: "
        f"hamu unlearn --resume --output_dir broken"
    )
    assert not (tmp_path / "broken/evaluation.json").exists()
    code, out, err = cli("unlearn", "--resume", "--output_dir", "broken")
    assert (code, err, f": going on after step {step} of " in out) == (0, "", True)
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "broken")
    if more == UNDONE:
        assert outcome(tmp_path / "whole")[2][0]["taken"] == 0, (
            "the case is for runs whose first step is not taken"
        )
    if more == BEST_OF_SAVED:
        record = json.loads((tmp_path / "broken/record.json").read_text())
        best = int(
            record["steps"]["ended_because"].rpartition("the weights are the best ones, of step ")[
                2
            ]
        )
        assert record["steps"]["in_model"] == best < record["steps"]["taken"]
        assert f"by {best} gradient updates of the method ga," in record["statement"][0]
        assert (
            f"; the model after has the first {best} behind it."
            in (tmp_path / "broken/record.md").read_text()
        )
    assert cli("unlearn", "--resume", "--output_dir", "broken") == (
        0,
        "the run in broken is complete",
        "",
    )


TEXT = ("train", "--data", "miniature", "--model", "tiny-llama", "--max_length", "64", "--max_steps", "6",
        "--per_device_train_batch_size", "96", "--train_sampling_strategy", "group_by_length")  # fmt: skip


@pytest.mark.parametrize(
    ("train", "step"),
    [
        (
            (
                "train",
                "--recipe",
                "digits",
                "--num_train_epochs",
                2,
                "--per_device_train_batch_size",
                256,
            ),
            8,
        ),
        (TEXT, 4),  # in the second epoch, which has an order of its own
    ],
)
def test_training_of_the_original_resumes_too(cli, tmp_path, signal_at, train, step):
    assert cli(*train, "--output_dir", "whole")[0] == 0
    signal_at(step, signal.SIGTERM)
    code, _, err = cli(*train, "--output_dir", "broken")
    assert code == 143
    assert "go on with: hamu train --resume --output_dir broken" in err
    code, _, err = cli(
        "train", "--resume", "--output_dir", "broken", "--per_device_train_batch_size", 7
    )
    assert code == 2
    assert "records, now they would be of 7" in err
    assert cli("train", "--resume", "--output_dir", "broken")[0] == 0
    ends = [
        (tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "broken")
    ]
    assert ends[0] == ends[1]


def test_a_terminal_that_is_closed_ends_a_run_in_order_unless_it_is_to_live_on(cli, signal_at):
    train = ("train", "--data", "digits", "--model", "resnet8", "--max_steps", 4, "--output_dir")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may be to live on
    signal_at(2, signal.SIGHUP)
    code, _, err = cli(*train, "of mine")
    assert (code, err) == (129, (
        "hamu train: interrupted by SIGHUP; step 2 is saved in of mine/checkpoint-2; go on with: hamu train --resume "
        "--output_dir 'of mine'\n"
    ))  # fmt: skip
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        signal_at(3, signal.SIGHUP)
        assert cli("train", "--resume", "--output_dir", "of mine")[0] == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_best_model_is_that_of_a_step_that_was_saved_and_its_step_is_named(
    cli, tmp_path, saved_model
):
    more = ("--learning_rate", "0.3", "--stopping", "off", "--report_to", "none")
    code, _, _ = cli(*settings(saved_model, *BEST_OF_SAVED, *more), "--output_dir", "run")
    assert code == 0
    found = json.loads((tmp_path / "run/evaluation.json").read_text())
    losses = {entry["step"]: entry["eval_retain_loss"] for entry in found["trajectory"]}
    best = min((step for step in losses if step and step % 2 == 0), key=losses.__getitem__)
    assert found["after"]["retain"]["loss"] == pytest.approx(losses[best])
    assert best != max(losses), "the last step is not the best one"
    assert found["ended"].endswith(f"; the weights are the best ones, of step {best}")
    assert len(losses) == len(found["trajectory"]), "no point has the figures of other weights"


def test_a_run_by_goal_that_lost_its_checkpoints_ends_alike(cli, tmp_path, saved_model, signal_at):
    assert cli(*settings(saved_model, *GOAL), "--output_dir", "whole")[0] == 0
    signal_at(2, signal.SIGTERM)
    assert cli(*settings(saved_model, *GOAL), "--output_dir", "broken")[0] == 143
    shutil.rmtree(tmp_path / "broken/checkpoint-2")
    assert cli("unlearn", "--resume", "--output_dir", "broken")[0] == 0
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "broken")
    whole, broken = (
        json.loads((tmp_path / name / "record.json").read_text()) for name in ("whole", "broken")
    )
    assert (broken["goal"], broken["hardness"]) == (whole["goal"], whole["hardness"])


def test_a_signal_before_the_first_step_leaves_nothing(cli, tmp_path, saved_model, monkeypatch):
    begin = ProgressBar.on_train_begin

    def on_train_begin(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ProgressBar, "on_train_begin", on_train_begin)
    code, _, err = cli(*settings(saved_model), "--output_dir", "run")
    assert (code, err) == (143, "hamu unlearn: interrupted before a step was taken\n")
    assert list(tmp_path.iterdir()) == []


def test_a_signal_when_no_step_was_taken_yet_leaves_nothing(cli, tmp_path, saved_model, signal_at):
    job = settings(
        saved_model,
        "--constraint_mode",
        "absolute",
        "--constraint",
        "1e6",
        "--on_infeasible",
        "skip",
    )
    signal_at(3, signal.SIGTERM)
    code, _, err = cli(*job, "--output_dir", "run")
    assert (code, err) == (143, "hamu unlearn: interrupted before a step was taken\n")
    assert list(tmp_path.iterdir()) == []


def test_a_best_checkpoint_that_was_removed_is_no_best(cli, tmp_path, saved_model, signal_at):
    job = settings(
        saved_model, *BEST_OF_SAVED, "--max_steps", 9
    )  # gradient ascent: the first is the best
    signal_at(5, signal.SIGTERM)
    assert cli(*job, "--output_dir", "run")[0] == 143
    shutil.rmtree(tmp_path / "run/checkpoint-2")
    assert cli("unlearn", "--resume", "--output_dir", "run")[0] == 0
    found = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert found["ended"].endswith("; the weights are the best ones, of step 6")


def test_a_second_signal_ends_a_run_at_once(cli, saved_model, monkeypatch):
    def on_step_end(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ProgressBar, "on_step_end", on_step_end)
    code, _, err = cli(*settings(saved_model), "--output_dir", "run")
    said = "hamu unlearn: interrupted again; what was done since the last checkpoint is lost\n"
    assert (code, err) == (130, said)


def test_a_damaged_checkpoint_is_named_and_passed_over(
    cli, tmp_path, saved_model, signal_at, caplog
):
    more = ("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "3")
    assert cli(*settings(saved_model, *more), "--output_dir", "whole")[0] == 0
    signal_at(5, signal.SIGTERM)
    assert cli(*settings(saved_model, *more), "--output_dir", "broken")[0] == 143
    broken = tmp_path / "broken"
    assert sorted(p.name for p in broken.glob("checkpoint-*")) == [
        "checkpoint-3",
        "checkpoint-4",
        "checkpoint-5",
    ]
    weights = broken / "checkpoint-5/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (broken / "checkpoint-4/optimizer.pt").unlink()
    (broken / ".checkpoint-abc").mkdir()  # of a save that was broken off
    with open(broken / "steps.jsonl", "a") as log:
        log.write('{"step": 6, "ta')
    assert cli("unlearn", "--resume", "--output_dir", "broken")[0] == 0
    assert (
        "checkpoint-5 is damaged: model.safetensors is not as it was written; it is skipped"
        in caplog.text
    )
    assert "checkpoint-4 is damaged: optimizer.pt is missing; it is skipped" in caplog.text
    assert outcome(tmp_path / "whole") == outcome(broken)
    assert not (broken / ".checkpoint-abc").exists()


def test_what_cannot_be_resumed_is_said(cli, tmp_path, saved_model, signal_at):
    assert cli("unlearn", "--resume", "--output_dir", "none")[2] == (
        "hamu unlearn: there is no run to resume in none: it has no config.yaml; start it without --resume\n"
    )
    signal_at(2, signal.SIGTERM)
    assert cli(*settings(saved_model), "--output_dir", "run")[0] == 143
    for more, message in [
        (
            ("--learning_rate", "3"),
            "has learning_rate 0.1; leave out --learning_rate 3.0, or start a new run",
        ),
        (("--method", "kl"), "has method hamu-q; leave out --method kl, or start a new run"),
        (("--trust_region",), "was started without --trust_region; leave out --trust_region True"),
        (
            ("--recipe", "digits"),
            "is resumed by its own settings, run/config.yaml; leave out --recipe and --config",
        ),
        (
            ("--per_device_train_batch_size", "100"),
            "the run took steps of 512 records, now they would be of 100",
        ),
    ]:
        code, _, err = cli("unlearn", "--resume", "--output_dir", "run", *more)
        assert code == 2
        assert message in err
    assert cli("unlearn", "--resume", "--output_dir", "run", "--per_device_train_batch_size", 256,
               "--gradient_accumulation_steps", 2)[0] == 0  # fmt: skip


def test_a_run_does_not_go_on_with_another_model_or_other_data(
    cli, tmp_path, saved_model, signal_at
):
    load_classifier(str(saved_model)).save_pretrained("model")
    signal_at(2, signal.SIGTERM)
    assert cli(*settings("model"), "--output_dir", "run")[0] == 143
    log = (tmp_path / "run/steps.jsonl").read_bytes()
    changed = load_classifier("model")
    with torch.no_grad():
        changed.conv.weight *= 1.01
    changed.save_pretrained("model")
    assert cli("unlearn", "--resume", "--output_dir", "run") == (2, "", (
        "hamu unlearn: the run in run began with another original model than there is now; put back what it was, or "
        "start a new run in another --output_dir\n"
    ))  # fmt: skip
    assert (tmp_path / "run/steps.jsonl").read_bytes() == log
    load_classifier(str(saved_model)).save_pretrained("renamed")
    inputs = (tmp_path / "run/inputs.json").read_bytes()
    for content, wrong in (
        (inputs[:100], "Unterminated string"),
        (b"[]", "it holds something else"),
    ):
        (tmp_path / "run/inputs.json").write_bytes(content)
        said = cli("unlearn", "--resume", "--output_dir", "run")[2]
        assert said.startswith(
            f"hamu unlearn: run/inputs.json does not say what that run has read: {wrong}"
        )
    (tmp_path / "run/inputs.json").write_bytes(inputs)
    config = (tmp_path / "run/config.yaml").read_text()
    for was, now, key in (
        ("num_train_epochs: 2.0", "num_train_epochs: 6", "num_train_epochs"),
        ("data: digits", "data: digits\ndata_seed: 7", "data_seed"),
        ("forget_class: '3'\n", "", "forget_class"),
    ):
        assert was in config
        (tmp_path / "run/config.yaml").write_text(config.replace(was, now))
        assert cli("unlearn", "--resume", "--output_dir", "run") == (2, "", (
            f"hamu unlearn: run/config.yaml has another {key} than the run began with; put back what it was, or start "
            f"a new run in another --output_dir\n"
        ))  # fmt: skip
        assert (tmp_path / "run/steps.jsonl").read_bytes() == log
    assert "\nmodel: model\n" in config
    moved = config.replace("\nmodel: model\n", "\nmodel: renamed\n")
    (tmp_path / "run/config.yaml").write_text(
        moved + "save_strategy: epoch\n"
    )  # which changes no result
    assert cli("unlearn", "--resume", "--output_dir", "run")[0] == 0, (
        "the model that it began with has moved"
    )


def test_training_does_not_go_on_with_other_data(cli, tmp_path, signal_at):
    lines = [
        json.dumps({"question": f"What is {n}?", "answer": f"It is {n}."}) + "\n" for n in range(40)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(lines))
    signal_at(2, signal.SIGTERM)
    train = (
        "train",
        "--data",
        "data.jsonl",
        "--model",
        "tiny-llama",
        "--max_length",
        64,
        "--max_steps",
        4,
    )
    assert cli(*train, "--per_device_train_batch_size", 8, "--output_dir", "run")[0] == 143
    for changed, what in ((lines[:-1], "training set"), (lines[::-1], "order of the training set")):
        data.write_text("".join(changed))
        code, _, err = cli("train", "--resume", "--output_dir", "run")
        assert (code, f"began with another {what} than there is now" in err) == (2, True)
    data.write_text("".join(lines))
    assert cli("train", "--resume", "--output_dir", "run")[0] == 0


def test_a_folder_may_be_moved_and_a_run_be_broken_off_again(cli, tmp_path, saved_model, signal_at):
    more = (
        "--load_best_model_at_end",
        "--save_strategy",
        "epoch",
        "--save_total_limit",
        "1",
        "--learning_rate",
        "0.3",
    )
    assert cli(*settings(saved_model, *more), "--output_dir", "whole")[0] == 0
    signal_at(4, signal.SIGTERM)
    assert cli(*settings(saved_model, *more), "--output_dir", "broken")[0] == 143
    assert (tmp_path / "broken/checkpoint-4").is_dir()
    (
        tmp_path / "broken/checkpoint-9"
    ).mkdir()  # damaged, and newer: --save_total_limit 1 must not prefer it
    (tmp_path / "broken").rename(tmp_path / "moved")
    signal_at(5, signal.SIGINT)
    assert cli("unlearn", "--resume", "--output_dir", "moved")[0] == 130
    assert (tmp_path / "moved/checkpoint-5").is_dir()
    assert not (tmp_path / "moved/checkpoint-9").exists()
    assert cli("unlearn", "--resume", "--output_dir", "moved")[0] == 0
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "moved")


def test_a_folder_may_have_the_name_of_a_model_that_is_built_in(
    cli, tmp_path, saved_model, signal_at
):
    train = ("train", "--data", "digits", "--model", "resnet8", "--max_steps", 4)
    signal_at(2, signal.SIGTERM)
    assert cli(*train, "--output_dir", "resnet8")[0] == 143
    assert cli("train", "--resume", "--output_dir", "resnet8")[0] == 0
    for left in (tmp_path / "resnet8/model").iterdir():
        shutil.copy(left, tmp_path / "resnet8")  # a saved model of this name too
    assert cli(*train, "--output_dir", "other")[0] == 0
    for name in ("resnet8", "other"):
        assert json.loads((tmp_path / name / "inputs.json").read_text())["original model"] is None
    assert (tmp_path / "other/model/model.safetensors").read_bytes() == (
        tmp_path / "resnet8/model/model.safetensors"
    ).read_bytes()
    lines = [
        json.dumps({"question": f"What is {n}?", "answer": f"It is {n}."}) + "\n" for n in range(9)
    ]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    (tmp_path / "tiny-llama").mkdir()
    assert cli("train", "--data", "data.jsonl", "--model", "tiny-llama", "--max_length", 64, "--max_steps", 1,
               "--output_dir", "tiny-llama")[0] == 0  # fmt: skip
    assert json.loads((tmp_path / "tiny-llama/inputs.json").read_text())["original model"] is None


def test_commands_run_outside_of_the_main_thread(capsys):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(main(["methods"])))
    thread.start()
    thread.join()
    assert codes == [0]


def test_a_damaged_checkpoint_that_is_asked_for_is_refused(trainer_of, saved_model, tmp_path):
    trainer_of(
        load_classifier(str(saved_model)), max_steps=2, save_strategy="steps", save_steps=2
    ).train()
    (tmp_path / "run/checkpoint-2/scheduler.pt").write_bytes(b"")
    again = trainer_of(load_classifier(str(saved_model)))
    with pytest.raises(
        HamuError,
        match=r"checkpoint-2 is damaged: scheduler\.pt is not as it was written; resume fro",
    ):
        again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    with pytest.raises(HamuError, match="there is no whole checkpoint in"):
        again.train(resume_from_checkpoint=True)


def test_an_optimizer_state_that_cannot_be_read_is_named_for_a_sharded_model_too(
    trainer_of, saved_model, tmp_path, monkeypatch
):
    """The file can be what was written, and yet not be what a run would have written."""
    trainer = trainer_of(load_classifier(str(saved_model)))
    (tmp_path / "optimizer.pt").write_bytes(b"no archive")
    monkeypatch.setattr("hamu.unlearning.trainer.resumable.is_sharded", lambda model: True)
    with pytest.raises(
        HamuError, match=r"the checkpoint .* cannot be restored: .*; resume from an older one"
    ):
        trainer._load_optimizer_and_scheduler(str(tmp_path))


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

    whole, broken, resumed = Own(), Own(), Own()
    trainer_of(whole, max_steps=4, save_strategy="no").train()
    trainer_of(broken, max_steps=2, save_strategy="steps", save_steps=2).train()
    trainer_of(resumed, max_steps=4, save_strategy="no").train(resume_from_checkpoint=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_full_disk_ends_the_run_with_the_last_checkpoint_whole(
    cli, tmp_path, saved_model, signal_at
):
    more = (
        "--save_strategy",
        "steps",
        "--save_steps",
        "1",
        "--optim",
        "adamw_torch",
        "--learning_rate",
        "1e-3",
    )
    assert cli(*settings(saved_model, *more), "--output_dir", "whole")[0] == 0
    signal_at(2, signal.SIGTERM)
    assert cli(*settings(saved_model, *more), "--output_dir", "run")[0] == 143
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    earlier = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100_000, hard)
    )  # a quota: model files are larger, logs are not
    try:
        code, _, err = cli("unlearn", "--resume", "--output_dir", "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, earlier)
    assert code == 2
    assert err.count("\n") == 1
    assert "hamu unlearn: the checkpoint of step 3 cannot be written into run: " in err
    assert "File too large" in err
    assert "make room, and go on from the one before with --resume" in err
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        ".hamu", "checkpoint-1", "checkpoint-2", "config.yaml", "inputs.json", "layers.jsonl", "steps.jsonl"
    ]  # fmt: skip
    assert cli("unlearn", "--resume", "--output_dir", "run")[0] == 0
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "run")


def test_runs_that_are_killed_end_alike():
    done = subprocess.run([sys.executable, str(KILLS), "--kills", "10", "--each", "5"], capture_output=True, text=True,
                          timeout=900, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert (figures["kills"], figures["ended_elsewhere"]) == (10, 0)
