"""Command lines, data and settings that are refused: one line, exit code 2, nothing written."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from run_files import write_rows
from small_models import save_small_world, small_vision_transformer

import hamu.cli
from hamu.cli import main
from hamu.unlearning.jobs.tasks import Task, TextTask

IMAGES = "--data a.npz --forget_rows 0,4"
TEXTS = "--data t.jsonl --forget_rows 0,3 --max_length 48"
KINDS = {"IMAGE": f"{IMAGES} --model image", "TEXT": f"{TEXTS} --model text"}
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
RESUMABLE = {"train": "training set", "unlearn": "forget set"}


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """Small data and models, and some that cannot be used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("origin"))
        rows = [{"question": f"What is {i}?", "answer": f"just {i}"} for i in range(8)]
        save_small_world(rows)
        for name in ("elsewhere/model", "run/model"):
            shutil.copytree("image", name)
        small_vision_transformer(num_channels=1, num_labels=12).save_pretrained("twelve")
        colours = np.zeros((20, 8, 8, 3), np.uint8)
        noise = np.random.default_rng(1).integers(0, 256, (6, 8, 8), dtype=np.uint8)
        np.savez("other.npz", images=noise, labels=np.arange(6) % 3)
        np.savez("colours.npz", images=colours, labels=np.arange(20) % 3)
        Path("cats/cat").mkdir(parents=True)
        Image.new("L", (8, 8)).save("cats/cat/0.png")
        long = {"question": "a? " * 999, "answer": "b", "perturbed_answer": "c"}
        write_rows("long.jsonl", [long])
        write_rows("gone.jsonl", [rows[0], {"question": "number  1?", "answer": "secret"}])
        Path("mine").mkdir()
        Path("mine/thesis.txt").write_text("mine")
        for command, began in RESUMABLE.items():
            Path(f"of-{command}").mkdir()
            Path(f"of-{command}/config.yaml").write_text("seed: 1")
            Path(f"of-{command}/inputs.json").write_text(json.dumps({began: None}))
        yield Path.cwd()


@pytest.fixture
def refused(origin, monkeypatch, capfd):
    """Runs a command line that must end in one line and change nothing; returns the line."""
    monkeypatch.chdir(origin)

    def call(line, code=2):
        words = [word for part in line.split(" ") for word in KINDS.get(part, part).split(" ")]
        before = sorted(Path().rglob("*"))
        assert main(words) == code
        assert sorted(Path().rglob("*")) == before
        err = capfd.readouterr().err
        assert err.startswith(f"hamu {words[0]}: ")
        assert err.count("\n") == 1
        return err

    return call


def table(text):
    """Pairs of a command line and the message that refuses it."""
    return [line.split(" => ") for line in text.strip().splitlines()]


