"""Write a run's model as a folder that transformers loads: AutoModelForCausalLM, AutoTokenizer.

    python -m scripts.export run=outputs/DAY/TIME out=my_model

Arguments are key=value:

    run   the run's directory, or one of its checkpoints, such as RUN/checkpoint.best
    out   the folder to write; it must be empty or absent

The folder holds config.json, generation_config.json, model.safetensors, and a tokenizer if the data
is text. `train.py init_from=my_model` starts from these weights. Models with learned positions
become GPT2LMHeadModel. model=modern becomes Qwen3ForCausalLM, or with model.qk_norm=false
LlamaForCausalLM. With windows of one width in some or all layers it also becomes Qwen3, or without
QK-norm MinistralForCausalLM or MistralForCausalLM. A model that none of them can express is refused
with the reasons.
"""

import json
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from config import SYNTHETIC_SOURCES
from data.tokenizer_json import tokenizer_files
from model import to_hugging_face
from scripts.arguments import command
from training.loop.trained import load_trained, read_run_config, trained_tokenizer
from training.record.files import whole_folder


@dataclass
class Options:
    run: Path
    out: Path


@command
def main(options: Options) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    config, out = replace(read_run_config(options.run), device="cpu"), options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={out} is there already; name another folder")
    trained = load_trained(options.run, config)
    settings, weights = to_hugging_face(trained.model)
    ends, files = {"bos_token_id": None, "eos_token_id": None}, {}
    if config.data.source not in SYNTHETIC_SOURCES:
        tokenizer = trained_tokenizer(options.run, config)
        ends = dict.fromkeys(ends, tokenizer.end_of_text)
        files = tokenizer_files(tokenizer, max_length=config.model.max_seq_len)
    files["config.json"] = json.dumps(settings | ends, indent=2)
    files["generation_config.json"] = json.dumps(ends, indent=2)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(out) as folder:
            for name, content in files.items():
                (folder / name).write_text(content, encoding="utf-8")
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            # safetensors creates files that only the owner can read
            shutil.copymode(folder / "config.json", folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise OSError(f"out={out} cannot be written: {error}") from error
    if not trained.model.backend.exact:
        print(
            f"trained with attention={trained.model.backend.name}, and transformers computes exact "
            "attention: val/loss_exact of the run is what the weights are worth there",
            file=sys.stderr,
        )
    print(*sorted(out.iterdir()), sep="\n")


if __name__ == "__main__":
    main()
