"""A small trained classifier, its problem, and a quiet trainer, shared by the tests of whole runs."""

import importlib
import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from report_examples import NASTY
from run_files import write_rows
from small_models import save_fine_tuned
from transformers import set_seed
from transformers.trainer_callback import PrinterCallback

from hamu import UnlearnConfig, UnlearnTrainer
from hamu.cli import main
from hamu.data import forget_class, pixel_statistics, read_images, read_text
from hamu.models import load_classifier, new_classifier
from hamu.models.language import new_language_model, new_tokenizer
from hamu.unlearning.compare import children
from hamu.unlearning.trainer import TrainConfig, train_original

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def digits():
    train, test = read_images("digits"), read_images("digits", "test")
    statistics = pixel_statistics(train)
    return train.normalized(*statistics), test.normalized(*statistics)


@pytest.fixture(scope="session")
def problem(digits):
    return forget_class(*digits, 3, 0.25)


@pytest.fixture(scope="session")
def saved_model(digits, tmp_path_factory):
    """The folder of a ResNet-8 that was trained for two epochs."""
    folder = tmp_path_factory.mktemp("original")
    set_seed(0)
    train = digits[0]
    model = new_classifier("resnet8", train, list(train.mean), list(train.std))
    args = TrainConfig(output_dir=str(folder), num_train_epochs=2, learning_rate=3e-3, optim="adamw_torch",
                       lr_scheduler_type="linear", per_device_train_batch_size=64, disable_tqdm=True)  # fmt: skip
    train_original(model, train, args).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def saved_text_model(tmp_path_factory):
    """The folder of a tiny Llama that was trained on the first 48 records of miniature."""
    folder = tmp_path_factory.mktemp("text-original")
    save_fine_tuned(folder, read_text("miniature").records[:48])
    return folder


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory):
    """A folder with 300 of the digits, 28 of them a 3, and 120 to test with."""
    folder = tmp_path_factory.mktemp("digits")
    for name, most in (("train", 300), ("test", 120)):
        some = read_images("digits", name).select(range(most))
        pixels, labels = some.pixels[:, 0].numpy(), some.labels.numpy()
        np.savez(folder / f"{name}.npz", images=pixels, labels=labels)
    return folder


@pytest.fixture(scope="session")
def finished_images(tmp_path_factory, saved_model, few_digits):
    """A folder to copy, with data, a model, and a run that has unlearned a class of these data from it."""
    folder = tmp_path_factory.mktemp("images")
    shutil.copytree(few_digits, folder / "data")
    shutil.copytree(saved_model, folder / "original")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["unlearn", "--data", "data", "--model", "original", "--retain_model", "original",
                     "--max_steps", "3", "--constraint_mode", "relative", "--stopping", "off", "--forget_class", "3",
                     "--learning_rate", "0.1", "--output_dir", "run"]) == 0  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def finished_texts(tmp_path_factory):
    """The same with texts, one of which is code, and an adapter that was merged."""
    folder = tmp_path_factory.mktemp("texts")
    texts, unseen = read_text("miniature").records, read_text("miniature", "test").records[:8]
    rows = {"records": texts[:40], "holdout": unseen}
    rows = {name: [dict(row.fields) for row in some] for name, some in rows.items()}
    rows["records"][0] |= {"question": f"Who? {NASTY}", "answer": NASTY}
    for name, some in rows.items():
        write_rows(folder / f"{name}.jsonl", some)
    torch.manual_seed(0)
    tokenizer = new_tokenizer((row.prompt + row.answer for row in texts), 400)
    for part in (new_language_model(tokenizer, hidden=32, layers=1, max_length=256), tokenizer):
        part.save_pretrained(folder / "original")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["unlearn", "--data", "records.jsonl", "--test_data", "holdout.jsonl", "--model", "original",
                     "--forget_filter", f"author={texts[0].fields['author']}", "--lora", "--lora_rank", "2", "--merge",
                     "--max_steps", "3", "--constraint_mode", "relative", "--stopping", "off", "--learning_rate", "0.5",
                     "--output_dir", "run"]) == 0  # fmt: skip
    return folder


@pytest.fixture
def images(finished_images, tmp_path, monkeypatch):
    """A copy of the images, their model and run to tamper with, which is the current folder."""
    monkeypatch.chdir(shutil.copytree(finished_images, tmp_path / "copy"))
    return Path()


@pytest.fixture
def texts(finished_texts, tmp_path, monkeypatch):
    """The same with texts."""
    monkeypatch.chdir(shutil.copytree(finished_texts, tmp_path / "copy"))
    return Path()


@pytest.fixture
def model(saved_model):
    return load_classifier(str(saved_model))


@pytest.fixture
def trainer_of(problem, tmp_path):
    """Makes a quiet UnlearnTrainer for a model."""

    def make(model, *, retain=problem.retain, forget=problem.forget, test=None, callbacks=None,
             optimizers=(None, None), retain_predictions=None, **settings):  # fmt: skip
        defaults = {"eval_strategy": "no", "eval_on_start": "auto" in settings, "max_steps": 3,
                    "per_device_train_batch_size": 256, "constraint_mode": "relative", "stopping": "off", "disable_tqdm": True}  # fmt: skip
        settings = {"output_dir": str(tmp_path / "run")} | defaults | settings
        trainer = UnlearnTrainer(model, UnlearnConfig(**settings), retain_dataset=retain, forget_dataset=forget,
                                 test_dataset=test, callbacks=callbacks, optimizers=optimizers,
                                 retain_predictions=retain_predictions)  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        return trainer

    return make


@pytest.fixture
def trained(trainer_of):

    def run(*given, **settings):
        trainer = trainer_of(*given, **settings)
        trainer.train()
        return trainer

    return run


@pytest.fixture
def cli(capfd, tmp_path, monkeypatch):
    """Runs a command in an empty folder; returns its exit code, its output and what it said on standard error."""
    monkeypatch.chdir(tmp_path)

    def call(*argv):
        code = main([str(a) for a in argv])
        captured = capfd.readouterr()
        return code, " ".join(captured.out.split()), captured.err

    return call


@pytest.fixture
def forked_runs(monkeypatch):
    """The runs of a comparison without the seconds that each takes to load the libraries."""
    importlib.import_module("hamu.unlearning.jobs")
    if not torch.cuda.is_available():  # a device does not survive a fork
        monkeypatch.setattr(children, "_CONTEXT", multiprocessing.get_context("fork"))