@pytest.mark.parametrize(("line", "message"), table("""
demo --task sound => task 'sound' is unknown; choose image or text
demo --seed -1 => seed -1 must be 0 to 4294967295
methods --all => methods takes no options; got --all
unlern => command 'unlern' is unknown; did you mean unlearn?
verify elsewhere => elsewhere has no record.json; name the --output_dir of a `hamu unlearn`
verify run --no_model => unrecognized arguments: --no_model; did you mean --no_models?
unlearn IMAGE --magic => unrecognized arguments: --magic; hamu unlearn --help lists the options
attack IMAGE --attacks relearn-few quantize => unrecognized arguments: quantize; join several values of one option by commas
unlearn IMAGE --methd hamu-q => --methd hamu-q; did you mean --method? hamu unlearn --help lists the
unlearn IMAGE --method hamuq => method 'hamuq' is unknown; did you mean hamu-q?
unlearn IMAGE --recipe digit => recipe 'digit' is unknown; did you mean digits?
unlearn IMAGE --config magic.yaml => the config file magic.yaml does not exist
unlearn IMAGE --seed x => argument --seed: invalid int value: 'x'; hamu unlearn --help lists the options
unlearn IMAGE --output_dir= => output_dir is empty; is a shell variable unset?
unlearn IMAGE --resume --output_dir => argument --output_dir/--output-dir: expected one argument;
unlearn IMAGE --optim sdg => the settings do not fit together: sdg is not a valid OptimizerNames, please
unlearn IMAGE --lora_dropout 1.5 => lora_dropout 1.5 must be at least 0 and below 1
evaluate IMAGE --generate -1 => generate -1 must be at least 0
evaluate IMAGE --model a\0b => model 'a\\x00b' has a character that no text may have
assess IMAGE --dry_run => assess has no --dry_run, which is for hamu train and hamu unlearn; leave it out
compare IMAGE --resume => compare has no --resume, as the same command again goes on where it was; leave
unlearn IMAGE --without_forget => has no --without_forget, which is for hamu train; leave it out
unlearn IMAGE --save_only_model => has save_only_model, which has no place here: give --resume and the --output_dir of a run
train --data a.npz => name the model with --model: resnet20, tiny-llama, or a saved one
evaluate --data a.npz => name the model with --model: one of hamu train, or hub:OWNER
unlearn --forget_class 3 --model image => name the training data with --data
train --data nowhere.csv --image_size 8 --model resnet8 => nowhere.csv is neither a file nor a folder
unlearn --data nowhere --model image --forget_class 3 => nowhere is neither a file nor a folder
unlearn IMAGE --model nowhere => nowhere is not a saved model: it has no config.json
unlearn IMAGE --retain_model twelve => 3 classes, the retain model twelve 12
unlearn --data colours.npz --forget_class 1 --model image => 1 channels, those of colours.npz have 3
train --data cats --model resnet8 => cats has one class alone, cat; a classifier needs at least two
unlearn --data a.npz --model image => say what to forget of images with one of --forget_class
unlearn IMAGE --forget_class 1 => got --forget_class and --forget_rows
unlearn IMAGE --forget_filter name=Ada => one of --forget_class, --forget_rows, --forget_data; got --forget_rows
unlearn TEXT --image_size 8 => image_size 8 is not for records; leave it out
unlearn IMAGE --lora => lora True is not for images; leave it out
unlearn IMAGE --load_in_4bit => load_in_4bit True is not for images; leave it out
unlearn IMAGE --rho 0.5 => rho is for --forget_class; leave it out with --forget_rows
unlearn --recipe tofu-llama2-lora --model x --data_dir d => --data_dir d has no effect on hub:locuslab/TOFU:full@train and
unlearn IMAGE --output_dir mine --overwrite => holds thesis.txt, which is not of a run
unlearn IMAGE --output_dir image/inside => the source image overlap
attack TEXT --unrelated_data mine --output_dir mine/out => the source mine overlap
unlearn IMAGE --forget_objective idk --max_steps 1 => idk needs another answer to each forget record, which images have
evaluate IMAGE --goal mean => goal 'mean' is unknown; choose one of unseen, retrained, erased, loss
evaluate IMAGE --test_data a.npz => all 12 test records are among those to retain or to forget; give
evaluate IMAGE --goal retrained => give --retain_model, or another --goal
unlearn IMAGE --goal retrained --data nowhere.npz => give --retain_model, or another --goal
evaluate TEXT --goal erased --data nowhere.jsonl => the goal erased is for classifiers; of texts choose
train --data a.npz --model image --eval_strategy epoch => an evaluation needs test data; give --test_data, or leave out --eval_
train --data a.npz --model image --gradient_checkpointing => SmallResNet cannot recompute activations; leave out --gradient_c
train --data a.npz --model image --test_data a.npz --eval_strategy epoch --metric_for_best_model taste => 'taste' is not measur
unlearn IMAGE --method ga --lr_scheduler_type cosine_with_min_lr => the schedule cosine_with_min_lr cannot
unlearn IMAGE --method ga --optim adamw_torch_npu_fused => the optimizer adamw_torch_npu_fused cannot be
unlearn IMAGE --method ga --optim sgd --optim_args momentm=0.9 => momentm=0.9: SGD takes no momentm from there
unlearn IMAGE --method ga --optim sgd --optim_args weight_decay=0.5 => SGD takes no weight_decay from there
train --data a.npz --model resnet8 --optim_args betas=0.8 => betas=0.8: AdamW takes no betas from there; correct
train --resume --output_dir of-unlearn => of-unlearn holds a run of hamu unlearn; resume it by that
unlearn --resume --output_dir of-train => of-train holds a run of hamu train; resume it by that
unlearn --data miniature --dry_run => a dry run needs --model, a folder or hub:OWNER/NAME
train --data nowhere --model resnet8 --expected_retain 9 --expected_forget 1 --dry_run => nowhere is neither a file nor
train --model tiny-llama --expected_retain 9 --expected_forget 1 --dry_run => name the training data with --data
train --data t.jsonl --model tiny-llama --lora => is new and trained whole, in float32; leave lora out
train --data t.jsonl --model tiny-llama --load_in_4bit => in float32; leave load_in_4bit out
unlearn IMAGE --forget_seed 99999999999999999999 => forget_seed 99999999999999999999 must be at least 0
unlearn --data t.jsonl --model text --forget_filter answer=Nobody => the forget set is empty
unlearn --data t.jsonl --model text --forget_data gone.jsonl => 1 of 2 records of gone.jsonl are not in
unlearn TEXT --model_dtype bfloat16 => would be trained in half precision
unlearn TEXT --load_in_4bit => weights in 4 bits cannot be trained
unlearn TEXT --lora --load_in_4bit --model_dtype float32 => exclude each other
unlearn TEXT --lora --lora_rank 0 => lora_rank 0 must be at least 1
unlearn TEXT --lora --lora_targets nothing => name layers with --lora_targets; there are q_proj,
unlearn TEXT --merge => there is no adapter to merge
unlearn TEXT --tokenizer nowhere => the tokenizer nowhere is no folder; name one, or hub:OWNER/NAME
unlearn TEXT --method ga --dry_run --model_dtype bfloat16 => would be trained in half precision
unlearn TEXT --method ga --dry_run --merge => there is no adapter to merge
unlearn TEXT --dry_run --goal retrained => give --retain_model, or another --goal
unlearn TEXT --method ga --dry_run --model nowhere => nowhere is not a saved model: it has no config.json
evaluate IMAGE --loss_on all => loss_on all is not for images; leave it out
train --data a.npz --model resnet8 --forget_rows 0,4 => forget_rows 0,4 has no effect on training with all data; give --without_forget
evaluate IMAGE --metrics verbmem => of images it may be rmia, ulira
evaluate IMAGE --lm_eval arc_easy => lm_eval arc_easy is not for images; leave it out
evaluate IMAGE --format open-unlearning => format open-unlearning is not for images; leave it out
evaluate IMAGE --metrics rmia --shadow_models 5 => must be an even number of at least 4
evaluate IMAGE --metrics rmia => rmia and ulira need data never trained on; give --test_data
evaluate IMAGE --metrics rmia --test_data other.npz --model elsewhere/model => elsewhere/config.yaml is not there
evaluate IMAGE --metrics rmia --test_data other.npz --model of-unlearn/model => of-unlearn/model is not a saved
evaluate TEXT --metrics rmia => of records it may be mia_gradnorm, verbmem; all others need no name
evaluate TEXT --metrics verbmem --generate 0 => give a --generate above 0
evaluate TEXT --metrics mia_gradnorm => give --test_data
attack IMAGE --unrelated_data x.jsonl => unrelated_data x.jsonl has no effect
unlearn TEXT --model adapter --lora_rank 64 => lora_rank 64 is for a new adapter, but adapter is one with
assess TEXT --model adapter --lora --lora_targets q_proj => but adapter is one with lora_targets
compare TEXT --model adapter --lora False => adapter is an adapter, which is trained; leave out --lora
train --data t.jsonl --model text --lora_alpha 2 => lora_alpha 2.0 is for a new adapter; give --lora too
evaluate TEXT --retain_model adapter --original_model typo => typo is not a saved model
evaluate TEXT --world_facts typo.jsonl => typo.jsonl is neither a file nor a folder
evaluate TEXT --real_authors t.jsonl => row 0 of t.jsonl has no perturbed_answer
evaluate TEXT --world_facts long.jsonl => row 0 of long.jsonl has no answer token among its
compare IMAGE --methods ft magic => method 'magic' is unknown; choose one of hamu-q
compare IMAGE --method ft => compare has no --method, as it takes several, by --methods; leave it
compare IMAGE --seed 1 --seeds 2 => --seeds takes the place of --seed; leave out one of them
compare IMAGE --constraint_mode relative --constraints 0.5 1.5 => -c1.5-lr0.0001-s42: a relative constraint is a share
compare IMAGE --seeds -1 => seed -1 must be 0 to 4294967295
compare IMAGE --jobs 0 => jobs 0 must be at least 1
compare IMAGE --at forget => at 'forget' must be forget=LOSS or retain=LOSS, in nats
compare IMAGE --trials 3 => trials 3 are judged at a loss; give --at forget=LOSS
compare IMAGE --at forget=1 --trials 0 => trials 0 must be at least 1
compare IMAGE --at forget=1 --trials 3 --constraints 0.5 => constraints are drawn by --trials
compare IMAGE --attacks relearn-retain => give --at, and leave --lr_scheduler_type at constant
compare IMAGE --at forget=1 --attacks relearn-retain --lr_scheduler_type linear => leave --lr_schedul
compare IMAGE --at forget=1 --attacks relearn-retian => attack 'relearn-retian' is not for images
unlearn IMAGE --auto --learning_rate 0.1 => auto sets learning_rate itself; leave out --learning_rate, or --auto
compare IMAGE --auto --target_forget_loss 2 => compare has no --auto, which is for hamu unlearn
evaluate TEXT --format csv => format 'csv' is unknown; it may be open-unlearning
"""))  # fmt: skip
def test_a_command_line(refused, line, message, monkeypatch):
    monkeypatch.setattr(TextTask, "predict", None)  # no model of texts is asked anything before
    said = refused(line)
    assert message in said
    assert "secret" not in said


