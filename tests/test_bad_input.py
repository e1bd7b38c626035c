"""Whatever a user gets wrong: one line that names the value, an exit code, and nothing lost."""

import resource
import shlex
import sys

import pytest
import torch

from tests.command import checkpoint, metrics, run, same, tiny, tiny_sweep
from tests.processes import limited
from training.launch.command_line import compose
from training.loop.device import pick_dtype

linux = pytest.mark.skipif(sys.platform != "linux", reason="the obstacle is Linux's")


# each of these alone is refused when the settings are composed, with its key and value
ALONE = """
    sead=1 +sead=1 xyz=1 attention.tile=3 model.width=3 left_out=[seed]
    model=null ~seed =3 words seq_len=32,64 seed=range(0,3)
    logger=[wandb,tensorboard] model=[gpt2,tiny] optim=[adamw,muon]
    attention=tiled:block_q=16,block_kv=8 attention=mine:BACKEND:floor=1e-3
    attention.options.block_q=32 hydra.sweeper.variants.wide={attention.window:64}
    seq_len=long seq_len=1.5 steps=1.5 batch_size=auto seed= deterministic=maybe model.bias=maybe
    seed=18446744073709551616 batch_size=1000000000000000000000000
    attention.block_q=18446744073709551616
    model.norm=batch model.activation=relu model.positions=sinus data.source=web
    tokenizer.name=word optim.name=sgd optim.schedule=linear logger.name=mlflow logger.mode=on
    device=tpu dtype=fp8 compile=maybe parallel.how=ring
    seq_len=-8 seq_len=0 steps=0 batch_size=0 log_every=0 seed=-1 sample_tokens=-1
    tokens_per_step=100 tokens_per_step=0
    model.num_layers=0 model.num_layers=100000000 model.num_heads=0 model.num_heads=3
    model.num_kv_heads=0 model.num_kv_heads=3 model.hidden_size=0 model.init_std=-1
    model.dropout=1.0 optim.lr=-1.0 optim.lr=nan optim.lr=inf optim.min_lr=-1.0
    optim.min_lr=10.0 optim.warmup_steps=-1 optim.beta1=1.0 optim.beta2=-0.1
    data.val_fraction=0.0 data.val_fraction=1.0 data.max_documents=0
    attention.block_q=0 attention.window=0 attention.softcap=0.0 attention.softcap=inf
    attention.softcap=nan attention.pattern=SSSL
    attention.ranks=4
"""

# the same of several settings, and the words that the sentence must have
TOGETHER = {
    # the choices that there are
    "attention=flash3": "attention/flash3 naive no_rescale",
    "logger=trackio": "logger/trackio wandb none",
    "experiment=everything": "experiment/everything break_it",
    # the key that was meant
    "steps=4 sead=1": "seed?",
    "seqlen=3": "seq_len?",
    "attention.block_k=4": "attention.block_kv?",
    "lr=1e-3": "optim.lr?",
    "optim.learning_rate=1": "optim.lr?",
    "block_size=64": "seq_len?",
    "attention=tiled,naive": "-m attention=",
    "'attention=[naive,no_max]'": "-m attention=",
    "attention=": "attention/ naive",
    "'seed=${nope:1}'": "seed nope",
    "'attention=tiled:block_q={a: ['": "attention=tiled:block_q={a:",
    # values that do not go together
    "attention=triton attention.kernel=fast": "attention.kernel=fast portable hopper",
    "attention=no_rescale attention.block_kv=-1": "attention.block_kv=-1",
    "model.positions=rope model.rope_theta=0": "model.rope_theta=0",
    "model.positions=rope model.hidden_size=12 model.num_heads=4": "head_dim 3",
    "seq_len=256 model.max_seq_len=100": "seq_len=256 model.max_seq_len=100",
    "data=last_write data.num_keys=0": "data.num_keys=0",
    "data=last_write data.num_values=1": "data.num_values=1 2",
    "attention.window=4 attention.pattern=SX": "attention.pattern=SX S L",
    "attention.window=4 \"attention.pattern=''\"": "attention.pattern= S L",
    "attention.window=8 attention.pattern=L": "attention.window=8 attention.pattern=L",
    "attention.softcap=1 attention.score_mod=a:B": "attention.score_mod=a:B attention.softcap",
    "model.positions=alibi attention.score_mod=a:B": "attention.score_mod=a:B alibi",
}

