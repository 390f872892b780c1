"""Jobs called from Python: the same result as by the command line, and nothing printed."""

import json

import numpy as np
import pytest
import torch

import hamu
from hamu.cli import main
from hamu.cli.commands import given_flags
from hamu.evaluation.predictions import Predictions
from hamu.files import file_digest
from hamu.unlearning.jobs.settings import settings_of
from hamu.unlearning.jobs.training import useless_words


def test_a_call_and_a_command_leave_the_same_run(saved_model, tmp_path, capfd):
    options = {"data": "digits", "forget_class": "3", "max_steps": 3, "method": "hamu-q",
               "constraint_mode": "relative", "model": str(saved_model), "use_cpu": True}  # fmt: skip
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["unlearn", *flags, "--output_dir", str(tmp_path / "command")]) == 0
    capfd.readouterr()
    result = hamu.unlearn(**options, output_dir=str(tmp_path / "call"))
    assert capfd.readouterr().out == ""
    for name in ("model/model.safetensors", "evaluation.json"):
        assert file_digest(tmp_path / "command" / name) == file_digest(result.folder / name), name
    records = [
        json.loads((tmp_path / f"{one}/record.json").read_text()) for one in ("command", "call")
    ]
    assert records[0]["settings"] == records[1]["settings"]
    assert result.record_digest == file_digest(result.folder / "record.json")
    again = hamu.unlearn(resume=True, output_dir=str(result.folder))
    assert again.was_complete
    assert again.figures["after"]["forget"] == result.figures["after"]["forget"]
    assert again.figures["ended_kind"] == result.figures["ended_kind"]
    assert hamu.verify(result.folder, no_models=True).count(False) == 0
    assert hamu.report(result.folder, no_models=True).read_text().startswith("<!doctype html>")
    for name, content in (("record.json", "{}"), ("model/model.safetensors", "")):
        whole = (result.folder / name).read_bytes()
        (result.folder / name).write_text(content)
        with pytest.raises(hamu.HamuError, match=r"is damaged: .*, and --resume makes it anew"):
            hamu.unlearn(resume=True, output_dir=str(result.folder))
        (result.folder / name).write_bytes(whole)
    (result.folder / "model/model.safetensors").unlink()
    with pytest.raises(hamu.HamuError, match="is damaged: it has no weights; remove that folder"):
        hamu.unlearn(resume=True, output_dir=str(result.folder))


@pytest.mark.parametrize("rows", [[1, 2], range(1, 3), np.array([1, 2]), torch.tensor([1, 2])])
def test_rows_may_be_in_any_sequence(rows):
    """Bytes are none: as numbers they would name other rows."""
    assert settings_of("unlearn", {"forget_rows": b"1,2"}).value("forget_rows") == "b'1,2'"
    assert settings_of("unlearn", {"forget_rows": rows}).value("forget_rows") == "1,2"


def test_a_list_of_no_trackers_is_none():
    settings = settings_of("unlearn", {"report_to": [], "use_cpu": True})
    assert settings.value("report_to") == []


@pytest.mark.parametrize("options", [{"model": torch.nn.Linear(2, 2)}, {"data": [{"text": "a"}]}])
def test_an_object_in_place_of_a_file_is_refused(options):
    [(name, given)] = options.items()
    message = f"{name} is a {type(given).__name__}; name a file or folder .* hamu.UnlearnTrainer"
    with pytest.raises(hamu.HamuError, match=message):
        hamu.unlearn(**options)


def test_a_template_may_be_typed_as_the_help_shows_it():
    for typed in ("Q: {question}\\nA:", "Q: {question}\nA:"):
        found = given_flags("evaluate", ["--question_template", typed])
        assert found == {"question_template": "Q: {question}\nA:"}


def test_a_model_whose_losses_are_not_finite_is_called_damaged():
    broken = Predictions(torch.full((4, 3), torch.nan), torch.zeros(4, dtype=torch.int64))
    assert "the retain loss is nan: the model is damaged" in useless_words({"retain": broken}, None)