@pytest.mark.parametrize(("content", "message"), table("""
- seed => run.yaml holds no settings; expected lines of `key: value`
unlearn: fast => unlearn in run.yaml holds no settings; expected lines of `key: value`
seed: 1|keep: 2|seed: 2 => run.yaml is not valid YAML, line 3: seed is there twice
? [seed]|: 1 => run.yaml is not valid YAML, line 1: found unhashable key
unlearn:|  seeds: [1] => run.yaml has the unknown setting 'seeds' under unlearn; did you mean seed?
compare:|  method: ga => run.yaml has the unknown setting 'method' under compare; did you mean methods?
unlern:|  seed: 1 => run.yaml has the unknown setting 'unlern'; did you mean unlearn?
seed: [[1], 2] => run.yaml has nested values under seed; give one value, or a list
seed: \xff => run.yaml is not valid YAML: unacceptable character #x00ff: invalid start byte
seed: 1|keep: ] => run.yaml is not valid YAML, line 2: expected the node content, but found ']'
seed: !!python/object/apply:os.mkdir [ran] => argument --seed: invalid int value: 'ran'
magic: 1 => run.yaml has the unknown setting 'magic'; see hamu unlearn --help-all
[[[ => run.yaml is not valid YAML: maximum recursion
"""))  # fmt: skip
def test_a_file_of_settings(refused, content, message):
    content = content.replace("|", "\n").replace("[[[", "[" * 500)
    Path("run.yaml").write_bytes(content.encode("latin1"))
    assert message in refused("unlearn IMAGE --config run.yaml")


