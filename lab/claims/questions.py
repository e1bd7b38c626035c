"""The questions the documents leave to their readers, answered from the figures of the claims."""

from typing import NamedTuple


class Question(NamedTuple):
    document: str
    asks: str
    answer: str  # a format string over the figures of the claims: {name[figure]}
    uses: tuple[str, ...]  # the claims whose figures it shows
    keys: str = ""  # of a table below the answer: what its columns are
    rows: tuple[
        tuple[str, str], ...
    ] = ()  # label, and a figure that is a dict over those columns: {name[figure]:.1f}


QUESTIONS = (
    Question(
        "chapter",
        "At what length does naive attention first fail, and where does tiled attention take less "
        "than a tenth of its memory?",
        "On an H200 (16 heads of 64, bfloat16, forward and backward) naive runs at "
        "{wall_moves_out[fits]:,} tokens with "
        "{wall_moves_out[gib]:.1f} GiB and fails at {wall_moves_out[fails]:,}, where one tensor "
        "alone asks for {wall_moves_out[asked]:.0f} "
        "GiB. At that length the Triton kernels take {wall_moves_out[triton_there]:.2f} GiB and "
        "the PyTorch loop with tiles of 2,048 "
        "{wall_moves_out[tiled_there]:.2f}. Less than a tenth of naive's memory: the Triton "
        "kernels from {wall_moves_out[tenth_triton]:,} "
        "tokens, the shortest tried; the loop from {wall_moves_out[tenth_tiled]:,}, once its tile "
        "is small against the length. On a card "
        "of 8 GB the chapter's own function (2 sequences, 8 heads, float16) fails at "
        "{wall_of_8_gigabytes[forward_fails]:,} tokens in the "
        "forward pass and at {wall_of_8_gigabytes[training_fails]:,} with backward, by "
        "its bytes alive.",
        ("wall_moves_out", "wall_of_8_gigabytes"),
    ),
    Question(
        "chapter",
        "Without the maximum, at which tile does the overflow appear, and how much earlier in "
        "float16 than in float32?",
        "It is a matter of the scores, not of the tile: a row breaks at the first tile that holds "
        "a score above "
        "{limits_of_exp[limit_float16]:.2f} in float16 or {limits_of_exp[limit_float32]:.2f} in "
        "float32 (or, in float16, where its sum "
        "passes 65,504). That is {limits_of_exp[ratio]:.0f} times larger scores. The table counts "
        "tiles from 0, over 8,192 rows of 1,024 "
        "keys in 16 tiles, all of it in that dtype. Random inputs of standard deviation 1, the "
        "ones everybody tries first, break in "
        "neither. In training the distance is one of steps: {no_max_in_training[float16]} of "
        "{no_max_in_training[float16_runs]} float16 "
        "runs died, at steps {no_max_in_training[float16_steps]}, and "
        "{no_max_in_training[float32]} of {no_max_in_training[float32_runs]} "
        "float32 runs.",
        ("overflow_by_dtype", "limits_of_exp", "no_max_in_training"),
        "standard deviation of q and k",
        (
            ("float16: first bad tile", "{overflow_by_dtype[float16]}"),
            ("float16: bad rows", "{overflow_by_dtype[float16_rows]:.1%}"),
            ("float16: half of them broken by tile", "{overflow_by_dtype[float16_half]:.0f}"),
            ("float32: first bad tile", "{overflow_by_dtype[float32]}"),
            ("float32: bad rows", "{overflow_by_dtype[float32_rows]:.1%}"),
            ("float32: half of them broken by tile", "{overflow_by_dtype[float32_half]:.0f}"),
        ),
    ),
    Question(
        "chapter",
        "Why is naive attention faster below some length?",
        "It is {small_calls[naive_calls]} operator calls whatever the length, two of them large "
        "matrix products that keep the machine "
        "busy. The loop makes {small_calls[a_tile]:.0f} small calls a tile: "
        "{small_calls[tiled_calls]} at 256 tokens with tiles of 64, "
        "{small_calls[tiled_calls_4096]:,} at 4,096. Each call costs its launch and takes its "
        "operands to memory and back, and a product "
        "of 64 x 64 does too little to pay for that. At 256 tokens that is "
        "{small_calls[naive]:.1f} ms against {small_calls[tiled]:.1f} "
        "ms. With more work a call the loop catches up (ms on one CPU thread, 4 heads of 64):",
        ("small_calls", "tiled_speed_on_a_cpu"),
        "tokens",
        (
            ("naive", "{tiled_speed_on_a_cpu[naive]:.0f}"),
            ("tiles of 64", "{tiled_speed_on_a_cpu[tiles_64]:.0f}"),
            ("tiles of 256", "{tiled_speed_on_a_cpu[tiles_256]:.0f}"),
            ("tiles of 1,024", "{tiled_speed_on_a_cpu[tiles_1024]:.0f}"),
        ),
    ),
    Question(
        "chapter",
        "And on a GPU: from what length is the tiled loop in plain PyTorch faster?",
        "From the length at which its row falls below naive's. Forward passes on an H200 in ms (2 "
        "sequences, 8 heads of 64, float16):",
        ("tiled_speed_on_a_gpu",),
        "tokens",
        (
            ("naive", "{tiled_speed_on_a_gpu[naive]:.2f}"),
            ("tiles of 64", "{tiled_speed_on_a_gpu[tiles_64]:.2f}"),
            ("tiles of 256", "{tiled_speed_on_a_gpu[tiles_256]:.2f}"),
            ("tiles of 1,024", "{tiled_speed_on_a_gpu[tiles_1024]:.2f}"),
            ("tiles of 2,048", "{tiled_speed_on_a_gpu[tiles_2048]:.2f}"),
            ("one fused kernel (triton)", "{tiled_speed_on_a_gpu[triton]:.3f}"),
        ),
    ),
    Question(
        "chapter",
        "What goes wrong with two of the three running states?",
        "No maximum: either the exponentials are not shifted and overflow "
        "({three_states[no_max_raw]} at a score of 12 in float16), or "
        "each tile is shifted by its own maximum and the sums do not fit together (relative error "
        "{three_states[no_max_own]:.2f}). No sum: "
        "the output is never normalised, off by a factor of {three_states[no_sum]:.0f}. No "
        "output: maximum and sum are right, but the "
        "weights are only known at the end, so every score is computed a second time, "
        "{three_states[no_output]:.1f} times the arithmetic.",
        ("three_states",),
    ),
    Question(
        "chapter",
        "Where does a score modifier such as ALiBi or a mask go, and why there?",
        "After the scale, before the maximum of the tile. There the running maximum bounds the "
        "modified scores, and the result is exact "
        "({place_of_a_modifier[right]:.0e} in float64). Before the scale the modifier is scaled "
        "along (relative error "
        "{place_of_a_modifier[before_scale]:.2f}); after exp it is no longer a score "
        "({place_of_a_modifier[after_exp]:.1f}). Between "
        "maximum and exp it cancels as long as it is small, and a bias of 800 gives "
        "{place_of_a_modifier[after_max]}. A mask applied after "
        "the maximum lets a hidden score decide the shift: one of 800 gives "
        "{place_of_a_modifier[mask_after_max]} for the rows that must "
        "not see it.",
        ("place_of_a_modifier",),
    ),
    Question(
        "guide",
        "Why is flash attention faster although it does more arithmetic?",
        "It hardly does: the forward products are the same ({twice_the_arithmetic[forward]:.3f} "
        "times with the rescaling), forward and "
        "backward together {twice_the_arithmetic[training]:.2f} times, because the backward "
        "computes the scores again. What shrinks is "
        "traffic. At 4,096 tokens and d = 64, a tile of 128 queries moves "
        "{nine_times_less[times][d 64, 128 queries]:.1f} times fewer "
        "elements in the forward pass than three separate kernels; the quoted 9 is another model "
        "with its backward. On an H200 at 16,384 "
        "tokens naive reaches {bound_by_memory[naive]:.1f} TFLOP/s and the fused kernel "
        "{bound_by_memory[triton]:.0f}.",
        ("twice_the_arithmetic", "nine_times_less", "bound_by_memory"),
    ),
    Question(
        "guide",
        "How do the two compare in memory?",
        "Naive keeps N x N scores: what it keeps for the backward pass grows like "
        "N^{linear_memory[naive]:.1f}. Tiled keeps q, k, v, out "
        "and one log-sum-exp a row: N^{linear_memory[recomputing]:.1f}. But only with a backward "
        "pass that recomputes the tiles; plain "
        "autograd through the loop keeps them all, N^{linear_memory[autograd]:.1f} and "
        "{linear_memory[kept]:.1f} times what naive keeps. "
        "On an H200 at 4,096 tokens: {half_the_memory[naive_training]:,.0f} MiB naive, "
        "{half_the_memory[triton_training]:,.0f} with the "
        "Triton kernels.",
        ("linear_memory", "half_the_memory"),
    ),
    Question(
        "guide",
        "How does the online softmax stay equal to the ordinary one?",
        "All exponentials of a row share one shift, and any shift cancels between numerator and "
        "denominator. When a larger maximum comes, "
        "alpha = exp(old - new) moves the old sum and the old output to the new shift. In exact "
        "arithmetic that is the same number; in "
        "float64 the difference to naive is {float64_tolerances[tiles]:.0e}, in float32 "
        "{float32_difference[difference]:.0e}, and never "
        "the same bits ({bit_for_bit[unequal]:.0%} of the elements differ).",
        ("float64_tolerances", "float32_difference", "bit_for_bit"),
    ),
    Question(
        "guide",
        "What decides the block size?",
        "What one thread block can hold, not the chip's total: {blocks_of_256[block]} KB of "
        "shared memory, and an SM's "
        "{blocks_of_256[registers]} KB of registers for the scores and the output. Blocks of 256 "
        "take {blocks_of_256[d64]:.0f} KB at d = "
        "64, {blocks_of_256[d128]:.0f} KB at d = 128, and their scores "
        "{blocks_of_256[scores]:.0f} KB: all the registers. Larger blocks of "
        "queries do pay: by block the forward traffic falls {nine_times_less[times]:.1f} times.",
        ("blocks_of_256", "nine_times_less"),
    ),
    Question(
        "guide",
        "How does it make contexts of 100,000 tokens possible?",
        "The matrix of one head takes {hundred_thousand_tokens[matrix]:.0f} GB in float16; q, k, "
        "v and out of that head take "
        "{hundred_thousand_tokens[four]:.0f} MB. Measured on an H200, 16 heads, forward and "
        "backward: {wall_moves_out[triton_gib]:.2f} GiB "
        "at {wall_moves_out[longest]:,} tokens, growing like N^{wall_moves_out[exponent]:.2f}. "
        "The arithmetic still grows with the square, "
        "which is why long-context models also use windows.",
        ("hundred_thousand_tokens", "wall_moves_out"),
    ),
    Question(
        "deep dive",
        "What happens without 1 / sqrt(d)?",
        "Scores grow with the square root of d (their variance like "
        "d^{missing_scale[exponent]:.2f}): at d = 128 they are "
        "{missing_scale[ratio]:.1f} times too large. The mean largest weight of a row goes from "
        "{missing_scale[weight]:.2f} to "
        "{missing_scale[weight_unscaled]:.2f}, so a few keys take all. Where a row is saturated "
        "its gradient vanishes: in "
        "{gradients_without_the_scale[vanished]:.0%} of the rows it is below a tenth of the "
        "scaled one. Not in general: its median norm "
        "goes from {gradients_without_the_scale[gradient_scaled]:.3f} to "
        "{gradients_without_the_scale[gradient]:.3f}. Large scores are "
        "also what kills attention without a maximum.",
        ("missing_scale", "gradients_without_the_scale"),
    ),
    Question(
        "deep dive",
        "Why does flash attention not reduce the arithmetic?",
        "Every score is still computed: a counter finds {same_products[naive]:,} FLOP in the "
        "products of the naive forward pass and "
        "{same_products[tiled]:,} in the tiled one. Rescaling adds "
        "{twice_the_arithmetic[rescaling]:.1%} with tiles of 64. The gain is in "
        "the traffic to memory.",
        ("same_products", "twice_the_arithmetic"),
    ),
    Question(
        "deep dive",
        "With one block as large as N, is tiled attention standard attention?",
        "Yes: one step, the first correction is exp(-inf) = {first_correction[with_key]}, nothing "
        "is ever rescaled. In float64 the two "
        "differ by {float64_tolerances[one_block]:.0e}. It is also where no_rescale is exact "
        "({no_rescale_is_finite[one_tile]:.0e}), so a "
        "test with one block proves nothing about the rescaling.",
        ("float64_tolerances", "first_correction", "no_rescale_is_finite"),
    ),
    Question(
        "deep dive",
        "Why alpha and beta, when the tile could subtract the new maximum at once?",
        "There is no need: beta * exp(s - tile maximum) is exp(s - new maximum). In float64 the "
        "form without beta is off by "
        "{missing_beta[without_beta]:.0e}, the form with it by {missing_beta[with_beta]:.0e}. "
        "Production kernels leave beta out. Only the "
        "rescaling of what is already there is needed.",
        ("missing_beta",),
    ),
    Question(
        "deep dive",
        "What happens to the precision as the blocks become more?",
        "Nothing, in float32 statistics: the largest error by number of tiles is "
        "{many_blocks[error]}, since no correction exceeds 1. In "
        "the dtype of bfloat16 inputs each tile rounds the sums, and the relative error grows "
        "with the length: "
        "{statistics_in_input_dtype[input]}.",
        ("many_blocks", "statistics_in_input_dtype"),
    ),
)

# the guide's checklist: what to be able to do, and where this project shows it
CHECKLIST = (
    (
        "explain why attention is bound by memory",
        "python -m lab.claims run=bound_by_memory,intensity",
    ),
    (
        "describe the memory hierarchy",
        "python -m lab.claims run=hierarchy_of_the_guide,blocks_of_256",
    ),
    ("write the online softmax", "attention/online_softmax.py"),
    (
        "count the traffic of standard and flash attention",
        "python -m lab.claims run=traffic_is_linear,nine_times_less",
    ),
    ("write tiled attention with a correct softmax", "attention/tiled.py"),
    (
        "measure memory and verify the reduction",
        "python -m scripts.benchmark attention=naive,tiled,sdpa seq_len=256,512,1024",
    ),
    ("show that two implementations agree", "python -m scripts.verify attention=tiled"),
    ("explain kernel fusion", "python -m lab.claims run=fusion,small_calls"),
    ("answer the interview questions", "docs/questions.md"),
)
