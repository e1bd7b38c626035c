"""Whatever a user gets wrong: one line that names the value, an exit code, and nothing lost."""

import copy
import functools
import resource
import shlex
import sys

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tests.command import ROOT, cache_folder, checkpoint, metrics, run, same, tiny, tiny_sweep
from tests.processes import limited
from training.launch.command_line import GROUPS, check_overrides, hydra_config, key_of, read_config
from training.launch.settings import settle
from training.loop.device import pick_dtype
from training.loop.run import build_run

linux = pytest.mark.skipif(sys.platform != "linux", reason="the obstacle is Linux's")


# each of these alone is refused, with its key and value
ALONE = """
    sead=1 +sead=1 xyz=1 attention.tile=3 model.width=3 left_out=[seed]
    model=null ~seed =3 words seq_len=32,64 seed=range(0,3)
    logger=[wandb,tensorboard] model=[gpt2,tiny] optim=[adamw,muon]
    attention=tiled:block_q=16,block_kv=8 attention=mine:BACKEND:floor=1e-3
    seed=18446744073709551616 batch_size=1000000000000000000000000
    attention.block_q=18446744073709551616
    model.norm=batch model.activation=relu model.positions=sinus model.checkpoint=mlp
    data.source=web tokenizer.name=word optim.name=sgd optim.schedule=linear logger.name=mlflow
    device=tpu dtype=fp8 dtype=bfloat16 compile=maybe
    seq_len=-8 seq_len=0 steps=0 batch_size=0 log_every=0 seed=-1 sample_tokens=-1
    tokens_per_step=100 tokens_per_step=0
    model.num_layers=0 model.num_layers=100000000 model.num_heads=0 model.num_heads=3
    model.num_kv_heads=0 model.num_kv_heads=3 model.hidden_size=0 model.dropout=1.0
    optim.lr=-1.0 optim.lr=nan optim.lr=inf optim.min_lr=-1.0
    optim.min_lr=10.0 optim.warmup_steps=-1 optim.beta1=1.0 optim.beta2=-0.1
    data.val_fraction=0.0 data.val_fraction=1.0
    attention.block_q=0 attention.window=0 attention.softcap=0.0 attention.softcap=inf
    attention.softcap=nan attention.pattern=SSSL attention.sinks=one attention.kernel=fast
    attention.block_kv=-1 attention.switch_at=2 attention=no.such:X attention.score_mod=nope:X
    model.rope_theta=0 data.num_keys=0 data.num_values=1 data.path=books data.name=org/name
    data=hub device=cuda cuda_graph=true init_from= init_from=./nowhere
"""
# what is typed after `python train.py`, and the words that the line must have: the key, the value,
# and the name of a way out; never prose. U: stands for tests.user_backends:
TOGETHER = {
    # the choices that there are
    "attention=flash3": "attention/flash3 naive no_rescale",
    "logger=trackio": "logger/trackio wandb none",
    # the key that was meant
    "lr=1e-3": "optim.lr?",
    "optim.learning_rate=1": "optim.lr?",
    "block_size=64": "seq_len?",
    "attention=U:RIGHT attention.cap=2": "attention.softcap? +attention.options.cap=",
    "attention=tiled,naive": "-m attention=",
    "'attention=[naive,no_max]'": "-m attention=",
    "attention=": "attention/ naive",
    "'attention=tiled:block_q={a: ['": "attention=tiled:block_q={a:",
    # values that do not go together
    "model.positions=rope model.hidden_size=12 model.num_heads=4": "head_dim 3",
    "seq_len=256 model.max_seq_len=100": "seq_len=256 model.max_seq_len=100",
    "attention.window=4 attention.pattern=SX": "attention.pattern=SX S L",
    "attention.window=4 \"attention.pattern=''\"": "attention.pattern= S L",
    "attention.window=8 attention.pattern=L": "attention.window=8 attention.pattern=L",
    "attention.softcap=1 attention.score_mod=a:B": "attention.score_mod=a:B attention.softcap",
    "model.positions=alibi attention.score_mod=a:B": "attention.score_mod=a:B alibi",
    # settings that nothing would read
    "data.field=body": "data.field=body data=text data=hub",
    "data=last_write data.documents=true": "data.documents=true data=last_write",
    "optim.schedule=constant optim.min_lr=0": "optim.min_lr=0.0 optim.schedule=cosine",
    "data=text data.path=README.md data.field=body": "data.field=body data.path=README.md",
    "data=recall tokenizer.vocab_size=500": "tokenizer.vocab_size=500 data=recall data=text",
    "eval_every=0 eval_sequences=7": "eval_sequences=7 eval_every=0",
    "attention.switch_to=naive": "attention.switch_to=naive attention.switch_at=null",
    "model.rope_theta=500": "model.rope_theta=500.0 model.positions=rope",
    # what only the machine can tell
    "compile=true attention.score_mod=U:HALVED": "attention.score_mod compile=false",
    # attentions that cannot do what is asked for
    "attention.softmax_dtype=fp8": "softmax_dtype=fp8 float32 input",
    "attention=sdpa attention.backend=fastest": "backend=fastest efficient",
    "attention=sdpa attention.backend=cudnn": "attention=sdpa cudnn attention.backend=auto",
    "attention=sdpa attention.window=4": "attention.window=4 attention=sdpa naive",
    "attention=sdpa attention.score_mod=U:HALVED": "HALVED attention=sdpa naive",
    "attention=sdpa data.documents=true": "data.documents=true attention=sdpa naive tiled",
    "attention=flex": "attention=flex attention=tiled",
    "attention=triton model.hidden_size=1024": "attention=triton head_dim 512 257",
    "attention=triton attention.score_mod=U:HALVED": "score_mod @triton.jit",
    # a switch of the attention
    "attention.switch_at=0 attention.switch_to=naive": "attention.switch_at=0 steps=4",
    "attention.switch_at=4 attention.switch_to=naive": "attention.switch_at=4 steps=4",
    "attention.switch_at=2 attention.switch_to=flashy": "attention.switch_to=flashy tiled",
    "attention.switch_at=2 attention.switch_to=sdpa attention.softcap=3": "softcap=3 sdpa",
    "attention.switch_at=2 \"attention.switch_to='naive:block_kv=4'\"": (
        "attention.switch_to=naive:block_kv=4 no options"
    ),
    # a user's own attention; tests/attention/look/test_try_out.py has more ways to be wrong
    "attention=U:naive": "attention=U:naive attention.Backend",
    "attention=U:RIGHT_IN_FP32 dtype=fp16": "RIGHT_IN_FP32 float16 float32",
    "attention=U:WRONG_SHAPE": "attention=U:WRONG_SHAPE shape",
    "attention=U:WRONG_DTYPE": "attention=U:WRONG_DTYPE float64",
    "attention=U:DEAF attention.window=16": "attention=U:DEAF exact=False",
    "attention=U:RAISES": "attention=U:RAISES KeyError user_backends.py",
    "attention=examples.differential_attention:BACKEND attention.switch_at=2 "
    "attention.switch_to=tiled": "examples.differential_attention:BACKEND attention.switch_at=2",
    # a user's own change of the scores
    "attention.score_mod=tests.user_backends": "tests.user_backends pkg.module:NAME",
    "attention.score_mod=U:halved": "attention.score_mod=U:halved attention.ScoreMod",
    "attention.score_mod=U:WRONG_DERIVATIVE": "attention.score_mod=U:WRONG_DERIVATIVE 0.5",
    "attention.score_mod=U:MIXES_SCORES": "attention.score_mod=U:MIXES_SCORES elementwise",
    "attention.score_mod=U:NO_DERIVATIVE": "attention.score_mod=U:NO_DERIVATIVE two shape",
    "attention.score_mod=U:FEW_ARGUMENTS": "attention.score_mod=U:FEW_ARGUMENTS TypeError",
    "attention.score_mod=U:FEWER_SCORES": "attention.score_mod=U:FEWER_SCORES two shape",
    "attention.score_mod=U:RANDOM_SCORES": "attention.score_mod=U:RANDOM_SCORES same",
    "attention.score_mod=U:NAN_SCORES": "attention.score_mod=U:NAN_SCORES NaN",
    # data and weights
    "data=text data.path=/no/such.txt": "data.path=/no/such.txt",
    "data=last_write seq_len=1": "data=last_write seq_len=1 seq_len=32",
    "data=recall seq_len=32 data.num_pairs=9": "data=recall seq_len=32 seq_len=36",
    "data=recall data.num_values=4 data.num_pairs=5": "data.num_values=4 data.num_pairs=4",
    "eval_sequences=1000000000": "1000000000 eval_sequences=",
    "tokenizer=bpe tokenizer.vocab_size=100": "tokenizer.vocab_size=100 tokenizer=bpe 8193",
}