@pytest.mark.parametrize("line", [
    *(f"{command} --data no.npz --forget_class 1 --model no" for command in ("assess", "compare", "evaluate")),
    "unlearn --data no.npz --forget_class 1 --model no", "train --data no.npz --model resnet8", "demo",
])  # fmt: skip
def test_an_output_folder_that_cannot_be_made_is_refused_before_data_are_read(refused, line):
    assert "cannot be made: Not a directory" in refused(f"{line} --output_dir t.jsonl/out")


def test_a_command_for_one_process_that_is_started_in_several(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = "assess: assess runs in one process; start it without torchrun"
    assert line in refused("assess IMAGE")


@pytest.mark.parametrize(("variables", "why"), [
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', no whole number from 1 on; start by torchrun"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', no whole number from 1 on"),
    ({"WORLD_SIZE": "2", "RANK": "x"}, "RANK is 'x', no whole number from 0 on"),
    ({"LOCAL_WORLD_SIZE": "-1"}, "LOCAL_WORLD_SIZE is '-1', no whole number from 1 on"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 and LOCAL_RANK empty, but no launcher has started"),
    ({"LOCAL_RANK": ""}, "WORLD_SIZE is 1 and LOCAL_RANK empty, but no launcher has started this"),
    ({"LOCAL_RANK": "3"}, "WORLD_SIZE is 1 and LOCAL_RANK 3, but no launcher has started this"),
])  # fmt: skip
def test_variables_that_no_launcher_has_set_are_named(refused, monkeypatch, variables, why):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert why in refused("unlearn IMAGE")


def test_a_signal_or_ctrl_c_leaves_nothing(refused, monkeypatch):
    monkeypatch.setattr(Task, "start", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    line = "hamu evaluate: interrupted by SIGTERM; what it had not saved is lost\n"
    assert refused("evaluate IMAGE", code=143) == line

    def broken_off(argv, screen):
        raise KeyboardInterrupt

    monkeypatch.setattr(hamu.cli, "_methods", broken_off)
    assert refused("methods", code=130) == "hamu methods: interrupted\n"


def test_ctrl_c_while_the_command_line_loads_ends_it_without_a_traceback(tmp_path):
    """`rich` stands for all that is imported before a command can handle signals.

    A job in the background inherits that Ctrl-C is ignored; here it is not.
    """
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    lines = ("import signal", heard, "signal.raise_signal(signal.SIGINT)", "")
    (tmp_path / "rich.py").write_text("\n".join(lines))
    entry = tomllib.loads(PROJECT.read_text())["project"]["scripts"]["hamu"]
    load = f"import sys, importlib.metadata as m; run = m.EntryPoint('hamu', {entry!r}, '').load()"
    for started in (["-m", "hamu"], ["-c", f"{load}; sys.exit(run())"]):
        command = [sys.executable, *started, "methods"]
        path = os.pathsep.join([str(tmp_path), *sys.path])
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
