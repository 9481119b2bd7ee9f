"""Exercise read-your-shard: tensor-parallel ranks that keep the wrong part of the weights.

vLLM 0.25.1: vllm/model_executor/layers/linear.py (MergedColumnParallelLinear, RowParallelLinear)
Articles: part 1 §8.2, part 2 §4.4
"""

from minivllm.learn.exercise import About

ABOUT = About(
    title="Wrong numbers without an error: a rank reads the wrong shard",
    chapter=8,
    minutes=25,
    hints=(
        "Write down for TP=2 which rows of `gate_up` rank 0 keeps. Do its gate rows and its up rows belong to the same "
        "intermediate neurons? Then the same for the columns of `down`: which neurons do they read?",
        "`gate_up` is two matrices on top of each other. Each rank needs its share of the first and its share of the second. "
        "`down` is cut along its other dimension, since its inputs are the neurons that this rank has computed.",
        "`file.get_slice(name)` returns something to be indexed: `s[a:b]` reads rows, `s[:, a:b]` columns, `s.get_shape()` "
        "the shape, and nothing else is read. With I neurons, rank r keeps those from r·I/W to (r+1)·I/W: rows `a:b` "
        "and `I+a:I+b` of gate_up, columns `a:b` of down.",
    ),
)