# what is typed after `python train.py`, and the words that the last line must hold: the key, the
# value, and the name of a way out; never prose. Words in capitals before = are variables of the
# environment. U: stands for tests.user_backends:
REFUSED = {
    "sead=1": "sead=1 seed?",
    # what only the machine can tell
    "compile=true attention.score_mod=U:HALVED": "attention.score_mod compile=false",
    "cuda_graph=true": "cuda_graph=true device=cpu",
    "device=cuda": "device=cuda device=cpu",
    "compile=true TORCHINDUCTOR_CACHE_DIR=/dev/null/x": "/dev/null/x",
    # settings that nothing would read
    "data.path=books": "data.path=books data=stdlib data=text",
    "data.name=org/name": "data.name=org/name data=hub",
    "data.field=body": "data.field=body data=text data=hub",
    "data=last_write data.num_pairs=2": "data.num_pairs=2 data=recall",
    "data=last_write tokenizer=bpe": "tokenizer.name=bpe data=last_write data=text",
    "data=last_write data.documents=true": "data.documents=true data=last_write",
    "optim.schedule=constant optim.min_lr=0": "optim.min_lr=0.0 optim.schedule=cosine",
    "model.rope_theta=500": "model.rope_theta=500.0 model.positions=rope",
    "attention=sdpa attention.block_kv=16": "attention.block_kv=16 attention=sdpa",
    "attention=U:RIGHT +attention.options.a=2": "attention.options.a=2 U:RIGHT",
    # attentions that cannot do what is asked for
    "attention.softmax_dtype=fp8": "softmax_dtype=fp8 float32 input",
    "attention=sdpa attention.backend=fastest": "backend=fastest efficient",
    "attention=sdpa attention.backend=cudnn": "attention=sdpa cudnn attention.backend=auto",
    "attention=sdpa attention.window=4": "attention.window=4 attention=sdpa naive",
    "attention=sdpa attention.score_mod=U:HALVED": "HALVED attention=sdpa naive",
    "attention=flex": "attention=flex attention=tiled",
    "attention=triton model.hidden_size=1024": "attention=triton head_dim 512 257",
    "attention=triton attention.score_mod=U:HALVED": "score_mod @triton.jit",
    "attention=triton TRITON_INTERPRET=0": "GPU TRITON_INTERPRET=1 attention=tiled",
    # a switch of the attention
    "attention.switch_at=2": "attention.switch_at=2 attention.switch_to=NAME",
    "attention.switch_at=0 attention.switch_to=naive": "attention.switch_at=0 steps=4",
    "attention.switch_at=4 attention.switch_to=naive": "attention.switch_at=4 steps=4",
    "attention.switch_at=2 attention.switch_to=flashy": "attention.switch_to=flashy tiled",
    "attention.switch_at=2 attention.switch_to=sdpa attention.softcap=3": "softcap=3 sdpa",
    "attention.switch_at=2 \"attention.switch_to='naive:block_kv=4'\"": (
        "attention.switch_to=naive:block_kv=4 no options"
    ),
    "attention.switch_at=2 \"attention.switch_to='tiled:block_kv=abc'\"": (
        "switch_to=tiled:block_kv=abc block_kv=abc"
    ),
    "attention.switch_to=[tiled]": "attention.switch_to=[",
    # a user's own attention; tests/attention/look/test_try_out.py has more ways to be wrong
    "attention=no.such:X": "attention=no.such:X no.py",
    "attention=U:naive": "attention=U:naive attention.Backend",
    "attention=U:RIGHT_IN_FP32 dtype=fp16": "RIGHT_IN_FP32 float16 float32",
    "attention=U:WRONG_SHAPE": "attention=U:WRONG_SHAPE shape",
    "attention=U:WRONG_DTYPE": "attention=U:WRONG_DTYPE float64",
    "attention=U:WRONG": "attention=U:WRONG exact=False",
    "attention=U:DEAF attention.window=16": "attention=U:DEAF exact=False",
    "attention=U:RAISES": "attention=U:RAISES KeyError user_backends.py",
    "attention=U:EXITS": "attention=U:EXITS SystemExit user_backends.py",
    "attention=examples.differential_attention:BACKEND attention.switch_at=2 "
    "attention.switch_to=tiled": "examples.differential_attention:BACKEND attention.switch_at=2",
    # a user's own change of the scores
    "attention.score_mod=nope:X": "attention.score_mod=nope:X nope.py",
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
    "data=text": "data=text data.path=FILE",
    "data=hub": "data=hub data.name=org/name",
    "data=text data.path=/no/such.txt": "data.path=/no/such.txt",
    "data=last_write seq_len=1": "data=last_write seq_len=1 seq_len=32",
    "data=recall seq_len=32 data.num_pairs=9": "data=recall seq_len=32 seq_len=36",
    "data=recall data.num_values=4 data.num_pairs=5": "data.num_values=4 data.num_pairs=4",
    "eval_sequences=1000000000": "1000000000 eval_sequences=",
    "tokenizer=bpe tokenizer.vocab_size=100": "tokenizer.vocab_size=100 tokenizer=bpe 8193",
    "init_from=": "init_from=",
    "init_from=./nowhere": "init_from=./nowhere",
    # the machine and its packages
    "logger=wandb logger.project=a/b": "logger.project=a/b 128",
    "logger=wandb WANDB_MODE=bogus": "WANDB_MODE=bogus",
    # folders and sweeps
    "--config-dir=/no/such": "/no/such",
    "resume=nowhere": "resume=nowhere overrides.yaml",
}


