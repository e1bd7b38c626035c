"""Train a small GPT with any attention.

    python train.py                                            a tiny GPT on Python's own library,
    minutes on two CPU cores
    python train.py attention=triton seq_len=8192 model=gpt2   our Triton flash-attention, on a GPU
    python train.py -m attention=tiled,sdpa,no_max seed=0,1    a sweep, with a table at the end
    python train.py resume=outputs/DAY/TIME steps=1200         go on with a run

A run directory holds config.yaml, env.json, metrics.jsonl, summary.json, checkpoint/,
checkpoint.best/ and loss_curve.png.
"""

import logging
import math
import os
import time
import traceback
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from config import RunConfig, as_written, read_config, register

log = logging.getLogger("tilegpt")
register()
# threads that wait must sleep: where another program has a core too, spinning costs several times
# the speed
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"} | os.environ


def train(config: RunConfig, run_dir: Path, summary: dict) -> None:
    """Build everything, run the loop, report. `summary` is filled as the run goes, so that an error
    loses nothing.
    """
    # here and not above: --help and a mistyped key are answered without loading torch
    import torch
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    from data import build_data
    from data.prefetch import Prefetcher
    from model import GPT, count_parameters, sample_text
    from training.batch_size import largest_batch, try_pass
    from training.checkpoint import Checkpoints
    from training.device import pick_device, pick_dtype, set_deterministic
    from training.evaluate import evaluate
    from training.health import AttentionMonitor
    from training.interrupt import Interrupt
    from training.loggers import build_logger
    from training.memory import MemoryMeter, cpu_memory_limit, is_out_of_memory
    from training.metrics import (
        MetricsFile,
        Progress,
        Throughput,
        WallClock,
        environment,
        peak_flops,
        read_metrics,
        write_json,
    )
    from training.optimizer import build_optimizer, learning_rate, set_learning_rate
    from training.outcome import after_training, outcome_of, resume_command, save_summary
    from training.plan import GIB, largest_peak_bytes
    from training.plot import draw_loss_curve
    from training.resume import check_start, new_start, resumed, stop_clock, write_settings
    from training.schedule import (
        attention_schedule,
        backend_after,
        describe,
        describe_attention,
        prepare_model,
    )
    from training.settings import settle
    from training.step import PendingStep, compute_gradients, queue_step
    from training.sweep import asked_keys, cli_overrides, job_names, job_overrides, searched_folders

    # what is refused at once; where it runs and in which precision
    if left_out := settle(config, asked=asked_keys()):
        summary["left_out"] = left_out
        log.info("\n".join(f"without {key}: {why}" for key, why in left_out.items()))
    check_start(config, asked=cli_overrides())
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
    set_deterministic(config.deterministic)
    summary |= {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}

    # attention: refused now rather than at the first step
    schedule = attention_schedule(config, dtype=dtype, device=device)
    summary |= describe(schedule, device=device, dtype=dtype, head_dim=config.model.head_dim)

    # data, model, optimizer
    data = build_data(config.data, config.tokenizer, seq_len=config.seq_len, seed=config.seed)
    torch.manual_seed(config.seed)
    model = GPT(config.model, vocab_size=data.vocab_size, backend=schedule[0]).to(device)
    predict = partial(
        largest_peak_bytes,
        vocab_size=data.vocab_size,
        backends=schedule.values(),
        dtype=dtype,
        device=device,
    )
    overrides = job_overrides() + searched_folders()  # what resume= replays
    if config.batch_size == "auto":
        trial = prepare_model(model, schedule[0], compile_mode=config.compile)
        attempt = partial(try_pass, trial, seq_len=config.seq_len, autocast=autocast, device=device)
        with cpu_memory_limit():
            held = sum(parameter.nbytes for parameter in model.parameters())
            config = largest_batch(
                config, predicted_bytes=predict, attempt=attempt, device=device, held_bytes=held
            )
        overrides.append(
            f"batch_size={config.batch_size}"
        )  # a resumed run makes the same passes, whatever is free by then
    optim = config.optimizer()
    optimizer = build_optimizer(model, optim)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    predicted_gib = predict(config) / GIB
    summary |= {"parameters": count_parameters(model), "data": data.fingerprint}
    # tensors alone: on a CPU the peak beside it is the process's, Python and its libraries included
    summary |= {"memory/predicted_gib": predicted_gib} if device.type == "cuda" else {}

    # where it starts and what it writes
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    plain_config = OmegaConf.to_container(OmegaConf.structured(config))
    first_step, tokens = 0, 0
    env = environment(data.fingerprint, device)
    start = new_start(
        {step: backend.name for step, backend in schedule.items()}, env, summary["started"]
    )
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    checkpoints = Checkpoints(
        run_dir, **state, config=plain_config, keep=config.keep, starts=[start]
    )
    if config.resume:
        meta = checkpoints.load()
        first_step, tokens = meta["step"], meta["tokens"]
        checkpoints.starts = resumed(meta, plain_config, start)
        metrics.go_back_to(first_step, meta["folder"] / metrics.path.name)
    watch = AttentionMonitor(
        model, autocast, read_metrics(metrics.path), is_out_of_memory=is_out_of_memory
    )
    summary |= {
        "steps_done": first_step,
        "tokens": tokens,
        "starts": checkpoints.starts,
    }  # from here on this folder is this run's
    write_settings(run_dir, plain_config, overrides)
    write_json(run_dir / "env.json", env)
    log.info(
        f"{data.description}\nmodel={config.model.name} {summary['parameters']:,} parameters, "
        f"{describe_attention(schedule)}"
    )
    log.info(
        f"{device} {summary['dtype']}, {config.sequences_per_step} x {config.seq_len} tokens a "
        f"step, in {run_dir}"
    )
    flops = {
        name: model.flops_per_token(config.seq_len, causal=causal)
        for name, causal in (("mfu", False), ("mfu_causal", True))
    }
    throughput = Throughput(device, flops_per_token=flops, peak=peak_flops(device, dtype))
    tokens_per_step = config.sequences_per_step * config.seq_len
    memory, wall = MemoryMeter(device), WallClock(seconds=stop_clock(checkpoints.starts))
    held_out = data.val_batch(config.eval_sequences) if config.eval_every else ()
    how = {
        "optimizer": optimizer,
        "scaler": scaler,
        "autocast": autocast,
        "grad_clip": optim.grad_clip,
    }

    def queue(step: int, before: PendingStep | None = None) -> PendingStep:
        set_learning_rate(optimizer, step, config.steps, optim)
        queued = queue_step(
            step_model, reader.passes(step), **how, update=config.is_quiet(step + 1), before=before
        )
        if queued.updated:
            throughput.step(tokens_per_step)
        return queued

    def validate(also: dict) -> dict[str, float]:
        return evaluate(
            model,
            *held_out,
            batch_size=config.batch_size,
            autocast=autocast,
            accuracy=data.metric == "accuracy",
            also=also,
        )

    def record(row: dict) -> None:
        row |= wall.row(tokens)
        metrics.write(row)
        logger.log(row, tokens=tokens)
        summary.update(
            {name: value for name, value in row.items() if name.startswith("val/")}
            | watch.summary()
            | memory.summary()
        )
        summary.update(
            steps_done=row["step"],
            tokens=tokens,
            step_tokens_per_sec=throughput.step_tokens_per_sec,
        )
        summary["tokens_per_sec"] = wall.tokens_per_sec(tokens)
        memory.reset()

    step, ahead, step_model = (
        first_step,
        None,
        prepare_model(model, backend_after(schedule, first_step), compile_mode=config.compile),
    )
    summary["compiled"] = step_model is not model
    tags = [
        *dict.fromkeys(each.name for each in schedule.values()),
        f"seq{config.seq_len}",
        config.model.name,
        config.data.source,
    ]
    names = job_names(run_dir) | {"tags": tags, "resume": config.resume is not None}
    logger = build_logger(config.logger, **names, run_dir=run_dir, run_config=plain_config)
    try:
        bar = tqdm(total=config.steps, initial=first_step, disable=None, unit="step")
        progress = Progress(config.steps, tokens_per_step=tokens_per_step, first_step=first_step)
        reader = Prefetcher(data, config.sequences_per_step, config.batch_size, device)
        with (
            cpu_memory_limit(),
            Interrupt() as interrupt,
            logging_redirect_tqdm(),
            bar,
            checkpoints,
            reader,
        ):
            if first_step == 0 and config.eval_every:
                record(row := {"step": 0, "tokens": 0, **validate({})})
                log.info(progress.line(0, row))
            wall.begin(tokens)
            while step < config.steps:
                # one optimizer step; where nothing is due after it, the next is queued before this
                # one is looked at
                now = ahead or queue(step)
                ahead = (
                    queue(step + 1, before=now) if now.updated and not interrupt.requested else None
                )
                loss, grad_norm = now.figures()  # the one wait for the GPU
                step, tokens = step + 1, tokens + tokens_per_step
                # a loss scaler meets infinite gradients on purpose and skips them: there only a
                # collapsed scale is a failure
                diverged = not math.isfinite(loss) or (
                    scaler.get_scale() < 1 if scaler.is_enabled() else not math.isfinite(grad_norm)
                )
                finished = diverged or step == config.steps
                # an interruption leaves no trace in the metrics: the resumed run's are those of a
                # run that nothing disturbed
                last = finished or (interrupt.requested and ahead is None)

                # what is known about it
                log_now, then = (
                    finished or step % config.log_every == 0,
                    None if diverged else schedule.get(step),
                )
                evaluate_now = config.eval_every and (
                    finished or then or step % config.eval_every == 0
                )
                compare = (
                    not diverged
                    and config.diagnose_steps > 0
                    and (finished or step % config.diagnose_steps == 0)
                )
                row = memory.row() if log_now or evaluate_now or compare else {}
                if log_now:
                    row |= {
                        "train/loss": loss,
                        "lr": learning_rate(step - 1, config.steps, optim),
                        "grad_norm": grad_norm,
                    }
                if log_now or compare:
                    with throughput.paused():
                        # the weights are still those of this step's forward pass; the scale is what
                        # one sequence weighs in its loss
                        row |= watch.inspect(
                            step,
                            *now.passes[0],
                            compare=compare,
                            loss_scale=scaler.get_scale() / config.sequences_per_step,
                        )
                if diverged:
                    if now.updated:  # no weight has moved, but the gradients are gone
                        compute_gradients(step_model, now.passes, **how)
                    card = watch.diagnose(step, now.passes)
                    row["attention/max_score"] = card["max_score"]
                    summary.update(status="diverged", first_bad_step=step, diagnosis=card)
                    log.error(f"step {step}: the run diverged: {card['message']}")
                elif not now.updated:
                    scaler.step(optimizer)
                    scaler.update()
                    throughput.step(tokens_per_step)
                due = progress.step(step) and bar.disable  # where there is a bar, it is enough
                with throughput.paused():
                    row |= throughput.row() if log_now else {}
                    if evaluate_now:
                        row |= validate({"_switched": then} if then else {})
                    if due or finished or "val/loss" in row:
                        log.info(progress.line(step, {"train/loss": loss} | row))
                    if then:
                        log.info(
                            f"step {step}: from here on attention={then.name} "
                            f"{dict(then.options) or ''}"
                        )
                        step_model = prepare_model(model, then, compile_mode=config.compile)
                        throughput.warm_up()
                    if row:
                        record({"step": step, "tokens": tokens, **row})
                    if (
                        last
                        or step % config.checkpoint_every == 0
                        or checkpoints.is_best(step, row.get("val/loss"))
                    ):
                        summary.update(steps_done=step, tokens=tokens)
                        checkpoints.save(step, tokens, row.get("val/loss"))
                bar.update()
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                if last:
                    break
            summary["tokens_per_sec"] = wall.tokens_per_sec(tokens)  # with the last checkpoint
            # before the signals are others' again
            if summary["status"] != "diverged":
                summary["status"] = "completed" if step == config.steps else "interrupted"
            summary["stopped"] = interrupt.requested
        if summary["status"] == "interrupted":
            log.warning(f"interrupted after step {step}; {resume_command(run_dir)}")
    except BaseException as error:
        summary |= outcome_of(
            error, device.type, run_dir, status=summary["status"], predicted_gib=predicted_gib
        )
        raise
    finally:
        save_summary(run_dir, summary)  # what follows may take long, or be killed
        logger.summary(summary)
        logger.finish(exit_code=0 if summary["status"] == "completed" else 1)

    # what came of it
    if device.type == "cuda" and (peak_gib := summary.get("memory/peak_gib")):
        log.info(
            f"peak memory {peak_gib:.2f} GiB, predicted {predicted_gib:.2f} "
            f"({predicted_gib / peak_gib - 1:+.1%})"
        )
    title = (
        f"{describe_attention(schedule)} model={config.model.name} seq_len={config.seq_len} "
        f"seed={config.seed}: {summary['status']}"
    )
    with after_training("loss curve", summary):
        curve = draw_loss_curve(run_dir, title=title)
        log.info(f"loss curve: {curve or 'no loss was recorded'}")
    if config.sample_tokens and data.tokenizer is not None and summary["status"] == "completed":
        with after_training("sample", summary), autocast:
            text = sample_text(
                model, data.tokenizer, "def ", max_new_tokens=config.sample_tokens, seed=config.seed
            )
            (run_dir / "sample.txt").write_text(text)
            log.info(f"\na sample:\n{text}\n")
    if logger.url_or_hint:
        log.info(f"logs: {logger.url_or_hint}")


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """One job. Every outcome becomes a status in summary.json: one job of a sweep never takes down
    another.

    Returns what a sweeper minimises: val/loss of a completed run, and infinity for any other.
    """
    from training.interrupt import Ending
    from training.outcome import Objective, close_run, outcome_outside_training

    run_dir = Path(HydraConfig.get().runtime.output_dir)
    written = as_written(cfg)
    summary = {
        "status": "running",
        "attention": written["attention"]["name"],
        "seq_len": written["seq_len"],
        "seed": written["seed"],
    }
    summary |= {"overrides": as_written(HydraConfig.get().overrides.task), "started": time.time()}
    with Ending() as ending:
        try:
            train(read_config(cfg), run_dir, summary)
        except BaseException as error:
            ending.held = True
            summary |= outcome_outside_training(error, summary["status"], run_dir)
            traceback.clear_frames(
                error.__traceback__
            )  # they would keep every tensor of this job alive
        # no call stands between the training and here, so no signal comes between a run and its
        # summary
        ending.held = True
        close_run(run_dir, summary, ending)
    return Objective(summary)


def command_line() -> None:
    """What a shell starts."""
    from training.command_line import start

    start(main)


if __name__ == "__main__":
    command_line()