@functools.cache
def composed(*choices: str):
    """Hydra's config of a tiny run. Composing it again for each mistake would take longest."""
    return hydra_config(*tiny(ROOT, *choices)[:-1])


def prepare(*typed: str) -> None:
    """All that train.py does with these arguments before it opens the folder of the run."""
    check_overrides(typed)
    settings = copy.deepcopy(composed(*(x for x in typed if key_of(x) in GROUPS)))
    for override in OverridesParser.create().parse_overrides(list(typed)):
        if override.key_or_group not in GROUPS:
            OmegaConf.update(settings, override.key_or_group, override.value())
    config = read_config(settings)
    settle(config, asked=typed)
    assert build_run(config, {}).held_out


def in_full(text: str) -> str:
    return text.replace("U:", "tests.user_backends:")


@pytest.fixture
def one_store(monkeypatch):
    monkeypatch.setenv("TILEGPT_CACHE", cache_folder())


PREPARED = {typed: typed for typed in ALONE.split()} | TOGETHER


@pytest.mark.parametrize(("typed", "named"), PREPARED.items(), ids=PREPARED)
def test_refused_before_a_run_begins(one_store, typed, named):
    with pytest.raises(ValueError) as refused:
        prepare(*shlex.split(in_full(typed)))
    answer = str(refused.value)
    assert not [word for word in in_full(named).split() if word not in answer], answer
    assert "\n" not in answer