@pytest.mark.parametrize(("typed", "named"), REFUSED.items(), ids=REFUSED)
def test_refused_in_one_line(monkeypatch, tmp_path, typed, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    typed, named = (text.replace("U:", "tests.user_backends:") for text in (typed, named))
    arguments = shlex.split(typed)
    variables = [each for each in arguments if each.partition("=")[0].isupper()]
    overrides = [each for each in arguments if each not in variables]
    environment = dict(each.split("=", 1) for each in variables)
    answer = run(*tiny(tmp_path / "run", *overrides), **environment).complaint()
    missing = [word for word in named.split() if word not in answer]
    assert not missing, answer
    # nothing was trained
    assert not [path for path in tmp_path.rglob("metrics.jsonl") if path.read_text()]
    assert not list(tmp_path.rglob("checkpoint"))


COMPOSED = [(typed, typed) for typed in ALONE.split()] + [
    (typed.replace("U:", "tests.user_backends:"), named) for typed, named in TOGETHER.items()
]


@pytest.mark.parametrize(("typed", "named"), COMPOSED)
def test_settings_are_refused_in_one_line(tmp_path, typed, named):
    with pytest.raises(ValueError) as refused:
        compose(*tiny(tmp_path, *shlex.split(typed))[:-1])
    answer = str(refused.value)
    assert not [word for word in named.split() if word not in answer], answer
    assert "\n" not in answer


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


@pytest.mark.parametrize(("typed", "short"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_pytorchs_names_of_dtypes_are_taken(typed, short):
    """A regression test: one who writes torch.bfloat16 all day was refused."""
    assert compose(f"dtype={typed}").dtype == short


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


@pytest.mark.parametrize("cache", ["file/cache", "x" * 300], ids=["made", "too-long"])
def test_a_cache_that_cannot_be(tmp_path, cache):
    (tmp_path / "file").touch()
    answer = run(*tiny(tmp_path / "run"), TILEGPT_CACHE=str(tmp_path / cache)).complaint()
    assert cache in answer
    assert "TILEGPT_CACHE" in answer


# the output folder


@pytest.mark.parametrize("arguments", [tiny, tiny_sweep], ids=["run", "sweep"])
@pytest.mark.parametrize(
    "folder", ["file", "file/runs", "a" * 300, pytest.param("/proc/self", marks=linux)], ids=len
)
def test_a_folder_that_cannot_be(folder, arguments, tmp_path):
    (tmp_path / "file").touch()
    # permissions do not stop root, but nobody makes a file in /proc/self
    path = tmp_path / folder
    answer = run(*arguments(path)).complaint()
    assert str(path) in answer and "hydra." in answer


def test_a_time_stamp_that_is_taken_gets_a_number(tmp_path):
    """A regression test: of two runs that were started in the same second, one was refused."""
    for _ in range(3):
        done = run(*tiny(tmp_path, "steps=1")[:-1], f"hydra.run.dir={tmp_path}/${{now:%Y}}")
        assert done.code == 0, done.output
    year, *others = sorted(tmp_path.iterdir())
    assert [path.name for path in others] == [f"{year.name}-2", f"{year.name}-3"]
    assert all(len(metrics(folder)) == 2 for folder in (year, *others))


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
