"""What the documents ask their readers to build, and where it is in this project."""

# (documents, what is asked for, where: files or commands)
ASKED = (
    (
        "chapter, notebook, guide",
        "naive attention with its scale and an optional causal mask",
        "attention/naive.py",
    ),
    ("chapter, notebook", "the tile loop, queries outside and keys inside", "attention/tiled.py"),
    (
        "notebook, exercise, guide",
        "the step without beta, p = exp(s - new maximum), statistics in float32",
        "attention/online_softmax.py",
    ),
    (
        "chapter, deep dive",
        "the step with alpha and beta; an output kept normalised; keys in the outer loop",
        "attention/exact_variants.py",
    ),
    (
        "exercise",
        "one head in NumPy, any block size, unequal lengths, its six tests",
        "conformance/numpy_reference.py",
    ),
    (
        "deep dive",
        "the online softmax of a vector in chunks, with the number of chunks",
        "conformance/numpy_reference.py",
    ),
    (
        "guide",
        "the update of the online softmax as a unit of its own",
        "attention/online_softmax.py",
    ),
    (
        "notebook, guide",
        "a softmax of each tile on its own, as the attempt that fails",
        "attention/defects.py",
    ),
    (
        "chapter, guide, deep dive",
        "attention without the maximum, without the rescaling",
        "attention/defects.py",
    ),
    (
        "chapter, deep dive",
        "a maximum from 0, a mask from positions in the tile, no 1 / sqrt(d)",
        "attention/defects.py",
    ),
    (
        "chapter, guide, deep dive",
        "the other single mistakes: alpha in the wrong place, -1e9, a missing beta",
        "lab/claims/rescaling.py",
    ),
    (
        "guide, deep dive",
        "a causal mask that skips whole tiles and masks the crossed ones only",
        "attention/mask.py",
    ),
    (
        "notebook, guide, deep dive",
        "a backward pass that recomputes the tiles from the statistics",
        "attention/tiled.py",
    ),
    (
        "notebook, guide, chapter",
        "a fused GPU kernel, forward and backward (here in Triton)",
        "attention/kernels/forward.py",
    ),
    ("guide, deep dive", "multi-query and grouped-query heads, batches", "attention/tiled.py"),
    ("chapter", "ALiBi and other score modifiers inside the tile loop", "attention/tiled.py"),
    ("chapter, deep dive", "decoding as one query against a cache", "model/generate.py"),
    ("guide", "a sliding window", "attention/mask.py"),
    (
        "chapter, notebook, guide",
        "peak memory by length, running out of it as a result",
        "scripts/benchmark.py",
    ),
    ("guide", "the longest sequence that each backend can take", "scripts/benchmark.py"),
    ("chapter, guide", "both memory curves in one picture, log scale", "results/memory_h200.png"),
    (
        "chapter, notebook, guide",
        "wall clock with warm-up and synchronisation",
        "scripts/benchmark.py",
    ),
    (
        "guide, deep dive",
        "a calculator of memory, a counter of traffic, the tile that fits",
        "scripts/plan.py",
    ),
    ("deep dive", "a check that nothing of size N x N is made", "conformance/memory_growth.py"),
    (
        "chapter, notebook, guide, deep dive",
        "numerical verification, block sizes, dtypes, ragged lengths, stress",
        "scripts/verify.py",
    ),
    ("deep dive", "its worked example, tile by tile", "scripts/trace.py"),
    ("chapter", "200 steps naive and tiled from one seed", "results/paired_curves.json"),
    ("chapter", "a GPT trained with each break", "conf/experiment/break_it.yaml"),
    ("chapter", "maxima and sums printed per tile while it breaks", "scripts/trace.py"),
    ("guide", "a demonstration to play with", "scripts/trace.py"),
)