LONG = "x" * 300
# the whole command, one mistake of each kind; words in capitals before = are variables of the
# environment
COMMANDS = {
    "sead=1": "sead=1 seed?",
    "steps=0": "steps=0",
    "attention=sdpa attention.block_kv=16": "attention.block_kv=16 attention=sdpa",
    "attention=U:WRONG": "attention=U:WRONG exact=False",
    "attention=U:EXITS": "attention=U:EXITS SystemExit user_backends.py",
    "attention=triton TRITON_INTERPRET=0": "GPU TRITON_INTERPRET=1 attention=tiled",
    "data=text": "data=text data.path=FILE",
    "compile=true TORCHINDUCTOR_CACHE_DIR=/dev/null/x": "/dev/null/x",
    "TILEGPT_CACHE=/dev/null/x": "/dev/null/x TILEGPT_CACHE",
    f"TILEGPT_CACHE={LONG}": f"{LONG} TILEGPT_CACHE",
    "logger=wandb logger.project=a/b": "logger.project=a/b 128",
    "logger=wandb WANDB_MODE=bogus": "WANDB_MODE=bogus",
    "resume=nowhere": "resume=nowhere checkpoint",
    # told by Hydra
    "seq_len=long": "seq_len=long",
    "seed=": "seed=",
    "attention.options.block_q=32": "attention.options.block_q",
    "'seed=${nope:1}'": "seed nope",
    "hydra.sweeper.variants.wide={attention.window:64}": "hydra.sweeper.variants.wide",
    "experiment=everything": "experiment/everything break_it",
    "--config-dir=/no/such": "/no/such",
}


@pytest.mark.parametrize(("typed", "named"), COMMANDS.items(), ids=lambda typed: typed[:60])
def test_a_command_is_refused_in_one_line(one_store, tmp_path, typed, named):
    arguments = shlex.split(in_full(typed))
    variables = [each for each in arguments if each.partition("=")[0].isupper()]
    overrides = [each for each in arguments if each not in variables]
    environment = dict(each.split("=", 1) for each in variables)
    answer = run(*tiny(tmp_path / "run", *overrides), **environment).complaint()
    assert not [word for word in in_full(named).split() if word not in answer], answer
    # nothing was trained
    assert not [path for path in tmp_path.rglob("metrics.jsonl") if path.read_text()]
    assert not list(tmp_path.rglob("checkpoint"))


