"""The directory of a run, written without training it."""

from pathlib import Path

import torch
import yaml
from omegaconf import OmegaConf
from torch.amp import GradScaler

from attention import get_backend
from config import ModelConfig, RunConfig
from data import build_data
from model import GPT
from tests.weights import with_weights
from training.loop.optimizer import AdamW
from training.record.checkpoint import Checkpoints
from training.record.names import attention_names

SMALL = ModelConfig(num_layers=1, num_heads=2, hidden_size=16, max_seq_len=32)


def write_run(
    run_dir: Path, *, shape: ModelConfig = SMALL, std: float = 1.0, overrides=(), **settings
) -> GPT:
    """A run directory as training leaves it after three steps. The weights are random and large, so
    that the attention decides what the model says.
    """
    config = RunConfig(model=shape, seq_len=shape.max_seq_len, **settings)
    plain = OmegaConf.to_container(OmegaConf.structured(config))
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(plain))
    torch.manual_seed(config.seed)
    # the bytes of text, or the tokens of a task
    vocab_size = 257
    if config.data.source == "last_write":
        data = build_data(config.data, config.tokenizer, seq_len=config.seq_len, seed=0)
        vocab_size = data.vocab_size
    model = with_weights(GPT(shape, vocab_size=vocab_size, backend=get_backend("tiled")), std)
    optimizer = AdamW(model.parameters())
    parts = {"model": model, "optimizer": optimizer, "config": plain}
    parts |= {"scaler": GradScaler("cpu", enabled=False), "overrides": [*overrides]}
    used = attention_names(config.attention)
    start = {"step": 0, "started": 0.0, "attention": used, "changed": {}, "data": "", "commit": ""}
    start["tokenizer"] = "byte"
    (run_dir / "metrics.jsonl").touch()
    (run_dir / "summary.json").write_text('{"status": "completed"}')
    with Checkpoints(run_dir, **parts, background=False) as checkpoints:
        checkpoints.starts = [start]
        checkpoints.save(3, 32)
    return model