# a file in a folder of the user's own, and the words that the last line must hold
OWN_FILES = {
    "unknown-key": ("attention/mine", "name: tiled\nblok_kv: 8\n", "attention.blok_kv"),
    "indentation": ("attention/mine", "name: tiled\n  block_kv: 8\n", "mine.yaml line 2, 11"),
    "encoding": ("attention/mine", "name: \xe9\n", "utf-8 0xe9"),
    "no-name": ("attention/mine", "block_kv: 8\n", "attention.name"),
    "without-package": ("experiment/mine", "steps: 3\n", "experiment/mine 'experiment'"),
    "sweep": (
        "experiment/mine",
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params: {sede: '0,1'}\n",
        "sede",
    ),
}


@pytest.mark.parametrize(("name", "text", "named"), OWN_FILES.values(), ids=OWN_FILES)
def test_a_mistake_in_a_file_of_a_user(tmp_path, name, text, named):
    """A regression test: Hydra printed lines of its own, or PyYAML's traceback."""
    path = tmp_path / "own" / f"{name}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="latin-1")
    given = name.replace("/", "=")
    answer = run(*tiny(tmp_path / "run", f"--config-dir={tmp_path / 'own'}", given)).complaint()
    assert not [word for word in named.split() if word not in answer], answer


# what looks like a mistake and is none


def test_one_tile_makes_no_rescale_exact_and_says_so(tmp_path):
    done = run(*tiny(tmp_path, "attention=no_rescale", "attention.block_kv=32"))
    assert done.code == 0, done.output
    assert any("block_kv=32" in line and "seq_len=32" in line for line in done.output.splitlines())


def test_auto_leaves_bfloat16_to_gpus_that_have_it(monkeypatch):
    has_it = {"is_bf16_supported": lambda including_emulation=True: including_emulation}
    for name, answer in (has_it | {"get_device_name": lambda device: "Tesla T4"}).items():
        monkeypatch.setattr(torch.cuda, name, answer)
    with pytest.raises(ValueError, match="dtype=bf16.*Tesla T4.*dtype=fp16"):
        pick_dtype("bf16", torch.device("cuda"))
    assert pick_dtype("auto", torch.device("cuda")) == torch.float32


# the output folder


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (tiny, "file"),
        (tiny, LONG),
        (tiny_sweep, "file/runs"),
        # permissions do not stop root, but nobody makes a file there
        pytest.param(tiny_sweep, "/proc/self", marks=linux),
    ],
    ids=["file", "too-long", "sweep-below-a-file", "sweep-in-proc"],
)
def test_a_folder_that_cannot_be(folder, arguments, tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / folder
    answer = run(*arguments(path)).complaint()
    assert str(path) in answer and "hydra." in answer


def test_a_time_stamp_that_is_taken_gets_a_number(tmp_path):
    """A regression test: of two runs that were started in the same second, one was refused."""
    for _ in range(2):
        done = run(*tiny(tmp_path, "steps=1")[:-1], f"hydra.run.dir={tmp_path}/${{now:%Y}}")
        assert done.code == 0, done.output
    year, second = sorted(tmp_path.iterdir())
    assert second.name == f"{year.name}-2"
    assert len(metrics(year)) == len(metrics(second)) == 2


# a disk that is full


@linux
@pytest.mark.parametrize("arguments", [tiny, tiny_sweep], ids=["run", "sweep"])
def test_a_disk_that_is_full_from_the_start(arguments, tmp_path):
    with limited(resource.RLIMIT_FSIZE, 0):
        done = run(*arguments(tmp_path))
    assert str(tmp_path) in done.complaint()


@linux
def test_a_disk_that_fills_up_leaves_the_last_checkpoint(tmp_path):
    """The weights still fit, the optimizer's state does not."""
    run_dir = tmp_path / "run"
    assert run(*tiny(run_dir)).code == 0
    before = checkpoint(run_dir)
    with limited(resource.RLIMIT_FSIZE, 120_000):
        answer = run(f"resume={run_dir}", "steps=8", "checkpoint_every=6").complaint()
    assert f"resume={run_dir}" in answer and f"checkpoint to {run_dir}" in answer
    assert same(checkpoint(run_dir), before)
    assert run(f"resume={run_dir}", "steps=8").code == 0
    assert [row["step"] for row in metrics(run_dir)] == list(range(9))
